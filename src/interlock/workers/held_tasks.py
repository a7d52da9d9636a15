"""Claimed tasks of this worker, from the claim until the report: heartbeats, and timeouts of children."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from types import MappingProxyType
from uuid import UUID

import msgspec
import structlog
from msgspec import UNSET, Raw, UnsetType

from interlock.client import Fence, TaskClient, WorkerClient
from interlock.errors import Forbidden, InterlockError, Unauthenticated
from interlock.wire import (
    ClaimGroup,
    Completion,
    Crash,
    Event,
    Heartbeat,
    HeartbeatBatch,
    HeartbeatBatchReply,
    Output,
    Release,
    TaskPayload,
    TaskSecret,
)
from interlock.workers.operators import ON_DATA, ON_SERVERS
from interlock.workers.pool import Pool
from interlock.workers.process import ChildProcess
from interlock.workers.protocol import Assignment, Outbound, Progressed, Work
from interlock.workers.puller import Kind, Pace
from interlock.workers.work_pool import WorkPool

Variables = Mapping[UUID, Mapping[str, str]]
"""Variables of the worker's environment that tasks may use, by org."""
NONE: Variables = MappingProxyType({})

LONGEST_BEAT_SECONDS = 5.0
"""Longest interval of heartbeats. They also report a cancel, which must not arrive late because the lease is long."""
PROGRESS_SECONDS = 1.0
"""New progress is sent this soon after the last heartbeat."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The data that tasks of one claim share."""

    attempt: int
    token: UUID
    expires_at: datetime
    timeout_at: datetime | None
    job_id: UUID
    org_id: UUID
    work: Work

    @property
    def kind(self) -> Kind:
        return self.work.operator, self.work.config


def lease_of(group: ClaimGroup, outbound: Outbound | None = None, variables: Variables = NONE) -> Lease:
    job = (group.job.dag_name, group.job.name)
    work = Work(
        group.operator,
        job,
        group.run_id,
        group.attempt,
        bytes(group.config),
        [],
        [],
        outbound=outbound if group.operator in ON_SERVERS else None,
        secrets=group.secrets,
        environment=dict(variables.get(group.org_id, {})),
    )
    return Lease(
        group.attempt, group.lease_token, group.lease_expires_at, group.timeout_at, group.job_id, group.org_id, work
    )


def lease_alone(
    task: TaskPayload,
    token: UUID,
    expires_at: datetime,
    secrets: Sequence[TaskSecret] = (),
    data_url: str | None = None,
    outbound: Outbound | None = None,
    variables: Variables = NONE,
) -> Lease:
    """Returns the lease of a task that shares its lease with no other, because its write grants name the task."""
    work = Work(
        task.operator,
        (task.job.dag_name, task.job.name),
        task.run_id,
        task.attempt,
        bytes(task.config),
        [msgspec.json.encode(one) for one in task.inputs],
        task.outputs,
        data_url if task.operator in ON_DATA else None,
        outbound=outbound if task.operator in ON_SERVERS else None,
        secrets=list(secrets),
        environment=dict(variables.get(task.org_id, {})),
    )
    return Lease(task.attempt, token, expires_at, task.timeout_at, task.job_id, task.org_id, work)


@dataclass(slots=True, eq=False)
class Held:
    slot: int
    task_id: UUID
    index: int | None
    payload: Raw
    lease: Lease
    kind: Kind
    estimate: float
    beat_every: float
    beat_at: float
    cancel: bool = False
    lost: bool = False
    """The lease is lost and another attempt may run the task, so nothing more is reported."""
    ended: bool = False
    """Answered, or canceled or lost while it was still queued."""
    stop_asked_at: float = 0.0
    paused: bool = False
    progress: float | None = None
    progress_text: str | None = None
    client: TaskClient | None = None
    """Created when the operator first emits."""

    @property
    def attempt(self) -> int:
        return self.lease.attempt

    @property
    def lease_token(self) -> UUID:
        return self.lease.token

    @property
    def fence(self) -> Fence:
        return Fence(self.task_id, self.attempt, self.lease_token)

    def assignment(self) -> Assignment:
        return Assignment(self.slot, self.task_id, self.index, bytes(self.payload))

    def completed(self, result: bytes, events: Sequence[Event] = (), outputs: Sequence[Output] = ()) -> Completion:
        return Completion(
            task_id=self.task_id,
            attempt=self.attempt,
            lease_token=self.lease_token,
            status="Completed",
            events=list(events),
            outputs=list(outputs),
            result=Raw(result),
        )

    def failed(self, error_class: str, message: str, crash: Crash | None = None) -> Completion:
        return Completion(
            task_id=self.task_id,
            attempt=self.attempt,
            lease_token=self.lease_token,
            status="Failed",
            error_class=error_class,
            error_message=message,
            crash=crash,
        )

    def canceled(self) -> Completion:
        return Completion(task_id=self.task_id, attempt=self.attempt, lease_token=self.lease_token, status="Canceled")

    def release(self) -> Release:
        return Release(task_id=self.task_id, attempt=self.attempt, lease_token=self.lease_token)

    def heartbeat(self, *, token: bool = False) -> Heartbeat:
        return Heartbeat(
            task_id=self.task_id,
            attempt=self.attempt,
            lease_token=self.lease_token,
            progress=self.progress,
            progress_text=self.progress_text,
            token=token,
        )

    def progressed(self, message: Progressed) -> None:
        if message.fraction is not None:
            self.progress = message.fraction
        self.progress_text = message.text
        last_beat = self.beat_at - self.beat_every
        self.beat_at = min(self.beat_at, last_beat + PROGRESS_SECONDS)

    def leased_until(self, expires_at: datetime, usual_lease: float) -> None:
        self.beat_every = beat_interval(expires_at, usual_lease)
        self.beat_at = time.monotonic() + self.beat_every

    def seconds_to_timeout(self) -> float:
        at = self.lease.timeout_at
        return inf if at is None else (at - datetime.now(UTC)).total_seconds()


def beat_interval(expires_at: datetime, usual_lease: float) -> float:
    """Returns a third of the lease, within bounds, since the server's clock may differ from ours."""
    left = (expires_at - datetime.now(UTC)).total_seconds()
    return max(min(left, usual_lease, 3 * LONGEST_BEAT_SECONDS) / 3, 0.1)


def bare_failure(completion: Completion, error_class: str, message: str) -> Completion:
    """Returns a failure of the same attempt, without any content that the server could refuse."""
    result: Raw | UnsetType = UNSET
    return Completion(
        task_id=completion.task_id,
        attempt=completion.attempt,
        lease_token=completion.lease_token,
        status="Failed",
        error_class=error_class,
        error_message=message,
        result=result,
    )


log = structlog.get_logger()

LOOK_SECONDS = 0.1
MAX_PER_CALL = 2_000


class Leases:
    def __init__(self, client: WorkerClient, pool: WorkPool, usual_lease: float) -> None:
        self._client, self._pool, self._usual_lease = client, pool, usual_lease

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.run_once()

    async def run_once(self) -> int:
        """Sends the heartbeats that are due. Most tasks end before their first one is."""
        now = time.monotonic()
        due = [held for held in self._pool.held.values() if held.beat_at <= now]
        for at in range(0, len(due), MAX_PER_CALL):
            await self._beat(due[at : at + MAX_PER_CALL])
        return len(due)

    async def _beat(self, due: list[Held]) -> None:
        try:
            reply = await self._client.heartbeat(HeartbeatBatch(items=[held.heartbeat() for held in due]))
        except (Unauthenticated, Forbidden):
            raise
        except InterlockError as error:
            log.warning("worker.heartbeat_failed", tasks=len(due), code=error.code, reason=error.detail)
        else:
            self._act_on(reply, due)

    def _act_on(self, reply: HeartbeatBatchReply, due: list[Held]) -> None:
        by_id = {held.task_id: held for held in due}
        for item in reply.items:
            held = by_id[item.task_id]
            held.leased_until(item.lease_expires_at, self._usual_lease)
            if item.cancel_requested:
                self._pool.cancel(held)
            elif item.paused != held.paused:
                self._pool.pause(held, item.paused)
        for refusal in reply.refused:
            self._pool.lose(by_id[refusal.task_id])


TIMEOUT_CHECK_SECONDS = 0.2
CANCEL_GRACE_SECONDS = 5.0
HOARD_SECONDS = 2.0
"""If every child has run one task for this long, the queue is released to other workers."""


class Watch:
    def __init__(self, pool: Pool, pace: Pace, cancel_grace: float = CANCEL_GRACE_SECONDS) -> None:
        self._pool, self._pace, self._grace = pool, pace, cancel_grace

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TIMEOUT_CHECK_SECONDS)
            self.run_once()

    def run_once(self) -> None:
        children = [child for child in self._pool.children if child.head is not None]
        for child in children:
            self._look_at(child)
        everyone_is_stuck = len(children) == len(self._pool.children) and all(
            child.head_seconds > HOARD_SECONDS for child in children
        )
        if self._pool.queue and everyone_is_stuck:
            self._pool.release_queue()

    def _look_at(self, child: ChildProcess) -> None:
        head = child.head
        if head is None or child.stopping is not None:
            return
        if head.seconds_to_timeout() <= 0:
            log.warning("worker.task_timed_out", task_id=str(head.task_id), attempt=head.attempt)
            child.kill("timeout", head.slot)
        elif self._ignores_the_stop(child, head):
            log.warning("worker.cancel_ignored", task_id=str(head.task_id), grace_seconds=self._grace)
            child.kill("lost" if head.lost else "cancel", head.slot)
        elif len(child.assigned) > 1 and child.stuck and not child.recalled:
            self._pace.learn(head.kind, child.head_seconds)
            child.recall()

    def _ignores_the_stop(self, child: ChildProcess, head: Held) -> bool:
        if not (head.cancel or head.lost):
            return False
        return time.monotonic() - max(head.stop_asked_at, child.head_since) > self._grace
