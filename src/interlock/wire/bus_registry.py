"""The registry of the command bus: services, routes, ACLs, limits, keys, and every change of them.

A request is the whole of what it registers: what is left out has its default. The same document stands in the
changelog as what was before, or after.
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
    """At least once, and no store is asked."""
    STRICT = "strict"
    """One delivery per command id, within a time, by all dispatchers together."""


class Sensitivity(StrEnum):
    """How soon a revoked ACL must stop working."""

    CRITICAL = "critical"
    MODERATE = "moderate"
    LOW = "low"


class Enforcement(StrEnum):
    STRICT = "strict"
    """Never one over: a command goes out on a token, or on an authoritative count."""
    RELAXED = "relaxed"
    """Counted after dispatch; a limit that was passed is then denied locally."""
    SHADOW = "shadow"
    """Counted and told, and nothing else."""


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
    """It was so already: nothing is recorded."""


class ServiceRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/services`."""

    name: ServiceName
    description: Annotated[str, Meta(max_length=1_000)] = ""
    dispatch_mode: DispatchMode | None = None
    """`cold-only` sends all its commands by the slow stage; unset: as the platform is set."""


class Fairness(Request, frozen=True, kw_only=True):
    """When one source has too much of a route."""

    dominant_share: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Of the warm dispatches of a window; above it a source dominates. 1 turns fairness off."""
    competing_share: Share = 0.1
    """What the others must have, together, for that to matter."""
    minimum_volume: Annotated[int, Meta(ge=1, le=1_000_000)] = 20
    """Dispatches in a window before shares mean anything."""
    ban_seconds: Annotated[float, Meta(gt=0, le=3_600)] = 30.0


class RouteRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/routes`: where a command of a target goes, to a queue or to a job."""

    target: ServiceName
    name: CommandName
    queue: QueueName | None = None
    dlq: QueueName | None = None
    """Under which name its dead letters are found; a queue must have one."""
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
    """`POST /v1/limits`: of a command of a target, from all sources or from one; or of a source, whatever it sends."""

    target: ServiceName | None = None
    name: CommandName | None = None
    """Unset, as `target`: the limit is on `source` alone."""
    source: Source | None = None
    """With a target the quota of one source; unset: the limit of all of them together."""
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
    """How long the version before it stays good; unset: bus_key_overlap_days."""


class RouteTrialRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/routes/test`."""

    source: Source
    target: ServiceName
    name: CommandName


class ServiceView(Reply, frozen=True, kw_only=True):
    name: str
    source: str
    """What its commands carry as their source: `org/service`."""
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
    """None, as `name`: the limit is on `source` alone."""
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
    """A version of a service's key; the secret is for the service alone, which reads it from `/v1/tenant-config`."""

    service: str
    version_id: str
    state: Literal["current", "previous", "expired", "revoked"]
    created_at: datetime
    created_by: str
    rotates_at: datetime | None
    """When the next version takes its place."""
    expires_at: datetime | None
    """Until when it is good, since it was replaced."""


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
    """What a request changed; or would change, in a dry run."""

    change_id: int | None
    """None: nothing was recorded."""
    kind: RegistryKind
    action: RegistryAction
    subject: str
    before: Raw
    """null: it was not there; of `after`: it is not there any more."""
    after: Raw
    dry_run: bool
    changed_at: datetime
    changed_by: str
    reverts: int | None = None
    """Which change this one took back."""


class ChangePage(Reply, frozen=True, kw_only=True):
    changes: list[RegistryChange]
    next_cursor: str | None


class RouteCheck(Reply, frozen=True, kw_only=True):
    check: Literal["service", "key", "acl", "route", "destination", "limit"]
    ok: bool
    detail: str


class RouteTrial(Reply, frozen=True, kw_only=True):
    """What would become of a command, checked against the registry as it is; nothing is sent."""

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
    """`GET /v1/tenant-config`: what a producer needs to sign, for the service whose API key asked."""

    tenant: str
    service: str
    source: str
    active: SecretVersion
    """To sign with."""
    previous: SecretVersion | None
    """Still accepted, for what is under way."""
    rotates_at: datetime | None
    poll_seconds: float
    """When to ask again."""
    replay_window_seconds: float
    """How far the clock of a producer may be off."""
