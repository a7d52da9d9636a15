"""The authoritative count of limits, compared with a model, and under concurrent use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.bus.model import Limit
from interlock.bus.path import limits
from interlock.bus.path.limits import Limits, LimitUse, Tokens
from interlock.clock import ManualClock
from interlock.stores.postgres import Database
from interlock.wire.bus_registry import Enforcement
from tests.conftest import copied


@pytest.fixture(scope="module")
async def url(postgres_url: str, template: str) -> AsyncIterator[str]:
    async with copied(postgres_url, template) as made:
        yield made


@pytest.fixture(scope="module")
async def place(url: str) -> AsyncIterator[tuple[Database, ManualClock]]:
    clock = ManualClock()
    database = await Database.open(url, clock=clock)
    yield database, clock
    await database.close()


async def taken(database: Database, limit: Limit, amount: int, org_id: UUID) -> limits.Grant:
    use = LimitUse(org_id, limit, amount)
    async with database.transaction() as connection:
        return (await limits.take(connection, [use]))[use.key]


@dataclass
class Window:
    """A model of consecutive windows of whole seconds."""

    limit: Limit
    start: float = -1.0
    used: int = 0
    carried: int = 0
    cooling_until: float = 0.0
    history: dict[float, int] = field(default_factory=dict)

    def take(self, amount: int, now: float) -> int:
        seconds, rate = self.limit.window_seconds, self.limit.rate
        start = now // seconds * seconds
        if self.start >= 0 and start > self.start:
            skipped = (start - self.start) / seconds - 1
            self.carried = int(min(self.limit.burst, rate + self.carried - self.used + rate * skipped))
            self.used = 0
        self.start = max(self.start, start)
        left = 0 if self.cooling_until > now else rate + self.carried - self.used
        granted = min(amount, left)
        if granted < amount and self.limit.cooldown_seconds and self.cooling_until <= now:
            self.cooling_until = now + self.limit.cooldown_seconds
        self.used += granted
        self.history[self.start] = self.history.get(self.start, 0) + granted
        return granted


_limits = st.builds(
    Limit,
    st.just("mailer"),
    st.just("send"),
    rate=st.integers(1, 8),
    window_seconds=st.sampled_from([1.0, 2.0, 5.0]),
    burst=st.sampled_from([0, 0, 3, 20]),
    cooldown_seconds=st.sampled_from([0.0, 0.0, 3.0]),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(limit=_limits, moves=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 12)), min_size=1, max_size=10))
async def test_window_grants_the_amount_of_the_model(
    place: tuple[Database, ManualClock], limit: Limit, moves: list[tuple[int, int]]
) -> None:
    database, clock = place
    org_id, model = uuid4(), Window(limit)
    for pause, amount in moves:
        clock.advance(pause)
        granted = await taken(database, limit, amount, org_id)
        assert granted.amount == model.take(amount, clock.now().timestamp())
    assert all(sum_ <= limit.rate + limit.burst for sum_ in model.history.values())


async def test_concurrent_takers_get_exactly_the_limit(place: tuple[Database, ManualClock]) -> None:
    database, _ = place
    limit, org_id = Limit("mailer", "crowd", rate=100, window_seconds=3600), uuid4()
    grants = await asyncio.gather(*(taken(database, limit, 7, org_id) for _ in range(40)))
    assert sum(grant.amount for grant in grants) == 100
    assert all(0 < grant.wait_seconds <= 3600 for grant in grants)


async def test_rollback_returns_tokens(place: tuple[Database, ManualClock]) -> None:
    database, _ = place
    limit, org_id = Limit("mailer", "undone", rate=5, window_seconds=3600), uuid4()
    async with database.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        assert (await limits.take(connection, [LimitUse(org_id, limit, 5)]))[org_id, "mailer", "undone", ""].amount == 5
        await transaction.rollback()
    assert (await taken(database, limit, 5, org_id)).amount == 5


async def test_tokens_expire_with_their_window(place: tuple[Database, ManualClock]) -> None:
    database, clock = place
    limit, tokens = Limit("mailer", "ending", rate=100, window_seconds=10), Tokens(uuid4())
    now = clock.now().timestamp()
    assert not tokens.take([limit], now)
    assert await Limits(database).settle([tokens], now) == 1
    ends = now // 10 * 10 + 10
    assert tokens.take([limit], now)
    assert not tokens.take([limit], ends)


async def test_process_prefetches_no_more_than_its_recent_use(place: tuple[Database, ManualClock]) -> None:
    database, clock = place
    limit, tokens = Limit("mailer", "modest", rate=1000, window_seconds=3600), Tokens(uuid4())
    now = clock.now().timestamp()
    for _ in range(3):
        tokens.take([limit], now)
    await Limits(database).settle([tokens], now)
    assert [tokens.take([limit], now) for _ in range(4)] == [True, True, True, False]


async def test_number_of_prefetching_dispatchers_is_limited(place: tuple[Database, ManualClock]) -> None:
    database, clock = place
    limit, org_id = Limit("mailer", "herd", rate=1000, window_seconds=3600), uuid4()
    now = clock.now().timestamp()
    herd = [Tokens(org_id) for _ in range(8)]
    for tokens in herd:
        tokens.take([limit], now)
        await Limits(database, prefetchers=5).settle([tokens], now)
    assert sum(tokens.take([limit], now) for tokens in herd) == 5
    clock.advance(1)
    late = Tokens(org_id)
    late.take([limit], now)
    await Limits(database, prefetchers=5).settle([late], now)
    assert late.take([limit], now)


async def test_exceeded_relaxed_limit_closes_until_the_next_window(
    place: tuple[Database, ManualClock],
) -> None:
    database, clock = place
    limit = Limit("mailer", "relaxed", rate=2, window_seconds=10, enforcement=Enforcement.RELAXED)
    tokens, now = Tokens(uuid4()), clock.now().timestamp()
    for sent in (2, 1):
        for _ in range(sent):
            tokens.spend(limit)
        await Limits(database).settle([tokens], now)
        assert (tokens.denied(limit, now) is not None) == (sent == 1)
    assert tokens.denied(limit, now // 10 * 10 + 10) is None


def own(rate: int, source: str = "billing", **more: object) -> Limit:
    return Limit("", "", rate, 3600.0, source=source, **more)  # type: ignore[arg-type]


async def test_source_limit_has_its_own_window_and_tokens(place: tuple[Database, ManualClock]) -> None:
    database, clock = place
    lane, now = Limit("mailer", "both", rate=1000, window_seconds=3600), clock.now().timestamp()
    tokens = Tokens(uuid4())
    assert not tokens.take([lane, own(40)], now)
    assert await Limits(database).settle([tokens], now) == 2
    assert [tokens.take([lane, own(40)], now) for _ in range(2)] == [True, False]
    assert await Limits(database).settle([tokens], now) == 2
    assert (await taken(database, own(40), 100, tokens.org_id)).amount == 40 - 2
    assert (await taken(database, own(40, "shipping"), 100, tokens.org_id)).amount == 40


async def test_limit_with_tokens_fetches_none_while_another_refuses(
    place: tuple[Database, ManualClock],
) -> None:
    _, clock = place
    lane, tokens, now = Limit("mailer", "held", rate=1000), Tokens(uuid4()), clock.now().timestamp()
    tokens.fetched(lane.key, 5, now + 1, 900)
    for _ in range(50):
        assert not tokens.take([lane, own(40)], now)
    assert [(wanted.limit.key, wanted.amount) for wanted in tokens.wanted(now)] == [(("", "", "billing"), 2)]


async def test_returned_tokens_can_be_taken_again(place: tuple[Database, ManualClock]) -> None:
    database, _ = place
    limit, org_id = own(5), uuid4()
    use = LimitUse(org_id, limit, 5)
    async with database.transaction() as connection:
        await limits.take(connection, [use])
        await limits.give_back(connection, {use.key: 3})
    assert (await taken(database, limit, 5, org_id)).amount == 3
