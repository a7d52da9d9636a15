"""Alerts: what a tenant is told out of band, and where."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final
from uuid import UUID

from msgspec import Meta, Raw

from interlock.wire.base import Reply, Request
from interlock.wire.bus_events import (
    AbuseDetected,
    CommandInvalid,
    ExecutedAfterAclRevoked,
    KeyExpiryImminent,
    TelemetryDropped,
    WarmPathBan,
    name_of,
)

ROUTE_UNHEALTHY: Final = "snavio.route.unhealthy"
"""A route's queue is not drained, or by nobody."""
DEAD_LETTERS: Final = "interlock.queue.dead_letters"
"""Wake-ups of the org's tasks were received too often without being settled."""
CRITICAL: Final = frozenset(name_of(kind) for kind in (CommandInvalid, TelemetryDropped, KeyExpiryImminent))
"""These are always told somewhere."""
ALERTED: Final = (
    *sorted(CRITICAL),
    name_of(ExecutedAfterAclRevoked),
    name_of(WarmPathBan),
    name_of(AbuseDetected),
    ROUTE_UNHEALTHY,
    DEAD_LETTERS,
)


class ChannelKind(StrEnum):
    DASHBOARD = "dashboard"
    EMAIL = "email"
    WEBHOOK = "webhook"


class Channel(Request, frozen=True, kw_only=True):
    kind: ChannelKind
    to: Annotated[str, Meta(max_length=254)] = ""
    """An address, or the name of one of the org's webhooks; of a dashboard nothing."""


class AlertSettings(Request, frozen=True, kw_only=True):
    """`PUT /v1/alert-channels/{event}`: where one kind of event is told. An empty list tells it nowhere."""

    channels: Annotated[list[Channel], Meta(max_length=20)]


class AlertSettingsView(Reply, frozen=True, kw_only=True):
    event: str
    critical: bool
    """It cannot be turned off."""
    channels: list[Channel]
    changed_by: str | None
    changed_at: datetime | None


class AlertSettingsList(Reply, frozen=True, kw_only=True):
    events: list[AlertSettingsView]


class AlertView(Reply, frozen=True, kw_only=True):
    alert_id: UUID
    org: str
    event: str
    critical: bool
    opened_at: datetime
    last_at: datetime
    told: int
    """Events of this kind since it was opened."""
    sample: Raw
    """The first of them."""
    unrouted: bool
    """Critical, and neither an address nor a webhook is told: operations is."""
    resolved_at: datetime | None
    resolved_by: str | None


class AlertPage(Reply, frozen=True, kw_only=True):
    alerts: list[AlertView]
    next_cursor: str | None
