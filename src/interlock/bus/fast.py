"""The second stage: dispatches what needs no coordination, by what this process has in memory. Waits for nothing.

What it cannot decide is handed to the slow stage with the reason. It never guesses: a token is there or is not, and an
entry that is too old to be believed is as good as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from interlock.bus import metrics
from interlock.bus.caches import ABSENT_SECONDS, ACL_TTLS, TTLS, StaleUse, Tenant
from interlock.bus.decision import Decision, Outcome, escalated, failed
from interlock.bus.envelope import Envelope
from interlock.bus.fairness import Shares
from interlock.bus.model import Acl, BanKind, Escalation, Kind, Limit, Route
from interlock.bus.seen import Seen
from interlock.bus.tokens import Tokens
from interlock.wire.bus_events import FailureReason
from interlock.wire.bus_registry import DedupeMode, DispatchMode, Enforcement

_LOOKED_UP: Final = 2
"""Entries for a command on a lane without a limit: its route and its ACL."""
_DELIVERED: Final = Outcome.DELIVERED


class Memory:
    """What the fast stage keeps of one org beside the caches."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.tokens = Tokens(tenant.org_id)
        self.shares = Shares()
        self.seen = Seen()


class Fast:
    def __init__(self, *, mode: DispatchMode = DispatchMode.ADAPTIVE) -> None:
        self._mode = mode
        self.fresh = 0
        self.stale = 0
        self.expired = 0

    def decide(self, memory: Memory, source: str, envelope: Envelope, now: float) -> Decision:
        tenant, command = memory.tenant, envelope.command
        if tenant.modes.get(source, self._mode) is DispatchMode.COLD_ONLY:
            return escalated(envelope, Escalation.COLD_ONLY)
        lane = (command.target, command.name)
        route = self._route(tenant, lane, now)
        if not isinstance(route, Route):
            return _unresolved(envelope, route, FailureReason.ROUTE_MISSING)
        acl = self._acl(tenant, (source, *lane), now)
        if not isinstance(acl, Acl):
            return _unresolved(envelope, acl, FailureReason.ACL_DENY)
        if route.dedupe_mode is DedupeMode.STRICT:
            return self._strict(memory, source, envelope, route, now)
        limit, own = tenant.limits.get(lane), tenant.source_limit(source)
        if limit is None and own is None:
            return Decision(Outcome.DELIVERED, envelope, route=route)
        return self._limited(memory, source, envelope, route, limit, own, now)

    def decide_all(
        self, memory: Memory, source: str, checked: Sequence[Envelope | Decision], now: float
    ) -> list[Decision]:
        """As `decide` of each that the shield let through. Of lanes on which nothing is counted and whose entries are
        fresh, the next command at the same moment is decided like the first."""
        free: dict[tuple[str, str], Route] = {}
        decisions = []
        for each in checked:
            if isinstance(each, Decision):
                decisions.append(each)
                continue
            lane = (each.command.target, each.command.name)
            route = free.get(lane)
            if route is not None:
                self.fresh += _LOOKED_UP
                decisions.append(Decision(_DELIVERED, each, "", "", route))
                continue
            fresh = self.fresh
            decision = self.decide(memory, source, each, now)
            decisions.append(decision)
            if self.fresh == fresh + _LOOKED_UP and decision.route and _is_free(memory.tenant, source, decision):
                free[lane] = decision.route
        return decisions

    def _route(self, tenant: Tenant, lane: tuple[str, str], now: float) -> Route | Escalation | None:
        """None: there is none, and that is known well enough."""
        age, (fresh, stale) = now - tenant.checked_at[Kind.ROUTES], TTLS[Kind.ROUTES]
        if age >= stale * tenant.shorter:
            self.expired += 1
            tenant.due = True
            return Escalation.ROUTE_STALE
        route = tenant.routes.get(lane)
        if route is None or (route.expires_at is not None and route.expires_at <= now):
            return self._absent(tenant, age)
        if age < fresh * tenant.shorter:
            self.fresh += 1
        else:
            self._used_stale(tenant, "routing", age - fresh)
        return route

    def _acl(self, tenant: Tenant, entry: tuple[str, str, str], now: float) -> Acl | Escalation | None:
        age = now - tenant.checked_at[Kind.ACLS]
        acl = tenant.acls.get(entry)
        if acl is None or (acl.expires_at is not None and acl.expires_at <= now):
            return self._absent(tenant, age)
        fresh, stale = ACL_TTLS[acl.sensitivity]
        if age < fresh * tenant.shorter:
            self.fresh += 1
        elif age < stale * tenant.shorter:
            self._used_stale(tenant, "acl", age - fresh)
            tenant.stale_acls[entry] = StaleUse(now, age)
        else:
            self.expired += 1
            tenant.due = True
            return Escalation.ACL_EXPIRED
        return acl

    def _absent(self, tenant: Tenant, age: float) -> Escalation | None:
        if age < ABSENT_SECONDS:
            return None
        tenant.due = True
        self.expired += 1
        return Escalation.CACHE_MISS

    def _used_stale(self, tenant: Tenant, metric: str, stale_seconds: float) -> None:
        tenant.due = True
        self.stale += 1
        metrics.CACHE_USAGE_STALE[metric].inc()
        metrics.CACHE_STALE_WINDOW[metric].set(stale_seconds)

    def _strict(self, memory: Memory, source: str, envelope: Envelope, route: Route, now: float) -> Decision:
        metrics.DEDUP_STRICT_MODE_USAGE.inc()
        if memory.seen.knows(source, envelope.metadata.id, now):
            metrics.DEDUP_DUPLICATES_PREVENTED.labels("fast").inc()
            return Decision(Outcome.DUPLICATE, envelope, route=route)
        metrics.DEDUP_ESCALATIONS.inc()
        memory.seen.handed_on(source, envelope.metadata.id, now + route.dedupe_seconds)
        # It goes by the slow stage in any case; there its quota counts, if it is banned.
        ban = memory.tenant.ban(BanKind.WARM, source, route.target, route.name, now)
        return escalated(envelope, Escalation.DEDUPE_REQUIRED, ban=ban)

    def _limited(
        self,
        memory: Memory,
        source: str,
        envelope: Envelope,
        route: Route,
        limit: Limit | None,
        own: Limit | None,
        now: float,
    ) -> Decision:
        """By the limit of the lane and by that of the source, as far as there are such: it must pass both."""
        lane = (route.target, route.name)
        watched = limit is not None and limit.enforcement is not Enforcement.SHADOW
        if watched:
            ban = memory.tenant.ban(BanKind.WARM, source, *lane, now) or memory.shares.banned(source, lane, now)
            if ban is not None:
                return escalated(envelope, Escalation.WARM_BAN, ban=ban)
            memory.shares.asked(source, lane, now)
        refusal = _held_back(memory.tokens, [each for each in (limit, own) if each is not None], envelope, now)
        if refusal is not None:
            return refusal
        if watched:
            memory.shares.dispatched(source, lane, route.fairness, now)
        return Decision(Outcome.DELIVERED, envelope, route=route)


def _is_free(tenant: Tenant, source: str, decision: Decision) -> bool:
    route = decision.route
    limited = route is None or (route.target, route.name) in tenant.limits or tenant.source_limit(source) is not None
    return decision.outcome is _DELIVERED and not limited


def _held_back(tokens: Tokens, limits: Sequence[Limit], envelope: Envelope, now: float) -> Decision | None:
    """Why it does not go out now, if it does not; then nothing of any limit is used. Refusals before tokens: who is
    refused needs none."""
    for limit in limits:
        if limit.enforcement is Enforcement.RELAXED and (closed := tokens.denied(limit, now)) is not None:
            return failed(envelope, FailureReason.RATE_LIMIT_EXCEEDED, wait_seconds=closed)
    strict = [limit for limit in limits if limit.enforcement is Enforcement.STRICT]
    if strict and not tokens.take(strict, now):
        return escalated(envelope, Escalation.TOKEN_REQUIRED)
    for limit in limits:
        if limit.enforcement is not Enforcement.STRICT:
            tokens.spend(limit)
    return None


def _unresolved(envelope: Envelope, found: Escalation | None, reason: FailureReason) -> Decision:
    return failed(envelope, reason) if found is None else escalated(envelope, found)
