"""Pause, resume, cancel and delete the runs of a job, in any state; and deadlines, which stop runs.

Tasks of a paused run that are running continue. Claims return none of its queued tasks, and their messages are acked,
so no message is redelivered in a loop. A resume sends the missing messages.
"""

from __future__ import annotations

from uuid import UUID

from interlock.errors import Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.actions import Actions
from interlock.tasks.queue import enqueue
from interlock.tasks.reads import Reads
from interlock.tasks.runs import HotStatus, delete_nameless_job
from interlock.wire.jobs import JobView

_sql = queries(__name__, "run_control")
_RUNS = 20
_STRETCH = 20_000
"""Number of task indexes of a run that one pass covers."""
_MAX_RUNS = 10_000


class RunControl:
    def __init__(
        self, database: Database, settings: Settings, reads: Reads, actions: Actions, status: HotStatus
    ) -> None:
        self._database = database
        self._settings = settings
        self._reads = reads
        self._actions = actions
        self._status = status

    async def pause(self, job: str, org_id: UUID) -> JobView:
        """Pauses the live runs of a job. Ended runs stay unchanged, here and below."""
        job_id = await self._submitted_job(job, org_id, "pause")
        async with self._database.connection() as connection:
            await _sql.pause_runs(connection, job_id=job_id, org_id=org_id)
        return await self._changed(job_id, org_id)

    async def resume(self, job: str, org_id: UUID) -> JobView:
        job_id = await self._submitted_job(job, org_id, "resume")
        async with self._database.connection() as connection:
            await _sql.resume_runs(connection, job_id=job_id, org_id=org_id)
        return await self._changed(job_id, org_id)

    async def cancel(self, job: str, org_id: UUID) -> JobView:
        job_id = await self._submitted_job(job, org_id, "cancel")
        async with self._database.connection() as connection:
            runs = await _sql.live_runs_of(connection, job_id=job_id, org_id=org_id, limit=_MAX_RUNS)
        for run in runs:
            await self._actions.cancel_run(run["run_id"], org_id)
        return await self._changed(job_id, org_id)

    async def _submitted_job(self, job: str, org_id: UUID, action: str) -> UUID:
        """Returns the id of a job that was submitted. A job of a DAG has tasks without a run, so it is refused."""
        found = await self._reads.find_job(job, org_id)
        if found["dag_name"] is not None:
            dag, name = found["dag_name"], f"{found['dag_name']}/{found['name']}"
            instead = f"interlock task cancel --job {name}" if action == "cancel" else f"interlock dag {action} {dag}"
            raise Conflict(
                f"Job {job!r} belongs to DAG {dag!r}. Use: {instead}. For one of its backfills: interlock backfill "
                f"{action} RUN.",
                code="job_of_a_dag",
            )
        job_id: UUID = found["job_id"]
        return job_id

    async def _changed(self, job_id: UUID, org_id: UUID) -> JobView:
        view = await self._reads.job(str(job_id), org_id)
        await self._status.forget([str(job_id), view.name], org_id)
        return view

    async def delete(self, job: str, org_id: UUID) -> JobView:
        """Deletes the job and returns its last state.

        The job disappears immediately. Its tasks and their results are deleted in the background.
        """
        found = await self._reads.job(job, org_id)
        if found.dag_name is not None:
            raise Conflict(
                f"Job {job!r} belongs to DAG {found.dag_name!r}. Deploy the DAG without it instead.",
                code="job_of_a_dag",
            )

        async def work(connection: Connection) -> Row | None:
            row: Row | None = await _sql.delete_job(connection, job_id=found.job_id, org_id=org_id)
            if row is not None and not row["runs"]:
                await delete_nameless_job(connection, found.job_id)
            await failpoint("delete.before_commit")
            return row

        if await self._database.run(work) is None:
            raise NotFound(f"There is no job {job!r} in this org.")
        await self._status.forget([str(found.job_id), found.name], org_id)
        return found


class RunWakes(Periodic):
    """Sends the messages that were not sent, or that were acked without effect, while a run was paused."""

    name = "run-wakes"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.relay_seconds
        self._database = database
        self._direct = settings.queue_direct

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            runs = await _sql.waking_runs(connection, limit=_RUNS)
        for run in runs:
            await self._database.run(lambda connection, run=run: self._wake(connection, run))  # type: ignore[misc]
        return len(runs)

    async def _wake(self, connection: Connection, run: Row) -> None:
        """Sends messages for the next stretch. A crash before the commit repeats it."""
        first = run["wake_index"]
        last = min(first + _STRETCH - 1, run["last_index"])
        span = {"shard": run["shard"], "run_id": run["run_id"], "first": first, "last": last}
        if last < first:
            pass  # all of it is held back
        elif run["queue"] is not None:
            await _sql.wake_ranges(connection, direct=self._direct, **span)
        else:
            ids = [row["task_id"] for row in await _sql.queued_of_range(connection, **span)]
            if ids:
                await enqueue(connection, ids, shard=run["shard"], direct=self._direct)
        await _sql.woken_to(connection, run_id=run["run_id"], walked_from=first, walked_to=first + _STRETCH)


class Deadlines(Periodic):
    """Fails runs that are past their deadline, and cancels their remaining tasks."""

    name = "run-deadlines"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.retry_seconds
        self._database = database

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            return len(await _sql.stop_overdue(connection, limit=_RUNS))
