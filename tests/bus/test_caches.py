"""Caches of a dispatcher: times to live, refreshes, and an unavailable registry."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from interlock.bus.model import Acl, Ban, BanKind, Decision, Key, Kind, Route
from interlock.bus.path.caches import Caches
from interlock.bus.path.fast_stage import Fast, Memory
from interlock.bus.path.verification import Shield
from interlock.clock import ManualClock
from interlock.errors import Unavailable
from interlock.wire.bus_registry import Sensitivity
from tests.support.signed_commands import SECRET, SOURCE, Shelf, signed

ORG = UUID(int=9)
LANE = ("mailer", "send-mail")
AWAY = Unavailable("The state database is unavailable; retry later.")


def shelf(sensitivity: Sensitivity = Sensitivity.LOW) -> Shelf:
    return Shelf(
        key_list=[Key(SOURCE, "hmac-v1", SECRET, current=True)],
        route_list=[Route(*LANE, queue="mail")],
        acl_list=[Acl(SOURCE, *LANE, sensitivity)],
    )


class Dispatcher:
    """Shield and fast stage with a registry that a test can make unavailable."""

    def __init__(self, registry: Shelf) -> None:
        self.clock = ManualClock()
        self.registry = registry
        self.caches = Caches(registry, self.clock, rng=lambda: 0.0)

    async def send(self) -> Decision:
        tenant = await self.caches.ready(ORG)
        now = self.caches.now()
        verified = Shield(rng=lambda: 1.0).verify([signed(now)], SOURCE, tenant, now)
        (decision,) = Fast().decide(Memory(tenant), SOURCE, verified.results, now)
        return decision

    async def later(self, turns: int) -> Decision:
        """Sends several commands concurrently."""
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
async def test_entries_are_used_until_they_expire_without_the_registry(age: float, expected: tuple[str, str]) -> None:
    dispatcher = Dispatcher(shelf())
    await dispatcher.send()
    dispatcher.registry.away = AWAY
    dispatcher.clock.advance(age)
    for _ in range(2):
        assert await dispatcher.said() == expected
        await dispatcher.refreshed()


async def test_no_command_passes_with_expired_keys_and_no_registry() -> None:
    dispatcher = Dispatcher(shelf())
    await dispatcher.send()
    dispatcher.registry.away = AWAY
    dispatcher.clock.advance(180)
    with pytest.raises(Unavailable):
        await dispatcher.send()
    dispatcher.registry.away = None
    assert await dispatcher.said() == ("delivered", "")


async def test_no_command_passes_after_a_cold_start_without_the_registry() -> None:
    dispatcher = Dispatcher(shelf())
    dispatcher.registry.away = AWAY
    with pytest.raises(Unavailable):
        await dispatcher.send()


async def test_refresh_loads_only_changed_kinds() -> None:
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


async def test_concurrent_callers_share_one_refresh() -> None:
    dispatcher = Dispatcher(shelf())
    await asyncio.gather(*(dispatcher.send() for _ in range(10)))
    assert dispatcher.registry.asked == 1


async def test_concurrent_callers_see_a_complete_first_load() -> None:
    dispatcher = Dispatcher(shelf())
    dispatcher.registry.slowly = True
    decisions = await asyncio.gather(*(dispatcher.later(turns) for turns in range(30)))
    assert {decision.outcome for decision in decisions} == {"delivered"}


async def test_fresh_entries_are_used_without_a_query() -> None:
    dispatcher = Dispatcher(shelf(Sensitivity.CRITICAL))
    for _ in range(3):
        await dispatcher.send()
        await dispatcher.refreshed()
    assert dispatcher.registry.asked == 1


async def test_change_notification_refreshes_after_the_next_dispatch() -> None:
    dispatcher = Dispatcher(shelf())
    await dispatcher.send()
    dispatcher.clock.advance(1)
    dispatcher.caches.expire()
    await dispatcher.refreshed()
    assert dispatcher.registry.asked == 2


def test_jitter_never_lengthens_a_time_to_live() -> None:
    for drawn in (0.0, 0.5, 0.999):
        caches = Caches(shelf(), ManualClock(), rng=lambda drawn=drawn: drawn)  # type: ignore[misc]
        assert 0.9 <= caches.tenant(ORG).shorter <= 1.0


async def test_bans_refresh_after_10_s_and_before_a_command_after_30_s() -> None:
    """Holds for every ACL: the ages of ACLs and routes do not trigger a refresh of bans."""
    dispatcher = Dispatcher(shelf(Sensitivity.LOW))
    await dispatcher.send()
    hard = Ban(SOURCE, BanKind.HARD, dispatcher.caches.now() + 600, *LANE)
    del dispatcher.registry.numbers[Kind.BANS]  # bans have no version, because dispatchers create them
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
