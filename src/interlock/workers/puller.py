"""Receives wake-ups and claims the tasks behind them, as much as the children can use soon."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from uuid import UUID

import msgspec
import structlog
from msgspec import Struct

from interlock.client import WorkerClient
from interlock.errors import Forbidden, InterlockError, NotFound, Unauthenticated
from interlock.failpoints import failpoint
from interlock.wire import (
    ClaimBatchReply,
    ClaimRequest,
    MessageRef,
    QueueMessage,
    Receipt,
    ReceiveReply,
    ReceiveRequest,
    SettleRequest,
)
from interlock.workers.pace import Kind, Pace
from interlock.workers.pool import MOST_PER_CLAIM, Pool
from interlock.workers.reporter import Reporter

log = structlog.get_logger()

PULLERS = 4
MOST_MESSAGES = 10
WAIT_SECONDS = 20.0
VISIBILITY_SECONDS = 15.0
"""From receiving a message to its claim: it is settled with that."""
PATIENT_RECEIVES = 5
"""A message that was put back this often is claimed from even without room: it must not become a dead letter."""
MOST_UNREPORTED = 20_000
PAUSE_SECONDS = 1.0


class WakeUp(Struct, frozen=True):
    """A message's body: one task, or a run's inclusive range."""

    task_id: UUID | None = None
    run_id: UUID | None = None
    start: int | None = None
    end: int | None = None


_wake_up = msgspec.json.Decoder(WakeUp)


class Puller:
    """Any number of `run` may be in flight at once."""

    def __init__(
        self, client: WorkerClient, pool: Pool, pace: Pace, reporter: Reporter, queue: str, worker_id: str
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
                log.error("worker.pull_failed", code=error.code, reason=error.detail)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _room(self, draining: asyncio.Event) -> None:
        while not draining.is_set() and not self._wanted():
            self._pool.room_made.clear()
            await self._pool.room_made.wait()

    def _wanted(self) -> int:
        if self._reporter.unreported > MOST_UNREPORTED:
            return 0
        return self._pool.room(self._pace.latest)

    async def _pull(self, draining: asyncio.Event) -> None:
        wanted = self._wanted()
        messages = min(max(int(wanted / self._pace.tasks_per_message), 1), MOST_MESSAGES)
        expected = min(wanted, math.ceil(messages * self._pace.tasks_per_message))
        with self._reserved(expected, self._pace.latest):
            received = await self._receive(messages, draining)
        if received:
            await failpoint("worker.received")
            await self._claim_all(received, draining)

    async def _receive(self, most: int, draining: asyncio.Event) -> list[QueueMessage]:
        """A long poll, left at once when the worker drains."""
        request = ReceiveRequest(
            queue=self._queue,
            worker_id=self._worker_id,
            max=most,
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
        tasks: dict[UUID, QueueMessage] = {}
        surplus: list[QueueMessage] = []
        for message in messages:
            wake_up = self._read(message)
            if wake_up is None:
                continue
            if draining.is_set():
                surplus.append(message)
            elif wake_up.task_id is not None:
                tasks[wake_up.task_id] = message
            elif not await self._claim_range(wake_up, message):
                surplus.append(message)
        surplus += await self._claim_tasks(tasks)
        if surplus:
            await self._client.nack(self._settle(surplus))

    def _read(self, message: QueueMessage) -> WakeUp | None:
        try:
            wake_up = _wake_up.decode(message.body)
        except msgspec.MsgspecError:
            wake_up = WakeUp()
        if wake_up.task_id is None and wake_up.run_id is None:
            log.error("worker.message_unreadable", queue=self._queue, message_id=message.message_id)
            return None
        return wake_up

    def _limit(self, kind: Kind | None, message: QueueMessage) -> int:
        room = self._pool.room(kind)
        return min(room, MOST_PER_CLAIM) or int(message.receives > PATIENT_RECEIVES)

    async def _claim_range(self, wake_up: WakeUp, message: QueueMessage) -> bool:
        """Claim from a run's range. False when there is no room; the message is still to be put back then."""
        assert wake_up.run_id is not None  # noqa: S101 - _read lets nothing else through
        kind = self._pace.kind_of_run(wake_up.run_id)
        limit = self._limit(kind, message)
        if not limit:
            return False
        request = ClaimRequest(
            worker_id=self._worker_id,
            run_id=wake_up.run_id,
            start=wake_up.start,
            end=wake_up.end,
            limit=limit,
            tokens=False,
            message=self._receipt(message),
        )
        await self._claim(request, limit, kind)
        return True

    async def _claim_tasks(self, tasks: dict[UUID, QueueMessage]) -> list[QueueMessage]:
        """Claim single tasks, all in one call. Returns the messages for which there is no room."""
        if not tasks:
            return []
        kind = self._pace.latest
        limit = max(self._limit(kind, message) for message in tasks.values())
        chosen = dict(list(tasks.items())[:limit])
        if len(chosen) == 1:
            (task_id, message), *_ = chosen.items()
            request = ClaimRequest(
                worker_id=self._worker_id, task_ids=[task_id], tokens=False, message=self._receipt(message)
            )
            await self._claim(request, 1, kind)
        elif chosen:
            request = ClaimRequest(worker_id=self._worker_id, task_ids=list(chosen), tokens=False)
            await self._claim(request, len(chosen), kind)
            await self._client.ack(self._settle(list(chosen.values())))
        return [message for task_id, message in tasks.items() if task_id not in chosen]

    async def _claim(self, request: ClaimRequest, expected: int, kind: Kind | None) -> None:
        with self._reserved(expected, kind):
            reply: ClaimBatchReply = await self._client.claim_batch(request)
        await failpoint("worker.claimed")
        taken = self._pool.take(reply.claims)
        per_message = taken + reply.remaining if request.run_id is not None else 1
        self._pace.message_held(per_message)

    @contextlib.contextmanager
    def _reserved(self, tasks: int, kind: Kind | None) -> Iterator[None]:
        seconds = tasks * self._pool.claim_seconds(kind)
        self._pool.reserved_seconds += seconds
        try:
            yield
        finally:
            self._pool.reserved_seconds = max(self._pool.reserved_seconds - seconds, 0.0)
            self._pool.room_made.set()

    def _receipt(self, message: QueueMessage) -> Receipt:
        return Receipt(queue=self._queue, message_id=message.message_id, receipt=message.receipt)

    def _settle(self, messages: list[QueueMessage]) -> SettleRequest:
        items = [MessageRef(message_id=one.message_id, receipt=one.receipt) for one in messages]
        return SettleRequest(queue=self._queue, items=items)
