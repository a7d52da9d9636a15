"""Shield and fast stage, compared with an independent model."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.bus.model import Acl, Ban, BanKind, Decision, Key, Kind, Lane, Limit, Route, Service
from interlock.bus.path.caches import Tenant
from interlock.bus.path.fast_stage import Fast, Memory
from interlock.bus.path.verification import Shield
from interlock.wire.bus_registry import DedupeMode, DispatchMode, Enforcement, Sensitivity
from tests.bus.decision_model import World, refreshes_after, verdict
from tests.support.signed_commands import SECRET, SOURCE, signed

NOW: Final = 1_800_000_000.0
ORG: Final = UUID(int=7)
ID: Final = "5c0a0a5e-5f5e-4c0e-8a55-1d2f3a4b5c6d"
LANE: Final = Lane("mailer", "send-mail")
SERVICE: Final = SOURCE.rpartition("/")[2]

_edges = (2.0, 4.0, 10.0, 20.0, 30.0, 60.0, 90.0, 180.0)
_ages = st.sampled_from([0.0, *_edges, *(edge - 0.1 for edge in _edges)])
_limited: Final = {
    "limit": st.sampled_from(["unlimited", "strict", "relaxed", "shadow"]),
    "tokens": st.integers(0, 2),
    "token_age": st.sampled_from([-1.0, -1.0, 0.0, 1.0]),
    "denied": st.booleans(),
    "own": st.sampled_from(["unlimited", "strict", "relaxed", "shadow"]),
    "own_tokens": st.integers(0, 2),
    "own_token_age": st.sampled_from([-1.0, -1.0, 0.0, 1.0]),
    "own_denied": st.booleans(),
    "ban": st.sampled_from(["none", "none", "none", "warm", "hard", "past"]),
    "everywhere": st.booleans(),
}
worlds = st.builds(
    World,
    skew=st.sampled_from([0.0, 0.0, 0.0, 59.9, -59.9, 60.1, -60.1]),
    flaw=st.sampled_from(["none"] * 8 + ["source", "target", "payload", "id", "signature", "twins"]),
    key=st.sampled_from(["current"] * 4 + ["previous", "expired", "missing"]),
    route=st.sampled_from(["none", "none", "none", "strict", "absent", "expired"]),
    acl=st.sampled_from(["critical", "moderate", "low", "absent", "expired"]),
    routes_age=_ages,
    acls_age=_ages,
    platform=st.sampled_from(["adaptive", "adaptive", "cold-only"]),
    service=st.sampled_from(["platform", "platform", "adaptive", "cold-only"]),
    seen=st.booleans(),
    **_limited,
)
resolved = st.builds(
    World,
    acl=st.sampled_from(["critical", "moderate", "low", "absent", "expired"]),
    route=st.sampled_from(["none", "none", "none", "strict", "absent", "expired"]),
    routes_age=_ages,
    acls_age=_ages,
    seen=st.booleans(),
)
admitted = st.builds(World, **_limited)
"""Worlds for the later checks: a world drawn from all values seldom passes the first ones."""


def message_of(world: World) -> bytes:
    raw = signed(NOW - world.skew, command_id=ID)
    if world.flaw == "twins":
        return raw.replace(b'"payload":{', b'"payload":{"n":2,')
    message = msgspec.json.decode(raw)
    if world.flaw == "source":
        message["command"]["source"] = "acme/other"
    elif world.flaw == "target":
        message["command"]["target"] = "mailer2"
    elif world.flaw == "payload":
        message["command"]["payload"]["n"] = 2
    elif world.flaw == "id":
        message["metadata"]["id"] = ID.replace("5c0a", "5c0b")
    elif world.flaw == "signature":
        message["metadata"]["hmac"] = "0" * 64
    return msgspec.json.encode(message)


def _tenant(world: World) -> Tenant:
    tenant = Tenant(ORG)
    ends = {"current": None, "previous": NOW + 60, "expired": NOW - 1}
    if world.key != "missing":
        tenant.put(Kind.KEYS, [Key(SOURCE, "hmac-v1", SECRET, world.key == "current", ends[world.key])])
    if world.route != "absent":
        mode = DedupeMode.STRICT if world.route == "strict" else DedupeMode.NONE
        ended = NOW - 1 if world.route == "expired" else None
        tenant.put(Kind.ROUTES, [Route(*LANE, queue="mail", dedupe_mode=mode, expires_at=ended)])
    if world.acl != "absent":
        expired = world.acl == "expired"
        sensitivity = Sensitivity.LOW if expired else Sensitivity(world.acl)
        tenant.put(Kind.ACLS, [Acl(SOURCE, *LANE, sensitivity, NOW - 1 if expired else None)])
    tenant.put(Kind.LIMITS, [each for each in (_limit(world), _own(world)) if each is not None])
    if world.ban != "none":
        place = (None, None) if world.everywhere else LANE
        kind = BanKind.WARM if world.ban == "past" else BanKind(world.ban)
        tenant.put(Kind.BANS, [Ban(SOURCE, kind, NOW + (-1 if world.ban == "past" else 60), *place)])
    if world.service != "platform":
        tenant.put(Kind.SERVICES, [Service(SOURCE, DispatchMode(world.service))])
    tenant.checked_at |= dict.fromkeys(Kind, NOW)
    tenant.checked_at |= {Kind.ROUTES: NOW - world.routes_age, Kind.ACLS: NOW - world.acls_age}
    return tenant


def _limit(world: World) -> Limit | None:
    return None if world.limit == "unlimited" else Limit(*LANE, rate=10, enforcement=Enforcement(world.limit))


def _own(world: World) -> Limit | None:
    if world.own == "unlimited":
        return None
    return Limit("", "", rate=10, enforcement=Enforcement(world.own), source=SERVICE)


def memory_of(world: World) -> Memory:
    memory = Memory(_tenant(world))
    memory.tokens.fetched((*LANE, ""), world.tokens, NOW - world.token_age, 5)
    memory.tokens.fetched(("", "", SERVICE), world.own_tokens, NOW - world.own_token_age, 5)
    if world.denied:
        memory.tokens.deny((*LANE, ""), NOW + 5)
    if world.own_denied:
        memory.tokens.deny(("", "", SERVICE), NOW + 5)
    if world.seen:
        memory.delivered_ids.confirm(SOURCE, ID, NOW + 5)
    return memory


def _decided(world: World, memory: Memory, message: bytes | None = None) -> Decision:
    verified = Shield(rng=lambda: 1.0).verify([message or message_of(world)], SOURCE, memory.tenant, NOW)
    (decision,) = Fast(mode=DispatchMode(world.platform)).decide(memory, SOURCE, verified.results, NOW)
    return decision


@settings(max_examples=1_000)
@given(worlds | resolved | admitted)
def test_every_decision_follows_the_rules(world: World) -> None:
    memory = memory_of(world)
    decision = _decided(world, memory)
    assert (decision.outcome, decision.reason) == verdict(world)
    assert memory.tenant.due == refreshes_after(world)


@settings(max_examples=300)
@given(worlds)
def test_only_delivered_and_duplicate_decisions_have_a_route(world: World) -> None:
    decision = _decided(world, memory_of(world))
    assert (decision.route is not None) == (decision.outcome in ("delivered", "duplicate"))


@settings(max_examples=200)
@given(st.integers(0, 5), st.integers(1, 12))
def test_fast_stage_dispatches_one_command_per_token(tokens: int, commands: int) -> None:
    world = World(limit="strict", tokens=tokens)
    memory = memory_of(world)
    outcomes = [_decided(world, memory).outcome.value for _ in range(commands)]
    assert outcomes.count("delivered") == min(tokens, commands)


@settings(max_examples=500)
@given(admitted)
def test_command_charges_all_limits_or_none(world: World) -> None:
    memory = memory_of(world)
    delivered = _decided(world, memory).outcome == "delivered"
    used = {"strict": (delivered, 0), "relaxed": (0, delivered), "shadow": (0, delivered), "unlimited": (0, 0)}
    counted = {spent.limit.key: spent.amount for spent in memory.tokens.spent()}
    for kind, held, key in (
        (world.limit, world.tokens, (*LANE, "")),
        (world.own, world.own_tokens, ("", "", SERVICE)),
    ):
        assert (held - memory.tokens._stocks[key].left, counted.get(key, 0)) == used[kind]


@settings(max_examples=200)
@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 12))
def test_scarcer_of_two_limits_decides_how_many_are_sent(lane: int, own: int, commands: int) -> None:
    world = World(limit="strict", tokens=lane, own="strict", own_tokens=own)
    memory = memory_of(world)
    outcomes = [_decided(world, memory).outcome.value for _ in range(commands)]
    assert outcomes.count("delivered") == min(lane, own, commands)


@settings(max_examples=300)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=3))
def test_message_changed_anywhere_is_refused(place: int, noise: bytes) -> None:
    raw = signed(NOW, command_id=ID)
    place %= len(raw)
    changed = raw[:place] + noise + raw[place + len(noise) :]
    if changed == raw:
        return
    assert _decided(World(), memory_of(World()), changed).outcome == "invalid"


@pytest.mark.parametrize("phase", [0.0, 15.0, 25.0])
def test_use_of_a_stale_acl_is_recorded_until_the_next_refresh(phase: float) -> None:
    world = World(acls_age=phase)
    memory = memory_of(world)
    _decided(world, memory)
    assert list(memory.tenant.stale_acls) == ([(SOURCE, *LANE)] if phase == 15.0 else [])
