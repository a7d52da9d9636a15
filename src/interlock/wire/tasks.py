"""Tasks, attempts and queues, for users, workers and operators."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from msgspec import Meta, Raw, Struct

from interlock.wire.base import Internal, Name, OperatorName, Outcome, Priority, Reply, Request, TaskStatus, WorkerId


class ReceiveRequest(Internal, frozen=True, kw_only=True):
    queue: Name
    worker_id: WorkerId
    max: Annotated[int, Meta(ge=1, le=100)] = 10
    wait_seconds: Annotated[float, Meta(ge=0, le=30)] = 20.0
    visibility_seconds: Annotated[float, Meta(ge=1, le=43_200)] = 30.0


class OperatorsReport(Internal, frozen=True, kw_only=True):
    """The operators that a worker can run in addition to the built-in ones."""

    queue: Name
    worker_id: WorkerId
    operators: Annotated[list[OperatorName], Meta(max_length=2000)]


class OperatorsReported(Internal, frozen=True, kw_only=True):
    operators: int


class QueueMessage(Struct, frozen=True):
    message_id: str
    receipt: str
    body: Raw
    receives: int
    enqueued_at: datetime


class ReceiveReply(Internal, frozen=True, kw_only=True):
    messages: list[QueueMessage]


class MessageRef(Struct, frozen=True):
    message_id: str
    receipt: str


class SettleRequest(Internal, frozen=True, kw_only=True):
    """Shared by `extend`, `ack` and `nack`; each reads the fields it needs."""

    queue: Name
    items: Annotated[list[MessageRef], Meta(min_length=1, max_length=1_000)]
    visibility_seconds: Annotated[float, Meta(ge=1, le=43_200)] = 30.0
    delay_seconds: Annotated[float, Meta(ge=0, le=43_200)] = 0.0


class Settled(Internal, frozen=True, kw_only=True):
    settled: int
    """Fewer than requested if receipts were stale: another consumer received the message, or it is gone."""


class QueueView(Reply, frozen=True, kw_only=True):
    queue: str
    depth: int
    in_flight: int
    oldest_age_seconds: float | None
    dead_letters: int


class QueueList(Reply, frozen=True, kw_only=True):
    queues: list[QueueView]


class DeadMessage(Reply, frozen=True, kw_only=True):
    message_id: str
    body: Raw
    receives: int
    enqueued_at: datetime
    dead_at: datetime


class DeadMessagePage(Reply, frozen=True, kw_only=True):
    messages: list[DeadMessage]


class JobRef(Struct, frozen=True):
    dag_name: str | None
    name: str | None


class TaskView(Reply, frozen=True, kw_only=True):
    task_id: UUID
    job_id: UUID
    job: JobRef
    run_id: UUID | None
    index: int | None
    origin_index: int | None = None
    """For a task of a rerun: its index in the run that had it first."""
    status: TaskStatus
    attempt: int
    dead: bool
    cancel_requested: bool
    priority: Priority
    payload: Raw
    start_date: str | None = None
    """For a task of a job with time partitions: the date of the first partition in its range."""
    end_date: str | None = None
    """The date of the last one, included."""
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    retry_at: datetime | None
    worker_id: str | None
    lease_expires_at: datetime | None
    progress: float | None
    progress_text: str | None
    error_class: str | None
    error_message: str | None
    result: Raw
    """Return value of the operator. JSON null until there is one, and in task lists if it is stored in a pack."""
    result_bytes: int | None = None
    """Size of a result that is too long for its row and is stored in a pack with others."""
    result_url: str | None = None
    """Anyone can read the result at this URL for one day. Set only when one task of a run is read by its index."""


class TaskPage(Reply, frozen=True, kw_only=True):
    """A page may be short or even empty while `next_cursor` is set: follow it until it is null."""

    tasks: list[TaskView]
    next_cursor: str | None


class Crash(Struct, frozen=True, omit_defaults=True):
    """How a worker's child process died."""

    exit_code: int | None = None
    signal: str | None = None
    oom: bool = False


class AttemptView(Reply, frozen=True, kw_only=True):
    attempt: int
    outcome: Outcome | None
    worker_id: str | None
    started_at: datetime
    ended_at: datetime | None
    error_class: str | None = None
    error_message: str | None = None
    crash: Crash | None = None


class AttemptPage(Reply, frozen=True, kw_only=True):
    attempts: list[AttemptView]


class Explanation(Reply, frozen=True, kw_only=True):
    """Why a task is in its state: a stable `reason`, a sentence, and supporting facts."""

    task_id: UUID
    status: TaskStatus
    reason: str
    detail: str
    facts: dict[str, Any]


class CancelRequest(Request, frozen=True, kw_only=True):
    """Cancels tasks by filter. `dry_run` only counts."""

    job: str | None = None
    run: str | None = None
    """By its id or a unique prefix."""
    status: TaskStatus | None = None
    dry_run: bool = False


class Changed(Reply, frozen=True, kw_only=True):
    """Number of tasks that a bulk action matched. `remaining`: more of them are handled in the background."""

    matched: int
    dry_run: bool = False
    remaining: bool = False


class RedriveRequest(Request, frozen=True, kw_only=True):
    """Gives dead letters a new set of attempts."""

    job: str | None = None
    run: str | None = None
    """By its id or a unique prefix."""
    error_class: str | None = None
    dry_run: bool = False
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
