"""The state database: pool, transactions, named queries, migrations."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import aiosql
import asyncpg
import structlog
from aiosql.adapters.asyncpg import AsyncPGAdapter

from interlock.clock import Clock, SystemClock
from interlock.errors import ConfigurationError, Unavailable, UnstorableText

log = structlog.get_logger()
T = TypeVar("T")

# asyncpg's stubs make Connection generic over a record class; nothing here needs another one.
# They are generic only in the stubs, not at run time.
Connection: TypeAlias = "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]"
Row = asyncpg.Record

_SQL = resources.files("interlock.sql")
_NAMED = re.compile(r"^-- name: (\w+)", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\$(\d+)")
SHARD = "shard"
"""A parameter of this name is the partition of `tasks` that a statement works on."""
_MANY_TEXTS = 10_000

# A connection that broke, or a server that is starting, stopping or out of connections: trying again is right.
_AWAY = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.DiskFullError,
    asyncpg.QueryCanceledError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    TimeoutError,
)
# Postgres text has no NUL, and a surrogate of its own is no character.
_NOT_TEXT = (asyncpg.CharacterNotInRepertoireError, asyncpg.UntranslatableCharacterError)
_BROKEN = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)
_GRACE_SECONDS = 5.0
_RETRYABLE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)


class _Statements(AsyncPGAdapter):
    """aiosql's own asyncpg adapter yields rows one by one and inspects the connection on every call: 50 µs each."""

    is_aio_driver = False  # what the methods return is awaited by the caller, as it is

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_shards: dict[tuple[str, int], tuple[str, list[str]]] = {}

    def _bound(self, query_name: str, sql: str, parameters: dict[str, Any]) -> tuple[Any, ...]:
        names = self.var_sorted[query_name]
        if SHARD in names:
            sql, names = self._of_shard(query_name, sql, parameters[SHARD])
        return sql, *[parameters[name] for name in names]

    def _of_shard(self, query_name: str, sql: str, shard: int) -> tuple[str, list[str]]:
        known = self._of_shards.get((query_name, shard))
        if known is None:
            if len(self._of_shards) > _MANY_TEXTS:
                self._of_shards.clear()
            known = self._of_shards[query_name, shard] = in_shard(sql, self.var_sorted[query_name], shard)
        return known

    def select(self, conn: Any, query_name: str, sql: str, parameters: Any, record_class: Any = None) -> Any:  # noqa: ARG002
        return conn.fetch(*self._bound(query_name, sql, parameters))

    def select_one(self, conn: Any, query_name: str, sql: str, parameters: Any, record_class: Any = None) -> Any:  # noqa: ARG002
        return conn.fetchrow(*self._bound(query_name, sql, parameters))

    def select_value(self, conn: Any, query_name: str, sql: str, parameters: Any) -> Any:
        return conn.fetchval(*self._bound(query_name, sql, parameters))

    def insert_update_delete(self, conn: Any, query_name: str, sql: str, parameters: Any) -> Any:
        return conn.execute(*self._bound(query_name, sql, parameters))


def in_shard(sql: str, names: list[str], shard: int) -> tuple[str, list[str]]:
    """A statement with the number of the shard in its text, and the parameters that are left.

    A parameter would leave every partition in the plan, to be locked by each execution: what is asked of one shard
    would get slower with the number of others.
    """
    place, literal = names.index(SHARD) + 1, str(int(shard))

    def renumbered(found: re.Match[str]) -> str:
        number = int(found[1])
        return literal if number == place else f"${number - (number > place)}"

    return _PLACEHOLDER.sub(renumbered, sql), [name for name in names if name != SHARD]


class Statements:
    """The named statements of one file, each made callable when it is first asked for.

    aiosql takes half a millisecond to read one, and a process uses few of them all.
    """

    def __init__(self, text: str) -> None:
        self.driver_adapter: Any = _Statements()
        starts = [*_NAMED.finditer(text)]
        ends = [*(start.start() for start in starts[1:]), len(text)]
        self._texts = {start[1]: text[start.start() : end] for start, end in zip(starts, ends, strict=True)}
        if len(self._texts) < len(starts):
            raise ValueError("two statements of a file have the same name")

    @property
    def available_queries(self) -> list[str]:
        return list(self._texts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._texts:
            raise AttributeError(f"there is no statement {name!r} in this file")
        loaded = aiosql.from_str(self._texts[name], lambda: self.driver_adapter, mandatory_parameters=False)
        statement = getattr(loaded, name)
        setattr(self, name, statement)  # the next one finds it without coming here
        return statement


# Statements are planned once per connection, often while a table is still empty: a plan that scans because there is
# nothing to scan would stay when there are millions of rows. Every statement here finds its rows by key, and pages of
# them by an index's own order; without statistics a bitmap and a sort look cheaper, and read a whole history.
_PLANNER = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
# An index read from end to end is no sequential scan: where a table is next to empty it may still be the plan.
# Not of runs' own shards: those have all their rows from the start, and to ask for the size of one waits for its drop.
_MAGNITUDES = (
    "select array_agg(floor(log(2, 1 + pg_relation_size(c.oid) / 8192))::int order by c.oid) from pg_class c"
    " join pg_namespace n on n.oid = c.relnamespace"
    " where n.nspname = 'interlock' and c.relkind = 'r' and c.relname !~ '^tasks_[1-9]'"
)
_MAGNITUDE_SECONDS = 1.0
_MANY_PROCESSES = 1000
# A session that somebody else has forgotten, or a backup, writes no row of ours. By ages, so that a simulated clock has
# its own answer; transactions end within the statement timeout, so older ones than a minute are none of ours.
_OLDEST_BEGIN = (
    "select interlock.clock() - least(interval '1 minute',"
    " coalesce(max(clock_timestamp() - a.xact_start), interval '0')) from pg_stat_get_activity(null) a"
    " where a.application_name like 'interlock%' and a.pid <> pg_backend_pid()"
    " and a.datid = (select d.oid from pg_database d where d.datname = current_database())"
)
_OLDEST_SECONDS = 1.0


_ARRAYS = ", ".join(f"null::{each}[]" for each in ("bool", "bytea", "float8", "int", "bigint", "timestamptz", "uuid"))


async def _know_types(connection: Connection) -> None:
    """asyncpg asks the catalog about each type that it meets first, which takes longer than most requests: here, of all
    at once, nobody waits for it. Before the first migration there are none."""
    enums = await connection.fetchval(
        "select string_agg(format('null::%s', t.oid::regtype), ', ') from pg_type t"
        " where t.typnamespace = to_regnamespace('interlock') and t.typtype = 'e'"
    )
    if enums is not None:
        await connection.fetchrow(f"select {_ARRAYS}, {enums}")  # names as the catalog quotes them


async def _keep_as_it_is(connection: Connection) -> None:
    """asyncpg would reset session state with a round trip per use; no statement here leaves any behind.

    Only one that was left inside a transaction, by a cancelled request, is set right.
    """
    if connection.is_in_transaction():
        await connection.reset()


@functools.cache
def queries(area: str, folder: str = "queries") -> Any:
    """The named statements of `sql/{folder}/{area}.sql`. Any: aiosql builds the methods from the file."""
    return Statements((_SQL / folder / f"{area}.sql").read_text())


@contextmanager
def _in_a_sentence() -> Iterator[None]:
    """Why there is no connection. What Python says of a malformed URL may quote a piece of its password."""
    try:
        yield
    except ValueError:
        raise ConfigurationError(
            "state_url is no database URL. Write postgresql://user:password@host:port/database, "
            "with special characters in the password percent-encoded."
        ) from None
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise ConfigurationError(f"The state database refuses state_url: {_reason(error)}") from error
    except _AWAY as error:
        raise Unavailable(f"The state database does not answer: {_reason(error)}") from error


class Database:
    """A pool whose every failure that means "the server is away" is Unavailable, and 503 to a caller."""

    def __init__(self, pool: asyncpg.Pool[Any], clock: Clock) -> None:
        self.pool = pool
        self.clock = clock
        self._magnitudes: list[int] | None = None
        self._planned: set[int] = set()
        """Server processes whose plans are as young as that."""
        self._look_again = 0.0
        self._oldest: tuple[float, datetime] | None = None
        """Until when it is good enough, and the begin of the oldest transaction."""

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        size: int = 10,
        timeout: float = 30.0,
        clock: Clock | None = None,
        name: str = "interlock",
    ) -> Database:
        with _in_a_sentence():
            pool = await asyncpg.create_pool(
                url,
                min_size=1,
                max_size=size,
                # The server ends a statement itself, so that none goes on after its caller was told 503; the client's
                # own limit is for a server that says nothing any more.
                command_timeout=timeout + _GRACE_SECONDS,
                timeout=min(timeout, 10.0),
                # Nor does it hold locks for a process that stands still between two statements.
                server_settings=_PLANNER
                | {"application_name": name}
                | dict.fromkeys(("statement_timeout", "idle_in_transaction_session_timeout"), str(int(timeout * 1000))),
                init=_know_types,
                reset=_keep_as_it_is,
            )
        return cls(pool, clock or SystemClock())

    async def close(self) -> None:
        try:
            await asyncio.wait_for(self.pool.close(), timeout=5)
        except TimeoutError:
            self.pool.terminate()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """One connection, autocommit: each statement is its own transaction."""
        try:
            async with self.pool.acquire() as connection:
                try:
                    await self._follow_growth(connection)
                    await self._steer(connection)
                    yield connection
                except _BROKEN:
                    # Never back into the pool: the server died in the middle of a statement.
                    connection.terminate()
                    raise
        except _AWAY as error:
            raise Unavailable(f"The state database is away, try again: {_reason(error)}") from error
        except _NOT_TEXT as error:
            raise UnstorableText("A text holds a character that cannot be stored, such as NUL.") from error
        except asyncpg.PostgresError as error:
            # Postgres quotes whole rows there, payloads included; the error goes to the log.
            error.detail = None
            raise

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        async with self.connection() as connection, connection.transaction():
            yield connection

    async def oldest_begin(self) -> datetime:
        """When the oldest open transaction of Interlock began; what commits from now on bears no earlier time.

        A time that is a moment old is as right, and a scan that starts from it reads a little more.
        """
        if self._oldest is None or time.monotonic() >= self._oldest[0] or self.clock.simulated() is not None:
            async with self.connection() as connection:
                begin: datetime = await connection.fetchval(_OLDEST_BEGIN)
            self._oldest = time.monotonic() + _OLDEST_SECONDS, begin
        return self._oldest[1]

    async def run(self, work: Callable[[Connection], Awaitable[T]], *, transaction: bool = True) -> T:
        """Runs `work`, again if Postgres chose it as the victim of a deadlock. `work` must have no other effects."""
        for pause in (0.01, 0.05, 0.2):
            try:
                return await self._once(work, transaction)
            except _RETRYABLE as error:
                log.warning("transaction.retried", reason=type(error).__name__)
                await asyncio.sleep(pause * random.random())  # noqa: S311 - jitter, not a secret
        return await self._once(work, transaction)

    async def _once(self, work: Callable[[Connection], Awaitable[T]], transaction: bool) -> T:
        scope = self.transaction if transaction else self.connection
        async with scope() as connection:
            return await work(connection)

    async def _follow_growth(self, connection: Connection) -> None:
        """When a table has doubled, every connection plans anew; nobody waits for the next ANALYZE."""
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + _MAGNITUDE_SECONDS
            magnitudes = await connection.fetchval(_MAGNITUDES)
            if magnitudes != self._magnitudes or len(self._planned) > _MANY_PROCESSES:
                self._magnitudes = magnitudes
                self._planned.clear()
        process = connection.get_server_pid()
        if process not in self._planned:
            await connection.execute("discard plans")
            self._planned.add(process)

    async def _steer(self, connection: Connection) -> None:
        simulated = self.clock.simulated()
        if simulated is not None:
            await connection.execute("select set_config('interlock.now', $1, false)", simulated.isoformat())


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


@dataclass(frozen=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations() -> list[Migration]:
    """All shipped migrations, in order."""
    files = sorted((f for f in (_SQL / "migrations").iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [Migration(int(f.name.split("_")[0]), Path(f.name).stem, f.read_text()) for f in files]


async def migrate(url: str, *, steps: Sequence[Migration] | None = None) -> list[str]:
    """Brings the schema forward. Safe to run from many processes at once; returns the names of what it applied."""
    shipped = list(steps if steps is not None else migrations())
    with _in_a_sentence():
        connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute("select pg_advisory_xact_lock(hashtextextended('interlock:migrate', 0))")
            return await _apply(connection, shipped)
    finally:
        await connection.close()


async def _apply(connection: Connection, shipped: list[Migration]) -> list[str]:
    await connection.execute(
        "create table if not exists public.interlock_migrations (version int primary key, name text not null,"
        " checksum text not null, applied_at timestamptz not null default now())"
    )
    rows = await connection.fetch("select version, name, checksum from public.interlock_migrations order by version")
    check_applied({row["version"]: row["checksum"] for row in rows}, shipped)
    missing = [step for step in shipped if step.version not in {row["version"] for row in rows}]
    for step in missing:
        await connection.execute(step.sql)
        await connection.execute(
            "insert into public.interlock_migrations (version, name, checksum) values ($1, $2, $3)",
            step.version,
            step.name,
            step.checksum,
        )
    return [step.name for step in missing]


def check_applied(applied: dict[int, str], shipped: Sequence[Migration]) -> None:
    """Refuses a database this build does not know, before anything is read or written in it."""
    newest = max((step.version for step in shipped), default=0)
    if applied and max(applied) > newest:
        raise ConfigurationError(
            f"The state database has schema version {max(applied)}, this Interlock knows only up to {newest}. "
            "Start the newer Interlock that migrated it, or point state_url at another database."
        )
    for step in shipped:
        if step.version in applied and applied[step.version] != step.checksum:
            raise ConfigurationError(
                f"Migration {step.name} was changed after it had been applied to this database. "
                "Restore the file; a change of schema is a new migration."
            )


async def require_schema(url: str) -> None:
    """What a process checks at start: the schema is exactly the one it was built for."""
    with _in_a_sentence():
        connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("select version, checksum from public.interlock_migrations")
    except asyncpg.UndefinedTableError:
        rows = []
    finally:
        await connection.close()
    shipped = migrations()
    check_applied({row["version"]: row["checksum"] for row in rows}, shipped)
    if len(rows) < len(shipped):
        raise ConfigurationError("The state database is behind this Interlock: run `interlock migrate` first.")
