"""Shield and fast stage in this process with all checks, by CPU time: decisions per second on one core."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID

from bench.bus.registry import PRODUCER, SECRET, TARGET, message
from interlock.bus.model import Acl, Key, Kind, Limit, Outcome, Route
from interlock.bus.path.caches import Tenant
from interlock.bus.path.fast_stage import Fast, Memory
from interlock.bus.path.verification import Shield
from interlock.wire.bus_registry import Sensitivity

SOURCE = f"bench/{PRODUCER}"


def known(routes: int, now: float) -> Memory:
    """Returns an org with `routes` routes, each with an ACL and a strict limit; all caches fresh, tokens available."""
    tenant = Tenant(UUID(int=1))
    names = [f"command-{n}" for n in range(routes)]
    tenant.put(Kind.KEYS, [Key(SOURCE, "hmac-v1", SECRET, current=True)])
    tenant.put(Kind.ROUTES, [Route(TARGET, name, queue="bench") for name in names])
    tenant.put(Kind.ACLS, [Acl(SOURCE, TARGET, name, Sensitivity.LOW) for name in names])
    tenant.put(Kind.LIMITS, [Limit(TARGET, name, rate=10**9, window_seconds=3600) for name in names])
    tenant.checked_at |= dict.fromkeys(Kind, now)
    memory = Memory(tenant)
    for name in names:
        memory.tokens.fetched((TARGET, name, ""), 10**9, now + 3600, 10**9)
    return memory


def decisions(routes: int, count: int, rounds: int) -> list[float]:
    """Returns decided commands per second of CPU time, one figure per round, spread over all routes."""
    now = time.time()
    memory, shield, fast = known(routes, now), Shield(), Fast()
    step = max(1, routes // count)
    messages = [message(f"command-{n * step % routes}") for n in range(count)]
    _decide(memory, shield, fast, messages[: count // 10], now)
    rates = []
    for _ in range(rounds):
        began = time.process_time()
        _decide(memory, shield, fast, messages, now)
        rates.append(count / (time.process_time() - began))
    return rates


def _decide(memory: Memory, shield: Shield, fast: Fast, messages: Sequence[bytes], now: float) -> None:
    for raw in messages:
        verified = shield.verify([raw], SOURCE, memory.tenant, now)
        (decision,) = fast.decide(memory, SOURCE, verified.results, now)
        assert decision.outcome is Outcome.DELIVERED, decision.reason
