"""Receives wake-ups and claims their tasks, as many as the children can run soon by the measured durations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

import msgspec
import structlog
from msgspec import Struct

from interlock.client import WorkerClient
from interlock.errors import Forbidden, InterlockError, NotFound, Unauthenticated
from interlock.failpoints import failpoint
from interlock.wire.attempts import ClaimBatchReply, ClaimRange, ClaimRequest, Receipt
from interlock.wire.tasks import MessageRef, QueueMessage, ReceiveReply, ReceiveRequest, SettleRequest
from interlock.workers.claimed_tasks import Kind, Pace
from interlock.workers.reporter import Reporter
from interlock.workers.work_pool import WorkPool

log = structlog.get_logger()

PULLERS = 4
MAX_MESSAGES = 10
MAX_TOGETHER = 2_000
MAX_UNKNOWN = 10
"""Most tasks to claim of an unknown job, which is assumed to resemble the last one. If it is slower, queued tasks are
released."""
WAIT_SECONDS = 20.0
VISIBILITY_SECONDS = 15.0
"""Time from receiving a message to its claim, which settles it."""
PATIENT_RECEIVES = 5
"""After this many receives, a message is claimed even without room, so that it does not become a dead letter."""
MAX_UNREPORTED = 20_000
PAUSE_SECONDS = 1.0


class Puller:
    """Pulls work from the queue. `run` may be called any number of times concurrently."""

    def __init__(
        self, client: WorkerClient, pool: WorkPool, pace: Pace, reporter: Reporter, queue: str, worker_id: str
    ) -> None:
        self._client, self._pool, self._pace, self._reporter = client, pool, pace, reporter
        self._queue, self._worker_id = queue, worker_id

    async def run(self, draining: asyncio.Event) -> None:
        while not draining.is_set():
            await self._room(draining)
            if draining.is_set():
                return
            try:
                await self._pull(draining)
            except (Unauthenticated, Forbidden, NotFound):
                raise
            except InterlockError as error:
                log.warning("worker.pull_failed", code=error.code, reason=error.detail)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _room(self, draining: asyncio.Event) -> None:
        while not draining.is_set() and not self._wanted():
            self._pool.room_made.clear()
            await self._pool.room_made.wait()

    def _wanted(self) -> int:
        if self._reporter.unreported > MAX_UNREPORTED:
            return 0
        return self._pool.room(self._pace.latest)

    async def _pull(self, draining: asyncio.Event) -> None:
        wanted = self._wanted()
        messages = min(max(int(wanted / self._pace.tasks_per_message), 1), MAX_MESSAGES)
        expected = min(wanted, math.ceil(messages * self._pace.tasks_per_message))
        with self._pool.reserved(expected, self._pace.latest):
            received = await self._receive(messages, draining)
        if received:
            await failpoint("worker.received")
            await self._claim_all(received, draining)

    async def _receive(self, limit: int, draining: asyncio.Event) -> list[QueueMessage]:
        """Receives messages with a long poll, which ends immediately when the worker drains."""
        request = ReceiveRequest(
            queue=self._queue,
            worker_id=self._worker_id,
            max=limit,
            wait_seconds=WAIT_SECONDS,
            visibility_seconds=VISIBILITY_SECONDS,
        )
        call: asyncio.Task[ReceiveReply] = asyncio.create_task(self._client.receive(request))
        stop = asyncio.create_task(draining.wait())
        try:
            await asyncio.wait({call, stop}, return_when=asyncio.FIRST_COMPLETED)
            return call.result().messages if call.done() else []
        finally:
            stop.cancel()
            call.cancel()

    # Claims

    async def _claim_all(self, messages: list[QueueMessage], draining: asyncio.Event) -> None:
        found = sort(messages)
        for message in found.unreadable:
            log.error("worker.message_unreadable", queue=self._queue, message_id=message.message_id)
        surplus: list[QueueMessage] = []
        fitting = [] if draining.is_set() else self._fitting(found.spans)
        if fitting:
            await self._claim_spans(fitting)
        for span in found.spans[len(fitting) :]:
            surplus += [span.message] if draining.is_set() else await self._claim_span(span)
        surplus += found.tasks.values() if draining.is_set() else await self._claim_tasks(found.tasks)
        if surplus:
            await self._client.nack(self._settle(surplus))

    def _limit(self, kind: Kind | None, messages: Iterable[QueueMessage]) -> int:
        must = any(message.receives > PATIENT_RECEIVES for message in messages)
        return min(self._pool.room(kind), self._pace.most_by_size(kind)) or int(must)

    def _fitting(self, spans: list[Span]) -> list[Span]:
        """Returns the leading spans that are of one known kind and fit completely."""
        kind = self._pace.kind_of_job(spans[0].job_id) if spans else None
        if kind is None or self._pace.seconds(kind) is None:
            return []
        room = min(self._limit(kind, ()), MAX_TOGETHER)
        fitting: list[Span] = []
        for span in spans:
            room -= span.tasks
            if room < 0 or self._pace.kind_of_job(span.job_id) != kind:
                break
            fitting.append(span)
        return fitting

    async def _claim_spans(self, spans: list[Span]) -> None:
        """Claims the tasks of many messages in one call, since most of a claim's cost is per call."""
        for span in spans:
            self._pace.message_held(span.tasks)
        ranges = [ClaimRange(span.run_id, span.start, span.end, self._receipt(span.message)) for span in spans]
        request = ClaimRequest(worker_id=self._worker_id, ranges=ranges, tokens=False)
        tasks = sum(span.tasks for span in spans)
        await self._claim(request, tasks, self._pace.kind_of_job(spans[0].job_id))

    async def _claim_span(self, span: Span) -> list[QueueMessage]:
        """Claims from a run's range. Returns its message if there is no room."""
        self._pace.message_held(span.tasks)
        known = self._pace.kind_of_job(span.job_id)
        kind = known or self._pace.latest
        wanted = span.tasks if known else min(span.tasks, MAX_UNKNOWN)
        limit = min(self._limit(kind, [span.message]), wanted)
        if not limit:
            return [span.message]
        request = ClaimRequest(
            worker_id=self._worker_id,
            run_id=span.run_id,
            start=span.start,
            end=span.end,
            limit=limit,
            tokens=False,
            message=self._receipt(span.message),
        )
        await self._claim(request, limit, kind)
        return []

    async def _claim_tasks(self, tasks: dict[UUID, QueueMessage]) -> list[QueueMessage]:
        """Claims single tasks in one call. Returns the messages for which there is no room."""
        if not tasks:
            return []
        kind = self._pace.latest
        self._pace.message_held(1)
        chosen = dict(list(tasks.items())[: self._limit(kind, tasks.values())])
        together = len(chosen) > 1
        if chosen:
            request = ClaimRequest(
                worker_id=self._worker_id,
                task_ids=list(chosen),
                tokens=False,
                message=None if together else self._receipt(next(iter(chosen.values()))),
            )
            await self._claim(request, len(chosen), kind)
        if together:
            await self._client.ack(self._settle(chosen.values()))
        return [message for task_id, message in tasks.items() if task_id not in chosen]

    async def _claim(self, request: ClaimRequest, expected: int, kind: Kind | None) -> None:
        with self._pool.reserved(expected, kind):
            reply: ClaimBatchReply = await self._client.claim(request)
        await failpoint("worker.claimed")
        self._pool.take(reply)

    def _receipt(self, message: QueueMessage) -> Receipt:
        return Receipt(queue=self._queue, message_id=message.message_id, receipt=message.receipt)

    def _settle(self, messages: Iterable[QueueMessage]) -> SettleRequest:
        items = [MessageRef(message_id=one.message_id, receipt=one.receipt) for one in messages]
        return SettleRequest(queue=self._queue, items=items)


class _Body(Struct, frozen=True):
    task_id: UUID | None = None
    job_id: UUID | None = None
    run_id: UUID | None = None
    start: int = 0
    end: int = 0


_decoder = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class Span:
    """An inclusive range of a run's tasks."""

    job_id: UUID | None
    run_id: UUID
    start: int
    end: int
    message: QueueMessage

    @property
    def tasks(self) -> int:
        return self.end - self.start + 1


@dataclass(slots=True)
class WakeUps:
    """The messages of one receive, by type."""

    tasks: dict[UUID, QueueMessage] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    unreadable: list[QueueMessage] = field(default_factory=list)


def sort(messages: Iterable[QueueMessage]) -> WakeUps:
    found = WakeUps()
    for message in messages:
        body = _read(message)
        if body.task_id is not None:
            found.tasks[body.task_id] = message
        elif body.run_id is not None:
            found.spans.append(Span(body.job_id, body.run_id, body.start, body.end, message))
        else:
            found.unreadable.append(message)
    return found


def _read(message: QueueMessage) -> _Body:
    try:
        return _decoder.decode(message.body)
    except msgspec.MsgspecError:
        return _Body()
