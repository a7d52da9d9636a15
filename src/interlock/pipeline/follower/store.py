"""The follower's rows in the data database: written once in effect, whatever ends the process, and by one attempt only.

A write is one transaction: the fence is checked and held, everything from the first block on is deleted, the rows are
copied in, and position, hashes and what is owed to readers move with them. A repeat gives the same rows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg

from interlock.adapters.postgres import Connection, queries
from interlock.pipeline.failures import DataDatabaseAway
from interlock.pipeline.follower.config import Kind
from interlock.pipeline.follower.rows import COLUMNS, Record
from interlock.workers.context import TaskFailed

_sql = queries("follower", "data")
_SCHEMA_FILE: Final = resources.files("interlock.sql") / "data" / "follower_schema.sql"
SCHEMA: Final = "datasets"

TIMEOUT_SECONDS: Final = 60
"""A write that takes longer is ended, as is a transaction that stands still for so long."""
MOST_OWED: Final = 1_000

_AWAY: Final = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.OperatorInterventionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InsufficientResourcesError,
    TimeoutError,
)


class Superseded(TaskFailed):
    """A newer attempt writes these datasets."""


class WrongChain(TaskFailed):
    """The endpoint serves another chain than the one that is stored."""


@dataclass(frozen=True, slots=True)
class Target:
    """An output: what it holds, and where."""

    kind: Kind
    dataset_uuid: UUID
    dataset_version: UUID

    @property
    def table(self) -> str:
        return table_of(self.dataset_version)


def table_of(dataset_version: UUID) -> str:
    return f"dataset_{dataset_version.hex}"


def location_of(dataset_version: UUID) -> str:
    """How a reader is told where the rows are."""
    return f"postgres_table:{table_of(dataset_version)}"


@dataclass(frozen=True, slots=True)
class Producer:
    """Whose attempt writes."""

    task_id: UUID
    attempt: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What is there already."""

    position: int
    """The last block that is stored; one before the first when there is none."""
    cursor: int | None
    """Complete up to here, as far as readers were told, or will be."""
    hashes: dict[int, str]


@dataclass(frozen=True, slots=True)
class Owed:
    """A rewrite that is committed and not yet announced."""

    owed_id: int
    dataset_version: UUID
    start: int
    end: int


class Store:
    def __init__(self, connection: Connection, targets: Sequence[Target], producer: Producer) -> None:
        self._connection = connection
        self.targets = targets
        self._versions = [target.dataset_version for target in targets]
        self._producer = producer
        self._holder = uuid4()

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, targets: Sequence[Target], producer: Producer) -> AsyncIterator[Store]:
        milliseconds = str(TIMEOUT_SECONDS * 1000)
        names = ("statement_timeout", "idle_in_transaction_session_timeout")
        with _opening():
            connection = await asyncpg.connect(
                url,
                timeout=10,
                command_timeout=TIMEOUT_SECONDS + 5,
                server_settings=dict.fromkeys(names, milliseconds) | {"application_name": "interlock block_follower"},
            )
        try:
            yield cls(connection, targets, producer)
        finally:
            # Not `close`: it would wait for a statement that is under way, and a stop is not to wait.
            connection.terminate()

    # The start

    async def take_over(self, chain_id: int, genesis: str | None, start_block: int, *, proven: bool = False) -> Stored:
        """Makes the tables, becomes their only writer, and tells how far they go.

        Raises Superseded for an attempt that is not the newest by its number, unless it has `proven` that it is.
        """
        kinds = [target.kind for target in self.targets]
        with _in_a_sentence():
            async with self._connection.transaction():
                await _sql.lock_schema(self._connection)
                await self._connection.execute(_SCHEMA_FILE.read_text())
                await _sql.create_tables(self._connection, versions=self._versions, kinds=kinds)
            await _sql.end_older(self._connection, versions=self._versions, proven=proven, **_named(self._producer))
            async with self._connection.transaction():
                rows = await _sql.take_over(
                    self._connection,
                    versions=self._versions,
                    kinds=kinds,
                    holder=self._holder,
                    chain_id=chain_id,
                    genesis=genesis,
                    start_block=start_block,
                    proven=proven,
                    **_named(self._producer),
                )
                self._check(rows, chain_id, genesis, start_block)
            hashes = await _sql.known_hashes(self._connection, version=self._versions[0])
        known = {row["block_number"]: row["block_hash"] for row in hashes}
        return Stored(rows[0]["position"], rows[0]["cursor"], known)

    async def told_cursor(self) -> int | None:
        """How far readers were told that the datasets go, whoever wrote them."""
        with _in_a_sentence():
            cursor: int | None = await _sql.told_cursor(self._connection, versions=self._versions)
        return cursor

    def _check(self, rows: Sequence[Any], chain_id: int, genesis: str | None, start_block: int) -> None:
        if len(rows) < len(self._versions):
            raise _superseded()
        kinds = {target.dataset_version: target.kind for target in self.targets}
        for row in rows:
            if row["chain_id"] != chain_id or (genesis and row["genesis"] and row["genesis"] != genesis):
                raise WrongChain(
                    f"What is stored is of chain {row['chain_id']} with first block {row['genesis']}, and rpc_url "
                    f"serves chain {chain_id} with {genesis}. Point rpc_url at the chain that was followed so far, or "
                    "deploy the job with another config to follow this one into datasets of their own."
                )
            if row["start_block"] != start_block or row["kind"] != kinds[row["dataset_version"]]:
                raise WrongChain(
                    f"Dataset version {row['dataset_version']} holds {row['kind']} from block {row['start_block']} on. "
                    "Another start_block, or other outputs, need a deploy of the job, which makes new versions."
                )

    def require_open(self) -> None:
        """A follower with nothing to write would not notice otherwise that a newer attempt has ended its connection."""
        if self._connection.is_closed():
            raise DataDatabaseAway("The data database is away: it, or a newer attempt, has closed the connection.")

    # Writes

    async def write(
        self, first: int, hashes: Sequence[str], records: Mapping[Kind, Sequence[Record]], keep_hashes: int
    ) -> int | None:
        """Makes the given blocks all there is from `first` on. Returns the cursor."""
        last = first + len(hashes) - 1
        kept = min(len(hashes), keep_hashes)
        with _in_a_sentence():
            async with self._connection.transaction():
                await self._hold()
                await _sql.delete_from(self._connection, versions=self._versions, first_block=first)
                for target in self.targets:
                    await self._copy(target, records[target.kind])
                moved = await _sql.advance(
                    self._connection,
                    versions=self._versions,
                    first_block=first,
                    last_block=last,
                    keep_hashes=keep_hashes,
                )
                await _sql.remember(
                    self._connection,
                    version=self._versions[0],
                    numbers=list(range(last - kept + 1, last + 1)),
                    hashes=list(hashes[len(hashes) - kept :]),
                )
        cursor: int | None = moved[0]["cursor"]
        return cursor

    async def _hold(self) -> None:
        held = await _sql.hold(self._connection, versions=self._versions, holder=self._holder)
        if len(held) < len(self._versions):
            raise _superseded()

    async def _copy(self, target: Target, records: Sequence[Record]) -> None:
        if records:
            await self._connection.copy_records_to_table(
                target.table, schema_name=SCHEMA, columns=COLUMNS[target.kind], records=records
            )

    # What readers are owed

    async def owed(self) -> list[Owed]:
        with _in_a_sentence():
            rows = await _sql.owed(self._connection, versions=self._versions, most=MOST_OWED)
        return [Owed(row["owed_id"], row["dataset_version"], row["range_start"], row["range_end"]) for row in rows]

    async def announced(self, ranges: Sequence[Owed]) -> None:
        """After the dispatcher has taken them."""
        owed_ids = [one.owed_id for one in ranges]
        with _in_a_sentence():
            await _sql.announced(self._connection, versions=self._versions, owed_ids=owed_ids)


def _named(producer: Producer) -> dict[str, Any]:
    return {"task_id": producer.task_id, "attempt": producer.attempt}


def _superseded() -> Superseded:
    return Superseded("A newer attempt has taken over these datasets: this one writes no more.")


@contextmanager
def _opening() -> Iterator[None]:
    try:
        with _in_a_sentence():
            yield
    except (ValueError, asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        # What Python says of a malformed URL may quote a piece of its password.
        why = "" if isinstance(error, ValueError) else f" ({error})"
        raise TaskFailed(
            f"INTERLOCK_DATA_URL of the worker does not open the data database{why}: write "
            "postgresql://user:password@host:port/database.",
            "DataDatabaseRefused",
        ) from None


@contextmanager
def _in_a_sentence() -> Iterator[None]:
    try:
        yield
    except asyncpg.DataError as error:
        raise TaskFailed(f"The chain gives a value that its column does not hold: {error}", "BadBlock") from None
    except asyncpg.InsufficientPrivilegeError as error:
        raise TaskFailed(
            f"The user of INTERLOCK_DATA_URL may not do what is needed there ({error}): let him create a schema.",
            "DataDatabaseRefused",
        ) from None
    except _AWAY as error:
        raise DataDatabaseAway(f"The data database is away: {str(error) or type(error).__name__}") from error
