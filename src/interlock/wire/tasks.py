"""Tasks and their attempts, as users see and steer them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from msgspec import Meta, Raw, Struct

from interlock.wire.base import Outcome, Priority, Reply, Request, TaskStatus


class JobRef(Struct, frozen=True):
    dag_name: str | None
    name: str | None


class TaskView(Reply, frozen=True, kw_only=True):
    task_id: UUID
    job_id: UUID
    job: JobRef
    run_id: UUID | None
    index: int | None
    status: TaskStatus
    attempt: int
    dead: bool
    cancel_requested: bool
    priority: Priority
    payload: Raw
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
    """What the operator returned; JSON null until there is something, and in lists of tasks if it is packed."""
    result_bytes: int | None = None
    """Of a result that is too long for its row, and packed with others."""
    result_url: str | None = None
    """Gives the result to whoever has it, for a day. Where one task of a run is asked for by its index."""


class TaskPage(Reply, frozen=True, kw_only=True):
    """A page may be short, even empty, while `next_cursor` is set: follow it until it is null."""

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
    """Why a task is where it is: a stable `reason`, a sentence, and the facts behind it."""

    task_id: UUID
    status: TaskStatus
    reason: str
    detail: str
    facts: dict[str, Any]


class CancelRequest(Request, frozen=True, kw_only=True):
    """Cancel by filter. `dry_run` only counts."""

    job: str | None = None
    run: UUID | None = None
    status: TaskStatus | None = None
    dry_run: bool = False


class Changed(Reply, frozen=True, kw_only=True):
    """How many tasks a bulk action reached; `remaining` are handled in the background."""

    matched: int
    dry_run: bool = False
    remaining: bool = False


class RedriveRequest(Request, frozen=True, kw_only=True):
    """Give dead letters a fresh set of attempts."""

    job: str | None = None
    run: UUID | None = None
    error_class: str | None = None
    dry_run: bool = False
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 10_000
