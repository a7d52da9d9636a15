"""The config fields of built-in operators that call an RPC endpoint, named as in block_follower's config."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Final, TypeAlias

import pyarrow as pa
from msgspec import Meta, Struct
from pyspark.sql import DataFrame, SparkSession

from interlock.outbound.exchange import Request
from interlock.spark.context import Scope, TaskContext
from interlock.workers.block_follower.chain import Block, Chain, Moved, records
from interlock.workers.block_follower.config import Kind, Seconds
from interlock.workers.block_follower.config import read_config as read_follower_config
from interlock.workers.block_follower.rpc import Endpoint, RpcFailed
from interlock.workers.context import TaskFailed
from interlock.workers.operator_requests import Placeholders, kept_sender
from interlock.workers.protocol import Outbound


class EndpointConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rpc_url: str | None = None
    headers: dict[str, str] = {}
    batch_size: Annotated[int, Meta(ge=1, le=2_000)] = 50
    """Blocks per request."""
    requests: Annotated[int, Meta(ge=1, le=256)] = 4
    """Concurrent requests, limited by the number of cores."""
    rpc_timeout_seconds: Seconds = 30.0
    rpc_patience_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 120.0


def source_of(config: EndpointConfig, rpc_url: str, ctx: TaskContext) -> Source:
    """Returns the endpoint with its secrets filled in, as for the follower. Raises BadConfig."""
    keys = Placeholders.of(ctx)
    filled = read_follower_config({"rpc_url": rpc_url, "headers": config.headers, "outputs": ["blocks"]}, 1, keys)
    return Source(
        asked=Request(filled.rpc_url, headers=filled.headers, bindings=keys.bindings("rpc_url", "headers")),
        outbound=ctx.outbound,
        timeout=config.rpc_timeout_seconds,
        patience=config.rpc_patience_seconds,
        batch=config.batch_size,
        parallel=config.requests,
    )


TRIES: Final = 5
"""Number of reads of a batch whose blocks do not link to each other, before the attempt fails."""
PAUSE_SECONDS: Final = 0.5

TYPES: Final[dict[Kind, str]] = {
    "blocks": """
        block_number bigint not null, block_hash string not null, parent_hash string not null,
        block_timestamp timestamp not null, miner string, gas_limit decimal(38,0) not null,
        gas_used decimal(38,0) not null, base_fee_per_gas decimal(38,0), difficulty decimal(38,0), size bigint,
        extra_data string, state_root string, transactions_root string, receipts_root string,
        transaction_count int not null
    """,
    "transactions": """
        block_number bigint not null, transaction_index int not null, block_hash string not null,
        block_timestamp timestamp not null, transaction_hash string not null, from_address string not null,
        to_address string, value decimal(38,0) not null, nonce decimal(38,0) not null, gas decimal(38,0) not null,
        gas_price decimal(38,0), max_fee_per_gas decimal(38,0), max_priority_fee_per_gas decimal(38,0), type int,
        input string not null
    """,
    "logs": """
        block_number bigint not null, log_index int not null, block_hash string not null,
        block_timestamp timestamp not null, transaction_hash string not null, transaction_index int not null,
        address string not null, topic0 string, topic1 string, topic2 string, topic3 string, data string not null
    """,
}
"""The columns of the follower's tables, in Spark's types."""

_ARROW: Final = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
    "decimal(38,0)": pa.decimal128(38, 0),
}


@dataclass(frozen=True)
class Source:
    """The RPC endpoint and how to call it. Spark sends it to executors, which check the addresses they connect to."""

    asked: Request
    outbound: Outbound = field(repr=False)
    timeout: float
    patience: float
    batch: int
    """Blocks per batch."""
    parallel: int
    """Concurrent batches."""


Ask: TypeAlias = Callable[[Chain, int, int], Awaitable[pa.RecordBatch]]
"""Function that requests an inclusive range of blocks."""

_PROBLEM: Final = [pa.field("problem_class", pa.string()), pa.field("problem", pa.string())]


@dataclass(frozen=True)
class Question:
    """A request, and the columns of its answer: `ddl` for Spark, `columns` for Arrow."""

    ask: Ask
    ddl: str
    columns: pa.Schema
    in_full: bool = False
    with_logs: bool = False


class ChainMoved(TaskFailed):
    """The chain was reorganized during the read. The next attempt reads it again."""


class BlocksMissing(TaskFailed):
    """The node does not have all blocks of the range."""


def answered(spark: SparkSession, source: Source, scope: Scope, question: Question) -> DataFrame:
    """Requests all batches of a range, once and immediately, and returns the answers. Raises the first problem.

    If Spark loses some of the answers, the attempt fails. They are not requested again, since the chain may have
    changed.
    """
    batches = -(-(scope.end - scope.start + 1) // source.batch)
    numbers = spark.range(0, batches, 1, min(batches, source.parallel))
    reading = Reading(source, scope, question)
    ddl = f"{question.ddl}, problem_class string, problem string"
    frame = numbers.mapInArrow(reading.rows, ddl).localCheckpoint(eager=True)
    for row in frame.where("problem is not null").select("problem_class", "problem").limit(1).collect():
        raise TaskFailed(row.problem, row.problem_class)
    return frame.drop("problem_class", "problem")


@dataclass(frozen=True)
class Reading:
    """Runs in executors: takes the numbers of batches and yields their rows."""

    source: Source
    scope: Scope
    question: Question

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = (number for batch in batches for number in batch.column(0).to_pylist())
        with asyncio.Runner() as runner:
            endpoint = _endpoint(self.source)
            chain = Chain(
                endpoint, in_full=self.question.in_full, with_logs=self.question.with_logs, span=self.source.batch
            )
            try:
                yield from self._answers(numbers, lambda first, last: runner.run(self._ask(chain, first, last)))
            finally:
                runner.run(endpoint.close())

    def _answers(
        self, numbers: Iterable[int], answer: Callable[[int, int], pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        for number in numbers:
            first = self.scope.start + number * self.source.batch
            try:
                yield self._without_problem(answer(first, min(first + self.source.batch - 1, self.scope.end)))
            except TaskFailed as failed:
                yield self._problem(failed)
                return

    async def _ask(self, chain: Chain, first: int, last: int) -> pa.RecordBatch:
        for left in reversed(range(TRIES)):
            try:
                return await self.question.ask(chain, first, last)
            except Moved:
                await _check_there(chain, first, last)
                if left:
                    await asyncio.sleep(PAUSE_SECONDS)
            except (ValueError, OverflowError, OSError) as error:
                raise RpcFailed(f"The RPC endpoint returned an invalid block: {error}", "BadBlock") from error
        raise ChainMoved(
            f"Blocks {first} to {last} do not link to each other after {TRIES} reads: the chain is being reorganized, "
            "or several nodes behind the endpoint disagree. The next attempt reads them again."
        )

    def _without_problem(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [*rows.columns, *(pa.nulls(rows.num_rows, field.type) for field in _PROBLEM)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _problem(self, failed: TaskFailed) -> pa.RecordBatch:
        row = {"problem_class": failed.error_class, "problem": str(failed)}
        return pa.RecordBatch.from_pylist([row], schema=self._schema)

    @property
    def _schema(self) -> pa.Schema:
        return pa.schema([*self.question.columns, *_PROBLEM])


def _endpoint(source: Source) -> Endpoint:
    return Endpoint(
        source.asked,
        kept_sender(source.outbound),
        timeout=source.timeout,
        patience=source.patience,
        most_calls=source.batch + 1,
    )


async def _check_there(chain: Chain, first: int, last: int) -> None:
    """Raises BlocksMissing if the node lacks a block of the range, which is not a reorg."""
    head, there = await chain.head(last)
    if there is None and head < last:
        raise BlocksMissing(
            f"The task needs blocks up to {last}, but the newest block of the node is {head}: use a range that exists, "
            "or retry the task later."
        )
    missing = sorted({first, last} - (await chain.headers([first, last])).keys())
    if missing:
        raise BlocksMissing(
            f"The node does not have block {missing[0]}, though its newest block is {head}: its history does not reach "
            "back that far. Use an archive node, or a later range."
        )


# Blocks as columns

_COLUMN: Final = re.compile(r"(\w+) (bigint|int|string|timestamp|decimal\(38,0\))( not null)?")


def whole_blocks(kinds: Sequence[Kind]) -> Question:
    """Requests one row per block, with a list of rows for each kind."""
    wanted = [kind for kind in TYPES if kind in {"blocks", *kinds}]
    ddl = ", ".join(f"{kind} array<struct<{_nested(TYPES[kind])}>>" for kind in wanted)
    columns = pa.schema([pa.field(kind, pa.list_(pa.struct(_fields(kind)))) for kind in wanted])
    return Question(
        partial(_read_blocks, columns),
        ddl,
        columns,
        in_full="transactions" in wanted,
        with_logs="logs" in wanted,
    )


def _nested(columns: str) -> str:
    return ", ".join(f"{name}: {kind}{rest}" for name, kind, rest in _COLUMN.findall(columns))


def _fields(kind: Kind) -> list[pa.Field]:
    return [pa.field(name, _ARROW[type_], nullable=not rest) for name, type_, rest in _COLUMN.findall(TYPES[kind])]


async def _read_blocks(columns: pa.Schema, chain: Chain, first: int, last: int) -> pa.RecordBatch:
    blocks = await chain.blocks(first, last)
    return pa.RecordBatch.from_arrays([_lists(field.name, field.type, blocks) for field in columns], schema=columns)


def _lists(kind: Kind, type_: pa.ListType, blocks: Sequence[Block]) -> pa.Array:
    made = [records(kind, [block]) for block in blocks]
    rows = [row for one in made for row in one]
    fields = list(type_.value_type)
    columns: Iterable[Iterable[Any]] = zip(*rows, strict=True) if rows else ([] for _ in fields)
    arrays = [pa.array(list(values), field.type) for values, field in zip(columns, fields, strict=True)]
    offsets = pa.array(accumulate((len(one) for one in made), initial=0), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(arrays, fields=fields), type=type_)


# Hashes


def hashes() -> Question:
    """Requests the numbers and hashes of those blocks that the node has."""
    columns = pa.schema([("block_number", pa.int64()), ("block_hash", pa.string())])
    return Question(_read_hashes, "block_number bigint, block_hash string", columns)


async def _read_hashes(chain: Chain, first: int, last: int) -> pa.RecordBatch:
    found = await chain.headers(range(first, last + 1))
    return pa.RecordBatch.from_pydict(
        {"block_number": list(found), "block_hash": [header.hash for header in found.values()]},
        schema=hashes().columns,
    )
