"""The tasks that a worker has claimed, and what every kind of pool that runs them can be asked to do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import structlog

from interlock.errors import ConfigurationError
from interlock.wire import ClaimBatchReply, Completion, Crash, Event, GroupedTask
from interlock.workers import protocol
from interlock.workers.held import NONE, Held, Lease, Variables, beat_interval, lease_alone, lease_of
from interlock.workers.pace import Kind, Pace
from interlock.workers.process import OperatorProcess

log = structlog.get_logger()

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


class WorkPool(ABC):
    def __init__(
        self,
        pace: Pace,
        desk: Desk,
        usual_lease: float,
        data_url: str | None = None,
        outbound: protocol.Outbound | None = None,
        variables: Variables = NONE,
    ) -> None:
        self._pace, self._desk, self._usual_lease, self._data_url = pace, desk, usual_lease, data_url
        self._outbound = outbound
        self._variables = variables
        self._slots = itertools.count(1)
        self._draining = asyncio.Event()
        self._failed_starts = 0
        self.queue: deque[Held] = deque()
        """Claimed, and in no process's hands yet."""
        self.held: dict[int, Held] = {}
        """All that is claimed and unanswered, by slot: what heartbeats keep alive."""
        self._reserved: list[float] = []
        """Seconds of work that calls in flight will bring."""
        self.room_made = asyncio.Event()

    # How much to claim

    @abstractmethod
    def room(self, kind: Kind | None) -> int:
        """How many tasks of a kind this worker should claim now; 0 for none."""

    @abstractmethod
    def claim_seconds(self, kind: Kind | None) -> float:
        """What a claimed task of a kind takes of the room."""

    @contextlib.contextmanager
    def reserved(self, tasks: int, kind: Kind | None) -> Iterator[None]:
        """Keep room for what a call may bring while it is in flight."""
        seconds = tasks * self.claim_seconds(kind)
        self._reserved.append(seconds)
        try:
            yield
        finally:
            self._reserved.remove(seconds)
            self.room_made.set()

    def _reserved_tasks(self, kind: Kind | None) -> int:
        """Rounded before it is rounded up: what floats leave over would take a whole place, and the only free one
        would stay empty."""
        return math.ceil(round(math.fsum(self._reserved) / self.claim_seconds(kind), 6))

    def _start_failed(self, what: str, cause: Crash) -> None:
        """A process that was to run tasks has ended before it could. That often in a row, no other will do better."""
        self._failed_starts += 1
        event = f"worker.{what}_not_started"
        log.error(event, exit_code=cause.exit_code, signal=cause.signal)
        if self._failed_starts >= MOST_FAILED_STARTS:
            raise ConfigurationError(
                f"The worker's {what} processes end before they are ready: see operator.output in its log for why."
            )

    # Claimed tasks come in

    @abstractmethod
    def take(self, reply: ClaimBatchReply) -> int:
        """Take over what was claimed and have it run. Returns how many tasks that were."""

    def estimate(self, kind: Kind) -> float:
        """Seconds that a task of a kind is expected to take."""
        return self._pace.seconds(kind) or 1.0

    def _claimed(self, reply: ClaimBatchReply) -> list[Held]:
        taken: list[Held] = []
        for group in reply.groups:
            taken += self._hold(lease_of(group, self._outbound, self._variables), group.tasks)
        for claim in reply.claims:
            task, token, expires_at = claim.task, claim.lease_token, claim.lease_expires_at
            if task is not None and token is not None and expires_at is not None:
                alone = GroupedTask(task.task_id, task.index, task.payload)
                given = (self._data_url, self._outbound, self._variables)
                lease = lease_alone(task, token, expires_at, claim.secrets, *given)
                taken += self._hold(lease, [alone])
        return taken

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

    # What processes report

    def _progressed(self, message: protocol.Progressed) -> None:
        held = self.held.get(message.slot)
        if held is not None:
            held.progressed(message)

    def _emit(self, process: OperatorProcess, message: protocol.Emit) -> None:
        def answer(accepted: int, problem: str | None) -> None:
            process.answer_emit(protocol.EmitAnswered(message.slot, accepted, problem))

        held = self.held.get(message.slot)
        if held is None or held.lost:
            answer(0, "The attempt was fenced off: another one has the task.")
        else:
            self._desk.emit(held, message.events, answer)

    def _show(self, process: OperatorProcess, slot: int, stream: str, line: str) -> None:
        held = self.held.get(slot)
        task_id = str(held.task_id) if held else None
        log.info("operator.output", task_id=task_id, pid=process.pid, stream=stream, line=line)

    def _finished(self, held: Held, message: protocol.Finished) -> None:
        if held.lost:
            return
        if message.events or message.outputs:
            self._desk.complete(held.completed(message.result, message.events, message.outputs))
        else:
            self._desk.completed(held, message.result)

    # Tasks end otherwise

    def cancel(self, held: Held) -> None:
        """The dispatcher wants it stopped: at once where it waits, by TaskCanceled where it runs."""
        if held.cancel or held.ended:
            return
        held.cancel, held.stop_asked_at = True, time.monotonic()
        if not self._stop(held):
            self._drop(held)
            self._end(held, held.canceled())

    def lose(self, held: Held) -> None:
        """It was fenced off: stop it and say no more about it."""
        if held.lost or held.ended:
            return
        held.lost, held.stop_asked_at = True, time.monotonic()
        log.info("worker.task_lost", task_id=str(held.task_id), attempt=held.attempt)
        if not self._stop(held):
            self._drop(held)

    @abstractmethod
    def _stop(self, held: Held) -> bool:
        """Stop it where it runs. False when no process has it."""

    @abstractmethod
    def pause(self, held: Held, paused: bool) -> None:
        """A source is to hold still, or may go on. One that does not run yet hears of it with a later heartbeat."""

    def _end(self, held: Held, completion: Completion) -> None:
        if not held.lost:
            self._desk.complete(completion)

    def _drop(self, held: Held) -> None:
        held.ended = True
        self.held.pop(held.slot, None)
        if held.client is not None:
            held.client.close()

    def release_queue(self) -> None:
        """Give back what waits here, so that another worker may have it."""
        waiting = [held for held in self.queue if not held.ended]
        self.queue.clear()
        self._release(waiting)

    def _release(self, tasks: list[Held]) -> None:
        for held in tasks:
            self._drop(held)
        self._desk.release([held for held in tasks if not held.lost])

    # The end

    @abstractmethod
    def drain(self) -> None:
        """Start nothing new: give back what waits, and let what runs finish."""

    @abstractmethod
    def kill_all(self) -> None:
        """End the processes of a drained pool, and give back what they had."""

    @abstractmethod
    async def ended(self) -> None:
        """When every process of a drained pool is gone."""

    async def abandon(self) -> None:
        """End everything at once."""
        self._draining.set()
        self.kill_all()
        await self.ended()
