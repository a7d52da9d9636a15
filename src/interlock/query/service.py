"""A query from its request to its reply: record, slot, granted relations, engine, rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog
from msgspec import Raw

from interlock.access.principals import Principal
from interlock.access.tokens import Claims, require_binding
from interlock.errors import (
    BadRequest,
    ConfigurationError,
    Conflict,
    Forbidden,
    InterlockError,
    InvalidQuery,
    NotFound,
    QueryCrashed,
    QueryTooLarge,
    TooLarge,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from interlock.query.admission import Places
from interlock.query.catalogue import Answer, Catalogue, described, description, shows_tables
from interlock.query.engine import (
    DataFile,
    Engine,
    Files,
    Format,
    Limits,
    QueryJob,
    Relation,
    Result,
    Table,
    csv_header,
    csv_of,
    rows_of,
)
from interlock.query.records import Asker, BatchQueries, Queries, Record, StoredFile, export_prefix, summary
from interlock.query.relations import Attempt, Granted, QueryRelations, ReadableFile, Version, mentioned
from interlock.query.sql_gate import UnknownRelation
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.telemetry import QUERIES, QUERY_SECONDS
from interlock.wire.queries import (
    QueryColumn,
    QueryExport,
    QueryFormat,
    QueryMode,
    QueryOutcome,
    QueryReply,
    TaskQuery,
    UserQuery,
)

_encoder = msgspec.json.Encoder()
_AROUND = len(b"[]")


class Rows:
    """Collects rows up to a byte limit."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._rows: list[bytes] = []
        self.bytes = _AROUND
        self.full = False

    @property
    def count(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[object]) -> bool:
        """Returns False once the limit is reached."""
        for row in rows:
            encoded = _encoder.encode(row)
            if self.bytes + len(encoded) + 1 > self._most:
                self.full = True
                return False
            self._rows.append(encoded)
            self.bytes += len(encoded) + 1
        return True

    def document(self) -> bytes:
        return b"[" + b",".join(self._rows) + b"]"


log = structlog.get_logger()

_SCHEMA: Final = "datasets"
"""Schema in the data database."""
_BUFFERED: Final = "buffered"
"""Storage whose tables have the org in each row."""
_ANY: Final = 2**62
_CHUNK: Final = 1 << 20
_AHEAD: Final = 4
"""Parts of a stream that are produced ahead of the reader."""
_FILE: Final = "result.parquet"

_OUTCOMES: Final[Mapping[type[BaseException], QueryOutcome]] = {
    asyncio.CancelledError: QueryOutcome.CANCELED,
    GeneratorExit: QueryOutcome.CANCELED,
    TooManyRequests: QueryOutcome.BUSY,
    QueryTooLarge: QueryOutcome.OVER_LIMIT,
    QueryCrashed: QueryOutcome.FAILED,
    InvalidQuery: QueryOutcome.REFUSED,
    BadRequest: QueryOutcome.REFUSED,
    Unauthenticated: QueryOutcome.REFUSED,
    Forbidden: QueryOutcome.REFUSED,
    NotFound: QueryOutcome.REFUSED,
    Conflict: QueryOutcome.REFUSED,
    TooLarge: QueryOutcome.REFUSED,
}
"""The first match counts; any other error is `Lost`."""


@dataclass(frozen=True)
class Stream:
    """A reply that is sent while it is produced. The caller must iterate over it or close it."""

    query_id: UUID
    format: QueryFormat
    parts: AsyncIterator[bytes]


@dataclass(frozen=True)
class Asked:
    """A query with its caller, independent of the caller's kind."""

    asker: Asker
    body: TaskQuery | UserQuery
    granted: Callable[[], Awaitable[Granted]]
    """Returns the relations that the caller may read."""
    prefix: Callable[[UUID], str]
    """Returns the prefix for an export."""


@dataclass(frozen=True)
class _Readable:
    """The relations that a statement reads."""

    granted: Granted
    relations: list[Relation]


async def _nothing() -> Granted:
    """The relations of a statement that reads no dataset."""
    return {}


class QueryService:
    def __init__(
        self,
        settings: Settings,
        queries: Queries,
        relations: QueryRelations,
        catalogue: Catalogue,
        batches: BatchQueries,
        engine: Engine,
        objects: Objects,
    ) -> None:
        self._settings = settings
        self._queries = queries
        self._relations = relations
        self._catalogue = catalogue
        self._batches = batches
        self._engine = engine
        self._objects = objects
        self._background: set[asyncio.Task[None]] = set()
        self.places = Places(settings.query_processes, queue=settings.query_queue, seconds=settings.query_queue_seconds)

    async def ask_as_task(self, claims: Claims, body: TaskQuery) -> QueryReply | Stream:
        async def granted() -> Granted:
            require_binding(claims, body.task_id, body.attempt)
            if body.mode is not QueryMode.INTERACTIVE:
                raise _no_batch_query_in_task()
            return await self._relations.of_task(Attempt(claims, body.lease_token))

        def prefix(query_id: UUID) -> str:
            if not claims.s3.write_prefixes:
                raise Forbidden(
                    "The job of this task has no output, so it has no prefix to export to.", code="no_prefix"
                )
            return f"{claims.s3.write_prefixes[0]}exports/{query_id}/"

        return await self._ask(Asked(Asker.attempt_of(claims), body, granted, prefix))

    async def ask_as_user(self, caller: Principal, body: UserQuery) -> QueryReply | Stream:
        if shows_tables(body.sql):
            return await self._from_catalogue(caller, body, self._catalogue.tables(caller))
        if (name := described(body.sql)) is not None:
            return await self._from_catalogue(caller, body, self._described(caller, name))
        try:
            return await self._ask_datasets(caller, body)
        except UnknownRelation as error:
            if body.datasets is not None:
                raise
            raise await self._catalogue.unknown(caller, error.name) from None

    async def _from_catalogue(
        self, caller: Principal, body: UserQuery, answering: Coroutine[Any, Any, Answer]
    ) -> QueryReply:
        """Answers a statement about the datasets themselves. No statement process runs."""
        if body.export or body.mode is QueryMode.BATCH or body.format is not QueryFormat.JSON:
            answering.close()
            raise BadRequest(
                "`show tables` and `describe` reply with rows as JSON: leave `format`, `mode` and `export` out.",
                code="not_exportable",
            )
        async with self._recorded(Asked(Asker.user_of(caller), body, _nothing, str)) as record:
            answer = await answering
            rows = answer.rows[: body.limit]
            record.outcome, record.rows = QueryOutcome.COMPLETED, len(rows)
            record.truncated = answer.truncated or len(rows) < len(answer.rows)
            await record.opened()
            return QueryReply(
                query_id=record.query_id,
                outcome=QueryOutcome.COMPLETED,
                columns=answer.columns,
                rows=Raw(_encoder.encode(rows)),
                row_count=len(rows),
                truncated=record.truncated,
                duration_ms=record.seconds * 1000,
            )

    async def _described(self, caller: Principal, name: str) -> Answer:
        try:
            found = await self._relations.of_user(caller, "", [name])
        except NotFound:
            raise await self._catalogue.unknown(caller, name) from None
        return description(found[name].schema)

    async def _ask_datasets(self, caller: Principal, body: UserQuery) -> QueryReply | Stream:
        async def granted() -> Granted:
            return await self._relations.of_user(caller, body.sql, body.datasets)

        def prefix(query_id: UUID) -> str:
            return export_prefix(self._objects.root, caller.org_id, query_id)

        return await self._ask(Asked(Asker.user_of(caller), body, granted, prefix))

    @property
    def processes(self) -> int:
        """The number of statement processes, including those that are being killed."""
        return self._engine.running

    async def drain(self) -> None:
        """Waits for background cleanup. Call it after closing the engine, which ends all running statements."""
        while self._background:
            await asyncio.wait(self._background)

    # One query

    async def _ask(self, asked: Asked) -> QueryReply | Stream:
        async with AsyncExitStack() as stack:
            record = await stack.enter_async_context(self._recorded(asked))
            if asked.body.export and asked.body.limit is not None:
                raise BadRequest(
                    "`limit` does not apply to an export, which has all rows: write LIMIT into the statement.",
                    code="export_limit",
                )
            # A batch query also takes a slot, while its statement is checked.
            await stack.enter_async_context(self.places.place(asked.asker.org_id))
            if asked.body.mode is not QueryMode.BATCH:
                try:
                    return await self._answer(asked, record, await self._resolved(asked, record), stack)
                except QueryTooLarge:
                    if asked.body.mode is not QueryMode.AUTO:
                        raise
            return await self._submit_batch(asked, record, await self._checked(asked, record))

    @asynccontextmanager
    async def _recorded(self, asked: Asked) -> AsyncIterator[Record]:
        record = self._queries.begin(asked.asker, asked.body.mode, asked.body.sql)
        try:
            yield record
        except BaseException as error:
            record.outcome, record.code = _outcome_of(error), error.code if isinstance(error, InterlockError) else None
            self._close_later(record)
            raise
        else:
            self._observe(record)
            # Before the reply is sent: no answer without a record.
            await self._queries.close(record)

    def _close_later(self, record: Record) -> None:
        """Closes the record in the background: the client may have disconnected, which cancels this task."""
        self._observe(record)
        self._in_background(self._close(record))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Retrieves the exception. The record has it already, and no reader may be left to raise it."""
        self._background.discard(task)
        if not task.cancelled():
            task.exception()

    async def _close(self, record: Record) -> None:
        try:
            await self._queries.close(record)
        except InterlockError as error:
            log.warning("query.not_recorded", reason=error.detail, **summary(record))

    def _observe(self, record: Record) -> None:
        QUERIES.labels(outcome=record.outcome.value).inc()
        QUERY_SECONDS.observe(record.seconds)

    # Relations

    async def _resolved(self, asked: Asked, record: Record) -> _Readable:
        granted = mentioned(asked.body.sql, await asked.granted())
        _note_versions(record, granted, granted)
        org_id = asked.asker.org_id
        files = await self._relations.files(granted.values(), org_id)
        relations = [
            _relation(name, version, files.get(version.dataset_version, []), org_id)
            for name, version in granted.items()
        ]
        return _Readable(granted, relations)

    async def _checked(self, asked: Asked, record: Record) -> _Readable:
        readable = await self._resolved(asked, record)
        statement = await self._engine.check(asked.body.sql, readable.relations)
        _note_versions(record, readable.granted, statement.scans)
        read = {name: version for name, version in readable.granted.items() if name in statement.scans}
        return replace(readable, granted=read)

    # Replies

    async def _submit_batch(self, asked: Asked, record: Record, readable: _Readable) -> QueryReply:
        await record.opened()
        task_id = await self._batches.submit(record, asked.body.sql, readable.granted)
        return QueryReply(query_id=record.query_id, outcome=QueryOutcome.BATCHED, task_id=task_id)

    async def _answer(
        self, asked: Asked, record: Record, readable: _Readable, stack: AsyncExitStack
    ) -> QueryReply | Stream:
        body = asked.body
        job = QueryJob(body.sql, readable.relations, self._limits(body), Format.PARQUET if body.export else Format.ROWS)
        result = await self._run(job, record)
        stack.push_async_callback(self._close_result, result)
        _note_versions(record, readable.granted, result.relations)
        if body.export:
            return await self._export(asked, record, result)
        if body.format is QueryFormat.JSON:
            try:
                return await self._rows(body, record, result)
            except QueryTooLarge:
                # A batch query may follow and is checked in its own process: free this one's memory first.
                await result.close()
                raise
        parts = result.arrow() if body.format is QueryFormat.ARROW else _csv(result)
        return self._stream(body, record, result, parts, stack.pop_all())

    async def _close_result(self, result: Result) -> None:
        """Closes a result.

        A process that has sent everything is closed in the background, so that no reply waits for its exit. Any other
        process may still be working, so it keeps its slot until it is dead.
        """
        if result.said_all:
            self._in_background(result.close())
        else:
            await result.close()

    async def _run(self, job: QueryJob, record: Record) -> Result:
        try:
            return await self._engine.run(job, allowed=record.opened)
        except ConfigurationError as error:
            raise Unavailable(
                f"This query service reads files only: its operator must configure how it reads tables. {error.detail}",
                code="tables_not_readable",
            ) from None

    def _limits(self, body: TaskQuery | UserQuery) -> Limits:
        settings = self._settings
        whole = body.format is QueryFormat.JSON and not body.export
        most_rows = settings.query_max_rows if whole else _ANY
        return Limits(
            seconds=settings.query_timeout_seconds,
            memory_mb=settings.query_memory_mb,
            threads=settings.query_threads,
            temp_mb=settings.query_temp_mb,
            rows=min(body.limit or most_rows, most_rows),
            bytes=settings.query_max_bytes if whole else settings.query_stream_bytes,
        )

    async def _rows(self, body: TaskQuery | UserQuery, record: Record, result: Result) -> QueryReply:
        rows = Rows(self._settings.query_max_bytes)
        async for batch in result.batches():
            if not rows.add(rows_of(batch)):
                break
        truncated = rows.full or result.summary.truncated
        if truncated and body.mode is QueryMode.AUTO and not _cut_by_own_limit(body, rows.count):
            raise QueryTooLarge("The result exceeds the row or byte limit of a reply.", code="query_too_many_rows")
        record.outcome, record.truncated = QueryOutcome.COMPLETED, truncated
        record.rows, record.bytes = rows.count, rows.bytes
        return QueryReply(
            query_id=record.query_id,
            outcome=QueryOutcome.COMPLETED,
            columns=[QueryColumn(name, kind) for name, kind in result.columns],
            rows=Raw(rows.document()),
            row_count=rows.count,
            truncated=truncated,
            duration_ms=record.seconds * 1000,
        )

    def _stream(
        self,
        body: TaskQuery | UserQuery,
        record: Record,
        result: Result,
        parts: AsyncIterator[bytes],
        stack: AsyncExitStack,
    ) -> Stream:
        """Produces the parts in a separate task, which releases everything however its reader ends."""
        ready: asyncio.Queue[bytes] = asyncio.Queue(_AHEAD)

        async def make() -> None:
            async with stack, self._in_time():
                record.bytes = 0
                async for part in parts:
                    record.bytes += len(part)
                    await ready.put(part)
                _note_end(body, record, result)

        making = self._in_background(make())
        return Stream(record.query_id, body.format, _until_made(ready, making))

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Limits the time of a reader that takes nothing, so that it does not keep its slot forever."""
        try:
            async with asyncio.timeout(self._settings.query_timeout_seconds):
                yield
        except TimeoutError:
            raise QueryTooLarge(
                "The client did not read the reply in time: export the result instead.", code="query_timed_out"
            ) from None

    async def _export(self, asked: Asked, record: Record, result: Result) -> QueryReply:
        prefix = asked.prefix(record.query_id)
        ended = result.summary
        if ended.file is None:
            raise RuntimeError("a result that was exported has a file")
        await self._queries.note_export(record, prefix)
        stored = await self._objects.write(f"{prefix}{_FILE}", _chunks(Path(ended.file)))
        record.export_files = [StoredFile(stored.uri, stored.size)]
        record.outcome, record.rows, record.bytes = QueryOutcome.COMPLETED, ended.rows, stored.size
        export: QueryExport = await self._queries.export(prefix, record.export_files, ended.rows)
        return QueryReply(
            query_id=record.query_id,
            outcome=QueryOutcome.COMPLETED,
            columns=[QueryColumn(name, kind) for name, kind in result.columns],
            row_count=ended.rows,
            duration_ms=record.seconds * 1000,
            export=export,
        )


def _note_versions(record: Record, granted: Granted, names: Iterable[str]) -> None:
    record.versions = sorted({granted[name].dataset_version for name in names})


def _relation(name: str, version: Version, files: list[ReadableFile], org_id: UUID) -> Relation:
    columns = None if version.schema is None else version.schema.columns
    if version.table is not None:
        if version.storage == _BUFFERED:
            return Relation(name, Table(_SCHEMA, version.table, org_id), columns)
        # Tables of a chain follower: all numbers are integers, some with 256 bits.
        return Relation(name, Table(_SCHEMA, version.table, whole_numbers=True), columns)
    return Relation(name, Files([_data_file(file, version.placed_by) for file in files]), columns)


def _data_file(file: ReadableFile, placed_by: str | None) -> DataFile:
    bounds = {} if placed_by is None else {placed_by: (file.start, file.end)}
    return DataFile(file.location, bounds, file.bytes, file.schema_hash)


def _note_end(body: TaskQuery | UserQuery, record: Record, result: Result) -> None:
    """Ends a stream. A truncated stream fails, because its reader could not tell a part from the whole."""
    ended = result.summary
    record.rows, record.truncated = ended.rows, ended.truncated
    if ended.truncated and not _cut_by_own_limit(body, ended.rows):
        raise QueryTooLarge(
            "The reply exceeds its byte limit: export the result instead.", code="query_stream_too_long"
        )
    record.outcome = QueryOutcome.COMPLETED


async def _until_made(ready: asyncio.Queue[bytes], making: asyncio.Task[None]) -> AsyncIterator[bytes]:
    try:
        while not (making.done() and ready.empty()):
            taking = asyncio.create_task(ready.get())
            await asyncio.wait({taking, making}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                yield taking.result()
            else:
                taking.cancel()
        making.result()
    finally:
        making.cancel()


def _cut_by_own_limit(body: TaskQuery | UserQuery, rows: int) -> bool:
    """Returns True if the caller's own limit truncated the result."""
    return body.limit is not None and rows >= body.limit


def _outcome_of(error: BaseException) -> QueryOutcome:
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), QueryOutcome.LOST)


def _no_batch_query_in_task() -> Forbidden:
    return Forbidden(
        "A task may not start batch queries: use mode `interactive`, or add a job with the operator sql to its DAG.",
        code="batch_of_a_task",
    )


async def _csv(result: Result) -> AsyncIterator[bytes]:
    yield csv_header([name for name, _ in result.columns])
    async for batch in result.batches():
        yield csv_of(batch)


async def _chunks(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as opened:
        while part := await asyncio.to_thread(opened.read, _CHUNK):
            yield part
