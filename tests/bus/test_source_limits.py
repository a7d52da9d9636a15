"""Limits on a source alone: registration, enforcement by both stages, and concurrent dispatchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from interlock.bus.build import build_ingress
from interlock.bus.path.ingress import Ingress
from interlock.bus.path.slow_stage import SlowStage
from interlock.clock import ManualClock
from tests.conftest import copied
from tests.support.bus_services import PRODUCER, TARGET, Bus, fresh, opened
from tests.support.bus_tenants import Tenant, tenant
from tests.support.system import System, running


@pytest.fixture
def clock_of_bus() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def bus(
    postgres_url: str, template: str, clock_of_bus: ManualClock, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bus]:
    folder = tmp_path_factory.mktemp("limited")
    async with copied(postgres_url, template) as url, running(url, folder, clock_of_bus) as system:
        yield await opened(system)


async def used(bus: Bus, *, source: str = "", name: str = "") -> int:
    found = await bus.system.value(
        f"select coalesce(sum(used), 0)::int from interlock.bus_windows where source = '{source}' and name = '{name}'"
    )
    return int(found)


async def failures(bus: Bus, ids: list[str]) -> list[dict[str, Any]]:
    return [event for i in ids for event in await bus.events(i) if event["event"] == "snavio.command.failed"]


async def test_source_limit_covers_all_targets_together(bus: Bus, clock_of_bus: ManualClock) -> None:
    queues = [await bus.lane(name) for name in ("one", "two", "strict-two")]
    other = await bus.service("shipping")
    await bus.acl("one", source="shipping")
    await bus.source_limit(5)
    await bus.refreshed()
    ids = [fresh() for _ in range(9)]
    lanes = ["one", "two", "strict-two"] * 3
    results = await bus.batch([bus.message(lane, command_id=i) for lane, i in zip(lanes, ids, strict=True)])
    assert {result["reason"] for result in results} == {"token_required"}
    await bus.settle()
    assert sum([len(await bus.queue(queue)) for queue in queues]) == 5
    told = await failures(bus, ids)
    assert [event["reason"] for event in told] == ["rate-limit-exceeded"] * 4
    assert all(event["retry_after_ms"] > 0 and event["throttle_until"] for event in told)
    # It does not affect other sources, and the next window starts from zero.
    assert (await bus.send(bus.message("one"), key=other))["outcome"] == "delivered"
    clock_of_bus.advance(3600)
    await bus.send(bus.message("one"))
    await bus.settle()
    assert await used(bus, source=PRODUCER) == 1


async def test_prefetched_tokens_of_both_limits_admit_a_command(bus: Bus) -> None:
    await bus.lane("warm")
    await bus.limit("warm", 1000)
    await bus.source_limit(60)
    await bus.refreshed()
    assert [r["outcome"] for r in await bus.batch([bus.message("warm") for _ in range(4)])] == ["pending"] * 4
    await bus.looked_after()
    warm = await bus.batch([bus.message("warm") for _ in range(4)])
    assert [(r["outcome"], r["reason"]) for r in warm] == [("delivered", None)] * 3 + [("pending", "token_required")]


async def test_refusal_by_the_target_limit_returns_the_source_token(bus: Bus) -> None:
    narrow, wide = await bus.lane("narrow"), await bus.lane("wide")
    await bus.limit("narrow", 2)
    await bus.source_limit(10)
    await bus.refreshed()
    await bus.batch([bus.message("narrow") for _ in range(8)])
    await bus.settle()
    assert (len(await bus.queue(narrow)), await used(bus, source=PRODUCER), await used(bus, name="narrow")) == (2, 2, 2)
    await bus.batch([bus.message("wide") for _ in range(12)])
    await bus.settle()
    assert (len(await bus.queue(wide)), await used(bus, source=PRODUCER)) == (8, 10)


async def test_source_at_its_limit_uses_no_shared_tokens(bus: Bus) -> None:
    queue = await bus.lane("shared")
    other = await bus.service("shipping")
    await bus.acl("shared", source="shipping")
    await bus.limit("shared", 6, cooldown_seconds=60.0)
    await bus.source_limit(2)
    await bus.refreshed()
    await bus.batch([bus.message("shared") for _ in range(20)])
    await bus.settle()
    await bus.batch([bus.message("shared") for _ in range(4)], key=other)
    await bus.settle()
    assert len(await bus.queue(queue)) == 6


async def test_exceeded_relaxed_source_limit_closes_in_that_gateway(bus: Bus) -> None:
    await bus.lane("first")
    await bus.lane("second")
    await bus.source_limit(3, enforcement="relaxed")
    await bus.refreshed()
    assert {r["outcome"] for r in await bus.batch([bus.message("first") for _ in range(5)])} == {"delivered"}
    await bus.looked_after()
    verdict = await bus.send(bus.message("second"))
    assert (verdict["outcome"], verdict["reason"]) == ("failed", "rate-limit-exceeded")
    assert 0 < verdict["retry_after_ms"] <= 3_600_000
    assert verdict["throttle_until"]


async def test_shadow_source_limit_counts_and_refuses_nothing(bus: Bus) -> None:
    await bus.lane("watched")
    await bus.source_limit(1, enforcement="shadow")
    await bus.refreshed()
    for _ in range(2):
        assert {r["outcome"] for r in await bus.batch([bus.message("watched") for _ in range(3)])} == {"delivered"}
        await bus.looked_after()
    assert await used(bus, source=PRODUCER) == 6


async def test_refusal_by_the_source_limit_is_no_fairness_violation(bus: Bus) -> None:
    """A ban becomes a refusal if the target has no room; an exhausted limit of the source does not count."""
    await bus.lane("roomy")
    await bus.limit("roomy", 10_000)
    await bus.source_limit(1)
    await bus.execute(
        "insert into interlock.bus_bans (org_id, source, target, name, kind, until, source_share, competing_share,"
        " dispatch_volume) values ($1, $2, $3, 'roomy', 'warm', interlock.clock() + interval '1 hour', .9, .2, 50)",
        bus.system.org_id,
        f"test/{PRODUCER}",
        TARGET,
    )
    await bus.refreshed()
    ids = [fresh() for _ in range(120)]
    await bus.batch([bus.message("roomy", command_id=i) for i in ids[:60]])
    await bus.batch([bus.message("roomy", command_id=i) for i in ids[60:]])
    await bus.settle()
    assert {event["reason"] for event in await failures(bus, ids)} == {"rate-limit-exceeded"}


async def gateways(system: System, count: int) -> list[Ingress]:
    kernel = system.kernel
    return [build_ingress(kernel.settings, kernel.stores.database, kernel.stores.wakeups) for _ in range(count)]


@pytest.mark.parametrize("lane_rate", [None, 700, 90])
async def test_concurrent_dispatchers_never_exceed_a_source_limit(bus: Bus, lane_rate: int | None) -> None:
    """Four gateways with their own tokens and four slow stages, concurrently on three lanes."""
    system, names, rate = bus.system, ("a", "b", "c"), 400
    queues = [await bus.lane(name) for name in names]
    if lane_rate is not None:
        for name in names:
            await bus.limit(name, lane_rate)
    await bus.source_limit(rate)
    ingresses, kernel = await gateways(system, 4), system.kernel
    slow = [SlowStage(kernel.stores.database, kernel.settings, kernel.stores.wakeups) for _ in range(4)]

    async def produce(gateway: Ingress, place: int) -> int:
        warm = 0
        for n in range(15):
            messages = [bus.message(names[(n + place + m) % 3]) for m in range(20)]
            decided = await gateway.accept(system.org_id, f"test/{PRODUCER}", messages)
            warm += sum(each.outcome == "delivered" for each in decided)
            await gateway.maintenance.run_once()
        return warm

    async def drain(stage: SlowStage) -> None:
        for _ in range(40):
            await stage.run_once()

    warm, _ = await asyncio.gather(
        asyncio.gather(*(produce(gateway, n) for n, gateway in enumerate(ingresses))),
        asyncio.gather(*(drain(stage) for stage in slow)),
    )
    await bus.settle()
    delivered = [len(await bus.queue(queue)) for queue in queues]
    expected = rate if lane_rate is None else min(rate, 3 * lane_rate)
    assert sum(warm) > 0
    assert sum(delivered) <= rate
    assert lane_rate is None or max(delivered) <= lane_rate
    # The gateways hold the remaining tokens.
    assert sum(delivered) >= 0.85 * expected
    for gateway in ingresses:
        await gateway.close()


# The registry


async def registered(system: System) -> Tenant:
    owner = await tenant(system)
    await owner.services("billing", "bot")
    return owner


async def test_source_limit_is_created_tried_shown_and_reverted(shared: System) -> None:
    owner = await registered(shared)
    tried = (await owner.ask("POST", "/v1/limits?dry_run=true", json={"source": "billing", "rate": 9})).json()
    assert (tried["dry_run"], tried["change_id"], tried["subject"]) == (True, None, "*/*/billing")
    assert (await owner.get("/v1/limits"))["limits"] == []
    made = await owner.put("limits", source="billing", rate=9, enforcement="relaxed")
    assert made["after"]["source"] == f"{owner.org}/billing"
    await owner.put("limits", target="bot", name="say", rate=100)
    await owner.put("limits", target="bot", name="say", source="billing", rate=5)
    shown = [(each["target"], each["source"], each["rate"]) for each in (await owner.get("/v1/limits"))["limits"]]
    source = f"{owner.org}/billing"
    assert shown == [(None, source, 9), ("bot", None, 100), ("bot", source, 5)]
    pages = [await owner.get("/v1/limits?limit=1")]
    while pages[-1]["next_cursor"]:
        pages.append(await owner.get(f"/v1/limits?limit=1&cursor={pages[-1]['next_cursor']}"))
    assert [each["rate"] for page in pages for each in page["limits"]] == [9, 100, 5]
    changed = await owner.put("limits", source=source, rate=20)
    back = (await owner.ask("POST", f"/v1/changes/{changed['change_id']}/revert")).json()
    assert (back["after"]["rate"], back["after"]["enforcement"]) == (9, "relaxed")
    gone = (await owner.ask("DELETE", "/v1/limits?source=billing")).json()
    assert (gone["action"], gone["subject"]) == ("delete", "*/*/billing")
    again = (await owner.ask("POST", f"/v1/changes/{gone['change_id']}/revert")).json()
    assert (again["action"], again["after"]) == ("create", gone["before"])


async def test_incomplete_limit_is_refused(shared: System) -> None:
    owner = await registered(shared)
    for entry in ({}, {"target": "bot"}, {"name": "say", "source": "billing"}, {"target": "bot", "source": "billing"}):
        assert await owner.refusal("POST", "/v1/limits", json=entry | {"rate": 1}) == (400, "bad_limit"), entry
    assert await owner.refusal("POST", "/v1/limits", json={"source": "nobody", "rate": 1}) == (404, "unknown_service")
    foreign = {"source": "somebody/billing", "rate": 1}
    assert await owner.refusal("POST", "/v1/limits", json=foreign) == (400, "foreign_source")
    assert await owner.refusal("DELETE", "/v1/limits?source=billing") == (404, "not_found")
    assert (await owner.refusal("DELETE", "/v1/limits"))[0] == 400


async def test_service_with_a_limit_or_a_quota_cannot_be_removed(shared: System) -> None:
    owner = await registered(shared)
    await owner.put("limits", source="billing", rate=1)
    assert await owner.refusal("DELETE", "/v1/services/billing") == (409, "service_in_use")
    await owner.ask("DELETE", "/v1/limits?source=billing")
    await owner.put("limits", target="bot", name="say", source="billing", rate=1)
    assert await owner.refusal("DELETE", "/v1/services/billing") == (409, "service_in_use")
    await owner.ask("DELETE", "/v1/limits/bot/say?source=billing")
    assert (await owner.ask("DELETE", "/v1/services/billing")).status_code == 200


async def test_another_org_sees_and_removes_no_limit_on_a_source(shared: System) -> None:
    owner, rival = await registered(shared), await registered(shared)
    await owner.put("limits", source="billing", rate=1)
    assert (await rival.get("/v1/limits"))["limits"] == []
    assert await rival.refusal("DELETE", "/v1/limits?source=billing") == (404, "not_found")
    assert await rival.refusal("DELETE", f"/v1/limits?source={owner.org}/billing") == (400, "foreign_source")
    assert len((await owner.get("/v1/limits"))["limits"]) == 1


async def test_trial_of_a_route_shows_the_source_limit(shared: System) -> None:
    owner = await registered(shared)
    await owner.put("limits", source="billing", rate=7)
    trial = {"source": "billing", "target": "bot", "name": "say"}
    checks = (await owner.ask("POST", "/v1/routes/test", json=trial)).json()["checks"]
    assert [check["detail"] for check in checks if check["check"] == "limit"] == [
        "7 every 1 s, strict, of all that billing sends"
    ]
