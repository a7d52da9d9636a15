"""Deletes what is past its time, in batches that never hold locks for long."""

from __future__ import annotations

from interlock.access.keyring import Keyring
from interlock.adapters.postgres import Database, queries
from interlock.kernel.loop import Periodic
from interlock.settings import Settings

_sql = queries("runs")
_principals_sql = queries("principals")
_BATCH = 5000


class Retention(Periodic):
    name = "retention"

    def __init__(self, database: Database, settings: Settings, keyring: Keyring) -> None:
        self.seconds = settings.retention_seconds
        self._database = database
        self._keyring = keyring
        self._age_seconds = settings.retention_days * 86_400

    async def run_once(self) -> int:
        done = await self._runs()
        async with self._database.connection() as connection:
            done += len(await _sql.delete_expired_requests(connection, most=_BATCH))
            done += len(await _principals_sql.delete_expired_capabilities(connection, most=_BATCH))
            await _sql.delete_stale_workers(connection)
        return done + await self._keyring.forget_expired()

    async def _runs(self) -> int:
        """The oldest expired run, a batch at a time; it goes only when its last task has."""
        async with self._database.transaction() as connection:
            run = await _sql.expired_run(connection, age_seconds=self._age_seconds)
            if run is None:
                return 0
            first, last = run["swept_index"], min(run["swept_index"] + _BATCH - 1, run["last_index"])
            tasks = await _sql.delete_run_tasks(connection, run_id=run["run_id"], first=first, last=last)
            await _sql.delete_task_traces(connection, task_ids=[row["task_id"] for row in tasks])
            if last < run["last_index"]:
                await _sql.set_swept(connection, run_id=run["run_id"], swept=last + 1)
            else:
                await _sql.delete_run(connection, run_id=run["run_id"])
                await _sql.delete_nameless_job(connection, job_id=run["job_id"])
        return len(tasks) + 1
