"""Deletes what is past its time, in batches that never hold locks for long."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from interlock.access.keyring import Keyring
from interlock.adapters.lowwater import Look, LowWater, low_water
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.failpoints import failpoint
from interlock.kernel.deletion import delete_part
from interlock.kernel.loop import Periodic
from interlock.kernel.shards import SMALL_SHARD
from interlock.settings import Settings

_sql = queries("runs")
_principals_sql = queries("principals")
_dags_sql = queries("retention")
_BATCH = 5000
_JOBS = 1000
_NO_JOB = UUID(int=0)


class Retention(Periodic):
    name = "retention"

    def __init__(self, database: Database, settings: Settings, keyring: Keyring) -> None:
        self.seconds = settings.retention_seconds
        self._database = database
        self._settings = settings
        self._keyring = keyring
        self._age_seconds = settings.retention_days * 86_400
        self._water, self._kept_water = low_water(), low_water()
        self._event_water: LowWater[int] = LowWater(0, lambda event_id: event_id - _BATCH)
        self._job = _NO_JOB

    async def run_once(self) -> int:
        done = await self._runs() + await self._tasks_of_dags() + await self._events()
        async with self._database.connection() as connection:
            done += len(await _sql.delete_expired_requests(connection, most=_BATCH))
            done += len(await _principals_sql.delete_expired_capabilities(connection, most=_BATCH))
            await _sql.delete_stale_workers(connection)
        return done + await self._keyring.forget_expired()

    async def _runs(self) -> int:
        """The oldest expired run, and the oldest of those that say how long they are kept, a batch at a time; a run
        goes only when its last task has. One with a shard of its own is handed on."""
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
        """Ended tasks of no run, of a page of jobs. It goes round, and stays where there is more than a batch."""
        deleted, self._job = await self._database.run(self._page_of_jobs)
        return deleted

    async def _page_of_jobs(self, connection: Connection) -> tuple[int, UUID]:
        jobs = await _dags_sql.dag_jobs_after(connection, after=self._job, most=_JOBS)
        ids = [row["job_id"] for row in jobs]
        tasks = await _dags_sql.delete_ended_tasks(
            connection, job_ids=ids, made_before=self._made_before(), age_seconds=self._age_seconds, most=_BATCH
        )
        if tasks:
            await _sql.delete_task_traces(connection, task_ids=[row["task_id"] for row in tasks])
            await failpoint("retention.before_commit")
        if len(tasks) == _BATCH:
            return len(tasks), self._job
        return len(tasks), ids[-1] if len(ids) == _JOBS else _NO_JOB

    def _made_before(self) -> UUID:
        """The first id of that moment, as uuidv7 counts. It narrows the search; when a task ended is what decides."""
        moment = self._database.clock.now() - timedelta(seconds=self._age_seconds)
        return UUID(int=int(moment.timestamp() * 1000) << 80)

    async def _events(self) -> int:
        with self._event_water.look() as look:
            async with self._database.connection() as connection:
                rows = await _dags_sql.delete_old_events(
                    connection, since=look.since, age_seconds=self._age_seconds, most=_BATCH
                )
            look.reached = max((row["event_id"] for row in rows), default=None)
        return len(rows)
