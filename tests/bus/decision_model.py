"""The decisions that shield and fast stage must make, as a list of rules: the first one that applies decides.

It shares only the names of outcomes with the stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

WINDOW: Final = 60.0
KINDS: Final = {"keys": (60.0, 180.0), "routes": (60.0, 180.0)}
ACLS: Final = {"critical": (2.0, 4.0), "moderate": (10.0, 20.0), "low": (30.0, 90.0)}
ABSENT: Final = 2.0

Verdict = tuple[str, str]


@dataclass(frozen=True)
class World:
    """A command, and everything that the decision about it depends on."""

    skew: float = 0.0
    flaw: str = "none"
    """none, source, target, payload, id, signature, twins"""
    key: str = "current"
    """current, previous, expired, missing"""
    route: str = "none"
    """absent, expired, or its dedupe mode: none, strict"""
    acl: str = "moderate"
    """absent, expired, or its sensitivity"""
    routes_age: float = 0.0
    acls_age: float = 0.0
    limit: str = "unlimited"
    """unlimited, strict, relaxed, shadow"""
    tokens: int = 0
    token_age: float = -1.0
    """Seconds since the end of their window; negative before it."""
    denied: bool = False
    own: str = "unlimited"
    """The limit on the source alone. This and the next three have the values of `limit`, `tokens` and so on."""
    own_tokens: int = 0
    own_token_age: float = -1.0
    own_denied: bool = False
    ban: str = "none"
    """none, warm, hard; `past` for an expired ban"""
    everywhere: bool = False
    """The ban is on all lanes."""
    platform: str = "adaptive"
    service: str = "platform"
    """platform, adaptive, cold-only"""
    seen: bool = False


Rule = tuple[Callable[[World], bool], Verdict]


def _strict(w: World) -> bool:
    return w.route == "strict"


def _mode(w: World) -> str:
    return w.platform if w.service == "platform" else w.service


RULES: Final[list[Rule]] = [
    # Shield
    (lambda w: w.flaw == "source", ("invalid", "command_source_present")),
    (lambda w: w.flaw == "twins", ("invalid", "malformed")),
    (lambda w: w.skew > WINDOW, ("invalid", "expired_timestamp")),
    (lambda w: w.skew < -WINDOW, ("invalid", "future_timestamp")),
    # A message for another target is on another lane.
    (lambda w: w.ban == "hard" and (w.everywhere or w.flaw != "target"), ("failed", "fairness-violation")),
    (lambda w: w.key == "missing", ("invalid", "unknown_key")),
    (lambda w: w.key == "expired", ("invalid", "expired_key")),
    (lambda w: w.flaw != "none", ("invalid", "invalid_hmac")),
    # Fast
    (lambda w: _mode(w) == "cold-only", ("escalated", "cold_only")),
    (lambda w: w.routes_age >= KINDS["routes"][1], ("escalated", "route_stale")),
    (lambda w: w.route in ("absent", "expired") and w.routes_age < ABSENT, ("failed", "route-missing")),
    (lambda w: w.route in ("absent", "expired"), ("escalated", "cache_miss")),
    (lambda w: w.acl in ("absent", "expired") and w.acls_age < ABSENT, ("failed", "acl-deny")),
    (lambda w: w.acl in ("absent", "expired"), ("escalated", "cache_miss")),
    (lambda w: w.acls_age >= ACLS[w.acl][1], ("escalated", "acl_expired")),
    (lambda w: _strict(w) and w.seen, ("duplicate", "")),
    (_strict, ("escalated", "dedupe_required")),
    (lambda w: w.limit in ("strict", "relaxed") and w.ban == "warm", ("escalated", "warm_ban")),
    (lambda w: w.limit == "relaxed" and w.denied, ("failed", "rate-limit-exceeded")),
    (lambda w: w.own == "relaxed" and w.own_denied, ("failed", "rate-limit-exceeded")),
    (lambda w: w.limit == "strict" and (w.tokens == 0 or w.token_age >= 0), ("escalated", "token_required")),
    (lambda w: w.own == "strict" and (w.own_tokens == 0 or w.own_token_age >= 0), ("escalated", "token_required")),
    (lambda w: True, ("delivered", "")),
]


def verdict(world: World) -> Verdict:
    return next(said for holds, said in RULES if holds(world))


def refreshes_after(world: World) -> bool:
    """Returns whether a stale or unknown entry was used, so that the cache is refreshed after the dispatch."""
    outcome, reason = verdict(world)
    if reason in ("cache_miss", "route_stale", "acl_expired"):
        return True
    if outcome == "invalid" or reason in ("fairness-violation", "cold_only"):
        return False
    stale_route = world.route in ("none", "strict") and world.routes_age >= KINDS["routes"][0]
    denied = reason in ("route-missing", "acl-deny")
    return stale_route or (not denied and world.acls_age >= ACLS[world.acl][0])
