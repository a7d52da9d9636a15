"""Webhooks: registration, events, deliveries, and the signature of a call.

    X-Interlock-Signature: t=<unix seconds>,v1=<hex of HMAC-SHA256 over "{t}.{body}">[,v1=…]

During a rotation there is one v1 for each secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final
from uuid import UUID

from msgspec import Meta, Raw, field

from interlock.wire.base import Name, Reply, Request
from interlock.wire.bus_events import AlertView
from interlock.wire.jobs import RunView

SIGNATURE: Final = "X-Interlock-Signature"
DELIVERY: Final = "X-Interlock-Delivery"
EVENT: Final = "X-Interlock-Event"
KEY_VERSION: Final = "X-Interlock-Key-Version"

_WRITTEN: Final = re.compile(r"t=([0-9]{1,12})((?:,v1=[0-9a-fA-F]{64}){1,5})", re.ASCII)


def signed(secrets: Sequence[str], moment: int, body: bytes) -> str:
    return f"t={moment}" + "".join(f",v1={_digest(secret, str(moment), body)}" for secret in secrets)


def signed_at(secrets: Sequence[str], signature: str, body: bytes) -> int | None:
    """Returns the time of signing in Unix seconds, or None if no secret matches. Every pair is compared in constant
    time, so that timing reveals nothing about a digest.
    """
    written = _WRITTEN.fullmatch(signature)
    if written is None:
        return None
    given, right = written[2].lower().split(",v1=")[1:], False
    for secret in secrets:
        expected = _digest(secret, written[1], body)
        for one in given:
            right |= hmac.compare_digest(expected, one)
    return int(written[1]) if right else None


def _digest(secret: str, moment: str, body: bytes) -> str:
    return hmac.new(secret.encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()


Share = Annotated[float, Meta(gt=0, le=1)]


class RunEnd(StrEnum):
    """Outcomes of a run that a webhook can subscribe to."""

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
    """Run outcomes to report; empty to report only shares."""
    dag: Name | None = None
    """Only runs of jobs of this DAG."""
    job: Name | None = None
    """Only runs of jobs with this name."""
    failed_share: Share | None = None
    """Report once per run, when this share of its tasks has failed permanently."""
    done_share: Share | None = None
    """Report once per run, when this share of its tasks has ended, with any outcome."""
    paused: bool = False


class RotateRequest(Request, frozen=True, kw_only=True):
    overlap_seconds: Annotated[float, Meta(ge=0, le=30 * 86_400)] = 86_400.0
    """How long calls are also signed with the old secret."""


class DeliveryRedrive(Request, frozen=True, kw_only=True):
    delivery_ids: Annotated[list[UUID], Meta(min_length=1, max_length=1_000)] | None = None
    """Deliveries to retry; by default, the oldest dead ones."""
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 1_000


class WebhookView(Reply, frozen=True, kw_only=True):
    webhook_id: UUID
    name: str
    url: str
    """Only scheme and host if the caller may not change the webhook: a path often contains a key."""
    events: list[RunEnd]
    dag: str | None
    job: str | None
    failed_share: float | None
    done_share: float | None
    paused: bool
    key_version: int
    previous_until: datetime | None
    """Time until which calls are also signed with the previous secret."""
    failures: int
    """Consecutive failed calls."""
    resting_until: datetime | None
    """No calls are made before this time because too many have failed."""
    created_by: str
    created_at: datetime


class WebhookPage(Reply, frozen=True, kw_only=True):
    webhooks: list[WebhookView]
    next_cursor: str | None


class WebhookSecret(Reply, frozen=True, kw_only=True):
    secret: str
    """Shown only once."""
    view: WebhookView


class DeliveryView(Reply, frozen=True, kw_only=True):
    delivery_id: UUID
    webhook_id: UUID
    event: WebhookEventType
    run_id: UUID | None
    status: DeliveryStatus
    tries: int
    due_at: datetime | None
    """Time of the next try. While a try is in progress, the time when it counts as lost."""
    created_at: datetime
    ended_at: datetime | None
    http_status: int | None
    reason: str | None
    """Reason why the last try failed."""
    body: Raw
    """The body exactly as sent."""


class DeliveryPage(Reply, frozen=True, kw_only=True):
    deliveries: list[DeliveryView]
    next_cursor: str | None


class WebhookJob(Reply, frozen=True, kw_only=True):
    job_id: UUID
    dag_name: str | None
    name: str | None


class WebhookEvent(Reply, frozen=True, kw_only=True):
    """The body of a webhook call. A repeated call has the same `id` and is identical byte for byte."""

    id: UUID
    type: WebhookEventType
    created_at: datetime
    org: str
    webhook: str
    job: WebhookJob | None = None
    run: RunView | None = None
    """The run at the time of the event."""
    alert: AlertView | None = None
    """Only for `bus.alert`."""
