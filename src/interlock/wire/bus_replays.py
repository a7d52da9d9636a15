"""Replays: which commands are sent again, why, and what became of them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import Meta, Struct

from interlock.wire.base import Reply, Request, ServiceName

MOST_COMMANDS = 1_000_000
_Moment = Annotated[datetime, Meta(extra_json_schema={"format": "date-time"})]
"""The OpenAPI document would call a moment in a nested body any text."""


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
    """All that are given must hold."""

    source: ServiceName | None = None
    """The service that has sent it."""
    target: ServiceName | None = None
    name: ServiceName | None = None
    since: _Moment | None = None
    """Accepted then or later; of dead letters, signed then or later."""
    until: _Moment | None = None
    """Before then."""
    command_ids: Annotated[list[UUID], Meta(min_length=1, max_length=1_000)] | None = None
    queue: ServiceName | None = None
    """Whose dead letters."""


class ReplayRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/replays`."""

    origin: ReplayOrigin
    reason: Annotated[str, Meta(min_length=1, max_length=200)]
    """Goes with each command, and into the record."""
    filters: ReplayFilters = ReplayFilters()
    dry_run: bool = False
    """Selects and counts, and sends nothing."""
    rate: Annotated[float, Meta(gt=0, le=1_000)] = 50.0
    """Commands per second, at most."""
    limit: Annotated[int, Meta(ge=1, le=MOST_COMMANDS)] = 100_000


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
    """Of the task on Spark that reads the archive."""
    selected: int | None
    sent: int
    """Delivered, or accepted to be."""
    failed: int
    """Refused; telemetry says why, for each."""
    detail: str | None
    created_at: datetime
    ended_at: datetime | None


class ReplayPage(Reply, frozen=True, kw_only=True):
    replays: list[ReplayView]
    next_cursor: str | None


class SelectedCommand(Struct, frozen=True):
    """A row of what the archive was asked for."""

    command_id: UUID
    source: str
    target: str
    name: str
    payload: str
