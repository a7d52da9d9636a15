"""Bulk submission: runs whose tasks are created in the background, from a staged list or from later calls."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.errors import BadRequest, Conflict, NotFound, TooLarge
from interlock.failpoints import failpoint
from interlock.jobs.ingest_records import close_open_run
from interlock.jobs.run_sources import StagedSource, announce
from interlock.jobs.staged_lists import Uploads
from interlock.jobs.submission import RunSettings, Submissions, items_of
from interlock.settings import Settings
from interlock.stores.isolation import UNSTORABLE
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.idempotency import Repeat, once
from interlock.tasks.reads import Reads, run_by_id, run_view
from interlock.telemetry import TASKS_CREATED
from interlock.wire.base import RunState
from interlock.wire.jobs import JobAccepted, JobRequest, RunView, TasksAdded, TasksRequest

_sql = queries(__name__, "ingest")
_ENDPOINT: Final = "POST /v1/jobs"


class BulkSubmissions:
    def __init__(
        self, database: Database, settings: Settings, submissions: Submissions, uploads: Uploads, reads: Reads
    ) -> None:
        self._database = database
        self._settings = settings
        self._submissions = submissions
        self._uploads = uploads
        self._reads = reads

    async def submit(self, request: JobRequest, org_id: UUID, repeat: Repeat) -> JobAccepted:
        """Inserts small closed lists synchronously; queues others for ingest."""
        _require_one_list(request)
        if not request.open and request.source is None and not self._is_large(request):
            submitted = await self._submissions.submit(request, org_id, idempotency_key=repeat.key, body=repeat.body)
            return msgspec.json.decode(submitted.body, type=JobAccepted)
        if request.dedupe_by is not None:
            raise BadRequest(
                f"`dedupe_by` is only for lists of at most {self._settings.sync_threshold} tasks inside the request.",
                code="dedupe_of_large_list",
            )
        self._submissions.check_payloads(request)
        staged = None if request.open else await self._staged(request, org_id)

        async def work(connection: Connection) -> JobAccepted:
            accepted = await self._write(connection, request, org_id, staged)
            await failpoint("submit.before_commit")
            return accepted

        accepted = await once(self._database, self._settings, org_id, _ENDPOINT, repeat, JobAccepted, 202, work)
        await failpoint("submit.committed")
        return accepted

    def _is_large(self, request: JobRequest) -> bool:
        return request.in_background or len(request.listed) > self._settings.sync_threshold

    async def _staged(self, request: JobRequest, org_id: UUID) -> StagedSource:
        source = request.source
        if source is None:
            source = await self._uploads.stage(_as_lines(request.listed), org_id)
        return await self._uploads.found(source, org_id)

    async def _write(
        self, connection: Connection, request: JobRequest, org_id: UUID, staged: StagedSource | None
    ) -> JobAccepted:
        job = await self._submissions.job(connection, request, org_id)
        if job["queue"] is None:
            raise BadRequest(
                f"Runtime {job['runtime']!r} has no queue: it accepts only closed lists of at most "
                f"{self._settings.sync_threshold} tasks inside the request.",
                code="runtime_without_queue",
            )
        run: Row = await _sql.insert_ingesting_run(
            connection,
            org_id=org_id,
            job_id=job["job_id"],
            range_size=self._settings.range_size,
            open=staged is None,
            **RunSettings.asked(request.limits, request.retention_days).columns,
        )
        if staged is None:
            await self._open(connection, job, run, request)
        else:
            await self._uploads.keep(connection, staged, org_id)
            source = msgspec.json.encode(staged).decode()
            await _sql.insert_ingest(connection, run_id=run["run_id"], org_id=org_id, source=source)
            await announce(connection, self._settings, [run["run_id"]])
        return JobAccepted(
            job_id=job["job_id"],
            run_id=run["run_id"],
            state=RunState(run["state"]),
            total=None,
            deduplicated=0,
            tasks_url=f"/v1/jobs/{job['job_id']}/tasks",
            status_url=f"/v1/jobs/{job['job_id']}",
        )

    # Open runs

    async def _open(self, connection: Connection, job: Row, run: Row, request: JobRequest) -> None:
        """Creates the shard of an open run right away: the run may become large, with tasks from many calls."""
        which = {"run_id": run["run_id"], "org_id": job["org_id"]}
        shard = (await _sql.give_shard(connection, **which))["shard"]
        await _sql.create_shard(
            connection,
            number=shard,
            job_id=job["job_id"],
            max_attempts=job["max_attempts"],
            priority=job["priority"],
            **which,
        )
        await _sql.finish_shard(connection, number=shard)
        if request.listed:
            await self._add(connection, job, run["run_id"], request.listed)

    async def add(self, job: str, request: TasksRequest, org_id: UUID, repeat: Repeat) -> TasksAdded:
        """Adds all tasks or none."""
        self._check_batch(request.tasks)
        job_id = (await self._reads.find_job(job, org_id))["job_id"]

        async def work(connection: Connection) -> TasksAdded:
            row = await self._newest(connection, job_id, org_id)
            added = await self._add(connection, row, row["run_id"], request.tasks)
            await failpoint("submit.before_commit")
            return added

        endpoint = f"POST /v1/jobs/{job_id}/tasks"
        try:
            added = await once(self._database, self._settings, org_id, endpoint, repeat, TasksAdded, 201, work)
        except UNSTORABLE as error:
            raise BadRequest(f"A payload cannot be stored: {str(error).splitlines()[0]}.", code="bad_payload") from None
        return added

    async def _newest(self, connection: Connection, job_id: UUID, org_id: UUID) -> Row:
        row: Row | None = await _sql.newest_run(connection, job_id=job_id, org_id=org_id)
        if row is None:
            raise NotFound("The job has no run: submit one with `open` set to true.")
        return row

    async def _add(self, connection: Connection, job: Row, run_id: UUID, tasks: list[Raw]) -> TasksAdded:
        items = items_of(tasks, None, job["concurrency_key"])
        run: Row | None = await _sql.extend_open_run(connection, run_id=run_id, org_id=job["org_id"], added=len(items))
        if run is None:
            raise Conflict("The run accepts no more tasks: it is closed or has ended.", code="run_closed")
        await _sql.add_tasks(
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
        await _sql.add_ranges(
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

    def _check_batch(self, tasks: list[Raw]) -> None:
        limit = self._settings.batch_limit
        if len(tasks) > limit:
            raise TooLarge(f"{len(tasks)} tasks in one call; the limit is {limit}.", code="too_many_tasks")
        self._submissions.check_tasks(tasks)

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


def _require_one_list(request: JobRequest) -> None:
    if request.source is not None and (request.tasks is not None or request.open):
        raise BadRequest("`source` cannot be combined with `tasks` or `open`: a run has one list.", code="two_lists")
    if request.source is None and request.tasks is None and not request.open:
        raise BadRequest("Set `tasks`, or `source`, or set `open` to true and add tasks later.", code="no_list")


def _as_lines(tasks: list[Raw]) -> bytes:
    """Puts one JSON value on each line. A line feed between tokens is only whitespace, and strings contain none."""
    return b"".join(bytes(task).replace(b"\r", b" ").replace(b"\n", b" ") + b"\n" for task in tasks)
