"""Watches for children that take too long: past the hard timeout, ignoring a cancel, or blocking other tasks.

At the hard timeout the worker kills the child and reports nothing about the task. The dispatcher's clock decides that
an attempt has timed out, and its reaper records that.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from interlock.workers.claimed_tasks import Held
from interlock.workers.pool import Pool
from interlock.workers.process import ChildProcess
from interlock.workers.task_durations import Pace

log = structlog.get_logger()

LOOK_SECONDS = 0.2
CANCEL_GRACE_SECONDS = 5.0
HOARD_SECONDS = 2.0
"""If every child has run one task for this long, the queue is released to other workers."""


class Watch:
    def __init__(self, pool: Pool, pace: Pace, cancel_grace: float = CANCEL_GRACE_SECONDS) -> None:
        self._pool, self._pace, self._grace = pool, pace, cancel_grace

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
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
