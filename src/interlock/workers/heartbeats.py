"""Loops over the held tasks: heartbeats renew their leases, and a watch ends children that take too long.

Taking too long means: past the hard timeout, ignoring a cancel, or blocking other tasks.

At the hard timeout the worker kills the child and reports nothing about the task. The dispatcher's clock decides that
an attempt has timed out, and its reaper records that.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from interlock.client import WorkerClient
from interlock.errors import Forbidden, InterlockError, Unauthenticated
from interlock.wire.attempts import HeartbeatBatch, HeartbeatBatchReply
from interlock.workers.claimed_tasks import Held, Pace
from interlock.workers.pool import Pool
from interlock.workers.process import ChildProcess
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


WATCH_SECONDS = 0.2
CANCEL_GRACE_SECONDS = 5.0
HOARD_SECONDS = 2.0
"""If every child has run one task for this long, the queue is released to other workers."""


class Watch:
    def __init__(self, pool: Pool, pace: Pace, cancel_grace: float = CANCEL_GRACE_SECONDS) -> None:
        self._pool, self._pace, self._grace = pool, pace, cancel_grace

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self.run_once()

    def run_once(self) -> None:
        children = [child for child in self._pool.children if child.head is not None]
        for child in children:
            self._look_at(child)
        everyone_is_stuck = len(children) == len(self._pool.children) and all(
            child.head_seconds > HOARD_SECONDS for child in children
        )
        if self._pool.queue and everyone_is_stuck:
            self._pool.release_queue()
        self._pool.make_way()

    def _look_at(self, child: ChildProcess) -> None:
        head = child.head
        if head is None or child.stopping is not None:
            return
        if head.seconds_to_timeout() <= 0:
            log.warning("worker.task_timed_out", task_id=str(head.task_id), attempt=head.attempt)
            child.kill("timeout", head.slot)
        elif self._ignores_the_stop(child, head):
            log.warning("worker.cancel_ignored", task_id=str(head.task_id), grace_seconds=self._grace)
            child.kill("lost" if head.lost else "cancel", head.slot)
        elif len(child.assigned) > 1 and child.stuck and not child.recalled:
            self._pace.learn(head.kind, child.head_seconds)
            child.recall()

    def _ignores_the_stop(self, child: ChildProcess, head: Held) -> bool:
        if not (head.cancel or head.lost):
            return False
        return time.monotonic() - max(head.stop_asked_at, child.head_since) > self._grace
