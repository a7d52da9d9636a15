"""The inputs of a decision about a command: routes, ACLs, limits, keys and bans.

The registry, snapshots and tests build these. Times are seconds since 1970, since every command compares them. All
entries belong to one org: targets and sources are services of the org whose credentials the request has.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from msgspec import Struct

from interlock.wire.bus_events import FailureReason
from interlock.wire.bus_registry import DedupeMode, DispatchMode, Enforcement, Sensitivity
from interlock.wire.commands import Envelope


class Kind(StrEnum):
    """A part of the registry with its own version, cached and refreshed separately."""

    SERVICES = "services"
    KEYS = "keys"
    ROUTES = "routes"
    ACLS = "acls"
    LIMITS = "limits"
    BANS = "bans"


class Lane(NamedTuple):
    """A command name of a target: the unit of limits and fairness."""

    target: str
    name: str


LimitKey = tuple[str, str, str]
"""Target, name and source of a limit, each empty if the limit names none. It identifies the window."""


class Fairness(Struct, frozen=True, gc=False):
    """The rules by which a source dominates a lane. Each target sets them for its own commands."""

    dominant_share: float = 0.8
    """Share of the warm dispatches of a window above which a source dominates. 1 turns fairness off."""
    competing_share: float = 0.1
    """Share of the commands that all other sources together must send for a ban."""
    minimum_volume: int = 20
    """Minimum dispatches in a window: below it, shares are not judged."""
    ban_seconds: float = 30.0


class Route(Struct, frozen=True, gc=False):
    """Leads to a queue of the target, or to the job `dag`/`job`."""

    target: str
    name: str
    queue: str | None = None
    dag: str | None = None
    job: str | None = None
    dedupe_mode: DedupeMode = DedupeMode.NONE
    dedupe_seconds: float = 300.0
    fairness: Fairness = Fairness()
    expires_at: float | None = None

    @property
    def lane(self) -> Lane:
        return Lane(self.target, self.name)


class Acl(Struct, frozen=True, gc=False):
    source: str
    """`org/service`."""
    target: str
    name: str
    sensitivity: Sensitivity = Sensitivity.MODERATE
    expires_at: float | None = None


class Limit(Struct, frozen=True, gc=False):
    """`rate` commands in each window of `window_seconds`; unused commands of earlier windows add up to `burst` more."""

    target: str
    """Empty, with `name`: the limit is on everything that `source` sends."""
    name: str
    rate: int
    window_seconds: float = 1.0
    burst: int = 0
    cooldown_seconds: float = 0.0
    """Seconds without admission after the limit was reached."""
    enforcement: Enforcement = Enforcement.STRICT
    source: str | None = None
    """A service. With a target, the limit is the quota of the service in the lane: only the slow stage checks it, and
    only for banned sources."""

    @property
    def key(self) -> LimitKey:
        return self.target, self.name, self.source or ""


class Service(Struct, frozen=True, gc=False):
    source: str
    dispatch_mode: DispatchMode | None = None
    """None for the platform's mode."""


class Key(Struct, frozen=True, gc=False):
    """A version of a service's secret."""

    source: str
    version_id: str
    secret: bytes
    current: bool
    """False for the previous version, which is valid until `expires_at`."""
    expires_at: float | None = None
    polled_at: float | None = None
    """When the service last fetched its configuration."""


class BanKind(StrEnum):
    WARM = "warm"
    """All dispatchers send the commands to the slow stage."""
    HARD = "hard"
    """The shield refuses the commands."""


class Ban(Struct, frozen=True, gc=False):
    source: str
    kind: BanKind
    until: float
    target: str | None = None
    """None, with `name`, for a ban on every lane."""
    name: str | None = None
    source_share: float = 0.0
    competing_share: float = 0.0
    dispatch_volume: int = 0


class Registry(Protocol):
    """The source of the caches. Every change of a kind in an org changes its version. A kind without a version is
    loaded at each refresh."""

    async def versions(self, org_id: UUID) -> Mapping[Kind, int]: ...

    async def services(self, org_id: UUID) -> list[Service]: ...

    async def keys(self, org_id: UUID) -> list[Key]: ...

    async def routes(self, org_id: UUID) -> list[Route]: ...

    async def acls(self, org_id: UUID) -> list[Acl]: ...

    async def limits(self, org_id: UUID) -> list[Limit]: ...

    async def bans(self, org_id: UUID) -> list[Ban]: ...


class Gathered(Protocol):
    """The registry of one org at one point in time."""

    @property
    def as_of(self) -> float: ...

    @property
    def versions(self) -> Mapping[Kind, int]: ...

    @property
    def entries(self) -> Mapping[Kind, list[Any]]:
        """Any: each kind has a type of its own."""


class Start(Protocol):
    """An alternative to the registry for a dispatcher that starts. Returns None if it has nothing usable."""

    async def org(self, org_id: UUID) -> Gathered | None: ...


class Escalation(StrEnum):
    """The reason for which the fast stage escalates a command."""

    CACHE_MISS = "cache_miss"
    DEDUPE_REQUIRED = "dedupe_required"
    TOKEN_REQUIRED = "token_required"  # noqa: S105 - a right to dispatch, not a secret
    ACL_EXPIRED = "acl_expired"
    ROUTE_STALE = "route_stale"
    WARM_BAN = "warm_ban"
    COLD_ONLY = "cold_only"


class Outcome(StrEnum):
    DELIVERED = "delivered"
    """Durable at the destination of its route."""
    ESCALATED = "escalated"
    """Durable; the slow stage decides, and telemetry reports the decision."""
    DUPLICATE = "duplicate"
    FAILED = "failed"
    INVALID = "invalid"


class Decision(Struct, gc=False):
    outcome: Outcome
    envelope: Envelope | None = None
    """None only if the message could not be decoded."""
    reason: str = ""
    detail: str = ""
    """A sentence for the sender."""
    route: Route | None = None
    """Set for delivered commands and duplicates."""
    wait_seconds: float | None = None
    """Seconds after which a retry makes sense."""
    ban: Ban | None = None
    """The ban that escalated or refused the command."""


def invalid(reason: str, detail: str, envelope: Envelope | None = None) -> Decision:
    return Decision(Outcome.INVALID, envelope, reason, detail)


def failed(
    envelope: Envelope, reason: FailureReason, *, wait_seconds: float | None = None, ban: Ban | None = None
) -> Decision:
    return Decision(Outcome.FAILED, envelope, reason.value, wait_seconds=wait_seconds, ban=ban)


def escalated(envelope: Envelope, reason: Escalation, *, ban: Ban | None = None) -> Decision:
    return Decision(Outcome.ESCALATED, envelope, reason.value, ban=ban)
