"""Ends attempts whose lease ran out or whose hard timeout has come.

A heartbeat never extends a lease past the timeout, so both are one index and one statement.
"""

from __future__ import annotations

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.kernel.tasks import wake_parked
from interlock.settings import Settings
from interlock.telemetry import TASKS_REAPED

_sql = queries("tasks")
_BATCH = 500


class Reaper(Periodic):
    name = "reaper"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.reap_seconds
        self._database = database
        self._direct = settings.queue_direct

    async def run_once(self) -> int:
        async def work(connection: Connection) -> list[Row]:
            rows: list[Row] = await _sql.reap(connection, most=_BATCH)
            freed = sorted(rows[0]["freed_jobs"] or []) if rows else []
            if freed:
                await wake_parked(connection, freed, rows[0]["freed_keys"], direct=self._direct)
            await failpoint("reap.before_commit")
            return rows

        rows = await self._database.run(work)
        for row in rows:
            TASKS_REAPED.labels(cause="timeout" if row["timed_out"] else "lease").inc()
        return len(rows)
