"""The fast stage: dispatches commands that need no coordination, from what this process has in memory, without waiting.

It escalates every other command to the slow stage, with the reason. It never guesses: it dispatches under a strict
limit only with a token, and it treats an entry past its time to live as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from interlock.bus import metrics
from interlock.bus.model import Acl, BanKind, Decision, Escalation, Kind, Limit, Outcome, Route, escalated, failed
from interlock.bus.path.caches import ABSENT_SECONDS, ACL_TTLS, TTLS, StaleUse, Tenant
from interlock.bus.path.fairness import Shares
from interlock.bus.path.limits import Tokens
from interlock.wire.bus_events import FailureReason
from interlock.wire.bus_registry import DedupeMode, DispatchMode, Enforcement
from interlock.wire.commands import Envelope

_MAX_DELIVERED: Final = 100_000
_MAX_PENDING: Final = 10_000


class DeliveredIds:
    """Ids of commands that strict routes have delivered, as far as this process knows.

    An escalated id is only pending: the slow stage may refuse its command, and the producer may send it again under
    the same id. Only a command that the slow stage has delivered makes the next one a duplicate; `confirm` records it.
    """

    def __init__(self) -> None:
        self._delivered: dict[tuple[str, str], float] = {}
        self._pending: dict[tuple[str, str], float] = {}

    def contains(self, source: str, command_id: str, now: float) -> bool:
        until = self._delivered.get((source, command_id))
        return until is not None and until > now

    def add_pending(self, source: str, command_id: str, until: float) -> None:
        if len(self._pending) >= _MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[source, command_id] = until

    def pending(self, limit: int, now: float) -> list[tuple[str, str]]:
        """Returns up to `limit` ids to look up, oldest first, and forgets expired ones."""
        self._pending = {entry: until for entry, until in self._pending.items() if until > now}
        return list(self._pending)[:limit]

    def confirm(self, source: str, command_id: str, until: float) -> None:
        self._pending.pop((source, command_id), None)
        if len(self._delivered) >= _MAX_DELIVERED:
            del self._delivered[next(iter(self._delivered))]
        self._delivered[source, command_id] = until


class Memory:
    """The state of one org in the fast stage: its caches and the counts of this process."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.tokens = Tokens(tenant.org_id)
        self.shares = Shares()
        self.delivered_ids = DeliveredIds()


class _Lookup:
    """The registry's answer for one command name of one target, looked up once per request."""

    __slots__ = ("commands", "expired", "fresh", "limit", "refusal", "route", "stale", "unlimited")

    def __init__(self) -> None:
        self.route: Route | None = None
        self.refusal: FailureReason | Escalation | None = None
        self.limit: Limit | None = None
        self.unlimited = False
        """There is a route, without a limit of its own and without deduplication."""
        self.commands = 0
        """Commands of the request on this lane."""
        self.fresh = 0
        self.expired = 0
        self.stale: list[tuple[str, float]] = []
        """Stale entries that were used: name in the metric, seconds since each became stale."""


class Fast:
    def __init__(self, *, mode: DispatchMode = DispatchMode.ADAPTIVE) -> None:
        self._mode = mode

    def decide(
        self, memory: Memory, source: str, verified: Sequence[Envelope | Decision], now: float
    ) -> list[Decision]:
        """Decides about each message of a request; a message that the shield refused keeps its decision."""
        tenant = memory.tenant
        if tenant.modes.get(source, self._mode) is DispatchMode.COLD_ONLY:
            return [each if isinstance(each, Decision) else escalated(each, Escalation.COLD_ONLY) for each in verified]
        source_limit = tenant.source_limit(source)
        lookups: dict[tuple[str, str], _Lookup] = {}
        decisions = []
        for each in verified:
            if isinstance(each, Decision):
                decisions.append(each)
                continue
            key = (each.command.target, each.command.name)
            lookup = lookups.get(key)
            if lookup is None:
                lookup = lookups[key] = _look_up(tenant, source, key, now)
            lookup.commands += 1
            if lookup.unlimited and source_limit is None:
                decisions.append(Decision(Outcome.DELIVERED, each, route=lookup.route))
            else:
                decisions.append(_decide(memory, source, each, lookup, source_limit, now))
        _count(lookups.values())
        return decisions


def _decide(
    memory: Memory, source: str, envelope: Envelope, lookup: _Lookup, source_limit: Limit | None, now: float
) -> Decision:
    route = lookup.route
    if route is None:
        return _refused(envelope, lookup.refusal)
    if route.dedupe_mode is DedupeMode.STRICT:
        return _strict(memory, source, envelope, route, now)
    return _limited(memory, source, envelope, route, lookup.limit, source_limit, now)


def _refused(envelope: Envelope, refusal: FailureReason | Escalation | None) -> Decision:
    if isinstance(refusal, FailureReason):
        return failed(envelope, refusal)
    return escalated(envelope, refusal or Escalation.CACHE_MISS)


# Registry entries of a lane


def _look_up(tenant: Tenant, source: str, key: tuple[str, str], now: float) -> _Lookup:
    lookup = _Lookup()
    route = _route(tenant, lookup, key, now)
    if route is not None and _acl_allows(tenant, lookup, (source, *key), now):
        lookup.route = route
        lookup.limit = tenant.limits.get(key)
        lookup.unlimited = lookup.limit is None and route.dedupe_mode is not DedupeMode.STRICT
    if lookup.stale or lookup.expired:
        tenant.due = True
    return lookup


def _route(tenant: Tenant, lookup: _Lookup, key: tuple[str, str], now: float) -> Route | None:
    age, (fresh, stale) = now - tenant.checked_at[Kind.ROUTES], TTLS[Kind.ROUTES]
    if age >= stale * tenant.shorter:
        lookup.expired += 1
        lookup.refusal = Escalation.ROUTE_STALE
        return None
    route = tenant.routes.get(key)
    if _is_absent(route, now):
        _refuse_absent(lookup, age, FailureReason.ROUTE_MISSING)
        return None
    if age < fresh * tenant.shorter:
        lookup.fresh += 1
    else:
        lookup.stale.append(("routing", age - fresh))
    return route


def _acl_allows(tenant: Tenant, lookup: _Lookup, entry: tuple[str, str, str], now: float) -> bool:
    age = now - tenant.checked_at[Kind.ACLS]
    acl = tenant.acls.get(entry)
    if acl is None or _is_absent(acl, now):
        _refuse_absent(lookup, age, FailureReason.ACL_DENY)
        return False
    fresh, stale = ACL_TTLS[acl.sensitivity]
    if age < fresh * tenant.shorter:
        lookup.fresh += 1
    elif age < stale * tenant.shorter:
        lookup.stale.append(("acl", age - fresh))
        tenant.stale_acls[entry] = StaleUse(now, age)
    else:
        lookup.expired += 1
        lookup.refusal = Escalation.ACL_EXPIRED
        return False
    return True


def _is_absent(entry: Route | Acl | None, now: float) -> bool:
    return entry is None or (entry.expires_at is not None and entry.expires_at <= now)


def _refuse_absent(lookup: _Lookup, age: float, reason: FailureReason) -> None:
    """Refuses if the cache is young enough to be sure that the entry does not exist; escalates otherwise."""
    if age < ABSENT_SECONDS:
        lookup.refusal = reason
    else:
        lookup.refusal = Escalation.CACHE_MISS
        lookup.expired += 1


def _count(lookups: Iterable[_Lookup]) -> None:
    for lookup in lookups:
        metrics.CACHE_FRESH.inc(lookup.fresh * lookup.commands)
        metrics.CACHE_STALE.inc(len(lookup.stale) * lookup.commands)
        metrics.CACHE_EXPIRED.inc(lookup.expired * lookup.commands)
        for kind, seconds in lookup.stale:
            metrics.CACHE_USAGE_STALE[kind].inc(lookup.commands)
            metrics.CACHE_STALE_WINDOW[kind].set(seconds)


# Deduplication and limits


def _strict(memory: Memory, source: str, envelope: Envelope, route: Route, now: float) -> Decision:
    metrics.DEDUP_STRICT_MODE_USAGE.inc()
    if memory.delivered_ids.contains(source, envelope.metadata.id, now):
        metrics.DEDUP_DUPLICATES_PREVENTED.labels("fast").inc()
        return Decision(Outcome.DUPLICATE, envelope, route=route)
    metrics.DEDUP_ESCALATIONS.inc()
    memory.delivered_ids.add_pending(source, envelope.metadata.id, now + route.dedupe_seconds)
    # The command goes to the slow stage in any case. The ban goes with it: there, a banned source has a quota.
    ban = memory.tenant.ban(BanKind.WARM, source, route.target, route.name, now)
    return escalated(envelope, Escalation.DEDUPE_REQUIRED, ban=ban)


def _limited(
    memory: Memory,
    source: str,
    envelope: Envelope,
    route: Route,
    limit: Limit | None,
    source_limit: Limit | None,
    now: float,
) -> Decision:
    """Dispatches if both the limit of the lane and the limit of the source admit the command."""
    lane = (route.target, route.name)
    watched = limit is not None and limit.enforcement is not Enforcement.SHADOW
    if watched:
        ban = memory.tenant.ban(BanKind.WARM, source, *lane, now) or memory.shares.banned(source, lane, now)
        if ban is not None:
            return escalated(envelope, Escalation.WARM_BAN, ban=ban)
        memory.shares.count_attempt(source, lane, now)
    limits = [each for each in (limit, source_limit) if each is not None]
    refusal = _held_back(memory.tokens, limits, envelope, now)
    if refusal is not None:
        return refusal
    if watched:
        memory.shares.count_dispatch(source, lane, route.fairness, now)
    return Decision(Outcome.DELIVERED, envelope, route=route)


def _held_back(tokens: Tokens, limits: Sequence[Limit], envelope: Envelope, now: float) -> Decision | None:
    """Returns the decision if a limit does not admit the command; then no limit is charged. Relaxed limits come first:
    a command that they refuse needs no token."""
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
