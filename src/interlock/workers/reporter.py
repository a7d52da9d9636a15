"""Reports to the dispatcher: completions in batches, released attempts, and events.

No report is dropped while the dispatcher is unavailable: calls are retried until it is back. One bad item must not harm
the others in its batch, so a refused batch is halved until the item is alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any
from uuid import UUID

import structlog
from msgspec import Raw

from interlock.client import TaskClient, WorkerClient
from interlock.errors import Fenced, Forbidden, InterlockError, NotFound, Unauthenticated
from interlock.failpoints import failpoint
from interlock.wire.attempts import (
    Completion,
    CompletionBatch,
    CompletionGroup,
    Event,
    HeartbeatBatch,
    Refusal,
    ReleaseBatch,
)
from interlock.workers.claimed_tasks import Held, Lease, bare_failure
from interlock.workers.logs import LogShipper

log = structlog.get_logger()

BATCH = 500
"""Waiting completions that trigger a call without a delay."""
MAX_PER_CALL = 2_000
GATHER_SECONDS = 0.005
FLIGHTS = 4
ITEM_BYTES = 400
"""Size of a completion on the wire, without its result and message."""
INDEX_BYTES = 20
"""Size of a completion in a group, without its result."""

Report = Completion | tuple[Held, bytes]
"""The outcome of an attempt: a completion, or the task and its result if it succeeded without events and outputs."""

_final = (Fenced.default_code, NotFound.default_code, Forbidden.default_code)
_refused = "ReportRefused"


class Reporter:
    def __init__(self, client: WorkerClient, call_bytes: int, log_bytes: int = 0) -> None:
        self._client = client
        self.logs = LogShipper(client, log_bytes)
        self._call_bytes = call_bytes
        self._waiting: list[Report] = []
        self._flights: set[asyncio.Task[None]] = set()
        self._others: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_flush = 0.0
        self.reported = 0
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the error that ends the worker."""

    @property
    def unreported(self) -> int:
        return len(self._waiting)

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def printed(self, held: Held, stream: str, line: str) -> None:
        self.logs.printed(held, stream, line)

    # Completions

    def complete(self, completion: Completion) -> None:
        self._report(completion)

    def completed(self, held: Held, result: bytes) -> None:
        self._report((held, result))

    def _report(self, report: Report) -> None:
        self._waiting.append(report)
        if len(self._waiting) == BATCH:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay(), self._flush)

    def _delay(self) -> float:
        """Returns the delay of the next call: the first result is sent immediately, those right after it together."""
        quiet = not self._flights and time.monotonic() - self._last_flush > GATHER_SECONDS
        return 0.0 if quiet else GATHER_SECONDS

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and len(self._flights) < FLIGHTS:
            self._last_flush = time.monotonic()
            self._start(self._flights, self._send(self._next_batch())).add_done_callback(self._landed)

    def _landed(self, _flight: asyncio.Task[None]) -> None:
        if self._waiting and self._timer is None:
            self._flush()

    def _next_batch(self) -> list[Report]:
        size = count = 0
        for report in self._waiting[:MAX_PER_CALL]:
            size += _size(report)
            if count and size > self._call_bytes:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _send(self, batch: list[Report]) -> None:
        await self.logs.before_reports()
        await failpoint("worker.before_complete")
        try:
            reply = await self._client.complete(_together(batch))
        except (Unauthenticated, Forbidden):
            raise
        except InterlockError as error:
            await self._send_apart(batch, error)
        else:
            self.reported += reply.accepted
            if reply.refused:
                self._look_at(batch, reply.refused)

    async def _send_apart(self, batch: list[Report], error: InterlockError) -> None:
        middle = len(batch) // 2
        if middle:
            await self._send(batch[:middle])
            await self._send(batch[middle:])
        else:
            self._refused_alone(_completion(batch[0]), error.code, error.detail)

    def _look_at(self, batch: list[Report], refused: list[Refusal]) -> None:
        by_id = {completion.task_id: completion for completion in map(_completion, batch)}
        for refusal in refused:
            if refusal.code in _final:
                log.info("worker.report_fenced", task_id=str(refusal.task_id), stale=refusal.stale)
            else:
                self._refused_alone(by_id[refusal.task_id], refusal.code, refusal.detail)

    def _refused_alone(self, completion: Completion, code: str, detail: str) -> None:
        """Fails the attempt with the reason of the refusal, unless that failure is what was refused."""
        task_id = str(completion.task_id)
        if completion.error_class == _refused:
            log.error("worker.report_dropped", task_id=task_id, code=code)
            return
        log.warning("worker.report_refused", task_id=task_id, code=code)
        message = f"The dispatcher refused the report of this attempt: {detail}"
        self.complete(bare_failure(completion, _refused, message[:2_000]))

    # Released attempts

    def release(self, held: Iterable[Held]) -> None:
        items = [one.release() for one in held]
        for at in range(0, len(items), MAX_PER_CALL):
            self._start(self._others, self._release(ReleaseBatch(items=items[at : at + MAX_PER_CALL])))

    async def _release(self, batch: ReleaseBatch) -> None:
        try:
            reply = await self._client.release(batch)
        except (Unauthenticated, Forbidden):
            raise
        except InterlockError as error:
            # Their leases expire instead, which costs each task an attempt.
            log.warning("worker.release_failed", tasks=len(batch.items), code=error.code, reason=error.detail)
        else:
            log.info("worker.released", tasks=reply.released)

    # Events

    def emit(self, held: Held, events: list[Event], answer: Callable[[int, str | None], None]) -> None:
        self._start(self._others, self._emit(held, events, answer))

    async def _emit(self, held: Held, events: list[Event], answer: Callable[[int, str | None], None]) -> None:
        try:
            accepted = await self._emitted(held, events)
        except InterlockError as error:
            answer(0, error.detail)
        else:
            answer(accepted, None)

    async def _emitted(self, held: Held, events: list[Event]) -> int:
        if held.client is not None:
            try:
                return (await held.client.events(events)).accepted
            except Unauthenticated:
                # The token has expired since its last use.
                held.client.close()
        token = await self._token(held)
        held.client = TaskClient(self._client.url, token, held.fence, verify=self._client.verify)
        return (await held.client.events(events)).accepted

    async def _token(self, held: Held) -> str:
        reply = await self._client.heartbeat(HeartbeatBatch(items=[held.heartbeat(token=True)]))
        token = reply.items[0].capability_token if reply.items else None
        if token is None:
            raise Fenced("This attempt has lost its lease: another attempt runs the task.", stale="lease_token")
        return token

    # Calls in flight

    def _start(self, flights: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        flights.add(task)

        def landed(ended: asyncio.Task[None]) -> None:
            flights.discard(ended)
            if not ended.cancelled() and (error := ended.exception()):
                self.fail(error)

        task.add_done_callback(landed)
        return task

    async def drain(self, seconds: float) -> None:
        """Sends all remaining reports, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._waiting or self._flights or self._others:
                    self._flush()
                    await asyncio.wait(self._flights | self._others)
                await self.logs.run_once()
        if self._waiting or self._flights or self._others:
            log.error("worker.reports_lost", waiting=len(self._waiting), calls=len(self._flights))

    def abandon(self) -> None:
        for task in (*self._flights, *self._others):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()


def _completion(report: Report) -> Completion:
    return report if isinstance(report, Completion) else report[0].completed(report[1])


def _together(batch: list[Report]) -> CompletionBatch:
    """Groups completed tasks of runs by lease, so that the fields that they share are sent once."""
    items: list[Completion] = []
    groups: dict[int, CompletionGroup] = {}
    for report in batch:
        if isinstance(report, Completion):
            items.append(report)
            continue
        held, result = report
        run_id, index = held.lease.work.run_id, held.index
        if run_id is None or index is None:
            items.append(_completion(report))
            continue
        group = groups.get(id(held.lease))
        if group is None:
            group = groups[id(held.lease)] = _group(held.lease, run_id)
        group.indexes.append(index)
        group.results.append(Raw(result))
    return CompletionBatch(items=items, groups=list(groups.values()))


def _group(lease: Lease, run_id: UUID) -> CompletionGroup:
    return CompletionGroup(run_id=run_id, attempt=lease.attempt, lease_token=lease.token, indexes=[], results=[])


def _size(report: Report) -> int:
    if not isinstance(report, Completion):
        return len(report[1]) + INDEX_BYTES
    result = report.result
    size = ITEM_BYTES + (len(result) if isinstance(result, Raw) else 2 * len(report.error_message or ""))
    return size + ITEM_BYTES * (len(report.events) + len(report.outputs))
