"""The base class of pools: the claimed tasks of a worker, and the operations on them."""

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
from interlock.wire.attempts import ClaimBatchReply, Completion, Event, GroupedTask
from interlock.wire.tasks import Crash
from interlock.workers import protocol
from interlock.workers.claimed_tasks import (
    NONE,
    Held,
    Kind,
    Lease,
    Pace,
    Variables,
    beat_interval,
    lease_alone,
    lease_of,
)
from interlock.workers.process import OperatorProcess

log = structlog.get_logger()

MAX_FAILED_STARTS = 5


class ReportSink(Protocol):
    """Accepts the pool's reports to the dispatcher."""

    def complete(self, completion: Completion) -> None: ...

    def completed(self, held: Held, result: bytes) -> None:
        """Reports a task that succeeded with a result only, without events and outputs."""

    def printed(self, held: Held, stream: str, line: str) -> None:
        """Keeps a line that an attempt printed."""

    def release(self, held: Iterable[Held]) -> None: ...

    def emit(self, held: Held, events: list[Event], answer: Callable[[int, str | None], None]) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Ends the worker with an error that it cannot recover from."""


class WorkPool(ABC):
    def __init__(
        self,
        pace: Pace,
        sink: ReportSink,
        usual_lease: float,
        data_url: str | None = None,
        outbound: protocol.Outbound | None = None,
        variables: Variables = NONE,
    ) -> None:
        self._pace, self._sink, self._usual_lease, self._data_url = pace, sink, usual_lease, data_url
        self._outbound = outbound
        self._variables = variables
        self._slots = itertools.count(1)
        self._draining = asyncio.Event()
        self._failed_starts = 0
        self.queue: deque[Held] = deque()
        """Claimed tasks that are not assigned to a process yet."""
        self.held: dict[int, Held] = {}
        """All claimed and unanswered tasks, by slot. Heartbeats keep their leases."""
        self._reserved: list[float] = []
        """Seconds of work that claims in flight may return."""
        self.room_made = asyncio.Event()

    # How much to claim

    @abstractmethod
    def room(self, kind: Kind | None) -> int:
        """Returns how many tasks of a kind this worker should claim now."""

    @abstractmethod
    def claim_seconds(self, kind: Kind | None) -> float:
        """Returns the room that a claimed task of a kind takes."""

    @contextlib.contextmanager
    def reserved(self, tasks: int, kind: Kind | None) -> Iterator[None]:
        """Reserves room for the tasks that a call in flight may return."""
        seconds = tasks * self.claim_seconds(kind)
        self._reserved.append(seconds)
        try:
            yield
        finally:
            self._reserved.remove(seconds)
            self.room_made.set()

    def _reserved_tasks(self, kind: Kind | None) -> int:
        """Returns the number of reserved tasks.

        It is rounded before it is rounded up. Otherwise a floating-point remainder would count as a whole task, and
        the only free child would stay idle.
        """
        return math.ceil(round(math.fsum(self._reserved) / self.claim_seconds(kind), 6))

    def _start_failed(self, what: str, cause: Crash) -> None:
        """Handles a process that ended before it was ready. After MAX_FAILED_STARTS in a row the worker gives up."""
        self._failed_starts += 1
        event = f"worker.{what}_not_started"
        log.error(event, exit_code=cause.exit_code, signal=cause.signal)
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise ConfigurationError(
                f"The last {self._failed_starts} {what} processes of the worker ended before they were ready: look for "
                "the cause in its log (operator.output)."
            )

    # Accepting claimed tasks

    @abstractmethod
    def take(self, reply: ClaimBatchReply) -> int:
        """Accepts claimed tasks and runs them. Returns their number."""

    def estimate(self, kind: Kind) -> float:
        """Returns the expected duration of a task of a kind."""
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

    # Reports from processes

    def _progressed(self, message: protocol.Progressed) -> None:
        held = self.held.get(message.slot)
        if held is not None:
            held.progressed(message)

    def _emit(self, process: OperatorProcess, message: protocol.Emit) -> None:
        def answer(accepted: int, problem: str | None) -> None:
            process.answer_emit(protocol.EmitAnswered(message.slot, accepted, problem))

        held = self.held.get(message.slot)
        if held is None or held.lost:
            answer(0, "This attempt has lost its lease: another attempt runs the task.")
        else:
            self._sink.emit(held, message.events, answer)

    def _show(self, process: OperatorProcess, slot: int, stream: str, line: str) -> None:
        held = self.held.get(slot)
        task_id = str(held.task_id) if held else None
        if held is not None:
            self._sink.printed(held, stream, line)
        log.info("operator.output", task_id=task_id, pid=process.pid, stream=stream, line=line)

    def _traced(self, process: OperatorProcess, message: protocol.Traced) -> None:
        """Keeps a traceback. The worker's own log gets it without the error's text, which may quote the payload."""
        held = self.held.get(message.slot)
        if held is not None:
            self._sink.printed(held, "traceback", message.text)
        if message.frames:
            task_id = str(held.task_id) if held else None
            log.info("operator.output", task_id=task_id, pid=process.pid, stream="traceback", line=message.frames)

    def _finished(self, held: Held, message: protocol.Finished) -> None:
        if held.lost:
            return
        if message.events or message.outputs:
            self._sink.complete(held.completed(message.result, message.events, message.outputs))
        else:
            self._sink.completed(held, message.result)

    # Stopping and pausing tasks

    def cancel(self, held: Held) -> None:
        """Cancels a task for the dispatcher: a queued one ends immediately, a running one gets TaskCanceled."""
        if held.cancel or held.ended:
            return
        held.cancel, held.stop_asked_at = True, time.monotonic()
        if not self._stop(held):
            self._drop(held)
            self._end(held, held.canceled())

    def lose(self, held: Held) -> None:
        """Stops a task that has lost its lease. Nothing more is reported about it."""
        if held.lost or held.ended:
            return
        held.lost, held.stop_asked_at = True, time.monotonic()
        log.info("worker.task_lost", task_id=str(held.task_id), attempt=held.attempt)
        if not self._stop(held):
            self._drop(held)

    @abstractmethod
    def _stop(self, held: Held) -> bool:
        """Stops a running task. Returns False if no process has it."""

    @abstractmethod
    def pause(self, held: Held, paused: bool) -> None:
        """Pauses or resumes a source. One that does not run yet is paused by a later heartbeat."""

    def _end(self, held: Held, completion: Completion) -> None:
        if not held.lost:
            self._sink.complete(completion)

    def _drop(self, held: Held) -> None:
        held.ended = True
        self.held.pop(held.slot, None)
        if held.client is not None:
            held.client.close()

    def release_queue(self) -> None:
        """Releases the queued tasks, so that another worker can claim them."""
        waiting = [held for held in self.queue if not held.ended]
        self.queue.clear()
        self._release(waiting)

    def _release(self, tasks: list[Held]) -> None:
        for held in tasks:
            self._drop(held)
        self._sink.release([held for held in tasks if not held.lost])

    # Draining

    @abstractmethod
    def drain(self) -> None:
        """Starts no new tasks: releases queued ones, and lets running ones finish."""

    @abstractmethod
    def kill_all(self) -> None:
        """Kills the processes of a drained pool, and releases their tasks."""

    @abstractmethod
    async def ended(self) -> None:
        """Waits until every process of a drained pool is gone."""

    async def abandon(self) -> None:
        """Kills all processes and waits for their end."""
        self._draining.set()
        self.kill_all()
        await self.ended()
