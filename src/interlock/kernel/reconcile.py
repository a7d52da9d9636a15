"""Finds queued tasks that no message stands for, and parked tasks that no freed slot woke.

Messages are only wake-ups, so any of them may be lost; this is what makes that harmless.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import structlog

from interlock.adapters.postgres import Connection, Database, queries
from interlock.kernel.loop import Periodic
from interlock.kernel.tasks import enqueue, wake_parked
from interlock.settings import Settings

log = structlog.get_logger()
_sql = queries("runs")
_BATCH = 1000
_STEP = 100


class Reconciler(Periodic):
    name = "reconciler"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.reconcile_seconds
        self._database = database
        self._direct = settings.queue_direct
        self._grace = settings.reconcile_grace_seconds

    async def run_once(self) -> int:
        return await self._database.run(self._pass)

    async def _pass(self, connection: Connection) -> int:
        """One step over live runs and one over jobs; the cursors go round."""
        if not await _sql.only_one(connection, name=self.name):
            return 0
        runs = await self._step(connection, "runs", _sql.live_runs_after, "run_id")
        jobs = await self._step(connection, "jobs", _sql.jobs_after, "job_id")
        lost = await _sql.lost_run_tasks(connection, run_ids=runs, grace=self._grace, most=_BATCH) if runs else []
        lost += await _sql.lost_job_tasks(connection, job_ids=jobs, grace=self._grace, most=_BATCH) if jobs else []
        if lost:
            log.warning("reconciler.messages_missing", tasks=len(lost))
            await enqueue(connection, [row["task_id"] for row in lost], direct=self._direct)
        woken = await self._wake_stranded(connection, jobs)
        return len(lost) + woken

    async def _step(self, connection: Connection, name: str, statement: Any, key: str) -> list[UUID]:
        cursor = await _sql.sweep_cursor(connection, name=name)
        ids = [row[key] for row in await statement(connection, cursor=cursor, most=_STEP)]
        await _sql.set_sweep_cursor(connection, name=name, cursor=ids[-1] if len(ids) == _STEP else None)
        return ids

    async def _wake_stranded(self, connection: Connection, jobs: list[UUID]) -> int:
        stranded = [row["job_id"] for row in await _sql.stranded_jobs(connection, job_ids=jobs)] if jobs else []
        if not stranded:
            return 0
        keys = [row["slot_key"] for row in await _sql.parked_keys(connection, job_ids=stranded, most=_BATCH)]
        return await wake_parked(connection, stranded, keys, direct=self._direct)
