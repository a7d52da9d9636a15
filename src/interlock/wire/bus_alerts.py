"""Alerts, their channels, and the health of routes."""

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
"""The queue of a route is not drained fast enough, or has no consumer."""
DEAD_LETTERS: Final = "interlock.queue.dead_letters"
"""Wake-ups of tasks of the org became dead letters: received too often without being settled."""
CRITICAL: Final = frozenset(name_of(kind) for kind in (CommandInvalid, TelemetryDropped, KeyExpiryImminent))
"""Events that need at least one channel."""
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
    """An e-mail address, or the name of a webhook of the org; empty for a dashboard."""


class AlertSettings(Request, frozen=True, kw_only=True):
    """`PUT /v1/alert-channels/{event}`: the channels of one kind of event. An empty list turns its alerts off."""

    channels: Annotated[list[Channel], Meta(max_length=20)]


class AlertSettingsView(Reply, frozen=True, kw_only=True):
    event: str
    critical: bool
    """The alert cannot be turned off."""
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
    """Number of events of this kind since the alert was opened."""
    sample: Raw
    """The first of them."""
    unrouted: bool
    """The alert is critical, has neither an e-mail address nor a webhook, and is flagged to operations."""
    resolved_at: datetime | None
    resolved_by: str | None


class AlertPage(Reply, frozen=True, kw_only=True):
    alerts: list[AlertView]
    next_cursor: str | None


class RouteStatus(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """The oldest message has waited for more than twice `expected_drain_seconds`."""
    STALLED = "stalled"
    """The queue has grown at each of the last checks."""
    UNPOLLED = "unpolled"
    """Messages wait, and none was in flight at any of the last checks."""
    MISROUTED = "misrouted"
    """Commands were sent to a route that does not exist."""


class RouteHealth(Reply, frozen=True, kw_only=True):
    target: str
    name: str
    status: RouteStatus
    since: datetime
    checked_at: datetime
    depth: int
    """Counted up to 10,000, like the next two."""
    in_flight: int
    dead_letters: int
    oldest_age_seconds: float | None
    misroutes: int


class RouteHealthPage(Reply, frozen=True, kw_only=True):
    routes: list[RouteHealth]
    next_cursor: str | None
