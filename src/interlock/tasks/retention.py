"""Deletes runs, and expired rows, in small batches that hold locks only briefly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from uuid import UUID

from interlock.access.keyring import Keyring
from interlock.access.sessions import Sessions
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.low_water import Look, LowWater, low_water
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks import shards
from interlock.tasks.overview import delete_old_minutes
from interlock.tasks.result_packs import forget_results
from interlock.tasks.runs import delete_nameless_job
from interlock.tasks.shards import SMALL_SHARD, Shards

_sql = queries(__name__, "runs")
_retention_sql = queries(__name__, "retention")
_logs_sql = queries(__name__, "logs")
_BATCH = 5000
_JOBS = 1000
_NO_JOB = UUID(int=0)


class Retention(Periodic):
    name = "retention"

    def __init__(self, database: Database, settings: Settings, keyring: Keyring, sessions: Sessions) -> None:
        self.seconds = settings.retention_seconds
        self._database = database
        self._settings = settings
        self._keyring = keyring
        self._sessions = sessions
        self._age_seconds = settings.retention_days * 86_400
        self._water, self._kept_water = low_water(), low_water()
        self._event_water: LowWater[int] = LowWater(0, lambda event_id: event_id - _BATCH)
        self._job = _NO_JOB

    async def run_once(self) -> int:
        done = await self._runs() + await self._tasks_of_dags() + await self._events()
        async with self._database.connection() as connection:
            done += len(await _sql.delete_expired_requests(connection, limit=_BATCH))
            done += len(await _retention_sql.delete_expired_capabilities(connection, limit=_BATCH))
            await _sql.delete_stale_workers(connection)
            done += await delete_old_minutes(connection, _BATCH)
        return done + await self._keyring.forget_expired() + await self._sessions.forget_expired()

    async def _runs(self) -> int:
        """Deletes a batch of the oldest expired run, and of the oldest one with its own retention.

        A run is deleted after its last task. A run with its own shard is left to RunDeletions.
        """
        with self._water.look() as look:
            done = await self._database.run(lambda connection: self._oldest_run(connection, look))
        with self._kept_water.look() as look:
            return done + await self._database.run(lambda connection: self._oldest_kept_run(connection, look))

    async def _oldest_run(self, connection: Connection, look: Look[datetime]) -> int:
        run = await _sql.expired_run(connection, age_seconds=self._age_seconds, since=look.since)
        if run is None:
            return 0
        look.reached = run["ended_at"]
        return await self._delete(connection, run)

    async def _oldest_kept_run(self, connection: Connection, look: Look[datetime]) -> int:
        run = await _sql.expired_kept_run(connection, since=look.since)
        if run is None:
            return 0
        look.reached = run["kept_until"]
        return await self._delete(connection, run)

    async def _delete(self, connection: Connection, run: Row) -> int:
        if run["shard"] == SMALL_SHARD:
            done = await delete_part(connection, self._settings, run)
        else:
            await _sql.request_deletion(connection, run_id=run["run_id"])
            done = 1
        await failpoint("retention.before_commit")
        return done

    async def _tasks_of_dags(self) -> int:
        """Deletes ended tasks without a run, for one page of jobs. Stays on the page while it yields full batches."""
        deleted, self._job = await self._database.run(self._page_of_jobs)
        return deleted

    async def _page_of_jobs(self, connection: Connection) -> tuple[int, UUID]:
        jobs = await _retention_sql.dag_jobs_after(connection, after=self._job, limit=_JOBS)
        ids = [row["job_id"] for row in jobs]
        tasks = await _retention_sql.delete_ended_tasks(
            connection, job_ids=ids, made_before=self._made_before(), age_seconds=self._age_seconds, limit=_BATCH
        )
        if tasks:
            await _sql.delete_task_traces(connection, task_ids=[row["task_id"] for row in tasks])
            await failpoint("retention.before_commit")
        if len(tasks) == _BATCH:
            return len(tasks), self._job
        return len(tasks), ids[-1] if len(ids) == _JOBS else _NO_JOB

    def _made_before(self) -> UUID:
        """Returns the first uuidv7 of that time. It narrows the search; the time when a task ended decides."""
        moment = self._database.clock.now() - timedelta(seconds=self._age_seconds)
        return UUID(int=int(moment.timestamp() * 1000) << 80)

    async def _events(self) -> int:
        with self._event_water.look() as look:
            async with self._database.connection() as connection:
                rows = await _retention_sql.delete_old_events(
                    connection, since=look.since, age_seconds=self._age_seconds, limit=_BATCH
                )
            look.reached = max((row["event_id"] for row in rows), default=None)
        return len(rows)


_RUNS = 10


async def delete_part(connection: Connection, settings: Settings, run: Row) -> int:
    """Deletes the next tasks of a run with their attempts and events, and the run itself after its last task.

    Returns the number of deleted rows.
    """
    first, last = run["swept_index"], min(run["swept_index"] + _BATCH - 1, run["last_index"])
    tasks = await _sql.delete_run_tasks(connection, run_id=run["run_id"], first=first, last=last)
    await _sql.delete_task_traces(connection, task_ids=[row["task_id"] for row in tasks])
    if last < run["last_index"]:
        await _sql.set_swept(connection, run_id=run["run_id"], swept=last + 1)
    else:
        await _delete_run(connection, settings, run)
    return len(tasks) + 1


async def _delete_run(connection: Connection, settings: Settings, run: Row) -> None:
    await _sql.delete_run(connection, run_id=run["run_id"])
    await forget_results(connection, settings, run["run_id"])
    await delete_nameless_job(connection, run["job_id"])


class RunDeletions(Periodic):
    name = "run-deletions"

    def __init__(self, database: Database, settings: Settings, known: Shards) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._settings = settings
        self._shards = known

    async def run_once(self) -> int:
        async with self._alone() as guard:
            runs = await _sql.deleting_runs(guard, limit=_RUNS) if guard is not None else []
            return sum([await self._delete(run) for run in runs])

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Connection | None]:
        """Holds an advisory lock over several transactions, because a concurrent detach cannot run in one.

        Yields None if another process holds the lock.
        """
        async with self._database.connection() as guard:
            if not await _sql.take_turn(guard, name=self.name):
                yield None
                return
            try:
                yield guard
            finally:
                await _sql.end_turn(guard, name=self.name)

    async def _delete(self, run: Row) -> int:
        if run["shard"] == SMALL_SHARD:
            done = await self._database.run(lambda connection: self._part(connection, run))
        else:
            done = await self._whole(run)
        self._shards.forget(run["run_id"])
        return done

    async def _part(self, connection: Connection, run: Row) -> int:
        done = await delete_part(connection, self._settings, run)
        await failpoint("deletion.before_commit")
        return done

    async def _whole(self, run: Row) -> int:
        """Deletes a run that has its own shard. After a crash between two steps the run is still to be deleted."""
        async with self._database.connection() as connection:
            gone = len(await _sql.delete_shard_attempts(connection, number=run["shard"], limit=_BATCH))
        if gone == _BATCH:
            return gone
        if run["with_outputs"] and run["swept_index"] <= run["last_index"]:
            return await self._database.run(lambda connection: self._traces(connection, run))
        if not await shards.drop(self._database, run["shard"]):
            return 0
        await failpoint("deletion.dropped")
        async with self._database.connection() as connection:
            gone = len(await _logs_sql.delete_logs_of_run(connection, run_id=run["run_id"], limit=_BATCH))
        if gone == _BATCH:
            return gone
        await self._database.run(lambda connection: _delete_run(connection, self._settings, run))
        return 1

    async def _traces(self, connection: Connection, run: Row) -> int:
        """Deletes the rows that tasks left in other tables. Only jobs with outputs leave any."""
        last = min(run["swept_index"] + _BATCH - 1, run["last_index"])
        ids = await _sql.ids_of_range(connection, run_id=run["run_id"], first=run["swept_index"], last=last)
        await _sql.delete_task_traces(connection, task_ids=[row["task_id"] for row in ids])
        await _sql.set_swept(connection, run_id=run["run_id"], swept=last + 1)
        return len(ids)
