"""Commands that were accepted: inboxes, dead letters and replays."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

from msgspec import Meta, Struct

from interlock.wire.base import Reply, Request, ServiceName
from interlock.wire.tasks import DeadMessage, MessageRef, QueueMessage

Visibility = Annotated[float, Meta(ge=1, le=43_200)]
MessageId = Annotated[str, Meta(pattern=r"^[0-9]{1,19}$(?!\n)")]


class InboxReceive(Request, frozen=True, kw_only=True):
    """`POST /v1/inbox/{queue}/receive`."""

    max: Annotated[int, Meta(ge=1, le=100)] = 10
    wait_seconds: Annotated[float, Meta(ge=0, le=20)] = 10.0
    """How long to wait for the first message."""
    visibility_seconds: Visibility = 30.0
    """The visibility timeout: how long no other receiver gets the messages."""


class InboxExtend(Request, frozen=True, kw_only=True):
    items: Annotated[list[MessageRef], Meta(min_length=1, max_length=1_000)]
    visibility_seconds: Visibility = 30.0
    """Counted from now."""


class InboxAck(Request, frozen=True, kw_only=True):
    items: Annotated[list[MessageRef], Meta(min_length=1, max_length=1_000)]


class InboxNack(Request, frozen=True, kw_only=True):
    items: Annotated[list[MessageRef], Meta(min_length=1, max_length=1_000)]
    delay_seconds: Annotated[float, Meta(ge=0, le=43_200)] = 0.0
    """Delay before the messages are delivered again."""


class DeadSelection(Request, frozen=True, kw_only=True):
    """Selects dead letters: those named, or the oldest."""

    message_ids: Annotated[list[MessageId], Meta(min_length=1, max_length=1_000)] | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 1_000


class InboxMessages(Reply, frozen=True, kw_only=True):
    messages: list[QueueMessage]


class InboxSettled(Reply, frozen=True, kw_only=True):
    settled: int
    """Number of settled messages. Messages with a stale receipt are not counted: another receiver has them, or they are
    gone."""


class InboxDead(Reply, frozen=True, kw_only=True):
    messages: list[DeadMessage]
    next_cursor: str | None


class DeliveredMetadata(Struct, frozen=True, kw_only=True):
    id: UUID
    timestamp: datetime
    type: str
    version_id: str
    hmac: str
    replayed: bool = False
    replay_id: UUID | None = None
    replay_reason: str | None = None


class DeliveredCommand(Struct, frozen=True, kw_only=True):
    source: str
    """`org/service`, from the verified credentials of the sender."""
    target: str
    name: str
    payload: Any
    """Any: only the two services know its type."""


class DeliveredMessage(Struct, frozen=True, kw_only=True):
    """The body of a message in a target's queue."""

    metadata: DeliveredMetadata
    command: DeliveredCommand


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
