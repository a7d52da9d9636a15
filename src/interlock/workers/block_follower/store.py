"""The follower's rows in the data database. Writes are idempotent, survive a crash, and are fenced to one attempt.

A write is one transaction. It checks and holds the fence, deletes everything from the first block on, copies the rows,
and updates position, hashes and pending events. Repeating a write gives the same rows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg

from interlock.stores.postgres import Connection, queries
from interlock.workers.block_follower.chain import COLUMNS, Record
from interlock.workers.block_follower.config import Kind
from interlock.workers.context import TaskFailed
from interlock.workers.failures import DataDatabaseAway

_sql = queries(__name__, "follower")
_SCHEMA_FILE: Final = resources.files("interlock.workers.block_follower") / "schema.sql"
SCHEMA: Final = "datasets"

TIMEOUT_SECONDS: Final = 60
"""Timeout of a statement, and of a transaction that is idle."""
MAX_OWED: Final = 1_000

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
    """A newer attempt has become the writer of these datasets."""


class WrongChain(TaskFailed):
    """The endpoint serves another chain than the stored one."""


@dataclass(frozen=True, slots=True)
class Target:
    """An output of the follower."""

    kind: Kind
    dataset_uuid: UUID
    dataset_version: UUID

    @property
    def table(self) -> str:
        return table_of(self.dataset_version)


def table_of(dataset_version: UUID) -> str:
    return f"dataset_{dataset_version.hex}"


def location_of(dataset_version: UUID) -> str:
    """Returns the location of the rows, as readers get it."""
    return f"postgres_table:{table_of(dataset_version)}"


@dataclass(frozen=True, slots=True)
class Producer:
    """The attempt that writes."""

    task_id: UUID
    attempt: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored state of a follower."""

    position: int
    """The last stored block; the block before the first one if nothing is stored."""
    cursor: int | None
    """The datasets are complete up to here. The event for it was emitted, or will be."""
    hashes: dict[int, str]


@dataclass(frozen=True, slots=True)
class Owed:
    """A rewrite that is committed, but whose event is not yet emitted."""

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
            # Not `close`, which would wait for a running statement and delay a stop.
            connection.terminate()

    # The start

    async def take_over(self, chain_id: int, genesis: str | None, start_block: int, *, proven: bool = False) -> Stored:
        """Creates the tables, makes this attempt their only writer, and returns the stored state.

        Raises Superseded if this attempt does not have the highest number, unless it has `proven` to be the newest.
        """
        kinds = [target.kind for target in self.targets]
        with _readable_errors():
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
        """Returns the last cursor that was emitted for the datasets, by any attempt."""
        with _readable_errors():
            cursor: int | None = await _sql.told_cursor(self._connection, versions=self._versions)
        return cursor

    def _check(self, rows: Sequence[Any], chain_id: int, genesis: str | None, start_block: int) -> None:
        if len(rows) < len(self._versions):
            raise _superseded()
        kinds = {target.dataset_version: target.kind for target in self.targets}
        for row in rows:
            if row["chain_id"] != chain_id or (genesis and row["genesis"] and row["genesis"] != genesis):
                raise WrongChain(
                    f"The stored blocks are of chain {row['chain_id']} with first block {row['genesis']}, but rpc_url "
                    f"serves chain {chain_id} with first block {genesis}. Point rpc_url at the stored chain, or deploy "
                    "the job with another config to write this chain into new datasets."
                )
            if row["start_block"] != start_block or row["kind"] != kinds[row["dataset_version"]]:
                raise WrongChain(
                    f"Dataset version {row['dataset_version']} contains {row['kind']} from block {row['start_block']} "
                    "on. To change start_block or outputs, deploy the job, which creates new dataset versions."
                )

    def require_open(self) -> None:
        """Raises DataDatabaseAway if the connection is closed.

        A newer attempt ends the connections of older ones. A follower with nothing to write would not notice otherwise.
        """
        if self._connection.is_closed():
            raise DataDatabaseAway("The data database, or a newer attempt of this task, has closed the connection.")

    # Writes

    async def write(
        self, first: int, hashes: Sequence[str], records: Mapping[Kind, Sequence[Record]], keep_hashes: int
    ) -> int | None:
        """Replaces everything from block `first` on by the given blocks. Returns the cursor."""
        last = first + len(hashes) - 1
        kept = min(len(hashes), keep_hashes)
        with _readable_errors():
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

    # Pending events

    async def owed(self) -> list[Owed]:
        with _readable_errors():
            rows = await _sql.owed(self._connection, versions=self._versions, limit=MAX_OWED)
        return [Owed(row["owed_id"], row["dataset_version"], row["range_start"], row["range_end"]) for row in rows]

    async def announced(self, ranges: Sequence[Owed]) -> None:
        """Deletes pending rewrites after the dispatcher has accepted their events."""
        owed_ids = [one.owed_id for one in ranges]
        with _readable_errors():
            await _sql.announced(self._connection, versions=self._versions, owed_ids=owed_ids)


def _named(producer: Producer) -> dict[str, Any]:
    return {"task_id": producer.task_id, "attempt": producer.attempt}


def _superseded() -> Superseded:
    return Superseded("A newer attempt of this task writes these datasets now: this attempt stops.")


@contextmanager
def _opening() -> Iterator[None]:
    try:
        with _readable_errors():
            yield
    except (ValueError, asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        # Python's message about a malformed URL may quote part of its password, so it is not passed on.
        why = "" if isinstance(error, ValueError) else f" ({error})"
        raise TaskFailed(
            f"The worker cannot open the data database with INTERLOCK_DATA_URL{why}: set it to "
            "postgresql://user:password@host:port/database.",
            "DataDatabaseRefused",
        ) from None


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except asyncpg.DataError as error:
        raise TaskFailed(f"A value of the chain does not fit into its column: {error}", "BadBlock") from None
    except asyncpg.InsufficientPrivilegeError as error:
        raise TaskFailed(
            f"The user in INTERLOCK_DATA_URL lacks a privilege ({error}): grant it CREATE on the database.",
            "DataDatabaseRefused",
        ) from None
    except _AWAY as error:
        raise DataDatabaseAway(f"The data database is unavailable: {str(error) or type(error).__name__}") from error
