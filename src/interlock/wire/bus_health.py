"""Health of the routes of an org."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from interlock.wire.base import Reply


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
