"""Webhooks: what an org is told of its runs, where, and what became of each call."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import Meta, Raw, field

from interlock.wire.base import Name, Reply, Request
from interlock.wire.bus_alerts import AlertView
from interlock.wire.jobs import RunView

Share = Annotated[float, Meta(gt=0, le=1)]


class RunEnd(StrEnum):
    """Ends of a run that a webhook may ask for."""

    COMPLETED = "run.completed"
    COMPLETED_WITH_FAILURES = "run.completed_with_failures"
    FAILED = "run.failed"
    CANCELED = "run.canceled"


class WebhookEventType(StrEnum):
    COMPLETED = "run.completed"
    COMPLETED_WITH_FAILURES = "run.completed_with_failures"
    FAILED = "run.failed"
    CANCELED = "run.canceled"
    FAILED_SHARE = "run.failed_share"
    DONE_SHARE = "run.done_share"
    ALERT = "bus.alert"
    TEST = "webhook.test"


class DeliveryStatus(StrEnum):
    PENDING = "Pending"
    DELIVERED = "Delivered"
    DEAD = "Dead"


def _every_end() -> list[RunEnd]:
    return list(RunEnd)


class WebhookRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/webhooks`."""

    name: Name
    url: Annotated[str, Meta(min_length=1, max_length=2_000)]
    events: Annotated[list[RunEnd], Meta(max_length=10)] = field(default_factory=_every_end)
    """Which ends of runs are told; none, for shares alone."""
    dag: Name | None = None
    """Only runs of jobs of this DAG."""
    job: Name | None = None
    """Only runs of jobs with this name."""
    failed_share: Share | None = None
    """Told once per run, when so much of it has failed for good."""
    done_share: Share | None = None
    """Told once per run, when so much of it has ended, however."""
    paused: bool = False


class RotateRequest(Request, frozen=True, kw_only=True):
    overlap_seconds: Annotated[float, Meta(ge=0, le=30 * 86_400)] = 86_400.0
    """How long calls are signed with the old secret, too."""


class DeliveryRedrive(Request, frozen=True, kw_only=True):
    delivery_ids: Annotated[list[UUID], Meta(min_length=1, max_length=1_000)] | None = None
    """Only these; else the oldest that are dead."""
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 1_000


class WebhookView(Reply, frozen=True, kw_only=True):
    webhook_id: UUID
    name: str
    url: str
    """Scheme and host alone, for who may not change it: a path often holds a key."""
    events: list[RunEnd]
    dag: str | None
    job: str | None
    failed_share: float | None
    done_share: float | None
    paused: bool
    key_version: int
    previous_until: datetime | None
    """How long calls are signed with the secret before this one, too."""
    failures: int
    """Calls in a row that came to nothing."""
    resting_until: datetime | None
    """It has failed so often that it is not called before then."""
    created_by: str
    created_at: datetime


class WebhookPage(Reply, frozen=True, kw_only=True):
    webhooks: list[WebhookView]
    next_cursor: str | None


class WebhookSecret(Reply, frozen=True, kw_only=True):
    secret: str
    """The only time it is shown."""
    view: WebhookView


class DeliveryView(Reply, frozen=True, kw_only=True):
    delivery_id: UUID
    webhook_id: UUID
    event: WebhookEventType
    run_id: UUID | None
    status: DeliveryStatus
    tries: int
    due_at: datetime | None
    """When it is tried next, or is taken to be lost if a try is under way."""
    created_at: datetime
    ended_at: datetime | None
    http_status: int | None
    reason: str | None
    """Why the last try came to nothing."""
    body: Raw
    """As it is sent."""


class DeliveryPage(Reply, frozen=True, kw_only=True):
    deliveries: list[DeliveryView]
    next_cursor: str | None


class WebhookJob(Reply, frozen=True, kw_only=True):
    job_id: UUID
    dag_name: str | None
    name: str | None


class WebhookEvent(Reply, frozen=True, kw_only=True):
    """The body of a call. A call that comes again has the same `id`, and is the same to the byte."""

    id: UUID
    type: WebhookEventType
    created_at: datetime
    org: str
    webhook: str
    job: WebhookJob | None = None
    run: RunView | None = None
    """As it was when this happened."""
    alert: AlertView | None = None
    """Of a `bus.alert`."""
