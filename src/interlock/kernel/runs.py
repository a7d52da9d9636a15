"""Folds what tasks did into their runs' counters, ends finished runs, and carries cancels of whole runs through."""

from __future__ import annotations

from interlock.adapters.lowwater import Look, LowWater
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.failpoints import failpoint
from interlock.kernel.actions import Actions
from interlock.kernel.loop import Periodic
from interlock.kernel.pace import Ended, Pace
from interlock.kernel.webhook_events import tell_of_runs
from interlock.settings import Settings

_sql = queries("runs")
_BATCH = 5000
_RUNS = 20
_SLACK_PAGES = 64
"""Writers fill pages of their own, some of them below the last one that was folded."""

Place = tuple[int, int]
"""Page and line of a row in its table."""


class RunCounters(Periodic):
    name = "run-counters"

    def __init__(self, database: Database, settings: Settings, pace: Pace) -> None:
        self.seconds = settings.fold_seconds
        self._database = database
        self._pace = pace
        self._retention_days = settings.retention_days
        self._water: LowWater[Place] = LowWater((0, 0), lambda place: (max(0, place[0] - _SLACK_PAGES), 0))

    async def run_once(self) -> int:
        with self._water.look() as look:
            rows = await self._database.run(lambda connection: self._fold(connection, look))
        await self._pace.note([Ended(row["run_id"], row["done"]) for row in rows])
        return len(rows)

    async def _fold(self, connection: Connection, look: Look[Place]) -> list[Row]:
        # Two folders would wait for each other's run rows and gain nothing.
        look.skipped = not await _sql.only_one(connection, name=self.name)
        if look.skipped:
            return []
        rows: list[Row] = await _sql.fold_deltas(connection, most=_BATCH, since=look.since)
        look.reached = rows[0]["reached"] if rows else None
        over = [row["run_id"] for row in rows if row["over"]]
        intolerable = [row["run_id"] for row in rows if row["intolerable"]]
        if intolerable:
            await _sql.stop_intolerable(connection, run_ids=intolerable)
        ended = [row["run_id"] for row in await _sql.end_runs(connection, run_ids=over)] if over else []
        watched = [row["run_id"] for row in rows if row["watched"]]
        if watched:
            now = self._database.clock.now()
            await tell_of_runs(connection, watched, ended=ended, now=now, retention_days=self._retention_days)
        await failpoint("fold.before_commit")
        return rows


class RunCancels(Periodic):
    name = "run-cancels"

    def __init__(self, database: Database, settings: Settings, actions: Actions) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._actions = actions

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            runs = await _sql.canceling_runs(connection, most=_RUNS)
        done = 0
        for row in runs:
            await self._actions.cancel_some_of_run(row)
            done += 1
        return done
