"""The registry of the command bus: services, routes, ACLs, limits, keys, and their changelog.

A request contains the complete entry: an omitted field has its default. The changelog stores the same document as the
state before or after a change.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Raw

from interlock.wire.base import Name, Reply, Request, ServiceName

Share = Annotated[float, Meta(ge=0, le=1)]
Source = Annotated[str, Meta(min_length=1, max_length=265, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/-]*$(?!\n)")]
"""A service of the org: `billing`, or in full `acme/billing`."""
Instant = Annotated[datetime, Meta(tz=True)]
CommandName = ServiceName
QueueName = ServiceName


class DispatchMode(StrEnum):
    ADAPTIVE = "adaptive"
    COLD_ONLY = "cold-only"


class DedupeMode(StrEnum):
    NONE = "none"
    """At-least-once delivery, without a look-up of the id."""
    STRICT = "strict"
    """One delivery per command id within `dedupe_seconds`, across all dispatchers."""


class Sensitivity(StrEnum):
    """How soon a revocation of the ACL must take effect."""

    CRITICAL = "critical"
    MODERATE = "moderate"
    LOW = "low"


class Enforcement(StrEnum):
    STRICT = "strict"
    """Never exceeded: each command needs a token or the authoritative count."""
    RELAXED = "relaxed"
    """Counted after dispatch; each dispatcher refuses commands once it sees that the limit is exceeded."""
    SHADOW = "shadow"
    """Counted and reported, but not enforced."""


class RegistryKind(StrEnum):
    SERVICES = "services"
    ROUTES = "routes"
    ACLS = "acls"
    LIMITS = "limits"
    KEYS = "keys"


class RegistryAction(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"
    NONE = "none"
    """The entry already had this content: nothing is recorded."""


class ServiceRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/services`."""

    name: ServiceName
    description: Annotated[str, Meta(max_length=1_000)] = ""
    dispatch_mode: DispatchMode | None = None
    """`cold-only` sends all its commands through the slow stage; unset: the mode of the platform."""


class Fairness(Request, frozen=True, kw_only=True):
    """The rules by which a source dominates a route."""

    dominant_share: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Share of the warm dispatches of a window above which a source dominates. 1 turns fairness off."""
    competing_share: Share = 0.1
    """Share of the commands that all other sources together must send for a ban."""
    minimum_volume: Annotated[int, Meta(ge=1, le=1_000_000)] = 20
    """Minimum dispatches in a window: below it, shares are not judged."""
    ban_seconds: Annotated[float, Meta(gt=0, le=3_600)] = 30.0


class RouteRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/routes`: the destination of a command of a target, a queue or a job."""

    target: ServiceName
    name: CommandName
    queue: QueueName | None = None
    dlq: QueueName | None = None
    """The name of its dead-letter queue; required with `queue`."""
    dag: Name | None = None
    job: Name | None = None
    dedupe_mode: DedupeMode = DedupeMode.NONE
    dedupe_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    expected_drain_seconds: Annotated[float, Meta(gt=0, le=7 * 86_400)] = 300.0
    fairness: Fairness = Fairness()
    expires_at: Instant | None = None


class AclRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/acls`: a source may send a command to a target."""

    source: Source
    target: ServiceName
    name: CommandName
    sensitivity: Sensitivity = Sensitivity.MODERATE
    expires_at: Instant | None = None


class LimitRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/limits`: a limit on a command of a target, from all sources or one, or on everything a source sends."""

    target: ServiceName | None = None
    name: CommandName | None = None
    """Unset, like `target`, for a limit on `source` alone."""
    source: Source | None = None
    """With a target: the quota of this source. Unset: the limit of all sources together."""
    rate: Annotated[int, Meta(ge=1, le=1_000_000_000)]
    """Commands in each window."""
    window_seconds: Annotated[float, Meta(ge=0.1, le=86_400)] = 1.0
    burst: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    cooldown_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    enforcement: Enforcement = Enforcement.STRICT


class ServiceKeyRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/service-keys`: the next version of a service's key."""

    service: ServiceName
    overlap_seconds: Annotated[float, Meta(ge=0, le=30 * 86_400)] | None = None
    """How long the previous version stays valid; unset: bus_key_overlap_days."""


class RouteTrialRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/routes/test`."""

    source: Source
    target: ServiceName
    name: CommandName


class ServiceView(Reply, frozen=True, kw_only=True):
    name: str
    source: str
    """The source of its commands: `org/service`."""
    description: str
    dispatch_mode: DispatchMode | None
    changed_at: datetime
    changed_by: str


class RouteView(Reply, frozen=True, kw_only=True):
    target: str
    name: str
    queue: str | None
    dlq: str | None
    dag: str | None
    job: str | None
    dedupe_mode: DedupeMode
    dedupe_seconds: float
    expected_drain_seconds: float
    fairness: Fairness
    expires_at: datetime | None
    changed_at: datetime
    changed_by: str


class AclView(Reply, frozen=True, kw_only=True):
    source: str
    target: str
    name: str
    sensitivity: Sensitivity
    expires_at: datetime | None
    changed_at: datetime
    changed_by: str


class LimitView(Reply, frozen=True, kw_only=True):
    target: str | None
    """None, like `name`, for a limit on `source` alone."""
    name: str | None
    source: str | None
    rate: int
    window_seconds: float
    burst: int
    cooldown_seconds: float
    enforcement: Enforcement
    changed_at: datetime
    changed_by: str


class ServiceKeyView(Reply, frozen=True, kw_only=True):
    """A version of a service's key. Only the service can read the secret, from `/v1/tenant-config`."""

    service: str
    version_id: str
    state: Literal["current", "previous", "expired", "revoked"]
    created_at: datetime
    created_by: str
    rotates_at: datetime | None
    """When the next version replaces it."""
    expires_at: datetime | None
    """When a replaced version expires."""


class ServicePage(Reply, frozen=True, kw_only=True):
    services: list[ServiceView]
    next_cursor: str | None


class RoutePage(Reply, frozen=True, kw_only=True):
    routes: list[RouteView]
    next_cursor: str | None


class AclPage(Reply, frozen=True, kw_only=True):
    acls: list[AclView]
    next_cursor: str | None


class LimitPage(Reply, frozen=True, kw_only=True):
    limits: list[LimitView]
    next_cursor: str | None


class ServiceKeyPage(Reply, frozen=True, kw_only=True):
    keys: list[ServiceKeyView]
    next_cursor: str | None


class RegistryChange(Reply, frozen=True, kw_only=True):
    """The change that a request made, or would make in a dry run."""

    change_id: int | None
    """None if nothing was recorded."""
    kind: RegistryKind
    action: RegistryAction
    subject: str
    before: Raw
    """null if the entry did not exist; `after` is null if the change removed it."""
    after: Raw
    dry_run: bool
    changed_at: datetime
    changed_by: str
    reverts: int | None = None
    """The change that this one reverted."""


class ChangePage(Reply, frozen=True, kw_only=True):
    changes: list[RegistryChange]
    next_cursor: str | None


class RouteCheck(Reply, frozen=True, kw_only=True):
    check: Literal["service", "key", "acl", "route", "destination", "limit"]
    ok: bool
    detail: str


class RouteTrial(Reply, frozen=True, kw_only=True):
    """The result of checking a command against the registry; nothing is sent."""

    source: str
    target: str
    name: str
    deliverable: bool
    checks: list[RouteCheck]


class SecretVersion(Reply, frozen=True, kw_only=True):
    version_id: str
    secret: str
    """32 bytes in hex: the key of HMAC-SHA256."""
    expires_at: datetime | None


class TenantConfig(Reply, frozen=True, kw_only=True):
    """`GET /v1/tenant-config`: the signing configuration for the service of the API key."""

    tenant: str
    service: str
    source: str
    active: SecretVersion
    """The version to sign with."""
    previous: SecretVersion | None
    """Still accepted, for commands that are under way."""
    rotates_at: datetime | None
    poll_seconds: float
    """Seconds until the next poll."""
    replay_window_seconds: float
    """Maximum clock skew of a producer."""
