"""Queues failed tasks again when their backoff is over."""

from __future__ import annotations

from interlock.adapters.lowwater import low_water
from interlock.adapters.postgres import Connection, Database, queries
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.kernel.tasks import enqueue
from interlock.settings import Settings
from interlock.telemetry import TASKS_REQUEUED

_sql = queries("tasks")
_BATCH = 1000


class Retries(Periodic):
    name = "retries"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._direct = settings.queue_direct
        self._water = low_water()

    async def run_once(self) -> int:
        async def work(connection: Connection) -> int:
            rows = await _sql.requeue_due(connection, most=_BATCH, since=look.since)
            look.reached = rows[0]["reached"]
            ids = [row["task_id"] for row in rows if row["task_id"] is not None]
            if ids:
                await enqueue(connection, ids, direct=self._direct)
            await failpoint("retry.before_commit")
            return len(ids)

        with self._water.look() as look:
            done = await self._database.run(work)
        TASKS_REQUEUED.inc(done)
        return done
