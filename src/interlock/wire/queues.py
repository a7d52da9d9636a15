"""Queues, as workers receive from them and operators look at them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta, Raw, Struct

from interlock.wire.base import Internal, Name, OperatorName, Reply, WorkerId


class ReceiveRequest(Internal, frozen=True, kw_only=True):
    queue: Name
    worker_id: WorkerId
    max: Annotated[int, Meta(ge=1, le=100)] = 10
    wait_seconds: Annotated[float, Meta(ge=0, le=30)] = 20.0
    visibility_seconds: Annotated[float, Meta(ge=1, le=43_200)] = 30.0


class OperatorsReport(Internal, frozen=True, kw_only=True):
    """The operators that a worker can run beside the built-in ones."""

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
    """`extend`, `ack` and `nack` take the same shape; each reads the fields it needs."""

    queue: Name
    items: Annotated[list[MessageRef], Meta(min_length=1, max_length=1_000)]
    visibility_seconds: Annotated[float, Meta(ge=1, le=43_200)] = 30.0
    delay_seconds: Annotated[float, Meta(ge=0, le=43_200)] = 0.0


class Settled(Internal, frozen=True, kw_only=True):
    settled: int
    """Fewer than asked: the others' receipts are stale, their messages went to another receiver or are gone."""


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
