"""The internal listener: claims and queues for worker wrappers, task endpoints for attempts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
from litestar import Litestar, MediaType, Request, Response, get, post
from litestar.datastructures import State
from litestar.openapi.spec import Components, Operation, RequestBody, SecurityScheme
from litestar.params import FromQuery, JSONBody
from msgspec import Raw

from interlock.access.principals import PLATFORM
from interlock.access.tokens import require_binding
from interlock.adapters.queue import Handle, Received
from interlock.api.application import application
from interlock.api.auth import capability_guard, claims_of, kernel_of, user_guard, worker_guard, worker_of
from interlock.api.gateway import DEGRADED, health_response, queue_view
from interlock.errors import Forbidden
from interlock.settings import RuntimeKind
from interlock.telemetry import (
    IN_FLIGHT,
    JOBS_HELD_BACK,
    OUTBOX_ROWS,
    QUEUE_DEAD,
    QUEUE_DEPTH,
    QUEUE_IN_FLIGHT,
    QUEUE_OLDEST,
    metrics_text,
)
from interlock.wire import (
    BufferPublish,
    BufferPublished,
    ClaimBatchReply,
    ClaimReply,
    ClaimRequest,
    Completion,
    CompletionBatch,
    CompletionBatchReply,
    CompletionReply,
    CredentialsRequest,
    DataReply,
    DataRequest,
    EventBatch,
    EventsAccepted,
    FetchReply,
    Health,
    Heartbeat,
    HeartbeatBatch,
    HeartbeatBatchReply,
    HeartbeatReply,
    OperatorsReport,
    OperatorsReported,
    QueueMessage,
    ReceiveReply,
    ReceiveRequest,
    Release,
    ReleaseBatch,
    ReleaseReply,
    Settled,
    SettleRequest,
    TaskCredentials,
)
from interlock.wiring import Kernel

Http = Request[Any, Any, State]


@post(
    "/internal/task-claim",
    guards=[worker_guard],
    status_code=200,
    summary="Claim a task, a list, or a range of a run",
)
async def claim(request: Http, data: JSONBody[ClaimRequest]) -> ClaimReply | ClaimBatchReply:
    for message in (data.message, *(span.message for span in data.ranges or ())):
        _require_queue(request, message.queue if message else None)
    reply = await kernel_of(request).claims.claim(data, worker_of(request))
    return reply if data.task_id is None else reply.claims[0]


@get("/internal/task-fetch", guards=[worker_guard], summary="A task as its worker would get it; read-only")
async def fetch(request: Http, task_id: FromQuery[UUID]) -> FetchReply:
    return await kernel_of(request).claims.fetch(task_id, worker_of(request))


@post("/internal/task-heartbeat", guards=[worker_guard], status_code=200, summary="Extend leases, in a batch")
async def heartbeat_batch(request: Http, data: JSONBody[HeartbeatBatch]) -> HeartbeatBatchReply:
    return await kernel_of(request).tasks.heartbeat(data.items)


@post("/internal/task-complete", guards=[worker_guard], status_code=200, summary="End attempts, in a batch")
async def complete_batch(request: Http, data: JSONBody[CompletionBatch]) -> CompletionBatchReply:
    return await kernel_of(request).tasks.complete(data.items, data.groups)


@post("/internal/task-release", guards=[worker_guard], status_code=200, summary="Give attempts back unused")
async def release_batch(request: Http, data: JSONBody[ReleaseBatch]) -> ReleaseReply:
    return ReleaseReply(released=await kernel_of(request).tasks.release(data.items))


@post(
    "/internal/task-data",
    guards=[worker_guard],
    status_code=200,
    summary="What held attempts read, and where they write",
)
async def task_data(request: Http, data: JSONBody[DataRequest]) -> DataReply:
    return await kernel_of(request).files.data(data.items)


@post(
    "/internal/operators",
    guards=[worker_guard],
    status_code=200,
    summary="Report which operators a worker can run, beside the built-in ones",
)
async def report_operators(request: Http, data: JSONBody[OperatorsReport]) -> OperatorsReported:
    _require_queue(request, data.queue)
    await kernel_of(request).operators.report(data)
    return OperatorsReported(operators=len(data.operators))


@post("/internal/queue/receive", guards=[worker_guard], status_code=200, summary="Wait for wake-ups of a queue")
async def receive(request: Http, data: JSONBody[ReceiveRequest]) -> ReceiveReply:
    _require_queue(request, data.queue)
    kernel = kernel_of(request)
    await kernel.presence.seen(data.worker_id, data.queue)
    receiving = kernel.queue.receive(
        data.queue,
        wait_seconds=data.wait_seconds,
        most=data.max,
        visibility_seconds=data.visibility_seconds,
    )
    messages = await _while_connected(request, receiving)
    return ReceiveReply(
        messages=[QueueMessage(m.message_id, m.receipt, Raw(m.body), m.receives, m.enqueued_at) for m in messages]
    )


async def _while_connected(request: Http, receiving: Coroutine[Any, Any, list[Received]]) -> list[Received]:
    """A worker that died while it waited must not be given messages: they would stay hidden for their visibility."""
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
    summary="Keep messages invisible for longer",
)
async def extend(request: Http, data: JSONBody[SettleRequest]) -> Settled:
    queue = _require_queue(request, data.queue)
    return Settled(settled=await kernel_of(request).queue.extend(queue, _handles(data), data.visibility_seconds))


@post("/internal/queue/ack", guards=[worker_guard], status_code=200, summary="Delete settled messages")
async def ack(request: Http, data: JSONBody[SettleRequest]) -> Settled:
    return Settled(settled=await kernel_of(request).queue.ack(_require_queue(request, data.queue), _handles(data)))


@post("/internal/queue/nack", guards=[worker_guard], status_code=200, summary="Give messages back to others")
async def nack(request: Http, data: JSONBody[SettleRequest]) -> Settled:
    queue = _require_queue(request, data.queue)
    return Settled(settled=await kernel_of(request).queue.nack(queue, _handles(data), data.delay_seconds))


@get("/internal/jwks/task", summary="Public keys of capability tokens")
async def jwks(request: Http) -> dict[str, list[dict[str, Any]]]:
    return {"keys": await kernel_of(request).keyring.jwks()}


@post("/v1/task/heartbeat", guards=[capability_guard], status_code=200, summary="Extend the attempt's lease")
async def heartbeat(request: Http, data: JSONBody[Heartbeat]) -> HeartbeatReply:
    claims, kernel = claims_of(request), kernel_of(request)
    require_binding(claims, data.task_id, data.attempt)
    reply = await kernel.tasks.heartbeat_one(data)
    if reply.capability_token is None:
        token = await kernel.tokens.renewed_if_due(claims, kernel.tasks.active_kid)
        reply = msgspec.structs.replace(reply, capability_token=token)
    return reply


@post("/v1/task/complete", guards=[capability_guard], status_code=200, summary="End the attempt")
async def complete(request: Http, data: JSONBody[Completion]) -> CompletionReply:
    require_binding(claims_of(request), data.task_id, data.attempt)
    return await kernel_of(request).tasks.complete_one(data)


@post("/v1/task/events", guards=[capability_guard], status_code=200, summary="Say what changed, mid-task")
async def events(request: Http, data: JSONBody[EventBatch]) -> EventsAccepted:
    require_binding(claims_of(request), data.task_id, data.attempt)
    accepted = await kernel_of(request).effects.emit(data)
    if accepted is None:
        raise await kernel_of(request).tasks.fenced(_fence(data))
    return accepted


@post(
    "/v1/task/buffer-publish",
    guards=[capability_guard],
    status_code=200,
    summary="Publish a batch of rows by pointer",
)
async def buffer_publish(request: Http, data: JSONBody[BufferPublish]) -> BufferPublished:
    require_binding(claims_of(request), data.task_id, data.attempt)
    published = await kernel_of(request).effects.publish(data)
    if published is None:
        raise await kernel_of(request).tasks.fenced(_fence(data))
    return published


@dataclass
class _BodyOptional(Operation):
    """Documents that a request may come without a body."""

    def __post_init__(self) -> None:
        if isinstance(self.request_body, RequestBody):
            self.request_body.required = False


@post(
    "/v1/task/credentials",
    guards=[capability_guard],
    status_code=200,
    summary="Credentials for the attempt's own prefixes of objects, until its lease ends",
    operation_class=_BodyOptional,
)
async def task_credentials(
    request: Http, data: JSONBody[CredentialsRequest | None] = None
) -> Response[TaskCredentials]:
    claims, fence = claims_of(request), data or CredentialsRequest()
    require_binding(claims, fence.task_id or claims.task_id, fence.attempt or claims.attempt)
    minted = await kernel_of(request).credentials.mint(claims, fence.lease_token)
    return Response(minted, status_code=200, headers={"Cache-Control": "no-store"})


@get("/healthz", summary="Whether this process can work", responses=DEGRADED)
async def health(request: Http) -> Response[Health]:
    return await health_response(kernel_of(request))


@get(
    "/metrics",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    media_type=MediaType.TEXT,
    summary="Prometheus metrics of this process and of the queues",
)
async def metrics(request: Http) -> bytes:
    await _refresh_gauges(kernel_of(request))
    return metrics_text()


_GAUGE_SECONDS = 5.0
_refreshed = {"at": float("-inf")}


async def _refresh_gauges(kernel: Kernel) -> None:
    """At most every few seconds, however often it is scraped."""
    if time.monotonic() - _refreshed["at"] < _GAUGE_SECONDS:
        return
    _refreshed["at"] = time.monotonic()
    for name in kernel.settings.queues:
        view = await queue_view(kernel, name)
        QUEUE_DEPTH.labels(queue=name).set(view.depth)
        QUEUE_IN_FLIGHT.labels(queue=name).set(view.in_flight)
        QUEUE_OLDEST.labels(queue=name).set(view.oldest_age_seconds or 0)
        QUEUE_DEAD.labels(queue=name).set(view.dead_letters)
    in_flight, owed = await kernel.reads.gauges()
    IN_FLIGHT.clear()
    for row in in_flight:
        IN_FLIGHT.labels(operator=row["operator"], runtime=row["runtime"]).set(row["n"])
    OUTBOX_ROWS.set(owed)
    for level, jobs in (await kernel.pauses.levels()).items():
        JOBS_HELD_BACK.labels(level=level).set(jobs)


def _fence(data: EventBatch | BufferPublish) -> Release:
    return Release(task_id=data.task_id, attempt=data.attempt, lease_token=data.lease_token)


def _handles(data: SettleRequest) -> list[Handle]:
    return [Handle(item.message_id, item.receipt) for item in data.items]


def _require_queue(request: Http, queue: str | None) -> str:
    """A worker token for some runtimes reaches the queues of those runtimes only."""
    runtimes = worker_of(request).runtimes
    if queue is not None and runtimes is not None:
        settings = kernel_of(request).settings
        mine = (settings.runtime(name) for name in runtimes if name in settings.runtime_names)
        if queue not in {runtime.queue for runtime in mine if runtime.kind is RuntimeKind.QUEUE}:
            raise Forbidden(f"This worker token does not reach the queue {queue!r}.", code="queue_not_granted")
    return queue or ""


HANDLERS = [
    claim,
    fetch,
    heartbeat_batch,
    complete_batch,
    release_batch,
    task_data,
    report_operators,
    receive,
    extend,
    ack,
    nack,
    jwks,
    heartbeat,
    complete,
    events,
    buffer_publish,
    task_credentials,
    health,
    metrics,
]


def dispatcher(kernel: Kernel) -> Litestar:
    schemes: dict[str, Any] = {
        "workerToken": SecurityScheme(type="apiKey", name="X-Trace-Worker-Token", security_scheme_in="header"),
        "capability": SecurityScheme(type="apiKey", name="X-Trace-Task-Capability", security_scheme_in="header"),
        "apiKey": SecurityScheme(type="http", scheme="bearer", description="An API key of scope `platform`: `ilk_…`."),
    }
    return application(
        kernel,
        "dispatcher",
        HANDLERS,
        title="Interlock dispatcher",
        components=Components(security_schemes=schemes),
    )
