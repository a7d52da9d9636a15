"""What a decision about a command is made from: routes, ACLs, limits, keys and bans, as the stages see them.

A registry, a snapshot and a test all build these. Instants are seconds since 1970, since they are compared for every
command. Everything belongs to one org: a target, like a source, is a service of the org whose credentials came.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from msgspec import Struct

from interlock.wire.bus_registry import DedupeMode, DispatchMode, Enforcement, Sensitivity


class Kind(StrEnum):
    """What is cached, refreshed and versioned by itself."""

    SERVICES = "services"
    KEYS = "keys"
    ROUTES = "routes"
    ACLS = "acls"
    LIMITS = "limits"
    BANS = "bans"


class Lane(NamedTuple):
    """What limits and fairness are about: one command of one target."""

    target: str
    name: str


LimitKey = tuple[str, str, str]
"""Target, name and source of a limit, each empty where it names none: which window it is."""


class Fairness(Struct, frozen=True, gc=False):
    """When a source has too much of a lane. Each target decides for its own commands."""

    dominant_share: float = 0.8
    """Of the warm dispatches of a window; above it a source dominates. 1 turns fairness off."""
    competing_share: float = 0.1
    """What the others must have, together, for that to matter."""
    minimum_volume: int = 20
    """Dispatches in a window before shares mean anything."""
    ban_seconds: float = 30.0


class Route(Struct, frozen=True, gc=False):
    """Leads to a queue of the target, or to a job: `dag` and `job`."""

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
    """`rate` commands in each window of `window_seconds`; what windows left unused adds up to `burst` more."""

    target: str
    """Empty, with `name`: of all that `source` sends."""
    name: str
    rate: int
    window_seconds: float = 1.0
    burst: int = 0
    cooldown_seconds: float = 0.0
    """How long nothing is admitted after the limit was reached."""
    enforcement: Enforcement = Enforcement.STRICT
    source: str | None = None
    """A service. With a target it has a quota in the lane, which only the slow stage looks at, and only for who was
    banned."""

    @property
    def key(self) -> LimitKey:
        return self.target, self.name, self.source or ""


class Service(Struct, frozen=True, gc=False):
    source: str
    dispatch_mode: DispatchMode | None = None
    """None: the platform's."""


class Key(Struct, frozen=True, gc=False):
    """A version of a service's secret."""

    source: str
    version_id: str
    secret: bytes
    current: bool
    """False for the previous one, which is good until `expires_at`."""
    expires_at: float | None = None
    polled_at: float | None = None
    """When the service last asked for its configuration."""


class BanKind(StrEnum):
    WARM = "warm"
    """To the slow stage, for all dispatchers."""
    HARD = "hard"
    """Refused by the shield."""


class Ban(Struct, frozen=True, gc=False):
    source: str
    kind: BanKind
    until: float
    target: str | None = None
    """None, with `name`: on every lane."""
    name: str | None = None
    source_share: float = 0.0
    competing_share: float = 0.0
    dispatch_volume: int = 0


class Registry(Protocol):
    """Where caches are loaded from. A version changes with any change of that kind in that org; a kind without one is
    loaded at each refresh."""

    async def versions(self, org_id: UUID) -> Mapping[Kind, int]: ...

    async def services(self, org_id: UUID) -> list[Service]: ...

    async def keys(self, org_id: UUID) -> list[Key]: ...

    async def routes(self, org_id: UUID) -> list[Route]: ...

    async def acls(self, org_id: UUID) -> list[Acl]: ...

    async def limits(self, org_id: UUID) -> list[Limit]: ...

    async def bans(self, org_id: UUID) -> list[Ban]: ...


class Gathered(Protocol):
    """The registry of one org as it was at a moment."""

    @property
    def as_of(self) -> float: ...

    @property
    def versions(self) -> Mapping[Kind, int]: ...

    @property
    def entries(self) -> Mapping[Kind, list[Any]]:
        """Any: of each kind its own."""


class Start(Protocol):
    """What a dispatcher may start from instead of the registry. None: it has nothing that could be used."""

    async def org(self, org_id: UUID) -> Gathered | None: ...


class Escalation(StrEnum):
    """Why the fast stage hands a command to the slow one."""

    CACHE_MISS = "cache_miss"
    DEDUPE_REQUIRED = "dedupe_required"
    TOKEN_REQUIRED = "token_required"  # noqa: S105 - a right to dispatch, not a secret
    ACL_EXPIRED = "acl_expired"
    ROUTE_STALE = "route_stale"
    WARM_BAN = "warm_ban"
    COLD_ONLY = "cold_only"
