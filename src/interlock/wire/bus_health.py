"""How the routes of an org are."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from interlock.wire.base import Reply


class RouteStatus(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """Its oldest message has waited for more than twice `expected_drain_seconds`."""
    STALLED = "stalled"
    """It was longer at each of the last looks."""
    UNPOLLED = "unpolled"
    """Messages wait, and at none of the last looks was one in flight."""
    MISROUTED = "misrouted"
    """Commands were sent to it, and there is no such route."""


class RouteHealth(Reply, frozen=True, kw_only=True):
    target: str
    name: str
    status: RouteStatus
    since: datetime
    checked_at: datetime
    depth: int
    """Counted up to 10,000, as are the next two."""
    in_flight: int
    dead_letters: int
    oldest_age_seconds: float | None
    misroutes: int


class RouteHealthPage(Reply, frozen=True, kw_only=True):
    routes: list[RouteHealth]
    next_cursor: str | None
