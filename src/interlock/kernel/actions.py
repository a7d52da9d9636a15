"""What users do to tasks by hand: cancel, retry, redrive; one, by run, by job, by filter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import UUID

from interlock.adapters.postgres import Connection, Database, queries
from interlock.errors import BadRequest, Conflict
from interlock.failpoints import failpoint
from interlock.kernel.reads import Reads
from interlock.kernel.tasks import SMALL_SHARD, enqueue
from interlock.settings import Settings
from interlock.wire import CancelRequest, Changed, RedriveRequest, TaskStatus, TaskView

_sql = queries("tasks")
_reads_sql = queries("reads")
_runs_sql = queries("runs")

_BATCH = 2_000
_CANCELABLE = (TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.FAILED)


class Actions:
    def __init__(self, database: Database, settings: Settings, reads: Reads) -> None:
        self._database = database
        self._settings = settings
        self._reads = reads

    async def cancel(self, task_id: UUID, org_id: UUID) -> TaskView:
        """In every state: a waiting task ends, a running one is asked to, an ended one stays as it is."""
        await self._cancel_ids([task_id], org_id)
        return await self._reads.task(task_id, org_id)

    async def cancel_run(self, run_id: UUID, org_id: UUID) -> Changed:
        """The request is durable; a first batch is canceled at once, the rest by the cancel loop."""
        await self._reads.run(run_id, org_id)
        async with self._database.connection() as connection:
            asked = await _runs_sql.request_run_cancel(connection, run_id=run_id, org_id=org_id)
        matched = await self.cancel_some_of_run(run_id, org_id) if asked else 0
        return Changed(matched=matched, remaining=matched >= _BATCH)

    async def cancel_some_of_run(self, run_id: UUID, org_id: UUID) -> int:
        async with self._database.connection() as connection:
            rows = await _runs_sql.cancelable_of_run(connection, run_id=run_id, most=_BATCH)
        return await self._cancel_ids([row["task_id"] for row in rows], org_id)

    async def cancel_matching(self, request: CancelRequest, org_id: UUID) -> Changed:
        if request.status is not None and request.status not in _CANCELABLE:
            raise BadRequest(f"A {request.status} task has ended; filter by Queued, Running or Failed.")
        statuses = [request.status] if request.status else list(_CANCELABLE)
        if request.dry_run:
            return Changed(matched=await self._count(request.job, request.run, statuses, org_id), dry_run=True)
        matched = 0
        async for ids in self._matching(request.job, request.run, statuses, org_id, dead=False, error_class=None):
            matched += await self._cancel_ids(ids, org_id)
        return Changed(matched=matched)

    async def retry(self, task_id: UUID, org_id: UUID) -> TaskView:
        """A failed task runs again at once; a dead letter gets a fresh set of attempts."""
        if not await self._redrive_ids([task_id], org_id):
            task = await self._reads.task(task_id, org_id)
            raise Conflict(f"The task is {task.status}; only a Failed one can be retried.", code="not_failed")
        return await self._reads.task(task_id, org_id)

    async def redrive(self, request: RedriveRequest, org_id: UUID) -> Changed:
        matched, failed = 0, [TaskStatus.FAILED]
        if request.dry_run:
            count = await self._count(
                request.job, request.run, failed, org_id, dead=True, error_class=request.error_class
            )
            return Changed(matched=min(count, request.limit), dry_run=True)
        pages = self._matching(request.job, request.run, failed, org_id, dead=True, error_class=request.error_class)
        async for ids in pages:
            matched += await self._redrive_ids(ids[: request.limit - matched], org_id)
            if matched >= request.limit:
                return Changed(matched=matched, remaining=True)
        return Changed(matched=matched)

    async def _cancel_ids(self, ids: list[UUID], org_id: UUID) -> int:
        async def work(connection: Connection) -> int:
            rows = await _sql.cancel(connection, shard=SMALL_SHARD, task_ids=sorted(ids), org_id=org_id)
            await failpoint("cancel.before_commit")
            return len(rows)

        return await self._database.run(work) if ids else 0

    async def _redrive_ids(self, ids: list[UUID], org_id: UUID) -> int:
        async def work(connection: Connection) -> int:
            rows = await _sql.redrive(connection, shard=SMALL_SHARD, task_ids=sorted(ids), org_id=org_id)
            if rows:
                await enqueue(connection, [r["task_id"] for r in rows], direct=self._settings.queue_direct)
            return len(rows)

        return await self._database.run(work) if ids else 0

    async def _count(
        self,
        job: str | None,
        run: UUID | None,
        statuses: list[TaskStatus],
        org_id: UUID,
        *,
        dead: bool = False,
        error_class: str | None = None,
    ) -> int:
        """A dry run: the only count there is, over what the filter would touch."""
        total = 0
        for run_id, job_id in await self._targets(job, run, org_id):
            total += len(await self._page(run_id, job_id, statuses, org_id, dead, error_class, most=1_000_000))
        return total

    async def _matching(
        self,
        job: str | None,
        run: UUID | None,
        statuses: list[TaskStatus],
        org_id: UUID,
        *,
        dead: bool,
        error_class: str | None,
    ) -> AsyncIterator[list[UUID]]:
        """Pages of ids. Each page leaves the filter once it is acted upon, so the next read is the next page."""
        for run_id, job_id in await self._targets(job, run, org_id):
            while ids := await self._page(run_id, job_id, statuses, org_id, dead, error_class, most=_BATCH):
                yield ids
                if len(ids) < _BATCH:
                    break

    async def _targets(self, job: str | None, run: UUID | None, org_id: UUID) -> list[tuple[UUID | None, UUID | None]]:
        """Runs to walk, and the job for its tasks of no run."""
        if run is not None:
            return [((await self._reads.run(run, org_id)).run_id, None)]
        if job is None:
            raise BadRequest("Say which tasks: give `job` or `run`.", code="filter_missing")
        job_id = (await self._reads.find_job(job, org_id))["job_id"]
        async with self._database.connection() as connection:
            runs = await _reads_sql.runs_from(connection, org_id=org_id, job_id=job_id, cursor=None, most=100_000)
        return [(row["run_id"], None) for row in runs] + [(None, job_id)]

    async def _page(
        self,
        run_id: UUID | None,
        job_id: UUID | None,
        statuses: list[TaskStatus],
        org_id: UUID,
        dead: bool,
        error_class: str | None,
        *,
        most: int,
    ) -> list[UUID]:
        shared = {
            "org_id": org_id,
            "statuses": [s.value for s in statuses],
            "dead": dead,
            "error_class": error_class,
            "most": most,
        }
        async with self._database.connection() as connection:
            if run_id is not None:
                rows = await _reads_sql.matching_run_tasks(connection, run_id=run_id, **shared)
            else:
                rows = await _reads_sql.matching_job_tasks(connection, job_id=job_id, **shared)
        return [row["task_id"] for row in rows]
