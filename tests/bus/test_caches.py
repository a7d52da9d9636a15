"""What a dispatcher believes, for how long, and what it does when it can ask nobody."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from interlock.bus.caches import Caches
from interlock.bus.decision import Decision
from interlock.bus.fast import Fast, Memory
from interlock.bus.model import Acl, Ban, BanKind, Key, Kind, Route
from interlock.bus.shield import Shield
from interlock.clock import ManualClock
from interlock.errors import Unavailable
from interlock.wire.bus_registry import Sensitivity
from tests.bus.producing import SECRET, SOURCE, Shelf, signed

ORG = UUID(int=9)
LANE = ("mailer", "send-mail")
AWAY = Unavailable("The state database is away, try again.")


def shelf(sensitivity: Sensitivity = Sensitivity.LOW) -> Shelf:
    return Shelf(
        key_list=[Key(SOURCE, "hmac-v1", SECRET, current=True)],
        route_list=[Route(*LANE, queue="mail")],
        acl_list=[Acl(SOURCE, *LANE, sensitivity)],
    )


class Dispatcher:
    """Shield and fast stage on a registry that a test may take away."""

    def __init__(self, registry: Shelf) -> None:
        self.clock = ManualClock()
        self.registry = registry
        self.caches = Caches(registry, self.clock, dice=lambda: 0.0)

    async def send(self) -> Decision:
        tenant = await self.caches.ready(ORG)
        now = self.caches.now()
        checked = Shield(dice=lambda: 1.0).check(signed(now), SOURCE, tenant, now)
        return checked if isinstance(checked, Decision) else Fast().decide(Memory(tenant), SOURCE, checked, now)

    async def later(self, turns: int) -> Decision:
        """Sent while others of this moment are on their way."""
        for _ in range(turns):
            await asyncio.sleep(0)  # noqa: TID251 - gives way, and waits for nothing
        return await self.send()

    async def refreshed(self) -> None:
        await self.caches.refresh_due([self.caches.tenant(ORG)])

    async def said(self) -> tuple[str, str]:
        decision = await self.send()
        return decision.outcome.value, decision.reason


@pytest.mark.parametrize(
    ("age", "expected"),
    [
        (0, ("delivered", "")),
        (29, ("delivered", "")),
        (31, ("delivered", "")),
        (89, ("delivered", "")),
        (91, ("escalated", "acl_expired")),
        (179, ("escalated", "acl_expired")),
    ],
)
async def test_without_the_registry_what_is_known_is_used_until_it_expires(
    age: float, expected: tuple[str, str]
) -> None:
    dispatcher = Dispatcher(shelf())
    await dispatcher.send()
    dispatcher.registry.away = AWAY
    dispatcher.clock.advance(age)
    for _ in range(2):
        assert await dispatcher.said() == expected
        await dispatcher.refreshed()


async def test_without_the_registry_nothing_is_let_in_once_the_keys_have_expired() -> None:
    dispatcher = Dispatcher(shelf())
    await dispatcher.send()
    dispatcher.registry.away = AWAY
    dispatcher.clock.advance(180)
    with pytest.raises(Unavailable):
        await dispatcher.send()
    dispatcher.registry.away = None
    assert await dispatcher.said() == ("delivered", "")


async def test_without_the_registry_a_cold_start_lets_nothing_in() -> None:
    dispatcher = Dispatcher(shelf())
    dispatcher.registry.away = AWAY
    with pytest.raises(Unavailable):
        await dispatcher.send()


async def test_a_refresh_loads_only_what_has_changed() -> None:
    dispatcher = Dispatcher(shelf())
    await dispatcher.send()
    loads = dispatcher.registry.loads
    dispatcher.clock.advance(61)
    await dispatcher.send()
    await dispatcher.refreshed()
    assert dispatcher.registry.loads == loads
    dispatcher.registry.numbers[Kind.ROUTES] += 1
    dispatcher.clock.advance(61)
    await dispatcher.send()
    await dispatcher.refreshed()
    assert dispatcher.registry.loads == loads + 1


async def test_whoever_comes_while_another_refreshes_waits_for_that_one() -> None:
    dispatcher = Dispatcher(shelf())
    await asyncio.gather(*(dispatcher.send() for _ in range(10)))
    assert dispatcher.registry.asked == 1


async def test_whoever_comes_while_an_org_is_loaded_for_the_first_time_finds_all_of_it() -> None:
    dispatcher = Dispatcher(shelf())
    dispatcher.registry.slowly = True
    decisions = await asyncio.gather(*(dispatcher.later(turns) for turns in range(30)))
    assert {decision.outcome for decision in decisions} == {"delivered"}


async def test_fresh_entries_are_used_without_a_look_at_the_registry() -> None:
    dispatcher = Dispatcher(shelf(Sensitivity.CRITICAL))
    for _ in range(3):
        await dispatcher.send()
        await dispatcher.refreshed()
    assert dispatcher.registry.asked == 1


async def test_a_notice_of_a_change_has_the_registry_looked_at_after_the_next_dispatch() -> None:
    dispatcher = Dispatcher(shelf())
    await dispatcher.send()
    dispatcher.clock.advance(1)
    dispatcher.caches.expire()
    await dispatcher.refreshed()
    assert dispatcher.registry.asked == 2


def test_jitter_never_lengthens_a_time_to_live() -> None:
    for dice in (0.0, 0.5, 0.999):
        caches = Caches(shelf(), ManualClock(), dice=lambda dice=dice: dice)  # type: ignore[misc]
        assert 0.9 <= caches.tenant(ORG).shorter <= 1.0


async def test_bans_are_looked_for_after_ten_seconds_and_before_a_command_that_comes_after_thirty() -> None:
    """Whatever the ACL: neither its age nor that of a route says that anybody is banned since."""
    dispatcher = Dispatcher(shelf(Sensitivity.LOW))
    await dispatcher.send()
    hard = Ban(SOURCE, BanKind.HARD, dispatcher.caches.now() + 600, *LANE)
    del dispatcher.registry.numbers[Kind.BANS]  # they have no version: dispatchers make them
    dispatcher.registry.ban_list = [hard]
    dispatcher.clock.advance(9)
    assert await dispatcher.said() == ("delivered", "")
    await dispatcher.refreshed()
    assert await dispatcher.said() == ("delivered", "")
    dispatcher.clock.advance(2)
    assert await dispatcher.said() == ("delivered", "")
    await dispatcher.refreshed()
    assert await dispatcher.said() == ("failed", "fairness-violation")
    dispatcher.registry.ban_list = []
    dispatcher.clock.advance(29)
    assert await dispatcher.said() == ("failed", "fairness-violation")
    dispatcher.clock.advance(1)
    assert await dispatcher.said() == ("delivered", "")
