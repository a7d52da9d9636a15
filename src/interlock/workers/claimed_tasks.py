"""A claimed task of this worker, from the claim until its report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from types import MappingProxyType
from uuid import UUID

import msgspec
from msgspec import UNSET, Raw, UnsetType

from interlock.client import Fence, TaskClient
from interlock.wire.access import TaskSecret
from interlock.wire.attempts import ClaimGroup, Completion, Event, Heartbeat, Output, Release, TaskPayload
from interlock.wire.tasks import Crash
from interlock.workers.operators import ON_DATA, ON_SERVERS
from interlock.workers.protocol import Assignment, Outbound, Progressed, Work
from interlock.workers.task_durations import Kind

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

    @property
    def private(self) -> bool:
        """True if the work has values that operators of other orgs must not find in their process."""
        return bool(self.work.secrets or self.work.environment or self.work.data_url)

    @property
    def credentials(self) -> bool:
        """True if the work has passwords of the platform, which no operator of a user may find in its process."""
        proxy = self.work.outbound is not None and self.work.outbound.proxy is not None
        return proxy or self.work.data_url is not None


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
