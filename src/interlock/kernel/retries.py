"""Queues failed tasks again when their backoff is over."""

from __future__ import annotations

from datetime import datetime

from interlock.adapters.lowwater import LowWater, low_water
from interlock.adapters.postgres import Connection, Database, queries
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.kernel.shards import Shards
from interlock.kernel.tasks import enqueue
from interlock.settings import Settings
from interlock.telemetry import TASKS_REQUEUED

_sql = queries("tasks")
_BATCH = 1000


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
            rows = await _sql.requeue_due(connection, shard=shard, most=_BATCH, since=look.since)
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
