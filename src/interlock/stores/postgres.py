"""The state database: pool, transactions, named queries, migrations.

`isolated` keeps an item that cannot be processed from failing the batch it is in. Batches and loops serve all orgs
together. An error caused by an item's content would recur with every retry and block the items around it. Such an item
is set aside: it is logged and counted in `interlock_set_aside_total`, and the other items are processed. Errors of an
unavailable store are not handled here.
"""

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
from typing import Any, Final, TypeAlias, TypeVar

import aiosql
import asyncpg
import structlog
from aiosql.adapters.asyncpg import AsyncPGAdapter

from interlock.clock import Clock, SystemClock
from interlock.errors import ConfigurationError, Unavailable, UnstorableText
from interlock.telemetry import SET_ASIDE

log = structlog.get_logger()
T = TypeVar("T")

# asyncpg's stubs make Connection generic over a record class, which nothing here needs. It is generic only in the
# stubs, not at run time.
Connection: TypeAlias = "asyncpg.Connection[Any] | asyncpg.pool.PoolConnectionProxy[Any]"
Row = asyncpg.Record

_PACKAGE = Path(__file__).parents[1]
_MIGRATIONS = resources.files("interlock.stores") / "migrations"
_NAMED = re.compile(r"^-- name: (\w+)", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\$(\d+)")
SHARD = "shard"
"""The parameter with the partition of `tasks` that a statement uses."""
_MANY_TEXTS = 10_000

# The connection broke, or the server is starting, stopping or out of connections: a retry may succeed.
_UNAVAILABLE = (
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
# Postgres text cannot contain NUL or an unpaired surrogate.
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
    """A faster adapter: aiosql's own yields single rows and inspects the connection on every call, at 50 µs each."""

    is_aio_driver = False  # the methods return awaitables, which the caller awaits

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
    """Returns the statement with the shard number as a literal, and the remaining parameters.

    With a parameter, the plan would contain every partition, and each execution would lock all of them: a query on one
    shard would get slower with the number of other shards.
    """
    place, literal = names.index(SHARD) + 1, str(int(shard))

    def renumbered(found: re.Match[str]) -> str:
        number = int(found[1])
        return literal if number == place else f"${number - (number > place)}"

    return _PLACEHOLDER.sub(renumbered, sql), [name for name in names if name != SHARD]


class Statements:
    """The named statements of one file, each parsed on first use.

    aiosql takes 0.5 ms to parse one, and a process uses only a few of them.
    """

    def __init__(self, text: str) -> None:
        self.driver_adapter: Any = _Statements()
        starts = [*_NAMED.finditer(text)]
        ends = [*(start.start() for start in starts[1:]), len(text)]
        self._texts = {start[1]: text[start.start() : end] for start, end in zip(starts, ends, strict=True)}
        if len(self._texts) < len(starts):
            raise ValueError("two statements in a file have the same name")

    @property
    def available_queries(self) -> list[str]:
        return list(self._texts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._texts:
            raise AttributeError(f"this file has no statement {name!r}")
        loaded = aiosql.from_str(self._texts[name], lambda: self.driver_adapter, mandatory_parameters=False)
        statement = getattr(loaded, name)
        setattr(self, name, statement)  # later lookups find it without __getattr__
        return statement


# Statements are planned once per connection, often while a table is still empty: a sequential scan planned for an empty
# table would stay when it has millions of rows. Every statement here finds its rows by key, and pages of rows in index
# order; without statistics, a bitmap scan and a sort look cheaper and would read the whole history.
_PLANNER = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
# A full index scan is not a sequential scan, so the planner may still choose it for an almost empty table. Shards of
# single runs are excluded: they have all rows from the start, and reading their size would wait for a concurrent drop.
_MAGNITUDES = (
    "select array_agg(floor(log(2, 1 + pg_relation_size(c.oid) / 8192))::int order by c.oid) from pg_class c"
    " join pg_namespace n on n.oid = c.relnamespace"
    " where n.nspname = 'interlock' and c.relkind = 'r' and c.relname !~ '^tasks_[1-9]'"
)
_MAGNITUDE_SECONDS = 1.0
_MANY_PROCESSES = 1000
# A forgotten session of another program, or a backup, writes no rows of Interlock. The query uses ages, so that it
# works
# with a simulated clock. Transactions end within the statement timeout, so those older than a minute are not ours.
_OLDEST_BEGIN = (
    "select interlock.clock() - least(interval '1 minute', coalesce(max(clock_timestamp() - a.xact_start), interval "
    "'0')) from pg_stat_get_activity(null) a where a.application_name like 'interlock%' and a.pid <> pg_backend_pid() "
    "and a.datid = (select d.oid from pg_database d where d.datname = current_database())"
)
_OLDEST_SECONDS = 1.0


_ARRAYS = ", ".join(f"null::{each}[]" for each in ("bool", "bytea", "float8", "int", "bigint", "timestamptz", "uuid"))


async def _load_types(connection: Connection) -> None:
    """Loads all types in advance: asyncpg queries the catalog on the first use of each type, which takes longer than
    most
    requests. Before the first migration there are none."""
    enums = await connection.fetchval(
        "select string_agg(format('null::%s', t.oid::regtype), ', ') from pg_type t"
        " where t.typnamespace = to_regnamespace('interlock') and t.typtype = 'e'"
    )
    if enums is not None:
        await connection.fetchrow(f"select {_ARRAYS}, {enums}")  # quoted by the catalog


async def _skip_reset(connection: Connection) -> None:
    """Skips asyncpg's reset of the session, which costs a round trip per use: no statement here changes session state.

    Only a connection that a cancelled request left inside a transaction is reset.
    """
    if connection.is_in_transaction():
        await connection.reset()


def queries(module: str, area: str) -> Any:
    """Loads the named statements of `queries/{area}.sql` next to the module `__name__`, or in a package around it.

    So a capability can load only its own statements. Any: aiosql builds the methods from the file.
    """
    folder = _PACKAGE
    found = None
    for part in module.split(".")[1:]:
        folder = folder / part
        file = folder / "queries" / f"{area}.sql"
        found = file if file.is_file() else found
    if found is None:
        raise FileNotFoundError(f"No package of {module} has queries/{area}.sql.")
    return _statements(found)


@functools.cache
def _statements(file: Path) -> Statements:
    return Statements(file.read_text())


async def database_time(connection: Connection) -> datetime:
    now: datetime = await connection.fetchval("select interlock.clock()")
    return now


async def try_lock(connection: Connection, name: str) -> bool:
    """Locks a name until the end of the transaction. Returns False if another transaction holds it."""
    locked: bool = await connection.fetchval(
        "select pg_try_advisory_xact_lock(hashtextextended('interlock:' || $1::text, 0))", name
    )
    return locked


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Converts connection errors. Python's message for a malformed URL may quote parts of its password."""
    try:
        yield
    except ValueError:
        raise ConfigurationError(
            "state_url is not a database URL. Write postgresql://user:password@host:port/database, "
            "with special characters in the password percent-encoded."
        ) from None
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise ConfigurationError(f"The state database rejects state_url: {_reason(error)}") from error
    except _UNAVAILABLE as error:
        raise Unavailable(f"The state database does not respond: {_reason(error)}") from error


class Database:
    """A connection pool that raises Unavailable (503) whenever the server is unavailable."""

    def __init__(self, pool: asyncpg.Pool[Any], clock: Clock) -> None:
        self.pool = pool
        self.clock = clock
        self._magnitudes: list[int] | None = None
        self._planned: set[int] = set()
        """Server processes that have planned since the last change of magnitudes."""
        self._check_growth_at = 0.0
        self._oldest: tuple[float, datetime] | None = None
        """Expiry of the cached value, and the start of the oldest transaction."""

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
        with _connection_errors():
            pool = await asyncpg.create_pool(
                url,
                min_size=1,
                max_size=size,
                # The server cancels statements itself, so that none continues after its caller got 503. The client's
                # timeout is for a server that no longer responds.
                command_timeout=timeout + _GRACE_SECONDS,
                timeout=min(timeout, 10.0),
                # The server also ends idle transactions, so that a stalled process holds no locks.
                server_settings=_PLANNER
                | {"application_name": name}
                | dict.fromkeys(("statement_timeout", "idle_in_transaction_session_timeout"), str(int(timeout * 1000))),
                init=_load_types,
                reset=_skip_reset,
            )
        return cls(pool, clock or SystemClock())

    async def close(self) -> None:
        try:
            await asyncio.wait_for(self.pool.close(), timeout=5)
        except TimeoutError:
            self.pool.terminate()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Yields a connection in autocommit mode: each statement is its own transaction."""
        try:
            async with self.pool.acquire() as connection:
                try:
                    await self._follow_growth(connection)
                    await self._set_simulated_time(connection)
                    yield connection
                except _BROKEN:
                    # Never return it to the pool: the server died in the middle of a statement.
                    connection.terminate()
                    raise
        except _UNAVAILABLE as error:
            raise Unavailable(f"The state database is unavailable; retry later: {_reason(error)}") from error
        except _NOT_TEXT as error:
            raise UnstorableText("A text contains a character that cannot be stored, such as NUL.") from error
        except asyncpg.PostgresError as error:
            # Postgres quotes whole rows in the detail, including payloads, and the error is logged.
            error.detail = None
            raise

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        async with self.connection() as connection, connection.transaction():
            yield connection

    async def oldest_begin(self) -> datetime:
        """Returns the start of the oldest open transaction of Interlock; later commits carry no earlier time.

        A slightly old value is still correct; a scan that starts from it only reads a little more.
        """
        if self._oldest is None or time.monotonic() >= self._oldest[0] or self.clock.simulated() is not None:
            async with self.connection() as connection:
                begin: datetime = await connection.fetchval(_OLDEST_BEGIN)
            self._oldest = time.monotonic() + _OLDEST_SECONDS, begin
        return self._oldest[1]

    async def run(self, work: Callable[[Connection], Awaitable[T]], *, transaction: bool = True) -> T:
        """Runs `work`, and retries it after a deadlock or serialization failure.

        `work` must have no other side effects.
        """
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
        """Discards the plans of all connections when a table has doubled in size, without waiting for ANALYZE."""
        now = time.monotonic()
        if now >= self._check_growth_at:
            self._check_growth_at = now + _MAGNITUDE_SECONDS
            magnitudes = await connection.fetchval(_MAGNITUDES)
            if magnitudes != self._magnitudes or len(self._planned) > _MANY_PROCESSES:
                self._magnitudes = magnitudes
                self._planned.clear()
        process = connection.get_server_pid()
        if process not in self._planned:
            await connection.execute("discard plans")
            self._planned.add(process)

    async def _set_simulated_time(self, connection: Connection) -> None:
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
    """Returns all shipped migrations, in order."""
    files = sorted((f for f in _MIGRATIONS.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [Migration(int(f.name.split("_")[0]), Path(f.name).stem, f.read_text()) for f in files]


async def migrate(url: str, *, steps: Sequence[Migration] | None = None) -> list[str]:
    """Applies missing migrations and returns their names. Safe to run concurrently in many processes."""
    shipped = list(steps if steps is not None else migrations())
    with _connection_errors():
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
    """Rejects a database with a schema unknown to this build, before anything is read or written."""
    newest = max((step.version for step in shipped), default=0)
    if applied and max(applied) > newest:
        raise ConfigurationError(
            f"The state database has schema version {max(applied)}, but this Interlock supports only versions up to "
            f"{newest}. Start the newer Interlock that migrated it, or point state_url to another database."
        )
    for step in shipped:
        if step.version in applied and applied[step.version] != step.checksum:
            raise ConfigurationError(
                f"Migration {step.name} was changed after it was applied to this database. "
                "Restore the file, and put schema changes into a new migration."
            )


async def require_schema(url: str) -> None:
    """Checks at process start that the database has exactly the schema of this build."""
    with _connection_errors():
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
        raise ConfigurationError("The schema of the state database is outdated; run `interlock migrate` first.")


R = TypeVar("R")

UNSTORABLE: Final = (asyncpg.DataError, asyncpg.ProgramLimitExceededError)
"""PostgreSQL errors about a value: text or a number it cannot represent, nesting or an index entry over its limit."""
CONTENT_ERRORS: Final = (*UNSTORABLE, UnstorableText, ValueError, OverflowError, RecursionError)
"""Errors caused by a value rather than by a store. msgspec and Unicode errors are ValueErrors."""


async def isolated(
    name: str, items: Sequence[T], work: Callable[[Sequence[T]], Awaitable[R]]
) -> tuple[list[R], list[tuple[T, Exception]]]:
    """Processes all items together. After a content error, bisects until the failing items are alone.

    `work` must leave no effect when it raises. Returns its results, and the items set aside with their errors.
    """
    try:
        return [await work(items)], []
    except CONTENT_ERRORS as error:
        if len(items) == 1:
            set_aside(name, error)
            return [], [(items[0], error)]
    middle = len(items) // 2
    done, aside = await isolated(name, items[:middle], work)
    more, others = await isolated(name, items[middle:], work)
    return done + more, aside + others


def set_aside(name: str, error: Exception, **where: str) -> None:
    """Counts and logs an item that is left out. Does not log the error's text, which may quote a payload."""
    SET_ASIDE.labels(loop=name).inc()
    log.warning("item.set_aside", loop=name, error=type(error).__name__, **where)
