"""Rows in the data database: the rows of a batch and its ledger row are one transaction.

A sink that loads a batch again, after a crash or concurrently with another sink, finds the ledger row and writes
nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final
from uuid import UUID

import asyncpg
import pyarrow as pa

from interlock.datasets.buffers.batch import BadBatch
from interlock.datasets.buffers.binary_copy import PUBLISH, binary
from interlock.datasets.buffers.shape import Shape
from interlock.errors import ConfigurationError, Unavailable
from interlock.failpoints import failpoint
from interlock.stores.postgres import Connection, queries

_sql = queries(__name__, "sink")
_SCHEMA_FILE: Final = resources.files("interlock.datasets.buffers") / "schema.sql"
_STAGE: Final = "sink_stage"
_STATEMENT_SECONDS: Final = 900
_OPEN_SECONDS: Final = 10
_MAX_KNOWN: Final = 10_000

_UNAVAILABLE: Final = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.OperatorInterventionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InsufficientResourcesError,
    asyncpg.DeadlockDetectedError,
    TimeoutError,
)
_BATCHS_FAULT: Final = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
    asyncpg.CardinalityViolationError,
)
_DROPPED: Final = (
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedColumnError,
    asyncpg.UndefinedFunctionError,
    asyncpg.InvalidColumnReferenceError,
    asyncpg.InvalidSchemaNameError,
)


@dataclass(frozen=True)
class Target:
    """The table of a dataset version."""

    dataset_version: UUID
    org_id: UUID
    shape: Shape

    @property
    def table(self) -> str:
        return f"dataset_{self.dataset_version.hex}"


@dataclass(frozen=True)
class Part:
    """A batch among those loaded together."""

    publish_id: UUID
    rows: int


@dataclass(frozen=True)
class Committed:
    publish_id: UUID
    batch: int
    rows: int


@dataclass(frozen=True)
class Staged:
    """A batch that a Spark task has staged or refused."""

    rows: int
    bytes: int
    refusal: str | None


class _Dropped(Exception):
    """The table existed, and was dropped."""


class Store:
    def __init__(self, pool: asyncpg.Pool[Any]) -> None:
        self._pool = pool
        self._made: dict[UUID, str] = {}
        """Existing tables, with the columns they were created with."""

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, size: int) -> AsyncIterator[Store]:
        """Opens a pool without connecting: the server may be unavailable at the moment."""
        limits = {"statement_timeout": _STATEMENT_SECONDS, "idle_in_transaction_session_timeout": _STATEMENT_SECONDS}
        with _opening():
            pool = asyncpg.create_pool(
                url,
                min_size=0,
                max_size=size,
                timeout=_OPEN_SECONDS,
                command_timeout=_STATEMENT_SECONDS + 5,
                server_settings={name: f"{seconds}s" for name, seconds in limits.items()}
                | {
                    "application_name": "interlock sink",
                    "timezone": "UTC",
                    "datestyle": "ISO, YMD",
                    "jit": "off",
                },
            )
            await pool
        try:
            yield cls(pool)
        finally:
            pool.terminate()

    # Tables

    async def ensure(self, target: Target) -> None:
        if self._made.get(target.dataset_version) == target.shape.table_columns:
            return
        async with self._transaction() as connection:
            await _sql.lock_schema(connection)
            await connection.execute(_SCHEMA_FILE.read_text())
            await _sql.ensure(
                connection,
                version=target.dataset_version,
                org_id=target.org_id,
                columns=target.shape.table_columns,
                key=list(target.shape.key),
            )
        if len(self._made) >= _MAX_KNOWN:
            self._made.clear()
        self._made[target.dataset_version] = target.shape.table_columns

    # Rows

    async def load(self, target: Target, parts: Sequence[Part], rows: pa.Table) -> list[Committed]:
        """Loads the rows of all parts, in the format of `copying.together`. Raises BadBatch and Unavailable."""

        async def stage(connection: Connection) -> str:
            await _sql.stage(connection, columns=target.shape.table_columns)
            await connection.copy_to_table(
                _STAGE, columns=[PUBLISH, *target.shape.names], source=binary(rows), format="binary"
            )
            return _STAGE

        return await self._again_if_dropped(target, parts, stage, repeated=False)

    async def load_staged(
        self, target: Target, parts: Sequence[Part], staging: str, *, leave_out: Set[UUID]
    ) -> list[Committed]:
        """Loads rows that a Spark task has staged in a table of its own, except those of refused batches."""

        async def stage(_: Connection) -> str:
            return f"datasets.{staging}"

        return await self._again_if_dropped(target, parts, stage, repeated=True, leave_out=leave_out)

    async def staged(self, staging: str) -> dict[UUID, Staged]:
        """Returns the findings of a Spark task about its batches; empty if it did not get that far."""
        try:
            async with self._transaction() as connection:
                rows = await _sql.staged(connection, name=staging)
        except _Dropped:
            return {}
        return {row["publish_id"]: Staged(row["rows"], row["bytes"], row["refusal"]) for row in rows}

    async def _again_if_dropped(
        self,
        target: Target,
        parts: Sequence[Part],
        stage: Any,
        *,
        repeated: bool,
        leave_out: Set[UUID] = frozenset(),
    ) -> list[Committed]:
        """Retries once with a new table if the table is dropped meanwhile. Any: a coroutine function."""
        try:
            return await self._commit(target, parts, stage, repeated=repeated, leave_out=leave_out)
        except _Dropped:
            self._made.pop(target.dataset_version, None)
        try:
            return await self._commit(target, parts, stage, repeated=repeated, leave_out=leave_out)
        except _Dropped:
            raise Unavailable(f"Table {target.table} of the data database is dropped repeatedly.") from None

    async def _commit(
        self,
        target: Target,
        parts: Sequence[Part],
        stage: Any,
        *,
        repeated: bool,
        leave_out: Set[UUID] = frozenset(),
    ) -> list[Committed]:
        await self.ensure(target)
        async with self._transaction() as connection:
            source = await stage(connection)
            last = await _sql.lock_table(connection, version=target.dataset_version, org_id=target.org_id)
            if last is None:
                raise _Dropped
            known = await self._known(connection, target, [part.publish_id for part in parts])
            wanted = [part for part in parts if part.publish_id not in leave_out]
            fresh = [part for part in wanted if part.publish_id not in known]
            numbers = {part.publish_id: last + at for at, part in enumerate(fresh, 1)}
            if fresh:
                await self._merge(connection, target, parts, source, numbers, repeated=repeated)
                await _sql.remember(
                    connection,
                    version=target.dataset_version,
                    org_id=target.org_id,
                    publish_ids=[part.publish_id for part in fresh],
                    numbers=list(numbers.values()),
                    rows=[part.rows for part in fresh],
                )
            await failpoint("sink.before_data_commit")
        await failpoint("sink.data_committed")
        return [
            known.get(part.publish_id) or Committed(part.publish_id, numbers[part.publish_id], part.rows)
            for part in wanted
        ]

    async def _known(
        self, connection: Connection, target: Target, publish_ids: Sequence[UUID]
    ) -> dict[UUID, Committed]:
        rows = await _sql.committed(connection, publish_ids=list(publish_ids), org_id=target.org_id)
        return {row["publish_id"]: Committed(row["publish_id"], row["batch"], row["rows"]) for row in rows}

    async def _merge(
        self,
        connection: Connection,
        target: Target,
        parts: Sequence[Part],
        source: str,
        numbers: dict[UUID, int],
        *,
        repeated: bool,
    ) -> None:
        await _sql.merge(
            connection,
            version=target.dataset_version,
            org_id=target.org_id,
            stage=source,
            publish_ids=[part.publish_id for part in parts],
            numbers=[numbers.get(part.publish_id) for part in parts],
            columns=target.shape.table_columns,
            key=list(target.shape.key),
            update_rows=target.shape.update,
            repeated=repeated,
        )

    async def committed(self, target: Target, publish_ids: Sequence[UUID]) -> dict[UUID, Committed]:
        """Returns the batches that are already loaded, so that they are not read again."""
        await self.ensure(target)
        try:
            async with self._transaction() as connection:
                return await self._known(connection, target, publish_ids)
        except _Dropped:
            self._made.pop(target.dataset_version, None)
            return {}

    # Cleanup

    async def forget(self, publish_ids: Sequence[UUID]) -> None:
        try:
            async with self._transaction() as connection:
                await _sql.forget(connection, publish_ids=list(publish_ids))
        except _Dropped:
            return  # the data database is new, so the ledger is empty

    async def stagings(self, limit: int) -> list[UUID]:
        """Returns the Spark tasks that have staging tables."""
        try:
            async with self._transaction() as connection:
                return [row["task_id"] for row in await _sql.stagings(connection, limit=limit)]
        except _Dropped:
            return []  # the data database is new

    async def drop_staging(self, prefix: str) -> None:
        try:
            async with self._transaction() as connection:
                await _sql.drop_staging(connection, prefix=prefix)
        except _Dropped:
            return

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        with _translated_errors():
            async with self._pool.acquire() as connection, connection.transaction():
                yield connection


@contextmanager
def _opening() -> Iterator[None]:
    try:
        yield
    except ValueError:
        # Python's own message about a malformed URL may quote part of the password.
        raise ConfigurationError(
            "data_url is not a database URL. Write postgresql://user:password@host:port/database, "
            "with special characters in the password percent-encoded."
        ) from None


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except _DROPPED as error:
        raise _Dropped from error
    except _BATCHS_FAULT as error:
        raise BadBatch("refused_by_database", f"The data database rejects the rows: {_reason(error)}.") from None
    except _UNAVAILABLE as error:
        raise Unavailable(f"The data database is unavailable: {_reason(error)}") from error
    except asyncpg.PostgresError as error:
        # A batch cannot cause these: missing privileges, a column changed by hand, a full disk.
        raise Unavailable(f"The data database reports an error: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Returns the message, which names columns and limits. Omits the detail, which quotes rows."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
