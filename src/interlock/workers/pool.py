"""The children of a worker and the claimed tasks they share."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import structlog

from interlock.errors import ConfigurationError
from interlock.wire import ClaimBatchReply, Completion, Crash, Event, GroupedTask
from interlock.workers import crash, process, protocol
from interlock.workers.held import Held, Lease, beat_interval, lease_alone, lease_of
from interlock.workers.pace import Kind, Pace
from interlock.workers.process import ChildProcess, Launch

log = structlog.get_logger()

PREFETCH_SECONDS = 0.2
"""Work that a worker claims ahead, per child."""
CHUNK_SECONDS = 0.05
"""Work handed to a child at once."""
FEED_BELOW_SECONDS = 0.01
"""A child with less than this ahead of it gets the next chunk: enough to bridge the way there."""
MOST_PER_CHUNK = 500
PROGRESS_SECONDS = 1.0
RESTART_FIRST_SECONDS = 0.05
RESTART_CAP_SECONDS = 5.0
MOST_FAILED_STARTS = 5


class Desk(Protocol):
    """Where the pool hands in what is to be told to the dispatcher."""

    def complete(self, completion: Completion) -> None: ...

    def completed(self, held: Held, result: bytes) -> None:
        """A task ended well, with its result and nothing else."""

    def release(self, held: Iterable[Held]) -> None: ...

    def emit(self, held: Held, events: list[Event], answer: Callable[[int, str | None], None]) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Going on is pointless."""


class Pool:
    def __init__(self, launch: Launch, pace: Pace, desk: Desk, usual_lease: float) -> None:
        self._launch, self._pace, self._desk, self._usual_lease = launch, pace, desk, usual_lease
        self._slots = itertools.count(1)
        self._supervisors: set[asyncio.Task[None]] = set()
        self._failed_starts = 0
        self._draining = asyncio.Event()
        self.children: list[ChildProcess] = []
        self.queue: deque[Held] = deque()
        """Claimed, and in no child's hands yet."""
        self.held: dict[int, Held] = {}
        """All that is claimed and unanswered, by slot: what heartbeats keep alive."""
        self.reserved_seconds = 0.0
        """Work that claims in flight will bring."""
        self._queued_seconds = 0.0
        self.room_made = asyncio.Event()

    # How much to claim

    def room(self, kind: Kind | None) -> int:
        """How many tasks of a kind this worker should claim now; 0 for none."""
        if self._draining.is_set():
            return 0
        free = sum(1 for child in self.children if child.ready and not child.assigned)
        spare = free - len(self.queue) - math.ceil(self.reserved_seconds / self.claim_seconds(kind))
        seconds = self._pace.seconds(kind)
        ahead = 0 if seconds is None else int(self._budget() / seconds)
        return max(spare, ahead, 0)

    def _budget(self) -> float:
        working = [child for child in self.children if child.ready and not child.stuck]
        backlog = self.reserved_seconds + self._queued_seconds + sum(child.load for child in working)
        return PREFETCH_SECONDS * len(working) - backlog

    def claim_seconds(self, kind: Kind | None) -> float:
        """What a claimed task of a kind takes of the room; an unknown one takes a child's whole share."""
        return self._pace.seconds(kind) or PREFETCH_SECONDS

    def estimate(self, kind: Kind) -> float:
        """Until the first of a kind has finished, it counts as a whole chunk: one per child."""
        return self._pace.seconds(kind) or CHUNK_SECONDS

    # Claimed tasks come in

    def take(self, reply: ClaimBatchReply) -> int:
        """Take over what was claimed and feed it to the children. Returns how many tasks that were."""
        taken: list[Held] = []
        for group in reply.groups:
            taken += self._hold(lease_of(group), group.tasks)
        for claim in reply.claims:
            task, token, expires_at = claim.task, claim.lease_token, claim.lease_expires_at
            if task is not None and token is not None and expires_at is not None:
                alone = GroupedTask(task.task_id, task.index, task.payload)
                taken += self._hold(lease_alone(task, token, expires_at, self._launch.data_url), [alone])
        if self._draining.is_set():
            self._release(taken)
            return len(taken)
        for held in taken:
            self.held[held.slot] = held
            self._queued_seconds += held.estimate
        self.queue.extend(taken)
        self.feed()
        return len(taken)

    def _hold(self, lease: Lease, tasks: list[GroupedTask]) -> list[Held]:
        kind = lease.kind
        self._pace.claimed(lease.job_id, kind)
        self._pace.weigh(kind, sum(len(task.payload) for task in tasks) / max(len(tasks), 1))
        estimate, every = self.estimate(kind), beat_interval(lease.expires_at, self._usual_lease)
        beat_at, slots = time.monotonic() + every, self._slots
        return [
            Held(next(slots), task.task_id, task.index, task.payload, lease, kind, estimate, every, beat_at)
            for task in tasks
        ]

    def feed(self) -> None:
        hungry = [
            child for child in self.children if child.ready and child.load < FEED_BELOW_SECONDS and not child.stuck
        ]
        for waiting, child in zip(range(len(hungry), 0, -1), hungry, strict=True):
            if not self.queue:
                return
            self._fill(child, math.ceil(len(self.queue) / waiting))

    def _fill(self, child: ChildProcess, share: int) -> None:
        chunk: list[Held] = []
        load = child.load
        while self.queue and len(chunk) < min(share, MOST_PER_CHUNK) and load < CHUNK_SECONDS:
            held = self.queue.popleft()
            self._queued_seconds -= held.estimate
            if not held.ended:
                chunk.append(held)
                load += held.estimate
        if not self.queue:
            self._queued_seconds = 0.0
        if chunk:
            child.assign(chunk)

    # Reports come in

    def heard(self, child: ChildProcess, messages: list[protocol.ToWrapper]) -> None:
        for message in messages:
            if type(message) is protocol.Finished:
                held = self._answered(child, message.slot)
                self._pace.learn(held.kind, message.seconds)
                if held.lost:
                    continue
                if message.events or message.outputs:
                    self._desk.complete(held.completed(message.result, message.events, message.outputs))
                else:
                    self._desk.completed(held, message.result)
            else:
                self._heard_other(child, message)
        if self._draining.is_set():
            self._retire_idle()
        self.feed()
        self.room_made.set()

    def _answered(self, child: ChildProcess, slot: int) -> Held:
        held = child.answered(slot)
        self._drop(held)
        return held

    def _drop(self, held: Held) -> None:
        held.ended = True
        self.held.pop(held.slot, None)
        if held.client is not None:
            held.client.close()

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
            case protocol.Progressed():
                self._progressed(message)
            case protocol.Emit():
                self._emit(child, message)
            case protocol.Printed():
                self._show(child, message.slot, message.stream, message.line)
            case protocol.Ready():
                child.ready, self._failed_starts = True, 0

    def _end(self, held: Held, completion: Completion) -> None:
        if not held.lost:
            self._desk.complete(completion)

    def _take_back(self, returned: list[Held]) -> None:
        for held in returned:
            if held.cancel or held.lost:
                self._drop(held)
                self._end(held, held.canceled())
        live = [held for held in returned if not held.ended]
        for held in live:
            held.paused = False  # the next child has not been told
        if self._draining.is_set():
            self._release(live)
            return
        self.queue.extendleft(reversed(live))
        self._queued_seconds += sum(held.estimate for held in live)

    def _progressed(self, message: protocol.Progressed) -> None:
        held = self.held.get(message.slot)
        if held is not None:
            held.progress, held.progress_text = message.fraction, message.text
            last_beat = held.beat_at - held.beat_every
            held.beat_at = min(held.beat_at, last_beat + PROGRESS_SECONDS)

    def _emit(self, child: ChildProcess, message: protocol.Emit) -> None:
        def answer(accepted: int, problem: str | None) -> None:
            child.answer_emit(protocol.EmitAnswered(message.slot, accepted, problem))

        held = self.held.get(message.slot)
        if held is None or held.lost:
            answer(0, "The attempt was fenced off: another one has the task.")
        else:
            self._desk.emit(held, message.events, answer)

    def _show(self, child: ChildProcess, slot: int, stream: str, line: str) -> None:
        held = self.held.get(slot)
        task_id = str(held.task_id) if held else None
        log.info("operator.output", task_id=task_id, pid=child.pid, stream=stream, line=line)

    def printed(self, child: ChildProcess, line: str) -> None:
        """A line that came past Python: it belongs, as far as can be told, to the running task."""
        self._show(child, child.head.slot if child.head else 0, "raw", line)

    # Tasks end otherwise

    def cancel(self, held: Held) -> None:
        """The dispatcher wants it stopped: at once where it waits, by TaskCanceled where it runs."""
        if held.cancel or held.ended:
            return
        held.cancel, held.stop_asked_at = True, time.monotonic()
        if not self._stop_in_child(held):
            self._drop(held)
            self._end(held, held.canceled())

    def pause(self, held: Held, paused: bool) -> None:
        """A source is to hold still, or may go on. One that is in no child yet hears of it with a later heartbeat."""
        child = self._child_of(held)
        if held.paused != paused and child is not None:
            held.paused = paused
            child.pause(held)

    def lose(self, held: Held) -> None:
        """It was fenced off: stop it and say no more about it."""
        if held.lost or held.ended:
            return
        held.lost, held.stop_asked_at = True, time.monotonic()
        log.info("worker.task_lost", task_id=str(held.task_id), attempt=held.attempt)
        if not self._stop_in_child(held):
            self._drop(held)

    def _stop_in_child(self, held: Held) -> bool:
        child = self._child_of(held)
        if child is not None:
            child.cancel(held)
        return child is not None

    def _child_of(self, held: Held) -> ChildProcess | None:
        return next((child for child in self.children if held in child.assigned), None)

    def release_queue(self) -> None:
        """Give back what waits here, so that another worker may have it."""
        waiting = [held for held in self.queue if not held.ended]
        self.queue.clear()
        self._queued_seconds = 0.0
        self._release(waiting)

    def _release(self, tasks: list[Held]) -> None:
        for held in tasks:
            self._drop(held)
        self._desk.release([held for held in tasks if not held.lost])

    # Children come and go

    def start(self, concurrency: int) -> None:
        for _ in range(concurrency):
            task = asyncio.create_task(self._keep_one())
            self._supervisors.add(task)
            task.add_done_callback(self._supervisor_ended)

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        self._supervisors.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._desk.fail(error)

    async def _keep_one(self) -> None:
        """One child after the other, until the pool drains."""
        pause = RESTART_FIRST_SECONDS
        while not self._draining.is_set():
            began = time.monotonic()
            await self._live_through_one()
            pause = RESTART_FIRST_SECONDS if time.monotonic() - began > 10 else pause
            await self._drained_within(pause)
            pause = min(pause * 2, RESTART_CAP_SECONDS)

    async def _drained_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()

    async def _live_through_one(self) -> None:
        child = await process.start(self._launch, self.heard, self.printed)
        self.children.append(child)
        if self._draining.is_set():
            child.retire()
        # It may have reported that it is ready before it was in the list.
        self.feed()
        self.room_made.set()
        try:
            cause = await child.ended()
        finally:
            self.children.remove(child)
        self._bury(child, cause)

    def _bury(self, child: ChildProcess, cause: Crash) -> None:
        if child.head is not None:
            self._end_head(child, cause)
        elif not child.ready and not self._draining.is_set():
            self._start_failed(cause)
        self._take_back(list(child.assigned))
        child.assigned.clear()
        self.feed()
        self.room_made.set()

    def _start_failed(self, cause: Crash) -> None:
        self._failed_starts += 1
        log.error("worker.child_not_started", exit_code=cause.exit_code, signal=cause.signal)
        if self._failed_starts >= MOST_FAILED_STARTS:
            raise ConfigurationError(
                "The worker's child processes end before they are ready: see operator.output in its log for why."
            )

    def _end_head(self, child: ChildProcess, cause: Crash) -> None:
        """What becomes of the task that was running when its child died."""
        held = child.assigned.popleft()
        why, slot = child.stopping or (None, 0)
        if why is None:
            log.warning("worker.child_crashed", task_id=str(held.task_id), pid=child.pid, **_told(cause))
            self._drop(held)
            self._end(held, held.canceled() if held.cancel else _crashed(held, cause))
        elif why == "drain" or slot != held.slot:
            # Killed for the sake of another: it may have begun, so this attempt does not go on elsewhere.
            self._release([held])
        else:
            self._drop(held)
            if why == "cancel":
                self._end(held, held.canceled())

    # The end

    def drain(self) -> None:
        """Start nothing new: give back what waits, and let what runs finish."""
        self._draining.set()
        self.release_queue()
        for child in self.children:
            if len(child.assigned) > 1:
                child.recall()
        self._retire_idle()
        self.room_made.set()

    def _retire_idle(self) -> None:
        for child in self.children:
            if not child.assigned:
                child.retire()

    def kill_all(self) -> None:
        for child in self.children:
            child.kill("drain")

    async def ended(self) -> None:
        """When every child of a drained pool is gone."""
        while self._supervisors:
            await asyncio.wait(self._supervisors)

    async def abandon(self) -> None:
        """End everything at once."""
        self._draining.set()
        self.kill_all()
        await self.ended()


def _told(cause: Crash) -> dict[str, object]:
    return {"exit_code": cause.exit_code, "signal": cause.signal, "oom": cause.oom}


def _crashed(held: Held, cause: Crash) -> Completion:
    return held.failed("WorkerCrashed", crash.sentence(cause), cause)
