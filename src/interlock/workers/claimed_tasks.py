"""A claimed task of this worker, from the claim until its report, and how long such tasks take.

The mean duration per operator and config decides how many tasks to claim. Slow tasks are claimed one per free child, so
that other workers get the rest. Fast ones are claimed by the hundreds, so that one round trip serves a whole batch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
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
from interlock.wire.base import LONGEST_SECONDS
from interlock.wire.tasks import Crash
from interlock.workers.logs import AttemptLog
from interlock.workers.operators import ON_DATA, ON_SERVERS
from interlock.workers.protocol import Assignment, Outbound, Progressed, Work

Kind = tuple[str, bytes]
"""An operator with its config: tasks of one kind take about the same time."""

WEIGHT = 0.1
"""Weight of the newest duration in the mean."""
MIN_SECONDS = 20e-6
"""Cost of a task that does nothing."""
REMEMBERED = 1000
MAX_TASKS = 1000
"""Most tasks of one claim."""
MAX_BYTES = 4 << 20
"""Most payload bytes that one claim should return."""


class Pace:
    def __init__(self, tasks_per_message: float) -> None:
        self._means: OrderedDict[Kind, float] = OrderedDict()
        self._kinds: OrderedDict[UUID, Kind] = OrderedDict()
        self._bytes: OrderedDict[Kind, float] = OrderedDict()
        self.tasks_per_message = tasks_per_message
        self.latest: Kind | None = None
        """The kind last claimed: the best guess for the next message."""

    def seconds(self, kind: Kind | None) -> float | None:
        """Returns the mean duration; None for a kind of which no task has finished."""
        return None if kind is None else self._means.get(kind)

    def learn(self, kind: Kind, seconds: float) -> None:
        seconds = max(seconds, MIN_SECONDS)
        mean = self._means.get(kind)
        if mean is None:
            self._means[kind] = seconds
            _forget_oldest(self._means)
        else:
            self._means[kind] = mean + WEIGHT * (seconds - mean)

    def weigh(self, kind: Kind, payload_bytes: float) -> None:
        self._bytes[kind] = payload_bytes
        _forget_oldest(self._bytes)

    def most_by_size(self, kind: Kind | None) -> int:
        """Returns how many tasks of a kind fit into one reply, by the size of the latest payloads."""
        known = None if kind is None else self._bytes.get(kind)
        return MAX_TASKS if known is None else min(max(int(MAX_BYTES / max(known, 1)), 1), MAX_TASKS)

    def kind_of_job(self, job_id: UUID | None) -> Kind | None:
        return None if job_id is None else self._kinds.get(job_id)

    def claimed(self, job_id: UUID, kind: Kind) -> None:
        self.latest = kind
        if self._kinds.get(job_id) != kind:
            self._kinds[job_id] = kind
            _forget_oldest(self._kinds)

    def message_held(self, tasks: int) -> None:
        self.tasks_per_message += WEIGHT * (max(tasks, 1) - self.tasks_per_message)


def _forget_oldest(known: OrderedDict[Kind, float] | OrderedDict[UUID, Kind]) -> None:
    if len(known) > REMEMBERED:
        known.popitem(last=False)


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
    always_on: bool = False
    """True for the task of an always-on source, which has no hard timeout and never ends."""

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
        partition=group.partition,
    )
    return Lease(
        group.attempt,
        group.lease_token,
        group.lease_expires_at,
        group.timeout_at,
        group.job_id,
        group.org_id,
        work,
        _always_on(group.timeout_at),
    )


def _always_on(timeout_at: datetime | None) -> bool:
    """Only tasks of always-on sources may run longer than any timeout that a job can set."""
    return timeout_at is not None and (timeout_at - datetime.now(UTC)).total_seconds() > LONGEST_SECONDS


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
        partition=task.partition,
    )
    return Lease(
        task.attempt,
        token,
        expires_at,
        task.timeout_at,
        task.job_id,
        task.org_id,
        work,
        _always_on(task.timeout_at),
    )


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
    log: AttemptLog | None = None
    """Created when the operator first prints."""

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
