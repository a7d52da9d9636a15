"""The read model of API and CLI: jobs, runs, tasks, attempts."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Raw, Struct

from interlock.calendars import dates_of
from interlock.errors import BadRequest, NotFound
from interlock.http.cursors import LAST, bad_cursor, next_cursor, uuid_cursor
from interlock.http.prefixes import MAX_CANDIDATES, only, required_span, span_of
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.logs import Logs
from interlock.tasks.result_packs import Packs
from interlock.tasks.shards import SMALL_SHARD, find_task
from interlock.wire.base import LONGEST_SECONDS, Outcome, Priority, RunState, TaskStatus
from interlock.wire.jobs import Counts, ErrorCount, JobPage, JobView, Policy, RunPage, RunView, Scaling
from interlock.wire.tasks import AttemptPage, AttemptView, Crash, JobRef, TaskPage, TaskView

_sql = queries(__name__, "reads")
_jobs_sql = queries(__name__, "jobs")
_effects_sql = queries(__name__, "effects")

_MAX_PROBES = 50
"""Limit of index lookups per page. A page that would need more is cut short, with a cursor to continue."""
_STRIDE = 1000
"""Most rows that a page with a filter walks, and that a prefix may match before it counts as too short."""
_FILTERED_ROWS = 500
"""Rows of one read if some of them may be left out."""


class _Cursor(msgspec.Struct, array_like=True, frozen=True):
    """The end of a page of tasks.

    Jobs come newest first. Within a job, its runs come newest first, each by index; then its tasks without a run, by
    status and newest first.
    """

    job: UUID | None = None
    run: UUID | None = None
    index: int = -1
    status: int = 0
    """0 while in the runs; then 1 + the index in _STATUSES."""
    task: UUID = LAST


_STATUSES = list(TaskStatus)


@dataclass(frozen=True)
class Narrow:
    """Filters that no index covers. Tasks are read in stretches, and those that do not match are left out."""

    dag: str | None = None
    operator: str | None = None
    error_class: str | None = None
    worker: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None

    @property
    def of_tasks(self) -> bool:
        return any((self.error_class, self.worker, self.created_after, self.created_before))

    def matches(self, row: Row) -> bool:
        return (
            (self.error_class is None or row["error_class"] == self.error_class)
            and (self.worker is None or row["worker_id"] == self.worker)
            and (self.created_after is None or row["created_at"] >= self.created_after)
            and (self.created_before is None or row["created_at"] < self.created_before)
        )


@dataclass
class _Page:
    limit: int
    tasks: list[TaskView]
    probes: int = _MAX_PROBES
    narrow: Narrow = field(default_factory=Narrow)

    @property
    def to_read(self) -> int:
        """Rows that the next read may return."""
        return max(self.room, _FILTERED_ROWS) if self.narrow.of_tasks else self.room

    def add(self, rows: Sequence[Row]) -> Row | None:
        """Adds the rows that match. Returns the last one that was added if others would have followed."""
        matching = [row for row in rows if self.narrow.matches(row)]
        kept = matching[: self.room]
        self.tasks.extend(_task_view(row) for row in kept)
        return kept[-1] if len(kept) < len(matching) else None

    @property
    def room(self) -> int:
        return self.limit - len(self.tasks)

    @property
    def closed(self) -> bool:
        return self.room <= 0 or self.probes <= 0


async def job_by_name(connection: Connection, name: str | None, org_id: UUID, *, dag: str = "") -> Row | None:
    job: Row | None = await _jobs_sql.job_by_name(connection, org_id=org_id, dag_name=dag, name=name)
    return job


async def run_by_id(connection: Connection, run_id: UUID, org_id: UUID) -> Row | None:
    run: Row | None = await _sql.run_by_id(connection, org_id=org_id, run_id=run_id)
    return run


class Reads:
    def __init__(self, database: Database, packs: Packs, retention_days: float, log_bytes: int) -> None:
        self._database = database
        self._packs = packs
        self.retention_days = retention_days
        self.logs = Logs(database, packs, self, log_bytes)

    async def find_job(self, name_or_id: str, org_id: UUID) -> Row:
        """Finds a job by id, by name, by `dag/name`, or by a unique prefix of its id. Names take precedence."""
        name_or_id = name_or_id.replace("%2F", "/")  # of a path; no name contains a percent sign
        async with self._database.connection() as connection:
            row = await self._named_job(connection, name_or_id, org_id)
            if row is None and (span := span_of(name_or_id)) is not None:
                found = await _sql.jobs_by_prefix(connection, org_id=org_id, limit=MAX_CANDIDATES + 1, **span)
                if found:
                    job_id = only(name_or_id, "job", [one["id"] for one in found])
                    row = await _sql.job_by_id(connection, org_id=org_id, job_id=job_id)
        if row is None:
            raise NotFound(f"There is no job {name_or_id!r} in this org.")
        return row

    async def _named_job(self, connection: Connection, name_or_id: str, org_id: UUID) -> Row | None:
        row: Row | None = None
        job_id = _uuid_or_none(name_or_id)
        if job_id is not None:
            row = await _sql.job_by_id(connection, org_id=org_id, job_id=job_id)
        elif "\x00" not in name_or_id:
            dag, _, name = name_or_id.rpartition("/")
            row = await job_by_name(connection, name, org_id, dag=dag)
        return row

    async def run_id(self, text: str, org_id: UUID) -> UUID:
        """Returns the id of a run, given by its id or a unique prefix. A full id is not looked up."""
        if (run_id := _uuid_or_none(text)) is not None:
            return run_id
        async with self._database.connection() as connection:
            rows = await _sql.runs_by_prefix(
                connection, org_id=org_id, limit=MAX_CANDIDATES + 1, **required_span(text, "run")
            )
        return only(text, "run", [row["id"] for row in rows])

    async def task_id(self, text: str, org_id: UUID) -> UUID:
        """Returns the id of a task, given by its id or a unique prefix. A full id is not looked up."""
        if (task_id := _uuid_or_none(text)) is not None:
            return task_id
        span = required_span(text, "task")
        async with self._database.connection() as connection:
            rows = await _sql.tasks_by_prefix(
                connection, org_id=org_id, walked=_STRIDE, limit=MAX_CANDIDATES + 1, **span
            )
        own = [row["id"] for row in rows if row["own"]]
        if len(rows) >= _STRIDE and len(own) < 2:
            raise BadRequest(f"Too many tasks start with {text!r}: write more characters.", code="ambiguous_id")
        return only(text, "task", own)

    async def job(self, name_or_id: str, org_id: UUID) -> JobView:
        job = await self.find_job(name_or_id, org_id)
        async with self._database.connection() as connection:
            run = await _sql.newest_run(connection, org_id=org_id, job_id=job["job_id"])
        return _job_view(job, run_view(run, self.retention_days) if run else None)

    async def jobs(self, org_id: UUID, cursor: str | None, limit: int) -> JobPage:
        async with self._database.connection() as connection:
            rows = await _sql.list_jobs(connection, org_id=org_id, cursor=uuid_cursor(cursor, None), limit=limit)
        jobs = [_job_view(row, _joined_run(row, self.retention_days)) for row in rows]
        return JobPage(jobs=jobs, next_cursor=next_cursor(rows, limit, "job_id"))

    async def run(self, run_id: UUID, org_id: UUID) -> RunView:
        async with self._database.connection() as connection:
            row = await run_by_id(connection, run_id, org_id)
        if row is None:
            raise NotFound(f"There is no run {run_id} in this org.")
        return run_view(row, self.retention_days)

    async def runs(
        self, job: str | None, org_id: UUID, *, state: RunState | None = None, cursor: str | None, limit: int
    ) -> RunPage:
        """Returns runs of a job, or of all jobs, newest first. With a `state`, a page covers a limited stretch."""
        walked = limit if state is None else max(limit, _STRIDE)
        span = {"org_id": org_id, "cursor": uuid_cursor(cursor, None), "state": state, "walked": walked}
        job_id = None if job is None else (await self.find_job(job, org_id))["job_id"]
        async with self._database.connection() as connection:
            if job_id is None:
                rows = await _sql.list_org_runs(connection, **span)
            else:
                rows = await _sql.list_runs(connection, job_id=job_id, **span)
        wanted = [row for row in rows if row["wanted"]]
        runs = [run_view(row, self.retention_days) for row in wanted[:limit]]
        following: str | None = None
        if len(wanted) > limit:
            following = str(runs[-1].run_id)
        elif rows and rows[-1]["more"]:
            following = str(rows[-1]["run_id"])
        return RunPage(runs=runs, next_cursor=following)

    async def gauges(self) -> tuple[list[Row], int]:
        """Returns the attempts in flight per operator, and the number of outbox rows."""
        async with self._database.connection() as connection:
            rows = await _sql.in_flight_by_operator(connection)
            owed = await _effects_sql.outbox_stats(connection, limit=100_000)
        return rows, owed["rows"]

    async def task(self, task_id: UUID, org_id: UUID) -> TaskView:
        row, _ = await self._task(task_id, org_id)
        return await self._with_result(row)

    async def task_of_run(self, run: Row, index: int, org_id: UUID) -> TaskView:
        async with self._database.connection() as connection:
            rows = await _sql.tasks_of_range(
                connection,
                shard=run["shard"],
                org_id=org_id,
                run_id=run["run_id"],
                first=index,
                last=index,
                status=None,
                limit=1,
            )
        if not rows:
            raise NotFound(f"Run {run['run_id']} has no task {index}; its last index is {run['last_index']}.")
        return await self._with_result(rows[0])

    async def _with_result(self, row: Row) -> TaskView:
        """Returns the task with its result, which may be in a pack."""
        view = _task_view(row)
        if row["pack"] is None:
            return view
        return msgspec.structs.replace(view, result=Raw(await self._packs.result_of(row) or b"null"))

    async def run_of_job(self, name_or_id: str, run: str | None, org_id: UUID) -> Row:
        """Returns a run of the job, by default the newest."""
        job = await self.find_job(name_or_id, org_id)
        run_id = None if run is None else await self.run_id(run, org_id)
        async with self._database.connection() as connection:
            if run_id is None:
                row = await _sql.newest_run(connection, org_id=org_id, job_id=job["job_id"])
            else:
                row = await run_by_id(connection, run_id, org_id)
        if row is None or row["job_id"] != job["job_id"]:
            raise NotFound(f"Job {name_or_id!r} has no run {run_id}." if run_id else f"Job {name_or_id!r} has no run.")
        found: Row = row
        return found

    async def task_row(self, task_id: UUID, org_id: UUID) -> Row:
        row, _ = await self._task(task_id, org_id)
        return row

    async def _task(self, task_id: UUID, org_id: UUID) -> tuple[Row, int]:
        """Returns the task and its shard."""
        async with self._database.connection() as connection:
            shard = SMALL_SHARD
            row = await _sql.task_by_id(connection, shard=shard, org_id=org_id, task_id=task_id)
            if row is None and (shard := await find_task(connection, task_id, org_id)) != SMALL_SHARD:
                row = await _sql.task_by_id(connection, shard=shard, org_id=org_id, task_id=task_id)
        if row is None:
            raise NotFound(f"There is no task {task_id} in this org.")
        return row, shard

    async def attempts(self, task_id: UUID, org_id: UUID) -> AttemptPage:
        _, shard = await self._task(task_id, org_id)
        async with self._database.connection() as connection:
            rows = await _sql.attempts_of(connection, shard=shard, task_id=task_id)
        return AttemptPage(attempts=[_attempt_view(row) for row in rows])

    async def tasks(
        self,
        org_id: UUID,
        *,
        job: str | None,
        run: str | None,
        status: TaskStatus | None,
        cursor: str | None,
        limit: int,
        narrow: Narrow | None = None,
    ) -> TaskPage:
        at = _decode(cursor)
        page = _Page(limit, [], narrow=narrow or Narrow())
        run_id = None if run is None else await self.run_id(run, org_id)
        # Before taking a connection: readers that each wait for a second connection would deadlock.
        job_id = (await self.find_job(job, org_id))["job_id"] if job is not None and run is None else None
        async with self._database.connection() as connection:
            if run_id is not None:
                row = await run_by_id(connection, run_id, org_id)
                if row is None:
                    raise NotFound(f"There is no run {run_id} in this org.")
                end = await self._walk_run(connection, org_id, row, status, at, page)
            elif job_id is not None:
                end = await self._walk_job(connection, org_id, job_id, status, at, page)
            else:
                end = await self._walk_org(connection, org_id, status, at, page)
        return TaskPage(tasks=page.tasks, next_cursor=_encode(end) if end else None)

    async def _walk_org(
        self, connection: Connection, org_id: UUID, status: TaskStatus | None, at: _Cursor, page: _Page
    ) -> _Cursor | None:
        """Walks job by job, newest first. Returns where to continue, or None at the end."""
        while not page.closed:
            jobs = await _sql.jobs_from(
                connection,
                org_id=org_id,
                cursor=at.job,
                limit=_MAX_PROBES + 1,
                dag=page.narrow.dag,
                operator=page.narrow.operator,
            )
            for row in (job for job in jobs[:_MAX_PROBES] if job["wanted"]):
                here = at if row["job_id"] == at.job else _Cursor(job=row["job_id"])
                end = await self._walk_job(connection, org_id, row["job_id"], status, here, page)
                if end is not None:
                    return end
            if len(jobs) <= _MAX_PROBES:
                return None
            at = _Cursor(job=jobs[-1]["job_id"])
        return at

    async def _walk_job(
        self,
        connection: Connection,
        org_id: UUID,
        job_id: UUID,
        status: TaskStatus | None,
        at: _Cursor,
        page: _Page,
    ) -> _Cursor | None:
        """Walks the job's runs, newest first, then its tasks without a run."""
        at = msgspec.structs.replace(at, job=job_id)
        while at.status == 0:
            runs = await _sql.runs_from(connection, org_id=org_id, job_id=job_id, cursor=at.run, limit=_MAX_PROBES + 1)
            page.probes -= 1
            for row in runs[:_MAX_PROBES]:
                here = at if row["run_id"] == at.run else _Cursor(job=job_id, run=row["run_id"])
                end = await self._walk_run(connection, org_id, row, status, here, page)
                if end is not None:
                    return end
            more = len(runs) > _MAX_PROBES
            at = _Cursor(job=job_id, run=runs[-1]["run_id"]) if more else _Cursor(job=job_id, status=1)
        return await self._walk_runless(connection, org_id, job_id, status, at, page)

    async def _walk_run(
        self,
        connection: Connection,
        org_id: UUID,
        run: Row,
        status: TaskStatus | None,
        at: _Cursor,
        page: _Page,
    ) -> _Cursor | None:
        index = at.index
        while not page.closed:
            page.probes -= 1
            rows, index = await self._probe(connection, org_id, run, status, index, page.to_read)
            cut = page.add(rows)
            if cut is not None:
                index = cut["task_index"]
            if index >= run["last_index"]:
                return None
        return _Cursor(job=at.job, run=run["run_id"], index=index)

    async def _probe(
        self, connection: Connection, org_id: UUID, run: Row, status: TaskStatus | None, index: int, room: int
    ) -> tuple[list[Row], int]:
        """Returns some of a run's tasks after `index`, and the last index covered."""
        shared = {"org_id": org_id, "shard": run["shard"], "run_id": run["run_id"]}
        if run["ended_at"] is not None and status in (TaskStatus.QUEUED, TaskStatus.RUNNING):
            return [], run["last_index"]
        if status not in (TaskStatus.FAILED, TaskStatus.CANCELED):
            # No index covers the statuses of the normal path, so this walks the run. Sparse matches take more pages.
            last = min(run["last_index"], index + (room if status is None else max(room, _STRIDE)))
            rows = await _sql.tasks_of_range(
                connection, first=index + 1, last=last, status=status and status.value, limit=room, **shared
            )
            return rows, (rows[-1]["task_index"] if len(rows) == room else last)
        rows = await _sql.tasks_of_run_by_status(connection, status=status.value, after=index, limit=room, **shared)
        return rows, (rows[-1]["task_index"] if len(rows) == room else run["last_index"])

    async def _walk_runless(
        self,
        connection: Connection,
        org_id: UUID,
        job_id: UUID,
        status: TaskStatus | None,
        at: _Cursor,
        page: _Page,
    ) -> _Cursor | None:
        after = at.task
        for position in range(at.status, len(_STATUSES) + 1):
            wanted = _STATUSES[position - 1]
            if status not in (None, wanted):
                continue
            if page.closed:
                return _Cursor(job=job_id, status=position, task=after)
            page.probes -= 1
            room = page.to_read
            rows = await _sql.tasks_of_job_by_status(
                connection,
                org_id=org_id,
                job_id=job_id,
                status=wanted.value,
                after=after,
                limit=room,
                inline_bytes=self._packs.inline_bytes,
            )
            last = page.add(rows) or (rows[-1] if len(rows) == room else None)
            if last is not None:
                return _Cursor(job=job_id, status=position, task=last["task_id"])
            after = LAST
        return None


def _uuid_or_none(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _encode(cursor: _Cursor) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(cursor)).rstrip(b"=").decode()


def _decode(cursor: str | None) -> _Cursor:
    if cursor is None:
        return _Cursor()
    try:
        raw = base64.urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
        decoded = msgspec.msgpack.decode(raw, type=_Cursor)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        raise bad_cursor() from None
    if not -1 <= decoded.index < 2**62 or not 0 <= decoded.status <= len(_STATUSES):
        raise bad_cursor()
    return decoded


def _job_view(row: Row, run: RunView | None) -> JobView:
    return JobView(
        job_id=row["job_id"],
        dag_name=row["dag_name"],
        name=row["name"],
        operator=row["operator"],
        runtime=row["runtime"],
        priority=_priority(row["priority"]),
        config=Raw(row["config"]),
        policy=Policy(
            max_attempts=row["max_attempts"],
            backoff_seconds=row["backoff_seconds"],
            backoff_factor=row["backoff_factor"],
            backoff_cap_seconds=row["backoff_cap_seconds"],
            jitter=row["jitter"],
            non_retryable=list(row["non_retryable"]),
            lease_seconds=row["lease_seconds"],
            # An always-on job has no timeout; the table stores a value above the maximum.
            timeout_seconds=row["timeout_seconds"] if row["timeout_seconds"] <= LONGEST_SECONDS else None,
        ),
        scaling=Scaling(
            max_concurrency=row["max_concurrency"],
            key=row["concurrency_key"],
            max_concurrency_per_key=row["max_concurrency_per_key"],
        ),
        created_at=row["created_at"],
        state=run.state if run else None,
        run=run,
    )


def run_view(row: Any, retention_days: float) -> RunView:
    """Builds the view. A run without its own retention gets the default."""
    return RunView(
        run_id=row["run_id"],
        job_id=row["job_id"],
        state=RunState(row["state"]),
        job=JobRef(dag_name=row["dag_name"], name=row["name"]),
        total=row["total"],
        counts=Counts(
            Queued=row["queued"],
            Running=row["running"],
            Completed=row["completed"],
            Failed=row["failed"],
            Canceled=row["canceled"],
            dead=row["dead"],
        ),
        errors=_errors(row["errors"]),
        rerun_of=row["rerun_of"],
        cancel_requested=row["cancel_requested"],
        reason=row["reason"],
        retention_days=retention_days if row["retention_days"] is None else row["retention_days"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )


def _errors(stored: str) -> list[ErrorCount]:
    counted = msgspec.json.decode(stored, type=dict[str, int])
    found = sorted(counted.items(), key=lambda one: (-one[1], one[0]))
    return [ErrorCount(error_class=name, tasks=tasks) for name, tasks in found]


def _joined_run(row: Row, retention_days: float) -> RunView | None:
    if row["run_id"] is None:
        return None
    return run_view({**row, "created_at": row["run_created_at"]}, retention_days)


def _priority(number: int) -> Priority:
    return Priority.BULK if number else Priority.NORMAL


class _Scope(Struct, frozen=True):
    start: int
    end: int


_scope = msgspec.json.Decoder(_Scope)


def _dates(row: Row) -> tuple[str | None, str | None]:
    """Returns the range of a task as dates, if its job has time partitions."""
    if row["partition"] is None:
        return None, None
    try:
        scope = _scope.decode(row["payload"])
    except (msgspec.MsgspecError, RecursionError):
        return None, None
    return dates_of(row["partition"], scope.start, scope.end)


def _task_view(row: Row) -> TaskView:
    first, last = _dates(row)
    return TaskView(
        task_id=row["task_id"],
        job_id=row["job_id"],
        job=JobRef(dag_name=row["dag_name"], name=row["name"]),
        run_id=row["run_id"],
        index=row["task_index"],
        origin_index=row["origin_index"],
        status=TaskStatus(row["status"]),
        attempt=row["attempt"],
        dead=row["dead"],
        cancel_requested=row["cancel_requested"],
        priority=_priority(row["priority"]),
        payload=Raw(row["payload"]),
        start_date=first,
        end_date=last,
        created_at=row["created_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        retry_at=row["retry_at"],
        worker_id=row["worker_id"],
        lease_expires_at=row["lease_expires_at"],
        progress=row["progress"],
        progress_text=row["progress_text"],
        error_class=row["error_class"],
        error_message=row["error_message"],
        result=Raw(row["result"] or "null"),
        result_bytes=row["pack_length"],
    )


def _attempt_view(row: Row) -> AttemptView:
    return AttemptView(
        attempt=row["attempt"],
        outcome=Outcome(row["outcome"]) if row["outcome"] else None,
        worker_id=row["worker_id"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        error_class=row["error_class"],
        error_message=row["error_message"],
        crash=msgspec.json.decode(row["crash"], type=Crash) if row["crash"] else None,
    )
