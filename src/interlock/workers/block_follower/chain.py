"""Reads blocks with their logs, all from one branch of the chain, and converts them to records of the outputs.

Blocks and logs come from different calls. Between the two, a reorg may happen, or another node behind the same address
may answer. Logs are therefore accepted only if they carry the hash of the block that was read. If the bloom of a block
indicates logs but none arrived, they are requested again by the hash of the block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from interlock.workers.block_follower.config import Kind
from interlock.workers.block_follower.rpc import Call, Endpoint, Refused, RpcFailed

T = TypeVar("T")

LOG_SPAN_GROWS_AFTER: Final = 50


class Header(Struct, rename="camel", gc=False):
    number: str
    hash: str
    parent_hash: str


class Transaction(Struct, rename="camel", gc=False):
    hash: str
    transaction_index: str
    from_: str = field(name="from")
    value: str
    nonce: str
    gas: str
    input: str
    to: str | None = None
    gas_price: str | None = None
    max_fee_per_gas: str | None = None
    max_priority_fee_per_gas: str | None = None
    type: str | None = None


class Log(Struct, rename="camel", gc=False):
    address: str
    topics: list[str]
    data: str
    block_number: str
    block_hash: str
    transaction_hash: str
    transaction_index: str
    log_index: str
    removed: bool = False


class Block(Struct, rename="camel", gc=False):
    number: str
    hash: str
    parent_hash: str
    timestamp: str
    gas_limit: str
    gas_used: str
    transactions: list[Transaction | str]
    logs_bloom: str | None = None
    miner: str | None = None
    base_fee_per_gas: str | None = None
    difficulty: str | None = None
    size: str | None = None
    extra_data: str | None = None
    state_root: str | None = None
    transactions_root: str | None = None
    receipts_root: str | None = None
    logs: list[Log] = field(default_factory=list, name="__logs")

    @property
    def height(self) -> int:
        return int(self.number, 16)

    @property
    def claims_logs(self) -> bool:
        """True if the bloom is not empty, or if the chain has no blooms, so that logs must be requested anyway."""
        return self.logs_bloom is None or self.logs_bloom.strip("0x") != ""


_header = msgspec.json.Decoder(Header | None)
_block = msgspec.json.Decoder(Block | None)
_logs = msgspec.json.Decoder(list[Log])
_quantity = msgspec.json.Decoder(str)


class Moved(Exception):
    """The chain changed between two answers. The caller reads again."""


class Chain:
    def __init__(self, endpoint: Endpoint, *, in_full: bool, with_logs: bool, span: int) -> None:
        """`in_full`: request full transactions, not only hashes. `span`: most blocks of one eth_getLogs call."""
        self._endpoint = endpoint
        self._in_full, self._with_logs = in_full, with_logs
        self._longest_span = self._log_span = span
        self._spans_taken = 0
        self._blooms_lie = False

    async def identity(self) -> tuple[int, str | None]:
        """Returns the chain id, and the hash of block 0 if the endpoint serves it."""
        answers = await self._endpoint.ask([Call("eth_chainId", []), _by_number(0)], trusting=False)
        chain_id, first = self._quantity(answers[0]), self._decoded(_header, answers[1])
        return chain_id, first.hash if first else None

    async def head(self, number: int) -> tuple[int, Header | None]:
        """Returns the number of the newest block, and the header at `number`, in one exchange."""
        answers = await self._endpoint.ask([Call("eth_blockNumber", []), _by_number(max(number, 0))])
        return self._quantity(answers[0]), self._decoded(_header, answers[1])

    async def headers(self, numbers: Sequence[int]) -> dict[int, Header]:
        """Returns the headers of those blocks that the endpoint has."""
        answers = await self._endpoint.ask([_by_number(number) for number in numbers])
        found = zip(numbers, [self._decoded(_header, answer) for answer in answers], strict=True)
        return {number: header for number, header in found if header is not None}

    async def blocks(self, first: int, last: int) -> list[Block]:
        """Returns the blocks of an inclusive range. Raises Moved if one is not a child of the one before."""
        numbers = range(first, last + 1)
        spans = self._spans(first, last) if self._with_logs else []
        calls = [_by_number(number, in_full=self._in_full) for number in numbers]
        answers = await self._endpoint.ask([*calls, *(_logs_of(*span) for span in spans)])
        found = [self._decoded(_block, answer) for answer in answers[: len(calls)]]
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(found) or not _linked(blocks, first):
            raise Moved
        if self._with_logs:
            await self._attach(blocks, spans, answers[len(calls) :])
        return blocks

    # Logs

    def _spans(self, first: int, last: int) -> list[tuple[int, int]]:
        size = self._log_span
        return [(start, min(start + size - 1, last)) for start in range(first, last + 1, size)]

    async def _attach(
        self, blocks: list[Block], spans: list[tuple[int, int]], answers: Sequence[Raw | Refused]
    ) -> None:
        by_hash = {block.hash: block for block in blocks}
        for span, answer in zip(spans, answers, strict=True):
            for log in await self._logs_or_halves(span, answer):
                if log.removed or log.block_hash not in by_hash:
                    raise Moved
                block = by_hash[log.block_hash]
                block.logs.append(log)
                self._blooms_lie |= not block.claims_logs
        await self._ask_again([block for block in blocks if not block.logs and (block.claims_logs or self._blooms_lie)])
        for block in blocks:
            block.logs.sort(key=_log_index)

    async def _logs_or_halves(self, span: tuple[int, int], answer: Raw | Refused) -> list[Log]:
        if not isinstance(answer, Refused):
            self._span_taken(span)
            return self._decoded(_logs, answer)
        first, last = span
        self._log_span, self._spans_taken = max(1, (last - first + 1) // 2), 0
        middle = (first + last) // 2
        halves = [(first, middle), (middle + 1, last)]
        answers = await self._endpoint.ask([_logs_of(*half) for half in halves])
        found = [await self._logs_or_halves(half, one) for half, one in zip(halves, answers, strict=True)]
        return [log for logs in found for log in logs]

    def _span_taken(self, span: tuple[int, int]) -> None:
        if span[1] - span[0] + 1 < self._log_span or self._log_span == self._longest_span:
            return
        self._spans_taken += 1
        if self._spans_taken >= LOG_SPAN_GROWS_AFTER:
            self._log_span, self._spans_taken = min(self._log_span * 2, self._longest_span), 0

    async def _ask_again(self, doubtful: list[Block]) -> None:
        """Requests missing logs by the hash of their block. Such a request cannot match another block."""
        calls = [Call("eth_getLogs", [{"blockHash": block.hash}], divisible=True) for block in doubtful]
        for block, answer in zip(doubtful, await self._endpoint.ask(calls), strict=True):
            if isinstance(answer, Refused):
                raise Moved
            block.logs = self._decoded(_logs, answer)
            if any(log.block_hash != block.hash for log in block.logs):
                raise Moved

    # Answers

    def _decoded(self, decoder: msgspec.json.Decoder[T], answer: Raw | Refused) -> T:
        try:
            return decoder.decode(bytes(answer) if isinstance(answer, Raw) else b"")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._nonsense(str(error)) from None

    def _quantity(self, answer: Raw | Refused) -> int:
        text = self._decoded(_quantity, answer)
        try:
            return int(text, 16)
        except ValueError:
            raise self._nonsense(f"{text[:50]!r} is not a number") from None

    def _nonsense(self, why: str) -> RpcFailed:
        return RpcFailed(
            f"The RPC endpoint at {self._endpoint.host} returned an invalid answer ({why}): check that rpc_url is an "
            "Ethereum-compatible endpoint.",
            "NotAnRpcEndpoint",
        )


def _by_number(number: int, *, in_full: bool = False) -> Call:
    return Call("eth_getBlockByNumber", [hex(number), in_full])


def _logs_of(first: int, last: int) -> Call:
    return Call("eth_getLogs", [{"fromBlock": hex(first), "toBlock": hex(last)}], divisible=last > first)


def _log_index(log: Log) -> int:
    return int(log.log_index, 16)


def _linked(blocks: Sequence[Block], first: int) -> bool:
    heights = all(block.height == number for number, block in enumerate(blocks, first))
    return heights and all(block.parent_hash == before.hash for before, block in itertools.pairwise(blocks))


Record = tuple[Any, ...]

COLUMNS: Final[dict[Kind, tuple[str, ...]]] = {
    "blocks": (
        "block_number",
        "block_hash",
        "parent_hash",
        "block_timestamp",
        "miner",
        "gas_limit",
        "gas_used",
        "base_fee_per_gas",
        "difficulty",
        "size",
        "extra_data",
        "state_root",
        "transactions_root",
        "receipts_root",
        "transaction_count",
    ),
    "transactions": (
        "block_number",
        "transaction_index",
        "block_hash",
        "block_timestamp",
        "transaction_hash",
        "from_address",
        "to_address",
        "value",
        "nonce",
        "gas",
        "gas_price",
        "max_fee_per_gas",
        "max_priority_fee_per_gas",
        "type",
        "input",
    ),
    "logs": (
        "block_number",
        "log_index",
        "block_hash",
        "block_timestamp",
        "transaction_hash",
        "transaction_index",
        "address",
        "topic0",
        "topic1",
        "topic2",
        "topic3",
        "data",
    ),
}
"""Same columns as in schema.sql."""

_NO_TOPICS: Final = (None, None, None, None)


def records(kind: Kind, blocks: Sequence[Block]) -> list[Record]:
    """Returns the records of some blocks. Raises ValueError for values that a chain cannot have."""
    return [record for block in blocks for record in _MAKERS[kind](block)]


def _number(quantity: str | None) -> int | None:
    return None if quantity is None else int(quantity, 16)


def _moment(block: Block) -> datetime:
    return datetime.fromtimestamp(int(block.timestamp, 16), UTC)


def _block_record(block: Block) -> Iterator[Record]:
    yield (
        block.height,
        block.hash,
        block.parent_hash,
        _moment(block),
        block.miner,
        int(block.gas_limit, 16),
        int(block.gas_used, 16),
        _number(block.base_fee_per_gas),
        _number(block.difficulty),
        _number(block.size),
        block.extra_data,
        block.state_root,
        block.transactions_root,
        block.receipts_root,
        len(block.transactions),
    )


def _transactions(block: Block) -> Iterator[Record]:
    height, moment = block.height, _moment(block)
    for one in block.transactions:
        if not isinstance(one, Transaction):
            raise ValueError("the endpoint returned hashes although full transactions were requested")  # noqa: TRY004 - the answer is wrong, not our type
        yield (
            height,
            int(one.transaction_index, 16),
            block.hash,
            moment,
            one.hash,
            one.from_,
            one.to,
            int(one.value, 16),
            int(one.nonce, 16),
            int(one.gas, 16),
            _number(one.gas_price),
            _number(one.max_fee_per_gas),
            _number(one.max_priority_fee_per_gas),
            _number(one.type),
            one.input,
        )


def _log_records(block: Block) -> Iterator[Record]:
    height, moment = block.height, _moment(block)
    for log in block.logs:
        topics = (*log.topics, *_NO_TOPICS)[:4]
        yield (
            height,
            int(log.log_index, 16),
            block.hash,
            moment,
            log.transaction_hash,
            int(log.transaction_index, 16),
            log.address,
            *topics,
            log.data,
        )


_MAKERS: Final[dict[Kind, Callable[[Block], Iterator[Record]]]] = {
    "blocks": _block_record,
    "transactions": _transactions,
    "logs": _log_records,
}
