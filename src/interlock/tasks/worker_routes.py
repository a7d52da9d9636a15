"""Claims and queues for workers, and the endpoints of attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from uuid import UUID

import msgspec
from litestar import get, post
from litestar.params import FromQuery, JSONBody
from msgspec import Raw

from interlock.access.build import access_of
from interlock.access.guards import capability_guard, claims_of, worker_guard, worker_of
from interlock.access.tokens import require_binding
from interlock.errors import Forbidden
from interlock.http.requests import Http, settings_of
from interlock.settings import RuntimeKind
from interlock.tasks.build import tasks_of
from interlock.tasks.queue import Handle, Received
from interlock.wire.attempts import (
    BufferPublish,
    BufferPublished,
    ClaimBatchReply,
    ClaimReply,
    ClaimRequest,
    Completion,
    CompletionBatch,
    CompletionBatchReply,
    CompletionReply,
    EventBatch,
    EventsAccepted,
    FetchReply,
    Heartbeat,
    HeartbeatBatch,
    HeartbeatBatchReply,
    HeartbeatReply,
    Release,
    ReleaseBatch,
    ReleaseReply,
)
from interlock.wire.logs import LogBatch, LogsKept
from interlock.wire.tasks import (
    OperatorsReport,
    OperatorsReported,
    QueueMessage,
    ReceiveReply,
    ReceiveRequest,
    Settled,
    SettleRequest,
)


@post(
    "/internal/task-claim",
    guards=[worker_guard],
    status_code=200,
    summary="Claim a task, a list, or a range of a run",
)
async def claim(request: Http, data: JSONBody[ClaimRequest]) -> ClaimReply | ClaimBatchReply:
    for message in (data.message, *(span.message for span in data.ranges or ())):
        _require_queue(request, message.queue if message else None)
    reply = await tasks_of(request).claims.claim(data, worker_of(request))
    return reply if data.task_id is None else reply.claims[0]


@get("/internal/task-fetch", guards=[worker_guard], summary="A task as a worker would receive it; read-only")
async def fetch(request: Http, task_id: FromQuery[UUID]) -> FetchReply:
    return await tasks_of(request).claims.fetch(task_id, worker_of(request))


@post("/internal/task-heartbeat", guards=[worker_guard], status_code=200, summary="Extend leases, in a batch")
async def heartbeat_batch(request: Http, data: JSONBody[HeartbeatBatch]) -> HeartbeatBatchReply:
    return await tasks_of(request).attempts.heartbeat(data.items)


@post("/internal/task-complete", guards=[worker_guard], status_code=200, summary="End attempts, in a batch")
async def complete_batch(request: Http, data: JSONBody[CompletionBatch]) -> CompletionBatchReply:
    return await tasks_of(request).attempts.complete(data.items, data.groups)


@post("/internal/task-release", guards=[worker_guard], status_code=200, summary="Release attempts unused")
async def release_batch(request: Http, data: JSONBody[ReleaseBatch]) -> ReleaseReply:
    return ReleaseReply(released=await tasks_of(request).attempts.release(data.items))


@post("/internal/task-logs", guards=[worker_guard], status_code=200, summary="Keep what attempts have printed")
async def keep_logs(request: Http, data: JSONBody[LogBatch]) -> LogsKept:
    return await tasks_of(request).reads.logs.keep(data.items)


@post(
    "/internal/operators",
    guards=[worker_guard],
    status_code=200,
    summary="Report the operators that a worker can run, in addition to the built-in ones",
)
async def report_operators(request: Http, data: JSONBody[OperatorsReport]) -> OperatorsReported:
    _require_queue(request, data.queue)
    await tasks_of(request).operators.report(data)
    return OperatorsReported(operators=len(data.operators))


@post("/internal/queue/receive", guards=[worker_guard], status_code=200, summary="Wait for messages of a queue")
async def receive(request: Http, data: JSONBody[ReceiveRequest]) -> ReceiveReply:
    _require_queue(request, data.queue)
    tasks = tasks_of(request)
    await tasks.dashboard.presence.seen(data.worker_id, data.queue)
    receiving = tasks.queue.receive(
        data.queue,
        wait_seconds=data.wait_seconds,
        limit=data.max,
        visibility_seconds=data.visibility_seconds,
    )
    messages = await _while_connected(request, receiving)
    return ReceiveReply(
        messages=[QueueMessage(m.message_id, m.receipt, Raw(m.body), m.receives, m.enqueued_at) for m in messages]
    )


async def _while_connected(request: Http, receiving: Coroutine[Any, Any, list[Received]]) -> list[Received]:
    """Cancels the receive if the worker disconnects.

    Its messages would otherwise stay invisible until their timeout.
    """
    work = asyncio.create_task(receiving)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else []
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(request: Http) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


@post(
    "/internal/queue/extend",
    guards=[worker_guard],
    status_code=200,
    summary="Extend the visibility timeout of messages",
)
async def extend(request: Http, data: JSONBody[SettleRequest]) -> Settled:
    queue = _require_queue(request, data.queue)
    return Settled(settled=await tasks_of(request).queue.extend(queue, _handles(data), data.visibility_seconds))


@post("/internal/queue/ack", guards=[worker_guard], status_code=200, summary="Delete settled messages")
async def ack(request: Http, data: JSONBody[SettleRequest]) -> Settled:
    return Settled(settled=await tasks_of(request).queue.ack(_require_queue(request, data.queue), _handles(data)))


@post("/internal/queue/nack", guards=[worker_guard], status_code=200, summary="Return messages to the queue")
async def nack(request: Http, data: JSONBody[SettleRequest]) -> Settled:
    queue = _require_queue(request, data.queue)
    return Settled(settled=await tasks_of(request).queue.nack(queue, _handles(data), data.delay_seconds))


@post("/v1/task/heartbeat", guards=[capability_guard], status_code=200, summary="Extend the attempt's lease")
async def heartbeat(request: Http, data: JSONBody[Heartbeat]) -> HeartbeatReply:
    claims, attempts = claims_of(request), tasks_of(request).attempts
    require_binding(claims, data.task_id, data.attempt)
    reply = await attempts.heartbeat_one(data)
    if reply.capability_token is None:
        token = await access_of(request).tokens.renewed_if_due(claims, attempts.active_kid)
        reply = msgspec.structs.replace(reply, capability_token=token)
    return reply


@post("/v1/task/complete", guards=[capability_guard], status_code=200, summary="End the attempt")
async def complete(request: Http, data: JSONBody[Completion]) -> CompletionReply:
    require_binding(claims_of(request), data.task_id, data.attempt)
    return await tasks_of(request).attempts.complete_one(data)


@post("/v1/task/events", guards=[capability_guard], status_code=200, summary="Emit dataset events during the task")
async def events(request: Http, data: JSONBody[EventBatch]) -> EventsAccepted:
    require_binding(claims_of(request), data.task_id, data.attempt)
    accepted = await tasks_of(request).effects.emit(data)
    if accepted is None:
        raise await tasks_of(request).attempts.fenced(_fence(data))
    return accepted


@post(
    "/v1/task/buffer-publish",
    guards=[capability_guard],
    status_code=200,
    summary="Publish a batch of rows by reference",
)
async def buffer_publish(request: Http, data: JSONBody[BufferPublish]) -> BufferPublished:
    require_binding(claims_of(request), data.task_id, data.attempt)
    published = await tasks_of(request).effects.publish(data)
    if published is None:
        raise await tasks_of(request).attempts.fenced(_fence(data))
    return published


def _fence(data: EventBatch | BufferPublish) -> Release:
    return Release(task_id=data.task_id, attempt=data.attempt, lease_token=data.lease_token)


def _handles(data: SettleRequest) -> list[Handle]:
    return [Handle(item.message_id, item.receipt) for item in data.items]


def _require_queue(request: Http, queue: str | None) -> str:
    """Checks that the worker token covers the queue: a token restricted to some runtimes covers only their queues."""
    runtimes = worker_of(request).runtimes
    if queue is not None and runtimes is not None:
        settings = settings_of(request)
        mine = (settings.runtime(name) for name in runtimes if name in settings.runtime_names)
        if queue not in {runtime.queue for runtime in mine if runtime.kind is RuntimeKind.QUEUE}:
            raise Forbidden(
                f"This worker token does not grant access to the queue {queue!r}.", code="queue_not_granted"
            )
    return queue or ""


HANDLERS = [
    claim,
    fetch,
    heartbeat_batch,
    complete_batch,
    release_batch,
    keep_logs,
    report_operators,
    receive,
    extend,
    ack,
    nack,
    heartbeat,
    complete,
    events,
    buffer_publish,
]
