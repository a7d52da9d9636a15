"""Submission: writes runs of small closed lists at once, and starts the ingest of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.errors import BadRequest, Conflict, NotFound, TooLarge
from interlock.failpoints import failpoint
from interlock.jobs.definitions import Definitions
from interlock.jobs.ingest_records import close_open_run
from interlock.jobs.run_sources import StagedSource, announce
from interlock.jobs.staged_lists import Uploads
from interlock.settings import Settings
from interlock.stores.postgres import UNSTORABLE, Connection, Database, Row, queries
from interlock.strict_json import NotStrict, first_not_strict, pointed, require_strict
from interlock.tasks.idempotency import Repeat, once
from interlock.tasks.limits import rate_key
from interlock.tasks.operators import Operators
from interlock.tasks.queue import enqueue
from interlock.tasks.reads import Reads, run_by_id, run_view
from interlock.tasks.runs import record_run_events
from interlock.tasks.shards import run_task_id
from interlock.telemetry import TASKS_CREATED
from interlock.wire.base import RunState
from interlock.wire.jobs import JobAccepted, JobRequest, RunView, TasksAdded, TasksRequest

_sql = queries(__name__, "submission")
_ingest_sql = queries(__name__, "ingest")
_ENDPOINT: Final = "POST /v1/jobs"


@dataclass(frozen=True)
class Items:
    """The list of tasks by column, as it is inserted."""

    payloads: list[str]
    dedupe_keys: list[str | None] | None
    slot_keys: list[str | None]

    def __len__(self) -> int:
        return len(self.payloads)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run, by column. A rerun has the settings of the run it repeats."""

    max_concurrency: int | None
    rate_key: str | None
    rate_per_second: float | None
    tolerated_share: float | None
    deadline_seconds: float | None
    retention_days: float | None

    @classmethod
    def asked(cls, request: JobRequest) -> RunSettings:
        limits = request.limits
        return cls(
            max_concurrency=limits.max_concurrency,
            rate_key=limits.rate.key if limits.rate else None,
            rate_per_second=limits.rate.per_second if limits.rate else None,
            tolerated_share=limits.tolerated_failure_share,
            deadline_seconds=limits.deadline_seconds,
            retention_days=request.retention_days,
        )

    @classmethod
    def of_run(cls, run: Row) -> RunSettings:
        return cls(**{field.name: run[field.name] for field in fields(cls)})

    @property
    def columns(self) -> dict[str, Any]:
        return asdict(self)


class ClosedRuns:
    """Writes closed lists within the caller's transaction: the run, its tasks and their messages."""

    def __init__(self, database: Database, settings: Settings, operators: Operators | None = None) -> None:
        self._database = database
        self._settings = settings
        self.definitions = Definitions(settings, operators or Operators(database, settings))

    async def within(self, connection: Connection, request: JobRequest, org_id: UUID) -> JobAccepted:
        """Writes a job of the platform itself. Its operator is not checked."""
        _check_payloads(request, self._settings)
        job = await self.definitions.job(connection, request, org_id, check=False)
        return await self.submit(connection, job, request)

    async def submit(self, connection: Connection, job: Row, request: JobRequest) -> JobAccepted:
        items = items_of(request.listed, request.dedupe_by, job["concurrency_key"])
        return await self._run_of(connection, job, items, RunSettings.asked(request))

    async def run_of(self, connection: Connection, job: Row, tasks: list[Raw], settings: RunSettings) -> JobAccepted:
        """Adds a run to an existing job."""
        items = items_of(tasks, None, job["concurrency_key"])
        return await self._run_of(connection, job, items, settings)

    async def _run_of(self, connection: Connection, job: Row, items: Items, settings: RunSettings) -> JobAccepted:
        run = await _sql.insert_run(
            connection,
            org_id=job["org_id"],
            job_id=job["job_id"],
            last_index=len(items) - 1,
            range_size=self._settings.range_size,
            total=len(items) if items.dedupe_keys is None else None,
            **settings.columns,
        )
        indexes = await self._tasks(connection, job, run["run_id"], items)
        if items.dedupe_keys is not None:
            run = await _sql.latch_run(connection, run_id=run["run_id"], total=len(indexes))
        if not indexes:  # The run has already ended, and no counter fold will follow.
            over = [run["run_id"]]
            now, kept = self._database.clock.now(), self._settings.retention_days
            await record_run_events(connection, over, ended=over, now=now, retention_days=kept)
        await self._enqueue(connection, job, run["run_id"], indexes, len(items) - 1)
        return accepted(job, run, total=len(indexes), deduplicated=len(items) - len(indexes))

    async def _tasks(self, connection: Connection, job: Row, run_id: UUID, items: Items) -> list[int]:
        shared = {
            "run_id": run_id,
            "org_id": job["org_id"],
            "job_id": job["job_id"],
            "max_attempts": job["max_attempts"],
            "priority": job["priority"],
            "payloads": items.payloads,
            "slot_keys": items.slot_keys,
        }
        if items.dedupe_keys is not None:
            rows = await _sql.insert_tasks(connection, dedupe_keys=items.dedupe_keys, **shared)
            return [row["task_index"] for row in rows]
        await _sql.insert_all_tasks(connection, **shared)
        return list(range(len(items)))

    async def _enqueue(self, connection: Connection, job: Row, run_id: UUID, indexes: list[int], last: int) -> None:
        direct = self._settings.queue_direct
        if indexes and job["queue"] is None:
            await enqueue(connection, [run_task_id(run_id, i) for i in indexes], direct=direct)
        elif indexes:
            await _sql.enqueue_ranges(
                connection,
                org_id=job["org_id"],
                job_id=job["job_id"],
                run_id=run_id,
                indexes=indexes,
                last=last,
                queue=job["queue"],
                priority=job["priority"],
                range_size=self._settings.range_size,
                direct=direct,
            )


class Submissions:
    def __init__(
        self, database: Database, settings: Settings, closed: ClosedRuns, uploads: Uploads, reads: Reads
    ) -> None:
        self._database = database
        self._settings = settings
        self._closed = closed
        self._uploads = uploads
        self._reads = reads

    async def submit(self, request: JobRequest, org_id: UUID, repeat: Repeat) -> JobAccepted:
        """Inserts small closed lists synchronously; stages others for ingest."""
        _require_one_list(request)
        small = self._is_small(request)
        if request.dedupe_by is not None and not small:
            raise BadRequest(
                f"`dedupe_by` is only for lists of at most {self._settings.sync_threshold} tasks inside the request.",
                code="dedupe_of_large_list",
            )
        _check_payloads(request, self._settings)
        staged = None if small or request.open else await self._staged(request, org_id)
        created: dict[str, int] = {}  # Stays empty for a repeated request.

        async def work(connection: Connection) -> JobAccepted:
            job = await self._closed.definitions.job(connection, request, org_id)
            if small:
                written = await self._closed.submit(connection, job, request)
                created[job["runtime"]] = written.total or 0
            else:
                written = await self._ingesting(connection, job, request, staged)
            await failpoint("submit.before_commit")
            return written

        status = 201 if small else 202
        with _storable():
            reply = await once(self._database, self._settings, org_id, _ENDPOINT, repeat, JobAccepted, status, work)
        await failpoint("submit.committed")
        for runtime, count in created.items():
            TASKS_CREATED.labels(runtime=runtime).inc(count)
        return reply

    def _is_small(self, request: JobRequest) -> bool:
        if request.open or request.source is not None or request.in_background:
            return False
        return len(request.listed) <= self._settings.sync_threshold

    async def _staged(self, request: JobRequest, org_id: UUID) -> StagedSource:
        source = request.source
        if source is None:
            source = await self._uploads.stage(_as_lines(request.listed), org_id)
        return await self._uploads.found(source, org_id)

    async def _ingesting(
        self, connection: Connection, job: Row, request: JobRequest, staged: StagedSource | None
    ) -> JobAccepted:
        """Inserts a run without tasks. The ingest reads the staged list; without a list, the run is open."""
        if job["queue"] is None:
            raise BadRequest(
                f"Runtime {job['runtime']!r} has no queue: it accepts only closed lists of at most "
                f"{self._settings.sync_threshold} tasks inside the request.",
                code="runtime_without_queue",
            )
        org_id = job["org_id"]
        run: Row = await _ingest_sql.insert_ingesting_run(
            connection,
            org_id=org_id,
            job_id=job["job_id"],
            range_size=self._settings.range_size,
            open=staged is None,
            **RunSettings.asked(request).columns,
        )
        if staged is None:
            await self._open(connection, job, run, request)
        else:
            await self._uploads.keep(connection, staged, org_id)
            source = msgspec.json.encode(staged).decode()
            await _ingest_sql.insert_ingest(connection, run_id=run["run_id"], org_id=org_id, source=source)
            await announce(connection, self._settings, [run["run_id"]])
        return accepted(job, run)

    # Open runs

    async def _open(self, connection: Connection, job: Row, run: Row, request: JobRequest) -> None:
        """Creates the shard of an open run right away: the run may become large, with tasks from many calls."""
        which = {"run_id": run["run_id"], "org_id": job["org_id"]}
        shard = (await _ingest_sql.give_shard(connection, **which))["shard"]
        await _ingest_sql.create_shard(
            connection,
            number=shard,
            job_id=job["job_id"],
            max_attempts=job["max_attempts"],
            priority=job["priority"],
            **which,
        )
        await _ingest_sql.finish_shard(connection, number=shard)
        if request.listed:
            await self._add(connection, job, run["run_id"], request.listed)

    async def add(self, job: str, request: TasksRequest, org_id: UUID, repeat: Repeat) -> TasksAdded:
        """Adds all tasks or none."""
        limit = self._settings.batch_limit
        if len(request.tasks) > limit:
            raise TooLarge(f"{len(request.tasks)} tasks in one call; the limit is {limit}.", code="too_many_tasks")
        _check_tasks(request.tasks, self._settings)
        job_id = (await self._reads.find_job(job, org_id))["job_id"]

        async def work(connection: Connection) -> TasksAdded:
            row = await self._newest(connection, job_id, org_id)
            added = await self._add(connection, row, row["run_id"], request.tasks)
            await failpoint("submit.before_commit")
            return added

        endpoint = f"POST /v1/jobs/{job_id}/tasks"
        with _storable():
            return await once(self._database, self._settings, org_id, endpoint, repeat, TasksAdded, 201, work)

    async def _newest(self, connection: Connection, job_id: UUID, org_id: UUID) -> Row:
        row: Row | None = await _ingest_sql.newest_run(connection, job_id=job_id, org_id=org_id)
        if row is None:
            raise NotFound("The job has no run: submit one with `open` set to true.")
        return row

    async def _add(self, connection: Connection, job: Row, run_id: UUID, tasks: list[Raw]) -> TasksAdded:
        items = items_of(tasks, None, job["concurrency_key"])
        run: Row | None = await _ingest_sql.extend_open_run(
            connection, run_id=run_id, org_id=job["org_id"], added=len(items)
        )
        if run is None:
            raise Conflict("The run accepts no more tasks: it is closed or has ended.", code="run_closed")
        await _ingest_sql.add_tasks(
            connection,
            shard=run["shard"],
            run_id=run_id,
            org_id=job["org_id"],
            job_id=job["job_id"],
            first_index=run["first_index"],
            max_attempts=job["max_attempts"],
            priority=job["priority"],
            payloads=items.payloads,
            slot_keys=items.slot_keys,
        )
        await _ingest_sql.add_ranges(
            connection,
            org_id=job["org_id"],
            run_id=run_id,
            job_id=job["job_id"],
            first=run["first_index"],
            last=run["last_index"],
            range_size=run["range_size"],
            queue=job["queue"],
            priority=job["priority"],
            direct=self._settings.queue_direct,
        )
        TASKS_CREATED.labels(runtime=job["runtime"]).inc(len(items))
        return TasksAdded(
            job_id=job["job_id"],
            run_id=run_id,
            state=RunState(run["state"]),
            first_index=run["first_index"],
            added=len(items),
        )

    async def close(self, job: str, org_id: UUID, repeat: Repeat) -> RunView:
        """Closes the run to new tasks; it ends with its last task. Idempotent."""
        job_id = (await self._reads.find_job(job, org_id))["job_id"]

        async def work(connection: Connection) -> RunView:
            row = await self._newest(connection, job_id, org_id)
            now, kept = self._database.clock.now(), self._settings.retention_days
            await close_open_run(connection, row["run_id"], org_id, now=now, retention_days=kept)
            closed = await run_by_id(connection, row["run_id"], org_id)
            return run_view(closed, self._settings.retention_days)

        endpoint = f"POST /v1/jobs/{job_id}/close"
        return await once(self._database, self._settings, org_id, endpoint, repeat, RunView, 200, work)


def accepted(job: Row, run: Row, *, total: int | None = None, deduplicated: int = 0) -> JobAccepted:
    """Returns the reply to a submission. A run that is being ingested has no total yet."""
    return JobAccepted(
        job_id=job["job_id"],
        run_id=run["run_id"],
        state=RunState(run["state"]),
        total=total,
        deduplicated=deduplicated,
        tasks_url=f"/v1/jobs/{job['job_id']}/tasks",
        status_url=f"/v1/jobs/{job['job_id']}",
    )


@contextmanager
def _storable() -> Iterator[None]:
    """Refuses payloads that PostgreSQL cannot store."""
    try:
        yield
    except UNSTORABLE as error:
        raise BadRequest(f"A payload cannot be stored: {str(error).splitlines()[0]}.", code="bad_payload") from None


def _require_one_list(request: JobRequest) -> None:
    if request.source is not None and (request.tasks is not None or request.open):
        raise BadRequest("`source` cannot be combined with `tasks` or `open`: a run has one list.", code="two_lists")
    if request.source is None and request.tasks is None and not request.open:
        raise BadRequest("Set `tasks`, or `source`, or set `open` to true and add tasks later.", code="no_list")


def _as_lines(tasks: list[Raw]) -> bytes:
    """Puts one JSON value on each line. A line feed between tokens is only whitespace, and strings contain none."""
    return b"".join(bytes(task).replace(b"\r", b" ").replace(b"\n", b" ") + b"\n" for task in tasks)


def _check_payloads(request: JobRequest, settings: Settings) -> None:
    """Raises for a request that is refused before anything is written."""
    _check_name(request.name)
    _check_config(request.config)
    _check_tasks(request.listed, settings)
    if request.limits.rate is not None:
        _check_rate_keys(request.listed, request.limits.rate.key)


def _check_tasks(tasks: list[Raw], settings: Settings) -> None:
    """Raises for the first payload that is too large or that a later reader could not parse."""
    limit = settings.payload_limit_bytes
    for index, task in enumerate(tasks):
        if len(task) > limit:
            raise TooLarge(f"tasks[{index}] has {len(task)} bytes; the limit is {limit}.", code="payload_too_large")
    if found := first_not_strict(tasks):
        place, reason = found
        raise BadRequest(f"tasks[{place}] cannot be stored: {reason}.", code="bad_payload")


def _check_name(name: str | None) -> None:
    try:
        UUID(name or "")
    except ValueError:
        return
    raise BadRequest("A job's name must not be a UUID, because paths accept a name or an id.", code="bad_job_name")


def _check_config(config: dict[str, Any]) -> None:
    try:
        require_strict(msgspec.json.encode(config))
    except NotStrict as error:
        raise BadRequest(f"`config` cannot be stored: {error}.", code="bad_config") from None


def _check_rate_keys(tasks: list[Raw], pointer: str) -> None:
    """Refuses a rate key that is a list, an object or too long. A missing key means no limit."""
    for index, task in enumerate(tasks):
        try:
            rate_key(pointer, msgspec.json.decode(task))
        except ValueError as error:
            raise BadRequest(f"tasks[{index}]: the rate key at {pointer!r} {error}.", code="bad_pointer") from None


def items_of(tasks: list[Raw], dedupe_by: str | None, slot_by: str | None) -> Items:
    payloads = [_text(index, task) for index, task in enumerate(tasks)]
    if dedupe_by is None and slot_by is None:
        return Items(payloads, None, [None] * len(payloads))
    values = [_value(index, task) for index, task in enumerate(tasks)]
    dedupe = [_pointed(i, value, dedupe_by, required=True) for i, value in enumerate(values)] if dedupe_by else None
    slots = [_pointed(i, value, slot_by, required=False) if slot_by else None for i, value in enumerate(values)]
    return Items(payloads, dedupe, slots)


def _text(index: int, task: Raw) -> str:
    try:
        return str(task, "utf-8")
    except UnicodeDecodeError:
        raise _not_json(index) from None


def _value(index: int, task: Raw) -> Any:
    try:
        return msgspec.json.decode(task)
    except (msgspec.DecodeError, RecursionError):
        raise _not_json(index) from None


def _not_json(index: int) -> BadRequest:
    return BadRequest(f"tasks[{index}] is not valid JSON in UTF-8.", code="bad_payload")


def _pointed(index: int, value: Any, pointer: str, *, required: bool) -> str | None:
    """Returns the scalar that a JSON pointer selects in a payload, as text."""
    try:
        text = pointed(value, pointer)
    except ValueError:
        raise BadRequest(
            f"tasks[{index}]: the value at {pointer!r} is too long or not text.", code="bad_pointer"
        ) from None
    if text is None and required:
        raise BadRequest(f"tasks[{index}] has no single value at {pointer!r}.", code="bad_pointer")
    return text
