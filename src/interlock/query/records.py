"""Records of queries: caller, data read and outcome. The statement itself is never stored, only its hash.

A record is opened before any check and closed at the end, so refused queries have one too. No statement runs before its
record is committed. If the process dies, the record stays open until a loop marks it as lost.

A batch query runs on Spark, as a task of the built-in operator batch_query, which reads pinned versions. One
transaction writes the task, its inputs and the end of the query's record. The job's edges define what the task may
read, and the dispatcher decides where it writes. A task with a forged payload therefore reaches nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Raw, Struct

from interlock.access.principals import Principal
from interlock.access.tokens import Claims
from interlock.errors import NotFound
from interlock.failpoints import failpoint
from interlock.http.cursors import FIRST, LAST, next_cursor, uuid_cursor
from interlock.jobs.spark_loads import BATCH_QUERY, batch_prefix
from interlock.jobs.submission import ClosedRuns
from interlock.processes.loop import Periodic
from interlock.query.relations import Granted
from interlock.settings import Settings
from interlock.stores.low_water import LowWater
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.result_packs import Packs
from interlock.tasks.shards import SMALL_SHARD, run_task_id
from interlock.telemetry import TASKS_CREATED
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import JobRequest, Policy
from interlock.wire.queries import ExportedFile, QueryExport, QueryMode, QueryOutcome, QueryPage, QueryView

_sql = queries(__name__, "queries")
_BATCH: Final = 5000
_GRACE_SECONDS: Final = 60.0
"""Added to the sum of all timeouts: no query is open for longer."""
SIGNED_SECONDS: Final = 3600.0


class StoredFile(Struct, frozen=True):
    uri: str
    bytes: int


class _BatchResult(Struct, frozen=True):
    """The task result of the operator batch_query."""

    prefix: str
    files: list[StoredFile]
    row_count: int


_files = msgspec.json.Decoder(list[StoredFile])
_result = msgspec.json.Decoder(_BatchResult)

_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True)
class Asker:
    """The caller of a query: a user or an attempt of a task."""

    org_id: UUID
    user: str | None = None
    key_id: str | None = None
    task_id: UUID | None = None
    attempt: int | None = None

    @classmethod
    def user_of(cls, principal: Principal) -> Asker:
        return cls(principal.org_id, user=principal.user, key_id=principal.key_id)

    @classmethod
    def attempt_of(cls, claims: Claims) -> Asker:
        return cls(claims.org_id, task_id=claims.task_id, attempt=claims.attempt)


@dataclass
class Record:
    """The record of a query. Fields are set as they become known."""

    opening: asyncio.Task[UUID]
    asker: Asker
    outcome: QueryOutcome = QueryOutcome.LOST
    code: str | None = None
    versions: list[UUID] = field(default_factory=list)
    rows: int | None = None
    bytes: int | None = None
    truncated: bool = False
    batch_task_id: UUID | None = None
    export_files: list[StoredFile] | None = None
    started: float = field(default_factory=time.monotonic)

    async def opened(self) -> None:
        """Waits until the record is committed. From then on a crash of this process cannot lose it."""
        await asyncio.shield(self.opening)

    @property
    def query_id(self) -> UUID:
        """The id of the query; the record must be open."""
        return self.opening.result()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class Queries:
    def __init__(self, database: Database, settings: Settings, objects: Objects, packs: Packs) -> None:
        self._database = database
        self._objects = objects
        self._packs = packs
        self._export_seconds = settings.query_export_hours * 3600
        self._keep_seconds = settings.replaced_files_seconds

    # Writing

    async def open(self, asker: Asker, mode: QueryMode, sql: str) -> Record:
        record = self.begin(asker, mode, sql)
        await record.opened()
        return record

    def begin(self, asker: Asker, mode: QueryMode, sql: str) -> Record:
        """Starts to open a record, for a caller that has other work to do at the same time."""
        return Record(asyncio.create_task(self._insert(asker, mode, sql)), asker)

    async def _insert(self, asker: Asker, mode: QueryMode, sql: str) -> UUID:
        async with self._database.connection() as connection:
            query_id: UUID = await _sql.open_query(
                connection,
                org_id=asker.org_id,
                user_name=asker.user,
                key_id=asker.key_id,
                task_id=asker.task_id,
                attempt=asker.attempt,
                mode=mode.value,
                sql_sha256=hashlib.sha256(sql.encode("utf-8", "surrogatepass")).digest(),
                statement=sql if asker.user is not None and _UNSTORABLE.search(sql) is None else None,
            )
        return query_id

    async def close(self, record: Record) -> None:
        await record.opened()
        async with self._database.connection() as connection:
            await failpoint("query.before_commit")
            await close_record(connection, record)

    async def note_export(self, record: Record, prefix: str) -> None:
        """Records the prefix before anything is written there, so that a crash does not leave files behind."""
        async with self._database.connection() as connection:
            await _sql.note_export(
                connection,
                query_id=record.query_id,
                org_id=record.asker.org_id,
                prefix=prefix,
                seconds=self._export_seconds,
                keep=self._keep_seconds,
            )

    # Reading

    async def page(self, caller: Principal, cursor: str | None, limit: int) -> QueryPage:
        before = uuid_cursor(cursor, LAST)
        async with self._database.connection() as connection:
            rows = await _sql.list_queries(connection, org_id=caller.org_id, before=before, limit=limit)
        return QueryPage(queries=[_view(row, caller) for row in rows], next_cursor=next_cursor(rows, limit, "query_id"))

    async def query(self, query_id: UUID, caller: Principal) -> QueryView:
        """Returns the record with newly signed URLs of its export."""
        org_id = caller.org_id
        async with self._database.connection() as connection:
            row = await _sql.find_query(connection, query_id=query_id, org_id=org_id)
            if row is None:
                raise NotFound(f"There is no query {query_id} in this org; old records are deleted.")
            task: Row | None = None
            if row["batch_task_id"] is not None:
                task = await batch_task(connection, row["batch_task_id"], org_id)
        view = _view(row, caller)
        return await self._with_export(view, row) if task is None else await self._with_batch(view, task, org_id)

    async def _with_export(self, view: QueryView, row: Row) -> QueryView:
        if row["export_files"] is None or self._is_gone(row["started_at"]):
            return view
        export = await self.export(row["export_prefix"], _files.decode(row["export_files"]), row["row_count"] or 0)
        return msgspec.structs.replace(view, export=export)

    def _is_gone(self, started_at: datetime) -> bool:
        return started_at + timedelta(seconds=self._export_seconds) <= self._database.clock.now()

    async def _with_batch(self, view: QueryView, task: Row, org_id: UUID) -> QueryView:
        status = TaskStatus(task["status"])
        view = msgspec.structs.replace(
            view, batch_status=status, batch_error=None if status is TaskStatus.COMPLETED else task["error"]
        )
        body = await self._packs.result_of(task) if status is TaskStatus.COMPLETED else None
        if body is None:
            return view
        result = _result.decode(body)
        # The result comes from the operator. Sign a URL only if it lies under the prefix that this operator may write.
        own = f"{batch_prefix(self._objects.root, org_id, view.batch_task_id)}"
        if not all(file.uri.startswith(own) for file in result.files):
            raise NotFound(f"The task of query {view.query_id} has no export.")
        export = await self.export(result.prefix, result.files, result.row_count)
        return msgspec.structs.replace(
            view, export=export, row_count=result.row_count, bytes=sum(file.bytes for file in result.files)
        )

    async def export(self, prefix: str, files: Sequence[StoredFile], rows: int) -> QueryExport:
        signed = [
            ExportedFile(uri=file.uri, url=await self._objects.sign("GET", file.uri, SIGNED_SECONDS), bytes=file.bytes)
            for file in files
        ]
        expires_at = self._database.clock.now() + timedelta(seconds=SIGNED_SECONDS)
        return QueryExport(prefix=prefix, files=signed, row_count=rows, expires_at=expires_at)


async def close_record(connection: Connection, record: Record) -> None:
    """Closes the record. Closing it twice has no effect."""
    files = None if record.export_files is None else msgspec.json.encode(record.export_files).decode()
    await _sql.close_query(
        connection,
        query_id=record.query_id,
        org_id=record.asker.org_id,
        outcome=record.outcome.value,
        code=record.code,
        versions=record.versions,
        row_count=record.rows,
        bytes=record.bytes,
        truncated=record.truncated,
        batch_task_id=record.batch_task_id,
        export_files=files,
    )


async def batch_task(connection: Connection, task_id: UUID, org_id: UUID) -> Row | None:
    """Returns the state and result of the task that runs a batch query."""
    task: Row | None = await _sql.batch_task(connection, shard=SMALL_SHARD, task_id=task_id, org_id=org_id)
    return task


class QueryRetention(Periodic):
    """Marks records of dead processes as lost, and deletes old records."""

    name = "queries"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.retention_seconds
        self._database = database
        self._age_seconds = settings.query_audit_days * 86_400
        # The run time, the time to read the reply and the time in the queue.
        self._longest = 2 * settings.query_timeout_seconds + settings.query_queue_seconds + _GRACE_SECONDS
        self._water: LowWater[UUID] = LowWater(FIRST, _a_little_before)

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            lost = await _sql.lose_queries(connection, seconds=self._longest, limit=_BATCH)
        return len(lost) + await self._old()

    async def _old(self) -> int:
        with self._water.look() as look:
            async with self._database.connection() as connection:
                rows = await _sql.delete_old_queries(
                    connection, since=look.since, age_seconds=self._age_seconds, limit=_BATCH
                )
            look.reached = max((row["query_id"] for row in rows), default=None)
        return len(rows)


def _a_little_before(query_id: UUID) -> UUID:
    """Returns an id from two seconds earlier: ids are ordered by time, with milliseconds in the first 48 bits."""
    return UUID(int=max(0, query_id.int - (2_000 << 80)))


def export_prefix(root: str, org_id: UUID, query_id: UUID) -> str:
    """Returns the prefix of a user's export."""
    return f"{root}/exports/{org_id}/{query_id}/"


def _view(row: Row, caller: Principal) -> QueryView:
    """Returns the record of a query. Only its author sees the statement."""
    return QueryView(
        query_id=row["query_id"],
        outcome=QueryOutcome(row["outcome"]),
        mode=QueryMode(row["mode"]),
        code=row["code"],
        user=row["user_name"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        dataset_versions=list(row["dataset_versions"]),
        sql_sha256=bytes(row["sql_sha256"]).hex(),
        sql=row["statement"] if row["user_name"] == caller.user else None,
        row_count=row["row_count"],
        bytes=row["bytes"],
        truncated=row["truncated"],
        duration_ms=_milliseconds(row["started_at"], row["ended_at"]),
        started_at=row["started_at"],
        batch_task_id=row["batch_task_id"],
        batch_status=None,
        batch_error=None,
        export=None,
    )


def _milliseconds(started_at: datetime, ended_at: datetime | None) -> float | None:
    return None if ended_at is None else max(0.0, (ended_at - started_at).total_seconds() * 1000)


def summary(record: Record) -> dict[str, Any]:
    """Returns log fields about the caller and the outcome, and none about the content."""
    there = record.opening.done() and not record.opening.cancelled() and record.opening.exception() is None
    return {
        "query_id": str(record.query_id) if there else None,
        "org_id": str(record.asker.org_id),
        "task_id": str(record.asker.task_id) if record.asker.task_id else None,
        "outcome": record.outcome.value,
        "code": record.code,
        "rows": record.rows,
    }


RUNTIME: Final = "spark"
_EVERYTHING: Final = {"start": -(2**62), "end": 2**62}
"""Scope of the inputs."""
_POLICY: Final = Policy(max_attempts=3, non_retryable=["BadConfig", "UnsafeQuery"])


class BatchQueries:
    def __init__(self, database: Database, closed_runs: ClosedRuns) -> None:
        self._database = database
        self._closed_runs = closed_runs

    async def submit(self, record: Record, sql: str, relations: Granted) -> UUID:
        """Creates the task that runs the query and returns its id. The statement has passed the SQL gate."""
        request = _job(record, sql, relations)

        async def work(connection: Connection) -> UUID:
            return await self._write(connection, record, request, relations)

        task_id = await self._database.run(work)
        TASKS_CREATED.labels(runtime=RUNTIME).inc()
        return task_id

    async def _write(self, connection: Connection, record: Record, request: JobRequest, relations: Granted) -> UUID:
        org_id = record.asker.org_id
        accepted = await self._closed_runs.within(connection, request, org_id)
        versions = [version.dataset_version for version in relations.values()]
        await _sql.insert_query_edges(connection, job_id=accepted.job_id, org_id=org_id, versions=versions)
        record.batch_task_id = run_task_id(accepted.run_id, 0)
        record.outcome = QueryOutcome.BATCHED
        await close_record(connection, record)
        await failpoint("batch_query.before_commit")
        return record.batch_task_id


def _job(record: Record, sql: str, relations: Granted) -> JobRequest:
    payload: dict[str, Any] = {
        "query_id": str(record.query_id),
        "sql": sql,
        "relations": list(relations),
        **_EVERYTHING,
    }
    return JobRequest(operator=BATCH_QUERY, runtime=RUNTIME, policy=_POLICY, tasks=[Raw(msgspec.json.encode(payload))])
