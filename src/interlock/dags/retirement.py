"""What becomes of a generation's tasks and rows after a swap.

One that was retired does no more: its tasks are canceled, the running ones asked to stop; what a source was told to do
goes to its successor. One that was brought back is given again what was canceled then. One that no version can bring
back loses its rows in the registry. All of it bit by bit: a generation may have a million tasks.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.dags.routing import Scopes
from interlock.failpoints import failpoint
from interlock.kernel.actions import Actions
from interlock.kernel.loop import Periodic
from interlock.settings import Settings

_sql = queries("dags")
_JOBS: Final = 100
_TASKS: Final = 2_000
_SCOPES: Final = 1_000
_ROWS: Final = 5_000
_GRACE_SECONDS: Final = 60.0
"""A router that read the edges just before the swap may still be about to write its tasks; longer than a statement may
take, nobody is."""
_FIRST: Final = UUID(int=0)


class Retirement(Periodic):
    """A page of all generations that were swapped in a pass; it goes round."""

    name = "retirement"

    def __init__(self, database: Database, settings: Settings, actions: Actions) -> None:
        self.seconds = settings.reconcile_seconds
        self._database = database
        self._actions = actions
        self._objects_root = settings.objects_root
        self._scopes = Scopes(settings)
        self._after = _FIRST

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            jobs = await _sql.swapped_jobs(connection, after=self._after, most=_JOBS, grace=_GRACE_SECONDS)
        done = sum([await self._see_to(job) for job in jobs])
        self._after = jobs[-1]["job_id"] if len(jobs) == _JOBS else _FIRST
        return done

    async def _see_to(self, job: Row) -> int:
        done = await self._revive(job) if job["active"] else await self._wind_up(job)
        if not done and job["settled"] and not await self._unended(job):
            async with self._database.connection() as connection:
                await _sql.settled(connection, job_id=job["job_id"], active=job["active"], grace=_GRACE_SECONDS)
        return done

    async def _unended(self, job: Row) -> bool:
        """Whether a retired one still has somebody at work."""
        return not job["active"] and bool(await self._tasks(job, most=1, asked=True))

    async def _tasks(self, job: Row, most: int, *, asked: bool) -> list[UUID]:
        """`asked`: also those whose cancel was asked for."""
        async with self._database.connection() as connection:
            rows = await _sql.unended_tasks(
                connection, job_id=job["job_id"], org_id=job["org_id"], most=most, asked=asked
            )
        return [row["task_id"] for row in rows]

    async def _revive(self, job: Row) -> int:
        async def work(connection: Connection) -> int:
            scopes = await _sql.take_back_scopes(connection, job_id=job["job_id"], most=_SCOPES)
            await self._scopes.give(connection, scopes, job["job_id"])
            await failpoint("retirement.before_commit")
            return len(scopes)

        # What is held back would be taken back and given to nobody.
        return 0 if job["paused"] else await self._database.run(work)

    async def _wind_up(self, job: Row) -> int:
        await self._cancel_runs(job)
        tasks = await self._tasks(job, most=_TASKS, asked=False)
        if tasks:
            async with self._database.connection() as connection:
                await _sql.hand_over_tasks(connection, job_id=job["job_id"], task_ids=tasks)
            return await self._actions.cancel_ids(tasks, job["org_id"])
        if not job["dropped"] or await self._unended(job):
            return 0
        return await self._drop(job)

    async def _cancel_runs(self, job: Row) -> None:
        async with self._database.connection() as connection:
            runs = await _sql.live_runs(connection, job_id=job["job_id"], org_id=job["org_id"], most=_JOBS)
        for run in runs:
            await self._actions.cancel_run(run["run_id"], job["org_id"])

    async def _drop(self, job: Row) -> int:
        async def work(connection: Connection) -> int:
            row = await _sql.drop_rows(
                connection, job_id=job["job_id"], org_id=job["org_id"], root=self._objects_root, most=_ROWS
            )
            await failpoint("retirement.before_commit")
            dropped: int = row["dropped"]
            return dropped

        return await self._database.run(work)
