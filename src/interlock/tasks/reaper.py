"""Ends attempts whose lease has expired or whose hard timeout is reached; requeues failed tasks after their backoff.

A heartbeat never extends a lease past the timeout, so one statement handles both. Claims write lease alarms, which
determine the leases to check.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime

from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.low_water import LowWater, low_water
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.limits import RunSlots
from interlock.tasks.queue import enqueue, wake_parked
from interlock.tasks.shards import Shards
from interlock.telemetry import TASKS_REAPED, TASKS_REQUEUED

_sql = queries(__name__, "tasks")
_BATCH = 500
_CLEARING = 60
"""Interval, in passes, at which alarms of ended runs are processed too. Nothing runs there, but they would pile up."""


class Reaper(Periodic):
    name = "reaper"

    def __init__(self, database: Database, settings: Settings, shards: Shards, turns: RunSlots) -> None:
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
            rows: list[Row] = await _sql.reap(connection, shard=shard, limit=_BATCH, since=look.since)
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
        # Most alarms find their tasks ended. If more alarms are due there is more work, even when nothing was reaped.
        return len(reaped) or int(rows[0]["more"])

    async def _wake_parked(self, rows: list[Row]) -> None:
        """Wakes parked tasks after the commit: locking them while holding ended ones could deadlock with a cancel."""
        freed = sorted(rows[0]["freed_jobs"] or [])
        if freed:
            keys = rows[0]["freed_keys"]
            await self._database.run(lambda c: wake_parked(c, freed, keys, direct=self._direct))


_RETRY_BATCH = 1000


class Retries(Periodic):
    name = "retries"

    def __init__(self, database: Database, settings: Settings, shards: Shards) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._direct = settings.queue_direct
        self._shards = shards
        self._waters: dict[int, LowWater[datetime]] = {}

    async def run_once(self) -> int:
        live = await self._shards.live()
        known = self._waters
        self._waters = {shard: known.get(shard) or low_water() for shard in live}
        return sum([await self._of_shard(shard, water) for shard, water in self._waters.items()])

    async def _of_shard(self, shard: int, water: LowWater[datetime]) -> int:
        async def work(connection: Connection) -> int:
            rows = await _sql.requeue_due(connection, shard=shard, limit=_RETRY_BATCH, since=look.since)
            look.reached = rows[0]["reached"]
            ids = [row["task_id"] for row in rows if row["task_id"] is not None]
            if ids:
                await enqueue(connection, ids, shard=shard, direct=self._direct)
            await failpoint("retry.before_commit")
            return len(ids)

        with water.look(await self._database.oldest_begin()) as look:
            done = await self._database.run(work)
        TASKS_REQUEUED.inc(done)
        return done
