"""The inbox of a service: receiving and settling messages, and dead letters."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from msgspec import Meta, Struct

from interlock.wire.base import Reply, Request
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
