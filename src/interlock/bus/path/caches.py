"""Caches of the registry in a dispatcher, one per org, with their age.

    fresh     used
    stale     used, and refreshed after the dispatch
    expired   not used: the shield waits for a refresh, the fast stage escalates the command

The times to live are the guarantee. A notification of a change refreshes sooner, but may be lost. A refresh reads
version numbers first, one small row per kind, and loads only the kinds that changed. If it fails, the cache is used
until it expires; from then on commands are refused or escalated.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

import structlog

from interlock.bus import metrics
from interlock.bus.model import Acl, Ban, BanKind, Key, Kind, Limit, Registry, Route, Start
from interlock.clock import Clock
from interlock.errors import InterlockError
from interlock.wire.bus_registry import DispatchMode, Sensitivity

log = structlog.get_logger()

_JITTER: Final = 0.1
"""Maximum share by which times to live are shortened, so that dispatchers do not refresh at the same time."""
_METRIC: Final = {Kind.ACLS: "acl", Kind.ROUTES: "routing", Kind.KEYS: "hmac"}


class Ttl(NamedTuple):
    fresh: float
    stale: float
    """Age at which the entry expires."""


TTLS: Final[Mapping[Kind, Ttl]] = {
    Kind.SERVICES: Ttl(60, 180),
    Kind.KEYS: Ttl(60, 180),
    Kind.ROUTES: Ttl(60, 180),
    Kind.LIMITS: Ttl(60, 180),
    Kind.BANS: Ttl(10, 30),
    Kind.ACLS: Ttl(30, 90),
}
"""For ACLs this is the refresh of all entries; the TTL of each entry depends on its sensitivity, below."""

ACL_TTLS: Final[Mapping[Sensitivity, Ttl]] = {
    Sensitivity.CRITICAL: Ttl(2, 4),
    Sensitivity.MODERATE: Ttl(10, 20),
    Sensitivity.LOW: Ttl(30, 90),
}
ABSENT_SECONDS: Final = 2.0
"""How long a missing entry counts as absent. After that it may have been created, and the slow stage decides."""


class StaleUse(NamedTuple):
    """The use of a stale ACL; if the ACL was revoked before, an event reports it."""

    at: float
    age: float


class Revoked(NamedTuple):
    source: str
    target: str
    name: str
    used_at: float
    stale_seconds: float


class Tenant:
    """The registry of one org as this process knows it. Every command reads it, hence the plain dicts."""

    def __init__(self, org_id: UUID, jitter: float = 0.0) -> None:
        self.org_id = org_id
        self.modes: dict[str, DispatchMode] = {}
        """Dispatch modes of services that override the platform's."""
        self.keys: dict[tuple[str, str], Key] = {}
        self.routes: dict[tuple[str, str], Route] = {}
        self.acls: dict[tuple[str, str, str], Acl] = {}
        self.limits: dict[tuple[str, str], Limit] = {}
        self.source_limits: dict[str, Limit] = {}
        """Limits on all commands of a service, by service."""
        self.bans: dict[tuple[str, str | None, str | None], Ban] = {}
        self.versions: dict[Kind, int] = {}
        self.checked_at: dict[Kind, float] = dict.fromkeys(Kind, 0.0)
        self.shorter = 1.0 - jitter
        self.due = False
        """Refresh after the dispatch: a stale entry was used, or the registry changed."""
        self.stale_acls: dict[tuple[str, str, str], StaleUse] = {}

    def age(self, kind: Kind, now: float) -> float:
        return now - self.checked_at[kind]

    def put(self, kind: Kind, items: Iterable[Any]) -> None:
        if kind is Kind.SERVICES:
            self.modes = {each.source: each.dispatch_mode for each in items if each.dispatch_mode is not None}
        elif kind is Kind.KEYS:
            self.keys = {(key.source, key.version_id): key for key in items}
        elif kind is Kind.ROUTES:
            self.routes = {(route.target, route.name): route for route in items}
        elif kind is Kind.ACLS:
            self.acls = {(acl.source, acl.target, acl.name): acl for acl in items}
        elif kind is Kind.LIMITS:
            found = list(items)
            self.limits = {(limit.target, limit.name): limit for limit in found if limit.source is None}
            self.source_limits = {limit.source: limit for limit in found if not limit.target}
        else:
            self.bans = {(ban.source, ban.target, ban.name): ban for ban in items}

    def source_limit(self, source: str) -> Limit | None:
        return self.source_limits.get(source.rpartition("/")[2]) if self.source_limits else None

    def ban(self, kind: BanKind, source: str, target: str, name: str, now: float) -> Ban | None:
        """Returns the ban on this lane or on all lanes, if there is one."""
        if not self.bans:
            return None
        for key in ((source, target, name), (source, None, None)):
            found = self.bans.get(key)
            if found is not None and found.kind is kind and found.until > now:
                return found
        return None


class Caches:
    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        *,
        start: Start | None = None,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._start = start
        self._rng = rng
        self._tenants: dict[UUID, Tenant] = {}
        self._refreshing: dict[UUID, asyncio.Lock] = {}
        self.revoked: list[tuple[UUID, Revoked]] = []
        """Revoked ACLs found by refreshes, not reported yet."""

    def now(self) -> float:
        return self._clock.now().timestamp()

    def tenant(self, org_id: UUID) -> Tenant:
        found = self._tenants.get(org_id)
        if found is None:
            found = self._tenants[org_id] = Tenant(org_id, _JITTER * self._rng())
        return found

    def expire(self) -> None:
        """Marks every org for a refresh after its next dispatch: the registry has changed."""
        for tenant in self._tenants.values():
            tenant.due = True

    async def ready(self, org_id: UUID) -> Tenant:
        """Returns an org whose keys may be used. Refreshes it first if they have expired or were never loaded."""
        tenant = self.tenant(org_id)
        now = self.now()
        if tenant.age(Kind.KEYS, now) >= TTLS[Kind.KEYS].stale * tenant.shorter:
            metrics.CACHE_EXPIRED.inc()
            await self.refresh(tenant)
        elif tenant.age(Kind.BANS, now) >= TTLS[Kind.BANS].stale * tenant.shorter:
            # The org was idle, and a source may have been banned since: the ban must hold from the first command.
            await self.refresh_if_possible(tenant)
        return tenant

    async def refresh(self, tenant: Tenant, *, unless_since: float | None = None) -> None:
        """Refreshes all kinds of an org. A caller that comes during a refresh waits for its result."""
        queried_at = self.now() if unless_since is None else unless_since
        lock = self._refreshing.setdefault(tenant.org_id, asyncio.Lock())
        async with lock:
            if min(tenant.checked_at.values()) > queried_at:
                return
            tenant.due = False
            await self._load(tenant)

    async def refresh_due(self, tenants: Iterable[Tenant]) -> None:
        """Refreshes orgs after their dispatches. A failed refresh is retried at the next use."""
        now = self.now()
        for tenant in tenants:
            # Commands do not set `due` for bans, which have the shortest time to live.
            if tenant.due or tenant.age(Kind.BANS, now) >= TTLS[Kind.BANS].fresh * tenant.shorter:
                await self.refresh_if_possible(tenant)

    async def refresh_if_possible(self, tenant: Tenant) -> bool:
        """Returns False if the refresh failed."""
        try:
            await self.refresh(tenant)
        except InterlockError as error:
            log.warning("bus.cache_refresh_failed", org_id=str(tenant.org_id), reason=str(error))
            return False
        return True

    async def _load(self, tenant: Tenant) -> None:
        if tenant.checked_at[Kind.KEYS] == 0 and await self._started(tenant):
            return
        # The age starts before the query: a change during the query may or may not be in its result.
        queried_at = self.now()
        versions = await self._registry.versions(tenant.org_id)
        # Keys last: a request that finds keys assumes that the other kinds are loaded.
        loaders: dict[Kind, Callable[[UUID], Any]] = {
            Kind.SERVICES: self._registry.services,
            Kind.ROUTES: self._registry.routes,
            Kind.ACLS: self._registry.acls,
            Kind.LIMITS: self._registry.limits,
            Kind.BANS: self._registry.bans,
            Kind.KEYS: self._registry.keys,
        }
        for kind, load in loaders.items():
            started = time.perf_counter()
            if kind not in tenant.versions or versions.get(kind) != tenant.versions[kind]:
                tenant.put(kind, await load(tenant.org_id))
                if kind in versions:
                    tenant.versions[kind] = versions[kind]
            if kind is Kind.ACLS:
                self._audit(tenant)
            self._refreshed(tenant, kind, queried_at, time.perf_counter() - started)
        tenant.shorter = 1.0 - _JITTER * self._rng()

    async def _started(self, tenant: Tenant) -> bool:
        """Loads the org from the snapshot, if there is one. The age is that of the snapshot, so that the times to live
        hold."""
        found = None if self._start is None else await self._start.org(tenant.org_id)
        if found is None:
            return False
        queried_at = self.now()
        # Snapshots contain no bans: these are short-lived, and dispatchers impose them.
        tenant.put(Kind.BANS, await self._registry.bans(tenant.org_id))
        tenant.checked_at[Kind.BANS] = queried_at
        for kind, entries in found.entries.items():
            tenant.put(kind, entries)
            tenant.checked_at[kind] = found.as_of
        tenant.versions |= found.versions
        tenant.due = True
        return True

    def _refreshed(self, tenant: Tenant, kind: Kind, queried_at: float, seconds: float) -> None:
        age, ttl = queried_at - tenant.checked_at[kind], TTLS[kind]
        tenant.checked_at[kind] = queried_at
        if kind in _METRIC:
            metrics.CACHE_REFRESH_DURATION[_METRIC[kind]].observe(seconds)
        log.debug(
            "bus.cache_refreshed",
            cache_type=_METRIC.get(kind, kind.value).upper(),
            age_seconds=round(age, 3),
            fresh_ttl=ttl.fresh,
            stale_ttl=ttl.stale,
        )

    def _audit(self, tenant: Tenant) -> None:
        for entry, use in tenant.stale_acls.items():
            if entry not in tenant.acls:
                self.revoked.append((tenant.org_id, Revoked(*entry, use.at, use.age)))
        tenant.stale_acls.clear()
