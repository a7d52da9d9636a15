"""The RPC methods: Ethereum's for reading the chain, `dev_*` for controlling it; and their parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from interlock import __version__
from interlock.dev.blocks import Block, Hex, Log, Receipt, Transaction, quantity
from interlock.dev.chain import MAX_BLOCKS, Chain
from interlock.dev.contents import Header
from interlock.dev.rpc import Code, Method, RpcError

_QUANTITY: Final = re.compile(r"0x(0|[1-9a-fA-F][0-9a-fA-F]{0,15})")
_HASH: Final = re.compile(r"0x[0-9a-fA-F]{64}")
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{40}")
_MAX_TOPICS: Final = 4
_MAX_ALTERNATIVES: Final = 1_000


def invalid(sentence: str) -> RpcError:
    return RpcError(Code.INVALID_PARAMS, f"invalid params: {sentence}")


def shown(value: Any) -> str:
    """Shortens a value for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def number_of(value: Any) -> int:
    if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
        raise invalid(f"{shown(value)} is not a quantity; write hex without leading zeros, such as 0x1b4")
    return int(value, 16)


def hash_of(value: Any) -> Hex:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise invalid(f"{shown(value)} is not a hash; write 0x and 64 hex digits")
    return value.lower()


def is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def address_of(value: Any) -> Hex:
    if not isinstance(value, str) or not _ADDRESS.fullmatch(value):
        raise invalid(f"{shown(value)} is not an address; write 0x and 40 hex digits")
    return value.lower()


@dataclass(frozen=True, slots=True)
class LogFilter:
    addresses: frozenset[Hex] = frozenset()
    """Addresses to match; empty matches all."""
    topics: tuple[frozenset[Hex], ...] = ()
    """Topics to match at each position; empty matches all. A log must have at least as many topics as the filter."""

    def matches(self, log: Log) -> bool:
        if self.addresses and log.address not in self.addresses:
            return False
        if len(self.topics) > len(log.topics):
            return False
        return all(not wanted or topic in wanted for wanted, topic in zip(self.topics, log.topics, strict=False))


def log_filter(fields: dict[str, Any]) -> LogFilter:
    return LogFilter(_addresses(fields.get("address")), _topics(fields.get("topics")))


def _addresses(value: Any) -> frozenset[Hex]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    _limit(values, "addresses")
    return frozenset(map(address_of, values))


def _topics(value: Any) -> tuple[frozenset[Hex], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid("topics must be an array")
    if len(value) > _MAX_TOPICS:
        raise invalid(f"a log has at most {_MAX_TOPICS} topics, got {len(value)}")
    return tuple(map(_alternatives, value))


def _alternatives(value: Any) -> frozenset[Hex]:
    """One topic or a list of topics; null, alone or in the list, matches any."""
    values = value if isinstance(value, list) else [value]
    _limit(values, "topics")
    return frozenset() if None in values else frozenset(map(hash_of, values))


def _limit(values: list[Any], what: str) -> None:
    if len(values) > _MAX_ALTERNATIVES:
        raise invalid(f"at most {_MAX_ALTERNATIVES} {what} are allowed, got {len(values)}")


_MAX_MINED: Final = 100_000
_MIN_PACE, _MAX_PACE = 0.001, 86_400.0


@dataclass(frozen=True, slots=True)
class Serving:
    """Limits of the RPC provider, as opposed to properties of the chain."""

    log_range: int = 1_000
    """Maximum number of blocks in one eth_getLogs."""
    log_results: int = 10_000
    """Maximum number of logs that one eth_getLogs returns."""
    abandoned: bool = True
    """True if eth_getBlockByHash still returns blocks that a reorg has replaced.

    Their transactions and logs are gone.
    """


class Methods:
    def __init__(self, chain: Chain, set_pace: Callable[[float], None], serving: Serving | None = None) -> None:
        """`set_pace` sets the seconds between mined blocks; 0 stops mining."""
        self._chain = chain
        self._set_pace = set_pace
        self._serving = serving or Serving()

    def table(self) -> Mapping[str, Method]:
        return {
            "web3_clientVersion": Method(lambda: f"interlock-devchain/{__version__}"),
            "net_version": Method(lambda: str(self._chain.shape.chain_id)),
            "eth_chainId": Method(lambda: quantity(self._chain.shape.chain_id)),
            "eth_syncing": Method(lambda: False),
            "eth_blockNumber": Method(lambda: quantity(self._chain.head.number)),
            "eth_getBlockByNumber": Method(self.block_by_number, required=1, optional=1),
            "eth_getBlockByHash": Method(self.block_by_hash, required=1, optional=1),
            "eth_getBlockReceipts": Method(self.block_receipts, required=1),
            "eth_getTransactionByHash": Method(self.transaction, required=1),
            "eth_getTransactionReceipt": Method(self.receipt, required=1),
            "eth_getLogs": Method(self.logs, required=1),
            "dev_mine": Method(self.mine, optional=1),
            "dev_reorg": Method(self.reorg, required=1),
            "dev_setAutomine": Method(self.set_automine, required=1),
        }

    # Blocks and transactions

    def block_by_number(self, which: Any, in_full: Any = False) -> Block | None:
        return self._block(self._header(which), in_full)

    def block_by_hash(self, which: Any, in_full: Any = False) -> Block | None:
        header = self._chain.by_hash(hash_of(which))
        is_served = header is not None and (self._serving.abandoned or self._chain.is_canonical(header))
        return self._block(header if is_served else None, in_full)

    def block_receipts(self, which: Any) -> tuple[Receipt, ...] | None:
        header = self._canonical(which) if is_hash(which) else self._header(which)
        return None if header is None else self._chain.contents(header).receipts()

    def transaction(self, which: Any) -> Transaction | None:
        found = self._chain.find_transaction(hash_of(which))
        return found[0].transactions[found[1]] if found else None

    def receipt(self, which: Any) -> Receipt | None:
        found = self._chain.find_transaction(hash_of(which))
        return found[0].receipts()[found[1]] if found else None

    def _block(self, header: Header | None, in_full: Any) -> Block | None:
        if not isinstance(in_full, bool):
            raise invalid(f"{shown(in_full)}: pass true for full transactions, false for their hashes")
        if header is None:
            return None
        contents = self._chain.contents(header)
        return contents.in_full() if in_full else contents.block

    def _header(self, which: Any) -> Header | None:
        return self._tagged(which) or self._chain.at(number_of(which))

    def _tagged(self, which: Any) -> Header | None:
        match which:
            case "latest" | "pending":  # there are no pending transactions
                return self._chain.head
            case "earliest":
                return self._chain.at(0)
            case "safe":
                return self._chain.safe
            case "finalized":
                return self._chain.finalized
            case _:
                return None

    def _canonical(self, which: Any) -> Header | None:
        header = self._chain.by_hash(hash_of(which))
        return header if header is not None and self._chain.is_canonical(header) else None

    # Logs

    def logs(self, fields: Any) -> list[Log]:
        if not isinstance(fields, dict):
            raise invalid(f"{shown(fields)}: a filter must be an object")
        wanted = log_filter(fields)
        found: list[Log] = []
        for header in self._span(fields):
            found += filter(wanted.matches, self._chain.contents(header).logs)
            if len(found) > self._serving.log_results:
                self._refuse(f"query returned more than {self._serving.log_results} results", self._serving.log_results)
        return found

    def _span(self, fields: dict[str, Any]) -> list[Header]:
        if fields.get("blockHash") is not None:
            return [self._block_of_logs(fields)]
        first, last = self._end(fields.get("fromBlock")), self._end(fields.get("toBlock"))
        if first > last:
            raise invalid(f"fromBlock {quantity(first)} is after toBlock {quantity(last)}")
        headers = list(self._chain.between(first, min(last, first + self._serving.log_range)))
        if len(headers) > self._serving.log_range:
            self._refuse(f"query exceeds max block range {self._serving.log_range}", self._serving.log_range)
        return headers

    def _block_of_logs(self, fields: dict[str, Any]) -> Header:
        if fields.get("fromBlock") is not None or fields.get("toBlock") is not None:
            raise invalid("cannot specify both blockHash and fromBlock/toBlock, choose one or the other")
        header = self._canonical(fields["blockHash"])
        if header is None:
            raise RpcError(Code.SERVER_ERROR, "unknown block")
        return header

    def _end(self, which: Any) -> int:
        """A number beyond the head is valid: the range then ends at the head."""
        header = self._tagged("latest" if which is None else which)
        return header.number if header else number_of(which)

    @staticmethod
    def _refuse(sentence: str, limit: int) -> NoReturn:
        raise RpcError(Code.LIMIT_EXCEEDED, sentence, {"limit": limit})

    # Control

    def mine(self, count: Any = 1) -> dict[str, str]:
        number = _count(count, limit=min(_MAX_MINED, MAX_BLOCKS - self._chain.head.number))
        return _place(self._chain.mine(number))

    def reorg(self, depth: Any) -> dict[str, str]:
        return _place(self._chain.reorg(_count(depth, limit=self._chain.deepest_reorg)))

    def set_automine(self, seconds: Any) -> bool:
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not (seconds == 0 or _MIN_PACE <= seconds <= _MAX_PACE):
            raise invalid(f"{shown(seconds)}: pass seconds from {_MIN_PACE} to {_MAX_PACE:.0f}, or 0 to stop mining")
        self._set_pace(float(seconds))
        return True


def _count(value: Any, *, limit: int) -> int:
    """Accepts a plain JSON number, for people at a prompt, or a quantity, for clients that support nothing else."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else number_of(value)
    if not 1 <= number <= limit:
        raise invalid(f"{number} is out of range; the allowed range is now 1 to {limit}")
    return number


def _place(header: Header) -> dict[str, str]:
    return {"number": quantity(header.number), "hash": header.hash}
