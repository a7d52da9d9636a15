"""Actions on all tasks or runs that match a filter."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta

from interlock.wire.base import Priority, Reply, Request, TaskStatus
from interlock.wire.tasks import JobRef

_Text = Annotated[str, Meta(min_length=1, max_length=200)]


class BulkKind(StrEnum):
    RETRY = "retry"
    """Run failed tasks again now: those that wait for a retry, and dead letters."""
    REDRIVE = "redrive"
    """Give dead letters new attempts."""
    CANCEL = "cancel"
    REPRIORITISE = "reprioritise"
    PAUSE = "pause"
    RESUME = "resume"


class BulkState(StrEnum):
    RUNNING = "Running"
    COMPLETED = "Completed"
    CANCELED = "Canceled"


class BulkFilter(Request, frozen=True, kw_only=True):
    """Selects tasks or runs. At least one of `run`, `job`, `dag` and `operator`; the other fields narrow it."""

    job: _Text | None = None
    """Id, name, or `dag/name`."""
    dag: _Text | None = None
    run: UUID | None = None
    operator: _Text | None = None
    status: TaskStatus | None = None
    error_class: _Text | None = None
    """Error class of the last attempt."""
    worker: _Text | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None


class BulkRequest(Request, frozen=True, kw_only=True):
    kind: BulkKind
    filter: BulkFilter
    priority: Priority | None = None
    """The new priority; only for `reprioritise`."""
    reason: Annotated[str, Meta(max_length=1_000)] | None = None
    dry_run: bool = False


class BulkSample(Reply, frozen=True, kw_only=True):
    """A task that matches, or for actions on runs a run."""

    task_id: UUID | None
    run_id: UUID | None
    job_id: UUID
    job: JobRef
    index: int | None
    status: TaskStatus | None
    error_class: str | None


class BulkPreview(Reply, frozen=True, kw_only=True):
    """The result of a dry run. `more`: the count stopped at its limit, and more may match."""

    kind: BulkKind
    unit: Literal["tasks", "runs"]
    matched: int
    more: bool
    samples: list[BulkSample]


class BulkView(Reply, frozen=True, kw_only=True):
    """A bulk operation: its progress, and after its end its audit record."""

    operation_id: UUID
    kind: BulkKind
    unit: Literal["tasks", "runs"]
    state: BulkState
    filter: BulkFilter
    priority: Priority | None
    reason: str | None
    requested_by: str
    matched: int
    changed: int
    skipped: int
    """Matched, but changed by somebody else in between."""
    expected: int | None
    """Upper bound of `matched` when the operation began; null if unknown."""
    progress: float | None
    """Share of the run that was walked, for a filter with `run`."""
    cancel_requested: bool
    created_at: datetime
    ended_at: datetime | None


class BulkPage(Reply, frozen=True, kw_only=True):
    operations: list[BulkView]
    next_cursor: str | None
