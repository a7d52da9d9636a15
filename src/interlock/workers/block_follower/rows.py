"""Converts blocks to records with the columns of each output's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from interlock.workers.block_follower.chain import Block, Transaction
from interlock.workers.block_follower.config import Kind

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


def _block(block: Block) -> Iterator[Record]:
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


def _logs(block: Block) -> Iterator[Record]:
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
    "blocks": _block,
    "transactions": _transactions,
    "logs": _logs,
}
