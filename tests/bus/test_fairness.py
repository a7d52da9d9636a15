"""Fairness: a source that crowds out others loses only the warm path; a source that is alone loses nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import pytest

from interlock.bus.model import Acl, Ban, BanKind, Fairness, Kind, Lane, Limit, Outcome, Route
from interlock.bus.path.caches import Tenant
from interlock.bus.path.fairness import Auditor, report
from interlock.bus.path.fast_stage import Fast, Memory
from interlock.clock import ManualClock
from interlock.wire.bus_registry import Sensitivity
from interlock.wire.commands import Envelope, read
from tests.conftest import copied
from tests.support.bus_services import PRODUCER, TARGET, Bus, fresh, opened
from tests.support.signed_commands import signed
from tests.support.system import running

NOW: Final = 1_800_000_000.0
LANE: Final = Lane("mailer", "send-mail")
RATE: Final = 100
OFF: Final = Fairness(dominant_share=1.0)


@dataclass
class Simulation:
    """Traffic on a lane with a limit per second, and a slow stage that admits what prefetched tokens leave over."""

    rules: Fairness = field(default_factory=Fairness)
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    warm: Counter[str] = field(default_factory=Counter)
    cold: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    bans: list[Ban] = field(default_factory=list)

    def __post_init__(self) -> None:
        tenant = Tenant(UUID(int=1))
        tenant.put(Kind.ROUTES, [Route(*LANE, queue="mail", fairness=self.rules)])
        tenant.put(Kind.LIMITS, [Limit(*LANE, rate=RATE)])
        self.memory = Memory(tenant)
        self.fast = Fast()
        self.envelope: Envelope = read(signed(NOW))

    def run(self, seconds: int, demand: dict[str, int]) -> None:
        """Sends the given number of commands per source and second, in random order, and fetches tokens in between."""
        tenant = self.memory.tenant
        tenant.put(Kind.ACLS, [Acl(source, *LANE, Sensitivity.LOW) for source in demand])
        for second in range(seconds):
            left = RATE
            for now, source in self._second(NOW + second, demand):
                tenant.checked_at |= dict.fromkeys(Kind, now)
                left -= self._prefetched(now, left)
                left -= self._sent(source, now, left)
            self.bans += self.memory.shares.take_imposed()

    def served(self, source: str) -> int:
        return self.warm[source] + self.cold[source]

    def warm_share(self, source: str) -> float:
        """Returns the share of the delivered commands that took the warm path, which is the fast one."""
        return self.warm[source] / self.served(source)

    def _second(self, start: float, demand: dict[str, int]) -> Iterator[tuple[float, str]]:
        sent = [source for source, count in demand.items() for _ in range(count)]
        self.rng.shuffle(sent)
        for place, source in enumerate(sent):
            yield start + place / len(sent), source

    def _prefetched(self, now: float, left: int) -> int:
        """Fetches tokens as a gateway does between two commands, within the limit."""
        taken = 0
        for wanted in self.memory.tokens.wanted(now):
            granted = min(wanted.amount, left)
            self.memory.tokens.fetched((*LANE, ""), granted, now // 1 + 1, left - granted)
            taken += granted
        return taken

    def _sent(self, source: str, now: float, left: int) -> int:
        (decision,) = self.fast.decide(self.memory, source, [self.envelope], now)
        if decision.outcome is Outcome.DELIVERED:
            self.warm[source] += 1
            return 0
        assert decision.outcome is Outcome.ESCALATED
        outcome = self.cold if left > 0 else self.refused
        outcome[source] += 1
        return min(1, max(0, left))


@pytest.mark.parametrize("demand", [5, 90, 500])
def test_source_alone_on_a_lane_is_never_banned(demand: int) -> None:
    simulation = Simulation()
    simulation.run(40, {"acme/alone": demand})
    assert simulation.bans == []


def test_sources_with_fair_shares_are_not_banned() -> None:
    simulation = Simulation()
    simulation.run(60, {"acme/one": 40, "acme/two": 40})
    assert simulation.bans == []


def test_little_other_traffic_is_no_competition() -> None:
    simulation = Simulation()
    simulation.run(60, {"acme/much": 98, "acme/little": 2})
    assert simulation.bans == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("greedy", "honest"), [(120, 20), (400, 60)])
def test_greedy_source_loses_only_the_warm_path_and_others_gain_it(seed: int, greedy: int, honest: int) -> None:
    fair, unfair = Simulation(rng=random.Random(seed)), Simulation(OFF, random.Random(seed))
    for simulation in (fair, unfair):
        simulation.run(40, {"acme/greedy": greedy, "acme/honest": honest})
    assert {ban.source for ban in fair.bans} == {"acme/greedy"}
    assert all(ban.source_share > 0.8 and ban.competing_share >= 0.1 for ban in fair.bans)
    assert fair.warm["acme/greedy"] < unfair.warm["acme/greedy"] / 10
    assert fair.served("acme/greedy") == pytest.approx(unfair.served("acme/greedy"), rel=0.05)
    assert fair.served("acme/honest") >= 0.95 * unfair.served("acme/honest")
    assert fair.warm_share("acme/honest") > unfair.warm_share("acme/honest")


@pytest.mark.parametrize("seed", range(3))
def test_lane_with_room_refuses_nobody_and_honest_sources_stay_warm(seed: int) -> None:
    alone, beside = Simulation(rng=random.Random(seed)), Simulation(rng=random.Random(seed))
    alone.run(40, {"acme/honest": 12})
    beside.run(40, {"acme/greedy": 80, "acme/honest": 12})
    assert {ban.source for ban in beside.bans} == {"acme/greedy"}
    assert beside.refused == Counter()
    assert (beside.served("acme/greedy"), beside.served("acme/honest")) == (40 * 80, 40 * 12)
    # Nine of ten next to the greedy source, and nearly all without it: producers see the latency of the warm path.
    assert alone.warm_share("acme/honest") > 0.99
    assert beside.warm_share("acme/honest") >= 0.9


def test_ban_expires() -> None:
    simulation = Simulation()
    simulation.run(10, {"acme/greedy": 600, "acme/honest": 90})
    (first, *_) = simulation.bans
    assert simulation.memory.shares.banned("acme/greedy", LANE, first.until - 0.1) is not None
    assert simulation.memory.shares.banned("acme/greedy", LANE, first.until) is None


def test_idle_lanes_are_dropped() -> None:
    shares = Simulation().memory.shares
    for n in range(100):
        shares.count_attempt("acme/one", (f"target-{n}", "ask"), NOW + n)
    shares.take_totals(NOW + 100)
    assert len(shares._windows) == 29


# Across dispatchers


@pytest.fixture(scope="module")
def clock_of_bus() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="module")
async def bus(
    postgres_url: str, template: str, clock_of_bus: ManualClock, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bus]:
    folder = tmp_path_factory.mktemp("fair")
    async with copied(postgres_url, template) as url, running(url, folder, clock_of_bus) as system:
        yield await opened(system)


async def audit(bus: Bus) -> None:
    await Auditor(bus.system.kernel.stores.database, bus.system.kernel.settings).run_once()


async def struck(bus: Bus, name: str, times: int) -> None:
    ban = Ban(f"test/{PRODUCER}", BanKind.WARM, 0.0, TARGET, name, 0.91, 0.12, 60)
    async with bus.system.kernel.stores.database.transaction() as connection:
        await report(connection, [(bus.system.org_id, ban)] * times, {})


async def abuses(bus: Bus, since: int) -> list[dict[str, object]]:
    return [e for e in (await bus.events())[since:] if e["event"] == "snavio.fairness.abuse_detected"]


async def test_repeated_bans_become_a_global_ban_reported_once(bus: Bus, clock_of_bus: ManualClock) -> None:
    await bus.lane("repeated")
    await bus.limit("repeated", 10_000)
    since = len(await bus.events())
    await struck(bus, "repeated", 2)
    await audit(bus)
    assert await abuses(bus, since) == []
    await struck(bus, "repeated", 1)
    await audit(bus)
    await audit(bus)
    (told,) = await abuses(bus, since)
    assert (told["source"], told["affected_targets"], told["total_violations"]) == (f"test/{PRODUCER}", [TARGET], 3)
    await bus.refreshed()
    assert (await bus.send(bus.message("repeated")))["reason"] == "warm_ban"
    clock_of_bus.advance(601)
    await bus.refreshed()
    assert (await bus.send(bus.message("repeated")))["reason"] == "token_required"
    await bus.settle()


async def test_auditor_finds_a_share_spread_over_dispatchers(bus: Bus) -> None:
    since, org_id = len(await bus.events()), bus.system.org_id
    for _ in range(4):
        totals = {(org_id, "test/loud", TARGET, "spread"): 85, (org_id, "test/calm", TARGET, "spread"): 15}
        async with bus.system.kernel.stores.database.transaction() as connection:
            await report(connection, [], totals)
    await audit(bus)
    assert [event["source"] for event in await abuses(bus, since)] == ["test/loud"]
    kept = await bus.system.value("select dispatched from interlock.bus_shares where source = 'test/loud'")
    assert kept == 4 * 85


async def test_auditor_does_not_flag_a_source_that_is_alone(bus: Bus) -> None:
    since, org_id = len(await bus.events()), bus.system.org_id
    async with bus.system.kernel.stores.database.transaction() as connection:
        await report(connection, [], {(org_id, "test/alone", TARGET, f"quiet-{n}"): 10_000 for n in range(3)})
    await audit(bus)
    assert await abuses(bus, since) == []


async def test_quota_applies_only_to_banned_sources(bus: Bus) -> None:
    queue = await bus.lane("quota")
    await bus.limit("quota", 10_000)
    await bus.limit("quota", 2, source=PRODUCER)
    await bus.refreshed()
    await bus.batch([bus.message("quota") for _ in range(4)])
    await bus.settle()
    assert len(await bus.queue(queue)) == 4
    await struck(bus, "quota", 3)
    await audit(bus)
    await bus.refreshed()
    ids = [fresh() for _ in range(4)]
    assert {r["reason"] for r in await bus.batch([bus.message("quota", command_id=i) for i in ids])} == {"warm_ban"}
    await bus.settle()
    assert len(await bus.queue(queue)) == 6
    reasons = [event["reason"] for i in ids for event in await bus.events(i) if "reason" in event]
    assert reasons == ["rate-limit-exceeded: source-quota"] * 2


async def test_quota_applies_to_banned_sources_on_strict_routes(bus: Bus) -> None:
    queue = await bus.lane("strict-quota", dedupe_mode="strict")
    await bus.limit("strict-quota", 10_000)
    await bus.limit("strict-quota", 1, source=PRODUCER)
    await struck(bus, "strict-quota", 3)
    await audit(bus)
    await bus.refreshed()
    results = await bus.batch([bus.message("strict-quota") for _ in range(3)])
    assert {result["reason"] for result in results} == {"dedupe_required"}
    await bus.settle()
    assert len(await bus.queue(queue)) == 1


async def test_banned_source_that_floods_a_full_target_is_refused(bus: Bus) -> None:
    await bus.lane("full")
    await bus.limit("full", 1, 86_400.0)
    await struck(bus, "full", 3)
    await audit(bus)
    await bus.refreshed()
    ids = [fresh() for _ in range(102)]
    await bus.batch([bus.message("full", command_id=command_id) for command_id in ids])
    await bus.settle()
    (told,) = await bus.events(ids[-1])
    assert (told["reason"], told["source_share"], told["competing_share"]) == ("fairness-violation", 0.91, 0.12)
    assert told["retry_after_ms"] > 0
    await bus.refreshed()
    verdict = await bus.send(bus.message("full"))
    assert (verdict["outcome"], verdict["reason"]) == ("failed", "fairness-violation")
    assert (await bus.send(bus.message()))["outcome"] == "delivered"


async def test_ban_of_one_gateway_is_reported_once(bus: Bus, clock_of_bus: ManualClock) -> None:
    rival = await bus.service("rival")
    await bus.lane("crowded")
    await bus.acl("crowded", source="rival")
    await bus.limit("crowded", 10_000)
    await bus.refreshed()
    for _ in range(4):
        clock_of_bus.advance(1)
        await bus.batch([bus.message("crowded") for _ in range(40)])
        await bus.batch([bus.message("crowded") for _ in range(6)], key=rival)
        await bus.looked_after()
    told = [e for e in await bus.events() if e["event"] == "snavio.fairness.warm-path-ban"]
    assert [(event["source"], event["command.name"]) for event in told] == [(f"test/{PRODUCER}", "crowded")]
    assert await bus.system.value("select count(*) from interlock.bus_strikes where name = 'crowded'") == 1
