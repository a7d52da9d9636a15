"""Replays: selection, reason and progress of commands that are sent again."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import Meta, Struct

from interlock.wire.base import Reply, Request, ServiceName

MAX_COMMANDS = 1_000_000
_Moment = Annotated[datetime, Meta(extra_json_schema={"format": "date-time"})]
"""Without the explicit format, the OpenAPI document describes a time in a nested body as plain text."""


class ReplayOrigin(StrEnum):
    ARCHIVE = "archive"
    DEAD_LETTERS = "dead-letters"


class ReplayState(StrEnum):
    SELECTING = "Selecting"
    SENDING = "Sending"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELED = "Canceled"


class ReplayFilters(Request, frozen=True, kw_only=True, omit_defaults=True):
    """A command must match all filters that are set."""

    source: ServiceName | None = None
    """The service that sent the command."""
    target: ServiceName | None = None
    name: ServiceName | None = None
    since: _Moment | None = None
    """Accepted at this time or later; dead letters: signed at this time or later."""
    until: _Moment | None = None
    """Accepted or signed before this time."""
    command_ids: Annotated[list[UUID], Meta(min_length=1, max_length=1_000)] | None = None
    queue: ServiceName | None = None
    """The queue of the dead letters."""


class ReplayRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/replays`."""

    origin: ReplayOrigin
    reason: Annotated[str, Meta(min_length=1, max_length=200)]
    """Part of each command and of the record of the replay."""
    filters: ReplayFilters = ReplayFilters()
    dry_run: bool = False
    """Selects and counts commands, but sends none."""
    rate: Annotated[float, Meta(gt=0, le=1_000)] = 50.0
    """Maximum commands per second."""
    limit: Annotated[int, Meta(ge=1, le=MAX_COMMANDS)] = 100_000


class ReplayView(Reply, frozen=True, kw_only=True):
    replay_id: UUID
    origin: ReplayOrigin
    filters: ReplayFilters
    reason: str
    operator: str
    dry_run: bool
    rate: float
    limit: int
    state: ReplayState
    task_id: UUID | None
    """The Spark task that reads the archive."""
    selected: int | None
    sent: int
    """Commands that were delivered, escalated or found to be duplicates."""
    failed: int
    """Commands that were refused; telemetry reports the reason of each."""
    detail: str | None
    created_at: datetime
    ended_at: datetime | None


class ReplayPage(Reply, frozen=True, kw_only=True):
    replays: list[ReplayView]
    next_cursor: str | None


class SelectedCommand(Struct, frozen=True):
    """A row of the selection from the archive."""

    command_id: UUID
    source: str
    target: str
    name: str
    payload: str
