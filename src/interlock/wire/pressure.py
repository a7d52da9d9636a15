"""Backpressure and backfills."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import Meta

from interlock.wire.base import Position, Priority, Reply, Request, RunState
from interlock.wire.jobs import Counts
from interlock.wire.tasks import JobRef


class PauseLevel(StrEnum):
    BULK = "bulk"
    """Only bulk work is held back."""
    ALL = "all"


class PauseView(Reply, frozen=True, kw_only=True):
    """A job that gets no new tasks, because a queue downstream of it is past its limit."""

    job_id: UUID
    job: JobRef
    cause_id: UUID
    cause: JobRef
    """Whose queue it is."""
    level: PauseLevel
    path: list[str]
    """Jobs from the one that is held back down to the cause, in the direction of the data."""
    reason: str
    since: datetime


class PausePage(Reply, frozen=True, kw_only=True):
    pauses: list[PauseView]
    next_cursor: str | None


class BackfillState(StrEnum):
    """Of the handing out of its tasks; `run_state` tells how they fare."""

    RUNNING = "Running"
    PAUSED = "Paused"
    DONE = "Done"
    CANCELED = "Canceled"
    FAILED = "Failed"
    """Its tasks could not be made; `run_reason` says why."""


class BackfillRequest(Request, frozen=True, kw_only=True):
    """Which scopes of a job to compute again: all that have a position from `start` to `end`."""

    start: Position
    end: Position
    priority: Priority = Priority.BULK
    reason: Annotated[str, Meta(max_length=1_000)] | None = None
    dry_run: bool = False


class BackfillScope(Reply, frozen=True, kw_only=True):
    input_index: int
    start: int
    end: int


class BackfillView(Reply, frozen=True, kw_only=True):
    run_id: UUID
    job_id: UUID
    job: JobRef
    start: int
    end: int
    priority: Priority
    reason: str | None
    requested_by: str
    state: BackfillState
    made: int
    """Tasks that were handed out so far."""
    total: int | None
    """Tasks that it has. Until they are there, as counted at the start: null when there were too many to count."""
    counts: Counts
    run_state: RunState
    run_reason: str | None = None
    """Why the run was given up."""
    created_at: datetime
    ended_at: datetime | None


class BackfillAnswer(Reply, frozen=True, kw_only=True):
    """How much there is to compute, and, unless that was all that was asked, the backfill that does it."""

    scopes: int
    more: bool
    """There are more than were counted."""
    first: list[BackfillScope]
    dry_run: bool
    backfill: BackfillView | None = None


class BackfillPage(Reply, frozen=True, kw_only=True):
    backfills: list[BackfillView]
    next_cursor: str | None
