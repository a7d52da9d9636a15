"""What races: the kernel's operations as a dispatcher or gateway calls them, each to be run on a kernel of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.access.principals import WorkerIdentity
from interlock.adapters.queue import Handle, Received
from interlock.wire import (
    ClaimBatchReply,
    ClaimReply,
    ClaimRequest,
    Completion,
    CompletionGroup,
    Event,
    EventBatch,
    Heartbeat,
    JobAccepted,
    JobRequest,
    Receipt,
    RedriveRequest,
    Release,
)
from interlock.wiring import Kernel
from tests.interleavings.scheduler import OWN_GATE, stand_at

ORG = UUID(int=1)
QUEUE = "platform"
WORKER = WorkerIdentity("test", "test", None)
VISIBILITY_SECONDS = 60.0

Operation = Callable[[Kernel], Awaitable[Any]]
End = Literal["Completed", "Failed", "Canceled"]


@dataclass(frozen=True)
class Lease:
    """An attempt that was claimed."""

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
    """One pass of a background loop; the answer is how much it did."""

    async def work(kernel: Kernel) -> int:
        return await next(service for service in kernel.services() if service.name == loop).run_once()

    return work


# What the holder of an attempt does


def complete(lease: Lease, status: End = "Completed", **more: Any) -> Operation:
    return lambda kernel: kernel.tasks.complete_one(Completion(**lease.fence, status=status, **more))


def complete_all(leases: Sequence[Lease]) -> Operation:
    return lambda kernel: kernel.tasks.complete([Completion(**lease.fence, status="Completed") for lease in leases])


def complete_group(leases: Sequence[Lease]) -> Operation:
    """As workers report what went well: by the indexes of a run, all under one lease."""
    first = leases[0]
    group = CompletionGroup(
        run_id=first.run_id,
        attempt=first.attempt,
        lease_token=first.lease_token,
        indexes=list(range(len(leases))),
        results=[Raw(b"1")] * len(leases),
    )
    return lambda kernel: kernel.tasks.complete([], [group])


def heartbeat(*leases: Lease) -> Operation:
    if len(leases) == 1:
        return lambda kernel: kernel.tasks.heartbeat_one(Heartbeat(**leases[0].fence))
    return lambda kernel: kernel.tasks.heartbeat([Heartbeat(**lease.fence) for lease in leases])


def release(lease: Lease) -> Operation:
    return lambda kernel: kernel.tasks.release([Release(**lease.fence)])


def emit(lease: Lease, *events: Event) -> Operation:
    return lambda kernel: kernel.effects.emit(EventBatch(**lease.fence, events=list(events)))


# Claims


def claim(*task_ids: UUID, message: Received | None = None) -> Operation:
    """One task: its verdict. Several: the whole reply."""

    async def work(kernel: Kernel) -> ClaimReply | ClaimBatchReply:
        what = {"task_id": task_ids[0]} if len(task_ids) == 1 else {"task_ids": list(task_ids)}
        reply = await kernel.claims.claim(ClaimRequest(worker_id="test", message=_receipt(message), **what), WORKER)
        return reply.claims[0] if len(task_ids) == 1 else reply

    return work


def claim_range(
    run_id: UUID, start: int, end: int, *, limit: int | None = None, message: Received | None = None
) -> Operation:
    """The indexes that were claimed."""

    async def work(kernel: Kernel) -> list[int | None]:
        request = ClaimRequest(
            worker_id="test", run_id=run_id, start=start, end=end, limit=limit, message=_receipt(message)
        )
        reply = await kernel.claims.claim(request, WORKER)
        return sorted(claim.task.index for claim in reply.claims if claim.task)  # type: ignore[type-var]

    return work


def _receipt(message: Received | None) -> Receipt | None:
    return Receipt(QUEUE, message.message_id, message.receipt) if message else None


# What users do


def cancel(task_id: UUID) -> Operation:
    return lambda kernel: kernel.actions.cancel(task_id, ORG)


def cancel_run(run_id: UUID) -> Operation:
    return lambda kernel: kernel.actions.cancel_run(run_id, ORG)


def retry(task_id: UUID) -> Operation:
    return lambda kernel: kernel.actions.retry(task_id, ORG)


def redrive_run(run_id: UUID) -> Operation:
    return lambda kernel: kernel.actions.redrive(RedriveRequest(run=run_id), ORG)


def submit(tasks: Sequence[Any], *, key: str | None = None, **job: Any) -> Operation:
    """What was accepted, and whether it is an earlier answer."""

    async def work(kernel: Kernel) -> tuple[JobAccepted, bool]:
        body = msgspec.json.encode({"operator": "echo", "tasks": list(tasks)} | job)
        request = msgspec.json.decode(body, type=JobRequest)
        submitted = await kernel.submissions.submit(request, ORG, idempotency_key=key, body=body)
        return msgspec.json.decode(submitted.body, type=JobAccepted), submitted.replayed

    return work


# Messages


def receive(most: int = 1) -> Operation:
    return lambda kernel: kernel.queue.receive(QUEUE, wait_seconds=0, most=most, visibility_seconds=VISIBILITY_SECONDS)


def ack(*messages: Received) -> Operation:
    return lambda kernel: kernel.queue.ack(QUEUE, _handles(messages))


def nack(*messages: Received) -> Operation:
    return lambda kernel: kernel.queue.nack(QUEUE, _handles(messages), 0)


def extend(*messages: Received) -> Operation:
    return lambda kernel: kernel.queue.extend(QUEUE, _handles(messages), VISIBILITY_SECONDS)


def _handles(messages: Sequence[Received]) -> list[Handle]:
    return [Handle(message.message_id, message.receipt) for message in messages]


# Not of the kernel


def hold(sql: str, *arguments: Any) -> Operation:
    """Somebody else's transaction: takes locks by a statement, stands at its own gate, and lets go."""

    async def work(kernel: Kernel) -> None:
        async with kernel.database.transaction() as connection:
            await connection.execute(sql, *arguments)
            await stand_at(OWN_GATE)

    return work
