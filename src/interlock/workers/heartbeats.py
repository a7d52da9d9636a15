"""Renews the leases of all held tasks by heartbeats, and acts on the replies."""

from __future__ import annotations

import asyncio
import time

import structlog

from interlock.client import WorkerClient
from interlock.errors import Forbidden, InterlockError, Unauthenticated
from interlock.wire.attempts import HeartbeatBatch, HeartbeatBatchReply
from interlock.workers.claimed_tasks import Held
from interlock.workers.work_pool import WorkPool

log = structlog.get_logger()

LOOK_SECONDS = 0.1
MAX_PER_CALL = 2_000


class Leases:
    def __init__(self, client: WorkerClient, pool: WorkPool, usual_lease: float) -> None:
        self._client, self._pool, self._usual_lease = client, pool, usual_lease

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.run_once()

    async def run_once(self) -> int:
        """Sends the heartbeats that are due. Most tasks end before their first one is."""
        now = time.monotonic()
        due = [held for held in self._pool.held.values() if held.beat_at <= now]
        for at in range(0, len(due), MAX_PER_CALL):
            await self._beat(due[at : at + MAX_PER_CALL])
        return len(due)

    async def _beat(self, due: list[Held]) -> None:
        try:
            reply = await self._client.heartbeat(HeartbeatBatch(items=[held.heartbeat() for held in due]))
        except (Unauthenticated, Forbidden):
            raise
        except InterlockError as error:
            log.warning("worker.heartbeat_failed", tasks=len(due), code=error.code, reason=error.detail)
        else:
            self._act_on(reply, due)

    def _act_on(self, reply: HeartbeatBatchReply, due: list[Held]) -> None:
        by_id = {held.task_id: held for held in due}
        for item in reply.items:
            held = by_id[item.task_id]
            held.leased_until(item.lease_expires_at, self._usual_lease)
            if item.cancel_requested:
                self._pool.cancel(held)
            elif item.paused != held.paused:
                self._pool.pause(held, item.paused)
        for refusal in reply.refused:
            self._pool.lose(by_id[refusal.task_id])
