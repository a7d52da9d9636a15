"""The racing operations: calls to the kernel as a dispatcher or gateway makes them, each on its own kernel."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.access.principals import WorkerIdentity
from interlock.apps.app import App
from interlock.apps.dispatcher import services as dispatcher_services
from interlock.tasks.idempotency import Repeat
from interlock.tasks.queue import Handle, Received
from interlock.wire.attempts import (
    ClaimBatchReply,
    ClaimReply,
    ClaimRequest,
    Completion,
    CompletionGroup,
    Event,
    EventBatch,
    Heartbeat,
    Receipt,
    Release,
)
from interlock.wire.jobs import JobAccepted, JobRequest
from interlock.wire.tasks import RedriveRequest
from tests.interleavings.scheduler import OWN_GATE, stand_at

ORG = UUID(int=1)
QUEUE = "platform"
WORKER = WorkerIdentity("test", "test", None)
VISIBILITY_SECONDS = 60.0

Operation = Callable[[App], Awaitable[Any]]
End = Literal["Completed", "Failed", "Canceled"]


@dataclass(frozen=True)
class Lease:
    """A claimed attempt."""

    task_id: UUID
    attempt: int
    lease_token: UUID
    run_id: UUID

    @property
    def fence(self) -> dict[str, Any]:
        return {"task_id": self.task_id, "attempt": self.attempt, "lease_token": self.lease_token}


def lease_of(claim: ClaimReply) -> Lease:
    assert claim.task_id is not None, claim
    assert claim.attempt is not None, claim
    assert claim.lease_token is not None, claim
    assert claim.task is not None, claim
    assert claim.task.run_id is not None, claim
    return Lease(claim.task_id, claim.attempt, claim.lease_token, claim.task.run_id)


def one_pass(loop: str) -> Operation:
    """Runs one pass of a background loop and returns how much it did."""

    async def work(kernel: App) -> int:
        return await next(service for service in dispatcher_services(kernel) if service.name == loop).run_once()

    return work


# Operations of a holder


def complete(lease: Lease, status: End = "Completed", **more: Any) -> Operation:
    return lambda kernel: kernel.tasks.attempts.complete_one(Completion(**lease.fence, status=status, **more))


def complete_all(leases: Sequence[Lease]) -> Operation:
    return lambda kernel: kernel.tasks.attempts.complete(
        [Completion(**lease.fence, status="Completed") for lease in leases]
    )


def complete_group(leases: Sequence[Lease]) -> Operation:
    """Completes tasks as workers report success: by the indexes of a run, all under one lease."""
    first = leases[0]
    group = CompletionGroup(
        run_id=first.run_id,
        attempt=first.attempt,
        lease_token=first.lease_token,
        indexes=list(range(len(leases))),
        results=[Raw(b"1")] * len(leases),
    )
    return lambda kernel: kernel.tasks.attempts.complete([], [group])


def heartbeat(*leases: Lease) -> Operation:
    if len(leases) == 1:
        return lambda kernel: kernel.tasks.attempts.heartbeat_one(Heartbeat(**leases[0].fence))
    return lambda kernel: kernel.tasks.attempts.heartbeat([Heartbeat(**lease.fence) for lease in leases])


def release(lease: Lease) -> Operation:
    return lambda kernel: kernel.tasks.attempts.release([Release(**lease.fence)])


def emit(lease: Lease, *events: Event) -> Operation:
    return lambda kernel: kernel.tasks.effects.emit(EventBatch(**lease.fence, events=list(events)))


# Claims


def claim(*task_ids: UUID, message: Received | None = None) -> Operation:
    """Claims tasks. Returns the verdict for one task, or the whole reply for several."""

    async def work(kernel: App) -> ClaimReply | ClaimBatchReply:
        what = {"task_id": task_ids[0]} if len(task_ids) == 1 else {"task_ids": list(task_ids)}
        reply = await kernel.tasks.claims.claim(
            ClaimRequest(worker_id="test", message=_receipt(message), **what), WORKER
        )
        return reply.claims[0] if len(task_ids) == 1 else reply

    return work


def claim_range(
    run_id: UUID, start: int, end: int, *, limit: int | None = None, message: Received | None = None
) -> Operation:
    """Claims a range and returns the claimed indexes."""

    async def work(kernel: App) -> list[int | None]:
        request = ClaimRequest(
            worker_id="test", run_id=run_id, start=start, end=end, limit=limit, message=_receipt(message)
        )
        reply = await kernel.tasks.claims.claim(request, WORKER)
        return sorted(claim.task.index for claim in reply.claims if claim.task)  # type: ignore[type-var]

    return work


def _receipt(message: Received | None) -> Receipt | None:
    return Receipt(QUEUE, message.message_id, message.receipt) if message else None


# Operations of users


def cancel(task_id: UUID) -> Operation:
    return lambda kernel: kernel.tasks.actions.cancel(task_id, ORG)


def cancel_run(run_id: UUID) -> Operation:
    return lambda kernel: kernel.tasks.actions.cancel_run(run_id, ORG)


def retry(task_id: UUID) -> Operation:
    return lambda kernel: kernel.tasks.actions.retry(task_id, ORG)


def redrive_run(run_id: UUID) -> Operation:
    return lambda kernel: kernel.tasks.actions.redrive(RedriveRequest(run=str(run_id)), ORG)


def submit(tasks: Sequence[Any], *, key: str | None = None, **job: Any) -> Operation:
    async def work(kernel: App) -> JobAccepted:
        body = msgspec.json.encode({"operator": "echo", "tasks": list(tasks)} | job)
        request = msgspec.json.decode(body, type=JobRequest)
        return await kernel.jobs.submissions.submit(request, ORG, Repeat(key, body))

    return work


# Messages


def receive(limit: int = 1) -> Operation:
    return lambda kernel: kernel.tasks.queue.receive(
        QUEUE, wait_seconds=0, limit=limit, visibility_seconds=VISIBILITY_SECONDS
    )


def ack(*messages: Received) -> Operation:
    return lambda kernel: kernel.tasks.queue.ack(QUEUE, _handles(messages))


def nack(*messages: Received) -> Operation:
    return lambda kernel: kernel.tasks.queue.nack(QUEUE, _handles(messages), 0)


def extend(*messages: Received) -> Operation:
    return lambda kernel: kernel.tasks.queue.extend(QUEUE, _handles(messages), VISIBILITY_SECONDS)


def _handles(messages: Sequence[Received]) -> list[Handle]:
    return [Handle(message.message_id, message.receipt) for message in messages]


# Operations outside the kernel


def hold(sql: str, *arguments: Any) -> Operation:
    """A foreign transaction: takes locks by a statement, stops at its own gate, and releases them."""

    async def work(kernel: App) -> None:
        async with kernel.stores.database.transaction() as connection:
            await connection.execute(sql, *arguments)
            await stand_at(OWN_GATE)

    return work
