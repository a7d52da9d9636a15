"""Deletes what is past its time, in batches that never hold locks for long."""

from __future__ import annotations

from uuid import UUID

from interlock.access.keyring import Keyring
from interlock.adapters.postgres import Database, queries
from interlock.kernel.loop import Periodic
from interlock.settings import Settings

_sql = queries("runs")
_principals_sql = queries("principals")
_BATCH = 5000
_RUNS = 20


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
        async with self._database.connection() as connection:
            rows = await _sql.expired_runs(connection, age_seconds=self._age_seconds, most=_RUNS)
        runs: list[UUID] = [row["run_id"] for row in rows]
        return await self._delete_some(runs) if runs else 0

    async def _delete_some(self, runs: list[UUID]) -> int:
        """Tasks first; a run goes only when it is empty, so a crash in between leaves something to find again."""
        async with self._database.transaction() as connection:
            tasks = await _sql.delete_run_tasks(connection, run_ids=runs, most=_BATCH)
            await _sql.delete_task_traces(connection, task_ids=[row["task_id"] for row in tasks])
            gone = await _sql.delete_empty_runs(connection, run_ids=runs) if len(tasks) < _BATCH else []
            if gone:
                await _sql.delete_nameless_jobs(connection, job_ids=[row["job_id"] for row in gone])
        return len(tasks) + len(gone)
