"""User actions on tasks: cancel, retry and redrive, for one task, a run, a job or a filter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import UUID

from interlock.errors import BadRequest, Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.queue import enqueue, wake_parked
from interlock.tasks.reads import Reads
from interlock.tasks.shards import SMALL_SHARD, find_task
from interlock.wire.base import TaskStatus
from interlock.wire.tasks import CancelRequest, Changed, RedriveRequest, TaskView

_sql = queries(__name__, "tasks")
_reads_sql = queries(__name__, "reads")
_runs_sql = queries(__name__, "runs")

_BATCH = 2_000
_STRETCH = 5_000
"""Number of task indexes of a run that one read covers."""
_MAX_COUNTED = 1_000_000
_CANCELABLE = (TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.FAILED)


async def request_run_cancel(connection: Connection, run_id: UUID, org_id: UUID) -> Row | None:
    """Records the request; the cancel loop cancels the tasks. Returns None if the run has ended."""
    run: Row | None = await _runs_sql.request_run_cancel(connection, run_id=run_id, org_id=org_id)
    return run


class Actions:
    def __init__(self, database: Database, settings: Settings, reads: Reads) -> None:
        self._database = database
        self._settings = settings
        self._reads = reads

    async def cancel(self, task_id: UUID, org_id: UUID) -> TaskView:
        """Cancels a task in any state. A waiting task ends, a running one is asked to stop; an ended one stays as it
        is.
        """
        await self.cancel_ids([task_id], org_id, shard=await self._shard_of(task_id, org_id))
        return await self._reads.task(task_id, org_id)

    async def cancel_run(self, run_id: UUID, org_id: UUID) -> Changed:
        """Records the request durably and cancels a first batch now; the cancel loop does the rest."""
        await self._reads.run(run_id, org_id)
        async with self._database.connection() as connection:
            run = await request_run_cancel(connection, run_id, org_id)
        if run is None:
            return Changed(matched=0)
        matched = await self.cancel_some_of_run(run)
        return Changed(matched=matched, remaining=run["last_index"] >= _STRETCH)

    async def cancel_some_of_run(self, run: Row) -> int:
        """Cancels the next stretch of a run. A crash before the last step repeats the stretch."""
        first, run_id = run["cancel_index"], run["run_id"]
        span = {"first": first, "last": first + _STRETCH - 1}
        async with self._database.connection() as connection:
            rows = await _runs_sql.cancelable_of_run(connection, shard=run["shard"], run_id=run_id, **span)
        matched = await self.cancel_ids([row["task_id"] for row in rows], run["org_id"], shard=run["shard"])
        walked = {"walked_from": first, "walked_to": first + _STRETCH}
        async with self._database.connection() as connection:
            await _runs_sql.cancel_walked(connection, run_id=run_id, **walked)
        return matched

    async def cancel_matching(self, request: CancelRequest, org_id: UUID) -> Changed:
        if request.status is not None and request.status not in _CANCELABLE:
            raise BadRequest(
                f"A {request.status} task has ended and cannot be canceled; filter by Queued, Running or Failed."
            )
        statuses = [request.status] if request.status else list(_CANCELABLE)
        if request.dry_run:
            return Changed(matched=await self._count(request.job, request.run, statuses, org_id), dry_run=True)
        matched = 0
        pages = self._matching(request.job, request.run, statuses, org_id, dead=False, error_class=None)
        async for shard, ids in pages:
            matched += await self.cancel_ids(ids, org_id, shard=shard)
        return Changed(matched=matched)

    async def retry(self, task_id: UUID, org_id: UUID) -> TaskView:
        """Runs a failed task again immediately. A dead letter gets a fresh set of attempts."""
        if not await self._redrive_ids([task_id], org_id, await self._shard_of(task_id, org_id)):
            task = await self._reads.task(task_id, org_id)
            raise Conflict(f"The task is {task.status}; only a Failed task can be retried.", code="not_failed")
        return await self._reads.task(task_id, org_id)

    async def redrive(self, request: RedriveRequest, org_id: UUID) -> Changed:
        matched, failed = 0, [TaskStatus.FAILED]
        if request.dry_run:
            count = await self._count(
                request.job, request.run, failed, org_id, dead=True, error_class=request.error_class
            )
            return Changed(matched=min(count, request.limit), dry_run=True)
        pages = self._matching(request.job, request.run, failed, org_id, dead=True, error_class=request.error_class)
        async for shard, ids in pages:
            matched += await self._redrive_ids(ids[: request.limit - matched], org_id, shard)
            if matched >= request.limit:
                return Changed(matched=matched, remaining=True)
        return Changed(matched=matched)

    async def _shard_of(self, task_id: UUID, org_id: UUID) -> int:
        async with self._database.connection() as connection:
            return await find_task(connection, task_id, org_id)

    async def cancel_ids(self, ids: list[UUID], org_id: UUID, *, shard: int = SMALL_SHARD) -> int:
        """Cancels tasks. Returns how many of them had not ended."""

        async def work(connection: Connection) -> list[Row]:
            return await self.cancel_within(connection, ids, org_id, shard)

        rows = await self._database.run(work) if ids else []
        await self.wake_next([row["task_id"] for row in rows if row["status"] == TaskStatus.CANCELED], shard)
        return len(rows)

    async def cancel_within(self, connection: Connection, ids: list[UUID], org_id: UUID, shard: int) -> list[Row]:
        """Cancels tasks in a transaction of the caller, who then calls `wake_next` with those that have ended."""
        rows: list[Row] = await _sql.cancel(connection, shard=shard, task_ids=ids, org_id=org_id)
        await failpoint("cancel.before_commit")
        return rows

    async def wake_next(self, canceled: list[UUID], shard: int) -> None:
        """Wakes the tasks behind the canceled ones: a freed slot may have woken one of these.

        Without this, the next parked task would wait for the reconciler.
        """

        async def work(connection: Connection) -> None:
            capped = await _runs_sql.capped_jobs_of(connection, shard=shard, task_ids=canceled)
            if capped:
                jobs, keys = {row["job_id"] for row in capped}, {row["slot_key"] for row in capped}
                await wake_parked(connection, sorted(jobs), list(keys), direct=self._settings.queue_direct)

        if canceled:
            await self._database.run(work)

    async def _redrive_ids(self, ids: list[UUID], org_id: UUID, shard: int) -> int:
        async def work(connection: Connection) -> int:
            return await self.redrive_within(connection, ids, org_id, shard)

        return await self._database.run(work) if ids else 0

    async def redrive_within(self, connection: Connection, ids: list[UUID], org_id: UUID, shard: int) -> int:
        """Queues failed tasks again in a transaction of the caller. Returns how many had failed."""
        runs = await _runs_sql.lock_runs_of(connection, shard=shard, task_ids=ids, org_id=org_id)
        if any(run["delete_requested"] for run in runs):
            return 0
        rows = await _sql.redrive(connection, shard=shard, task_ids=ids, org_id=org_id)
        if rows:
            await enqueue(connection, [r["task_id"] for r in rows], shard=shard, direct=self._settings.queue_direct)
        await failpoint("redrive.before_commit")
        return len(rows)

    async def _count(
        self,
        job: str | None,
        run: str | None,
        statuses: list[TaskStatus],
        org_id: UUID,
        *,
        dead: bool = False,
        error_class: str | None = None,
    ) -> int:
        """Counts the tasks that the filter matches. Only a dry run counts rows."""
        total = 0
        for target in await self._targets(job, run, org_id):
            if target.job_id is None and TaskStatus.FAILED in statuses:
                total += len(await self._failed(target, org_id, dead, error_class, limit=_MAX_COUNTED))
            elif target.job_id is not None:
                total += len(await self._without_run(target, statuses, org_id, dead, error_class, limit=_MAX_COUNTED))
            async for ids in self._unended(target, statuses, org_id):
                total += len(ids)
        return total

    async def _matching(
        self,
        job: str | None,
        run: str | None,
        statuses: list[TaskStatus],
        org_id: UUID,
        *,
        dead: bool,
        error_class: str | None,
    ) -> AsyncIterator[tuple[int, list[UUID]]]:
        """Yields pages of ids with their shard. Processed tasks leave the filter, so the next read is the next page."""
        for target in await self._targets(job, run, org_id):
            while ids := await self._indexed(target, statuses, org_id, dead, error_class):
                yield target.shard, ids
                if len(ids) < _BATCH:
                    break
            async for ids in self._unended(target, statuses, org_id):
                yield target.shard, ids

    async def _targets(self, job: str | None, run: str | None, org_id: UUID) -> list[_Target]:
        """Returns the runs to walk, and the job for its tasks that belong to no run."""
        if run is not None:
            run_id = await self._reads.run_id(run, org_id)
            async with self._database.connection() as connection:
                row = await _reads_sql.run_by_id(connection, org_id=org_id, run_id=run_id)
            if row is None:
                raise NotFound(f"There is no run {run} in this org.")
            return [_run_target(row)]
        if job is None:
            raise BadRequest("The filter is empty: give `job` or `run`.", code="filter_missing")
        job_id = (await self._reads.find_job(job, org_id))["job_id"]
        async with self._database.connection() as connection:
            runs = await _reads_sql.runs_from(connection, org_id=org_id, job_id=job_id, cursor=None, limit=100_000)
        return [*map(_run_target, runs), _Target(job_id=job_id)]

    async def _indexed(
        self, target: _Target, statuses: list[TaskStatus], org_id: UUID, dead: bool, error_class: str | None
    ) -> list[UUID]:
        if target.run_id is None:
            return await self._without_run(target, statuses, org_id, dead, error_class, limit=_BATCH)
        if TaskStatus.FAILED not in statuses:
            return []
        return await self._failed(target, org_id, dead, error_class, limit=_BATCH)

    async def _failed(
        self, target: _Target, org_id: UUID, dead: bool, error_class: str | None, *, limit: int
    ) -> list[UUID]:
        shared = {"org_id": org_id, "dead": dead, "error_class": error_class, "limit": limit}
        async with self._database.connection() as connection:
            rows = await _reads_sql.failed_of_run(connection, shard=target.shard, run_id=target.run_id, **shared)
        return [row["task_id"] for row in rows]

    async def _without_run(
        self,
        target: _Target,
        statuses: list[TaskStatus],
        org_id: UUID,
        dead: bool,
        error_class: str | None,
        *,
        limit: int,
    ) -> list[UUID]:
        shared = {"org_id": org_id, "dead": dead, "error_class": error_class, "limit": limit}
        async with self._database.connection() as connection:
            rows = await _reads_sql.matching_job_tasks(
                connection, job_id=target.job_id, statuses=[s.value for s in statuses], **shared
            )
        return [row["task_id"] for row in rows]

    async def _unended(self, target: _Target, statuses: list[TaskStatus], org_id: UUID) -> AsyncIterator[list[UUID]]:
        """Yields queued and running tasks of a run. No index covers their status, so this walks a live run."""
        wanted = [s.value for s in statuses if s in (TaskStatus.QUEUED, TaskStatus.RUNNING)]
        if target.ended or not wanted:
            return
        for first in range(0, target.last_index + 1, _STRETCH):
            span = {"first": first, "last": first + _STRETCH - 1}
            async with self._database.connection() as connection:
                rows = await _reads_sql.unended_of_run(
                    connection, shard=target.shard, run_id=target.run_id, org_id=org_id, statuses=wanted, **span
                )
            if rows:
                yield [row["task_id"] for row in rows]


@dataclass(frozen=True)
class _Target:
    """A run, or the tasks of a job that belong to no run."""

    run_id: UUID | None = None
    job_id: UUID | None = None
    shard: int = SMALL_SHARD
    last_index: int = -1
    ended: bool = False


def _run_target(row: Row) -> _Target:
    return _Target(
        run_id=row["run_id"], shard=row["shard"], last_index=row["last_index"], ended=row["ended_at"] is not None
    )
