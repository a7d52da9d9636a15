"""A claimed task in the hands of this worker, from the claim until its report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from msgspec import UNSET, Raw, UnsetType

from interlock.client import Fence, TaskClient
from interlock.wire import Completion, Crash, Event, Heartbeat, Output, Release, TaskPayload
from interlock.workers.pace import Kind
from interlock.workers.protocol import Assignment

LONGEST_BEAT_SECONDS = 5.0
"""Heartbeats also bring the news of a cancel: a long lease is no reason to hear of it late."""


@dataclass(slots=True, eq=False)
class Held:
    slot: int
    task_id: UUID
    attempt: int
    lease_token: UUID
    task: TaskPayload
    kind: Kind
    estimate: float
    beat_every: float
    beat_at: float
    cancel: bool = False
    lost: bool = False
    """Fenced off: another attempt has it, so that nothing is reported any more."""
    ended: bool = False
    """Answered, canceled or lost while it still stood in a queue."""
    stop_asked_at: float = 0.0
    progress: float | None = None
    progress_text: str | None = None
    client: TaskClient | None = None
    """Made when the operator first emits."""

    @property
    def fence(self) -> Fence:
        return Fence(self.task_id, self.attempt, self.lease_token)

    def assignment(self) -> Assignment:
        task = self.task
        return Assignment(
            self.slot,
            self.task_id,
            self.attempt,
            task.operator,
            (task.job.dag_name, task.job.name),
            task.run_id,
            task.index,
            bytes(task.config),
            bytes(task.payload),
            [bytes(one) for one in task.inputs],
            task.outputs,
        )

    def completed(self, result: bytes, events: list[Event], outputs: list[Output]) -> Completion:
        return Completion(
            task_id=self.task_id,
            attempt=self.attempt,
            lease_token=self.lease_token,
            status="Completed",
            events=events,
            outputs=outputs,
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

    def leased_until(self, expires_at: datetime, usual_lease: float) -> None:
        self.beat_every = beat_interval(expires_at, usual_lease)
        self.beat_at = time.monotonic() + self.beat_every

    def seconds_to_timeout(self) -> float:
        return (self.task.timeout_at - datetime.now(UTC)).total_seconds()


def beat_interval(expires_at: datetime, usual_lease: float) -> float:
    """A third of the lease. The server's clock may be off from ours, hence the bounds."""
    left = (expires_at - datetime.now(UTC)).total_seconds()
    return max(min(left, usual_lease, 3 * LONGEST_BEAT_SECONDS) / 3, 0.1)


def bare_failure(completion: Completion, error_class: str, message: str) -> Completion:
    """The same attempt, failed, with nothing in it that a server could refuse."""
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
