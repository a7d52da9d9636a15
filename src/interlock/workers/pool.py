"""The pool of child processes of a worker, and the claimed tasks that they run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import structlog

from interlock.wire.attempts import ClaimBatchReply, Completion
from interlock.wire.tasks import Crash
from interlock.workers import process, protocol
from interlock.workers.claimed_tasks import Held, Kind, Pace
from interlock.workers.process import ChildProcess, Launch
from interlock.workers.work_pool import ReportSink, WorkPool

log = structlog.get_logger()

PREFETCH_SECONDS = 0.2
"""Seconds of work that a worker claims ahead, per child."""
CHUNK_SECONDS = 0.05
"""Seconds of work in one chunk for a child."""
FEED_BELOW_SECONDS = 0.01
"""A child with less work than this gets the next chunk. It covers the time until the chunk arrives."""
MAX_PER_CHUNK = 500
MAX_ALWAYS_ON = 16
"""Default number of always-on sources that have a child of their own. More of them occupy children of tasks."""
MAX_SKIPPED = 500
"""Most queued tasks of other children that are skipped to find work for a child."""
TURN_SECONDS = 1.0
"""A child works, or is idle, for this long before it is replaced for tasks that it may not run. A start takes about
0.3 s, so shorter turns would waste most of the time."""
RESTART_FIRST_SECONDS = 0.05
RESTART_CAP_SECONDS = 5.0


class Pool(WorkPool):
    """Children for tasks, and one more for each always-on source, which would otherwise occupy a child forever."""

    def __init__(
        self, launch: Launch, pace: Pace, sink: ReportSink, usual_lease: float, *, always_on: int = MAX_ALWAYS_ON
    ) -> None:
        super().__init__(pace, sink, usual_lease, launch.data_url, launch.outbound, launch.variables)
        self._launch = launch
        self._concurrency = 0
        self._max_always_on = always_on
        self._always_on = 0
        """Number of held tasks of always-on sources."""
        self._supervisors: set[asyncio.Task[None]] = set()
        self.children: list[ChildProcess] = []
        self._queued_seconds = 0.0

    # How much to claim

    def room(self, kind: Kind | None) -> int:
        if self._draining.is_set():
            return 0
        free = sum(1 for child in self.children if child.ready and not child.stale and not child.assigned)
        spare = free - len(self.queue) - self._reserved_tasks(kind)
        seconds = self._pace.seconds(kind)
        ahead = 0 if seconds is None else int(self._budget() / seconds)
        return max(spare, ahead, 0)

    def _budget(self) -> float:
        working = [child for child in self.children if child.ready and not child.stale and not child.stuck]
        backlog = sum(self._reserved) + self._queued_seconds + sum(child.load for child in working)
        return PREFETCH_SECONDS * len(working) - backlog

    def claim_seconds(self, kind: Kind | None) -> float:
        """Returns the seconds of room that a claimed task takes. One of an unknown kind takes a child's whole share."""
        return self._pace.seconds(kind) or PREFETCH_SECONDS

    def estimate(self, kind: Kind) -> float:
        """Returns the expected duration. A task of an unknown kind counts as a whole chunk, so each child gets one."""
        return self._pace.seconds(kind) or CHUNK_SECONDS

    # Accepting claimed tasks

    def take(self, reply: ClaimBatchReply) -> int:
        taken = self._claimed(reply)
        if self._draining.is_set():
            self._release(taken)
            return len(taken)
        for held in taken:
            self.held[held.slot] = held
            self._queued_seconds += held.estimate
            self._always_on += held.lease.always_on
        self._start_children()
        self.queue.extend(taken)
        self.feed()
        return len(taken)

    def feed(self) -> None:
        underfed = [
            child
            for child in self.children
            if child.ready and not child.stale and child.load < FEED_BELOW_SECONDS and not child.stuck
        ]
        for waiting, child in zip(range(len(underfed), 0, -1), underfed, strict=True):
            if not self.queue:
                return
            self._fill(child, math.ceil(len(self.queue) / waiting))
        self.make_way()

    def _fill(self, child: ChildProcess, share: int) -> None:
        chunk: list[Held] = []
        skipped: list[Held] = []
        load = child.load
        lease, admitted = None, False
        most = min(share, MAX_PER_CHUNK)
        while self.queue and len(chunk) < most and load < CHUNK_SECONDS and not self._apart(child, chunk):
            held = self.queue.popleft()
            if held.lease is not lease and not held.ended:
                lease, admitted = held.lease, child.tenancy.admits(held.lease)
                if admitted:
                    child.tenancy.add(lease)
            if not held.ended and not admitted:
                skipped.append(held)
                if len(skipped) == MAX_SKIPPED:
                    break
                continue
            self._queued_seconds -= held.estimate
            if not held.ended:
                chunk.append(held)
                load += held.estimate
        self.queue.extendleft(reversed(skipped))
        if not self.queue:
            self._queued_seconds = 0.0
        if chunk:
            child.assign(chunk)

    def _apart(self, child: ChildProcess, chunk: list[Held]) -> bool:
        """Returns True if the next queued task must not follow the chunk, because one of them never ends."""
        if chunk and chunk[-1].lease.always_on:
            return True
        return self.queue[0].lease.always_on and bool(chunk or child.assigned)

    def make_way(self) -> None:
        """Replaces children that may not run the queued tasks, so that these do not wait without end.

        A child that is idle although tasks are queued is replaced after TURN_SECONDS. A busy one is replaced if the
        first queued task may run in no child, or only in children that are stuck.
        """
        first = next((held for held in self.queue if not held.ended), None)
        if first is None:
            return
        for child in self.children:
            child.stale |= child.idle_seconds > TURN_SECONDS
        if self._waits_in_vain(first) and (others := self._after_their_turn()):
            min(others, key=lambda child: child.load).stale = True
        self._retire_idle()

    def _waits_in_vain(self, first: Held) -> bool:
        if len(self.children) < self._wanted_children():
            return False  # a new child is being started, which may run any task
        return all(child.stuck or not (child.stale or child.tenancy.admits(first.lease)) for child in self.children)

    def _after_their_turn(self) -> list[ChildProcess]:
        now = time.monotonic()
        return [
            child
            for child in self.children
            if not child.stale
            and not child.stuck
            and (not child.assigned or now - child.first_assigned_at > TURN_SECONDS)
        ]

    # Handling reports

    def heard(self, child: ChildProcess, messages: list[protocol.ToWrapper]) -> None:
        for message in messages:
            if type(message) is protocol.Finished:
                held = self._answered(child, message.slot)
                self._pace.learn(held.kind, message.seconds)
                self._finished(held, message)
            else:
                self._heard_other(child, message)
        if child.stale or self._draining.is_set():
            self._retire_idle()
        self.feed()
        self.room_made.set()

    def _answered(self, child: ChildProcess, slot: int) -> Held:
        held = child.answered(slot)
        self._drop(held)
        # A source has ended: so does its child, and with it its supervisor if the pool has one too many.
        child.stale |= held.lease.always_on
        return held

    def _drop(self, held: Held) -> None:
        if held.lease.always_on and held.slot in self.held:
            self._always_on -= 1
        super()._drop(held)

    def _heard_other(self, child: ChildProcess, message: protocol.ToWrapper) -> None:
        match message:
            case protocol.Raised():
                held = self._answered(child, message.slot)
                self._pace.learn(held.kind, message.seconds)
                self._end(held, held.failed(message.error_class, message.message))
            case protocol.Stopped():
                held = self._answered(child, message.slot)
                self._end(held, held.canceled())
            case protocol.GivenBack():
                self._take_back(child.given_back(message.slots))
            case protocol.Outdated():
                log.info("worker.code_edited", pid=child.pid)
                child.stale = True
                self._take_back(child.given_back(message.slots))
            case protocol.Progressed():
                self._progressed(message)
            case protocol.Emit():
                self._emit(child, message)
            case protocol.Printed():
                self._show(child, message.slot, message.stream, message.line)
            case protocol.Traced():
                self._traced(child, message)
            case protocol.Ready():
                child.ready, self._failed_starts = True, 0

    def _take_back(self, returned: list[Held]) -> None:
        for held in returned:
            if held.cancel or held.lost:
                self._drop(held)
                self._end(held, held.canceled())
        live = [held for held in returned if not held.ended]
        for held in live:
            held.paused = False  # the next child does not know of the pause yet
        if self._draining.is_set():
            self._release(live)
            return
        self.queue.extendleft(reversed(live))
        self._queued_seconds += sum(held.estimate for held in live)

    def printed(self, child: ChildProcess, line: str) -> None:
        """Logs a line that was not written through Python's streams. It most likely belongs to the running task."""
        self._show(child, child.head.slot if child.head else 0, "raw", line)

    # Stopping and pausing tasks

    def pause(self, held: Held, paused: bool) -> None:
        child = self._child_of(held)
        if held.paused != paused and child is not None:
            held.paused = paused
            child.pause(held)

    def _stop(self, held: Held) -> bool:
        child = self._child_of(held)
        if child is not None:
            child.cancel(held)
        return child is not None

    def _child_of(self, held: Held) -> ChildProcess | None:
        return next((child for child in self.children if held in child.assigned), None)

    def release_queue(self) -> None:
        self._queued_seconds = 0.0
        super().release_queue()

    # Starting and replacing children

    def start(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._start_children()

    def _wanted_children(self) -> int:
        return self._concurrency + min(self._always_on, self._max_always_on)

    def _start_children(self) -> None:
        for _ in range(self._wanted_children() - len(self._supervisors)):
            task = asyncio.create_task(self._supervise())
            self._supervisors.add(task)
            task.add_done_callback(self._supervisor_ended)

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        self._supervisors.discard(task)
        if task.cancelled():
            return
        if error := task.exception():
            self._sink.fail(error)
        elif not self._draining.is_set():
            self._start_children()  # several may have ended at the same time, each as the one too many

    async def _supervise(self) -> None:
        """Runs one child after the other until the pool drains, or has more children than it needs."""
        pause = RESTART_FIRST_SECONDS
        while not self._draining.is_set() and len(self._supervisors) <= self._wanted_children():
            began = time.monotonic()
            child = await self._run_one_child()
            if child.stale and child.stopping is None:
                continue
            pause = RESTART_FIRST_SECONDS if time.monotonic() - began > 10 else pause
            await self._drained_within(pause)
            pause = min(pause * 2, RESTART_CAP_SECONDS)

    async def _drained_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()

    async def _run_one_child(self) -> ChildProcess:
        child = await process.start(self._launch, self.heard, self.printed)
        self.children.append(child)
        if self._draining.is_set():
            child.retire()
        # The child may have reported that it is ready before it was in the list.
        self.feed()
        self.room_made.set()
        try:
            cause = await child.ended()
        finally:
            self.children.remove(child)
        self._clean_up(child, cause)
        return child

    def _clean_up(self, child: ChildProcess, cause: Crash) -> None:
        if child.head is not None:
            self._end_head(child, cause)
        elif not child.ready and not self._draining.is_set():
            self._start_failed("child", cause)
        self._take_back(list(child.assigned))
        child.assigned.clear()
        self.feed()
        self.room_made.set()

    def _end_head(self, child: ChildProcess, cause: Crash) -> None:
        """Ends or releases the task that was running when its child died."""
        held = child.assigned.popleft()
        why, slot = child.stopping or (None, 0)
        if why is None:
            log.warning("worker.child_crashed", task_id=str(held.task_id), pid=child.pid, **_crash_fields(cause))
            self._drop(held)
            self._end(held, held.canceled() if held.cancel else _crashed(held, cause))
        elif why == "drain" or slot != held.slot:
            # The child was killed because of another task. This one may have started, so its attempt must not be run
            # by another child.
            self._release([held])
        else:
            self._drop(held)
            if why == "cancel":
                self._end(held, held.canceled())

    # Draining

    def drain(self) -> None:
        self._draining.set()
        self.release_queue()
        for child in self.children:
            if len(child.assigned) > 1:
                child.recall()
        self._retire_idle()
        self.room_made.set()

    def _retire_idle(self) -> None:
        for child in self.children:
            if not child.assigned and (child.stale or self._draining.is_set()):
                child.retire()

    def renew(self) -> None:
        """Replaces each child as soon as it has finished its tasks. New children can open files that are new."""
        for child in self.children:
            child.stale = True
            if len(child.assigned) > 1:
                child.recall()
        self._retire_idle()

    def kill_all(self) -> None:
        for child in self.children:
            child.kill("drain")

    async def ended(self) -> None:
        while self._supervisors:
            await asyncio.wait(self._supervisors)


def _crash_fields(cause: Crash) -> dict[str, object]:
    return {"exit_code": cause.exit_code, "signal": cause.signal, "oom": cause.oom}


def _crashed(held: Held, cause: Crash) -> Completion:
    return held.failed("WorkerCrashed", process.sentence(cause), cause)
