"""Ends attempts whose lease ran out or whose hard timeout has come.

A heartbeat never extends a lease past the timeout, so both are one statement. Which leases to look at, the alarms that
claims have set say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime

from interlock.adapters.lowwater import LowWater, low_water
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.kernel.shards import Shards
from interlock.kernel.tasks import wake_parked
from interlock.kernel.turns import Turns
from interlock.settings import Settings
from interlock.telemetry import TASKS_REAPED

_sql = queries("tasks")
_BATCH = 500
_CLEARING = 60
"""Every so many passes alarms of runs that have ended are heard, too: nothing runs there, and they would pile up."""


class Reaper(Periodic):
    name = "reaper"

    def __init__(self, database: Database, settings: Settings, shards: Shards, turns: Turns) -> None:
        self.seconds = settings.reap_seconds
        self._database = database
        self._direct = settings.queue_direct
        self._shards = shards
        self._turns = turns
        self._waters: defaultdict[int, LowWater[datetime]] = defaultdict(low_water)
        self._passes = 0

    async def run_once(self) -> int:
        shards = set(await self._shards.live())
        if self._passes % _CLEARING == 0:
            shards |= set(await self._shards.alarmed())
            self._waters = defaultdict(low_water, {s: w for s, w in self._waters.items() if s in shards})
        self._passes += 1
        return sum([await self._of_shard(shard) for shard in sorted(shards)])

    async def _of_shard(self, shard: int) -> int:
        async def work(connection: Connection) -> list[Row]:
            rows: list[Row] = await _sql.reap(connection, shard=shard, most=_BATCH, since=look.since)
            await failpoint("reap.before_commit")
            return rows

        with self._waters[shard].look(await self._database.oldest_begin()) as look:
            rows = await self._database.run(work)
            look.reached = rows[0]["reached"]
        await self._wake_parked(rows)
        reaped = [row for row in rows if row["task_id"] is not None]
        await self._turns.ended(Counter([row["run_id"] for row in reaped if row["run_id"]]))
        for row in reaped:
            TASKS_REAPED.labels(cause="timeout" if row["timed_out"] else "lease").inc()
        # Most alarms find their tasks ended. While more are due there is work, whatever these came to.
        return len(reaped) or int(rows[0]["more"])

    async def _wake_parked(self, rows: list[Row]) -> None:
        """After the commit: whoever held ended tasks while it waits for parked ones could meet a cancel of both."""
        freed = sorted(rows[0]["freed_jobs"] or [])
        if freed:
            keys = rows[0]["freed_keys"]
            await self._database.run(lambda c: wake_parked(c, freed, keys, direct=self._direct))
