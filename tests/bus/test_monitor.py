"""Route health: finds routes whose queues are not drained."""

from __future__ import annotations

from typing import Any

from interlock.bus.alerts import LOOKS, Monitor
from interlock.bus.loops import TelemetryBatches
from interlock.bus.path.delivery import target_queue
from interlock.bus.telemetry import emit
from interlock.clock import ManualClock
from interlock.wire.access import KeyRequest, Role
from interlock.wire.bus_events import CommandFailed, FailureReason
from tests.support.bus_targets import Target, target
from tests.support.system import System


async def _health(system: System, *, bad: bool = False) -> dict[str, dict[str, Any]]:
    page = (await system.user("GET", f"/v1/route-health?bad={str(bad).lower()}")).json()
    return {each["target"]: each for each in page["routes"]}


async def _look(system: System, clock: ManualClock, times: int = 1) -> None:
    for _ in range(times):
        clock.advance(30)
        await Monitor(system.kernel.stores.database, system.kernel.settings).run_once()


async def _take_all(bot: Target) -> None:
    queue, name = bot.system.kernel.tasks.queue, target_queue(bot.org_id, bot.queue)
    await queue.receive(name, wait_seconds=0, limit=100, visibility_seconds=3600)


async def test_unpolled_queue_is_reported_and_alerts_once(still: System, clock: ManualClock) -> None:
    bot, well = await target(still), await target(still)
    await bot.send("a")
    await _look(still, clock, LOOKS)
    assert (await _health(still))[bot.service]["status"] == "healthy"
    await _look(still, clock, 2)
    found = await _health(still)
    assert (found[bot.service]["status"], found[bot.service]["depth"]) == ("unpolled", 1)
    assert found[well.service]["status"] == "healthy"
    assert list(await _health(still, bad=True)) == [bot.service]
    await _look(still, clock)
    (alert,) = (await still.user("GET", "/v1/alerts")).json()["alerts"]
    assert (alert["event"], alert["told"]) == ("snavio.route.unhealthy", 1)
    assert alert["sample"]["target"] == bot.service
    await _take_all(bot)
    await _look(still, clock)
    assert (await _health(still))[bot.service]["status"] == "healthy"


async def test_message_waiting_twice_the_drain_time_is_unhealthy(still: System, clock: ManualClock) -> None:
    bot = await target(still, drain=60)
    await bot.send("a", "b")
    queue, name = still.kernel.tasks.queue, target_queue(bot.org_id, bot.queue)
    await queue.receive(name, wait_seconds=0, limit=1, visibility_seconds=3600)
    clock.advance(60)
    await _look(still, clock, 2)
    assert (await _health(still))[bot.service]["status"] == "healthy"
    await _look(still, clock)
    assert (await _health(still))[bot.service]["status"] == "unhealthy"


async def test_queue_that_grows_at_every_check_is_stalled(still: System, clock: ManualClock) -> None:
    bot = await target(still)
    queue, name = still.kernel.tasks.queue, target_queue(bot.org_id, bot.queue)
    for _ in range(LOOKS):
        await bot.send(*range(3))
        await queue.receive(name, wait_seconds=0, limit=1, visibility_seconds=3600)
        await _look(still, clock)
    assert (await _health(still))[bot.service]["status"] == "stalled"
    await _look(still, clock)
    assert (await _health(still))[bot.service]["status"] == "healthy"


async def test_concurrent_monitors_count_a_check_once(still: System, clock: ManualClock) -> None:
    bot = await target(still)
    await bot.send("a")
    clock.advance(60)
    for _ in range(3 * LOOKS):
        await Monitor(still.kernel.stores.database, still.kernel.settings).run_once()
    assert (await _health(still))[bot.service]["status"] == "healthy"


async def test_misroutes_are_counted_until_the_route_exists(still: System, clock: ManualClock) -> None:
    lost = [
        CommandFailed(reason=FailureReason.ROUTE_MISSING, target="nobody", name="post", source="default/billing")
        for _ in range(12)
    ]
    async with still.kernel.stores.database.transaction() as connection:
        await emit(connection, [(still.org_id, event) for event in lost])
    await TelemetryBatches(still.kernel.stores.database, still.kernel.settings).run_once()
    found = (await _health(still, bad=True))["nobody"]
    assert (found["status"], found["misroutes"]) == ("misrouted", 12)
    clock.advance(2 * 86_400)
    await _look(still, clock)
    assert await _health(still) == {}


async def test_dead_letters_of_task_queues_alert_their_org(still: System, clock: ManualClock) -> None:
    for _ in range(2):
        await still.submit([1])
    await _look(still, clock)
    assert (await still.user("GET", "/v1/alerts")).json()["alerts"] == []
    await still.value("update interlock.queue_messages set dead_at = interlock.clock()")
    await _look(still, clock)
    (alert,) = (await still.user("GET", "/v1/alerts")).json()["alerts"]
    assert (alert["event"], alert["told"]) == ("interlock.queue.dead_letters", 2)
    assert alert["sample"] == {"event": alert["event"], "queues": ["platform"], "dead_letters": 2}
    await _look(still, clock, 3)
    (alert,) = (await still.user("GET", "/v1/alerts")).json()["alerts"]
    other = await still.kernel.access.principals.create_org("other")
    key = await still.kernel.access.principals.create_key(
        KeyRequest(user="root", role=Role.ADMIN), other.org_id, granted_by=None
    )
    assert (await still.user("GET", "/v1/alerts", key=key.key)).json()["alerts"] == []
