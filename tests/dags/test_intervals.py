"""Cron sources with time partitions: each partition gets one task, whatever happens to schedule and scheduler."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlock import failpoints
from interlock.calendars import Calendar, Every, calendar_of
from interlock.clock import ManualClock
from interlock.dags.definition import CatchUp
from interlock.dags.scheduler import Scheduler
from interlock.dags.schedules import Covered, Cron, Schedule
from tests.dags.test_scheduler import process
from tests.support.source_dags import active_job, deploy, make_tasks, payloads, source_job
from tests.support.system import System, running, until

START = datetime(2025, 6, 1, 12, 0, 30, tzinfo=UTC)
DAILY: dict[str, Any] = {"kind": "cron", "schedule": "0 6 * * *", "timezone": "Europe/Berlin"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


def daily(partition: Any = "daily", **source: Any) -> dict[str, Any]:
    return source_job(**DAILY | source) | {"partition": partition}


async def step(system: System, clock: ManualClock, hours: float, *, every: float = 1) -> None:
    """Lets time pass, with a pass of the scheduler every so many hours."""
    for _ in range(int(hours / every)):
        clock.advance(every * 3600)
        await Scheduler(system.kernel.stores.database, system.kernel.settings).run_once()


async def days(system: System, calendar: str = "daily Europe/Berlin") -> list[str]:
    await make_tasks(system)
    made = [msgspec.json.decode(payload) for payload in await payloads(system, await active_job(system))]
    return sorted(str(calendar_of(calendar).dates(one["start"], one["end"])) for one in made)


async def test_start_stands_for_the_day_before_it(still: System, clock: ManualClock) -> None:
    await deploy(still, daily())
    await step(still, clock, 24)
    (payload,) = [msgspec.json.decode(one) for one in await _payloads(still)]
    assert payload == {
        "scheduled_at": "2025-06-02T04:00:00Z",
        "partition_key": "1748728800-1748815199",
        "start": 1748728800,
        "end": 1748815199,
        "interval_start": "2025-06-01T00:00:00+02:00",
        "interval_end": "2025-06-02T00:00:00+02:00",
    }


async def _payloads(system: System) -> list[str]:
    await make_tasks(system)
    return await payloads(system, await active_job(system))


async def test_deploy_before_todays_start_includes_yesterday(still: System, clock: ManualClock) -> None:
    clock.advance(-9 * 3600)
    await deploy(still, daily())
    await step(still, clock, 2)
    assert await days(still) == ["2025-05-31"]


async def test_start_after_several_partitions_makes_a_task_for_each(still: System, clock: ManualClock) -> None:
    await deploy(still, daily(schedule="0 6 * * 1"))
    await step(still, clock, 24)
    assert await days(still) == [f"2025-05-{day}" for day in range(26, 32)] + ["2025-06-01"]


async def test_starts_within_a_partition_make_no_further_task(still: System, clock: ManualClock) -> None:
    await deploy(still, daily(schedule="0 * * * *"))
    await step(still, clock, 36)
    assert await days(still) == ["2025-06-01", "2025-06-02"]


async def test_downtime_of_days_loses_no_day(still: System, clock: ManualClock) -> None:
    await deploy(still, daily(max_catch_up=2))
    await step(still, clock, 24)
    await step(still, clock, 24 * 9, every=24 * 9)
    await step(still, clock, 0.2, every=0.05)
    assert await days(still) == [f"2025-06-{day:02}" for day in range(1, 11)]


@pytest.mark.parametrize(("catch_up", "made"), [("latest", ["2025-06-01", "2025-06-10"]), ("none", ["2025-06-01"])])
async def test_catch_up_can_leave_missed_days_out(
    still: System, clock: ManualClock, catch_up: str, made: list[str]
) -> None:
    await deploy(still, daily(catch_up=catch_up))
    await step(still, clock, 24)
    await step(still, clock, 24 * 9, every=24 * 9)
    assert await days(still) == made
    await step(still, clock, 24)
    assert await days(still) == [*made, "2025-06-11"]


async def test_changed_schedule_loses_and_repeats_no_day(still: System, clock: ManualClock) -> None:
    await deploy(still, daily())
    await step(still, clock, 24 * 2)
    for hour in (1, 23, 4, 14):
        await deploy(still, daily(schedule=f"30 {hour} * * *"))
        await step(still, clock, 24 * 2)
    assert await days(still) == [f"2025-06-{day:02}" for day in range(1, 10)]


async def test_new_generation_goes_on_where_the_previous_one_was(still: System, clock: ManualClock) -> None:
    await deploy(still, daily())
    await step(still, clock, 24)
    clock.advance(15 * 3600)
    await deploy(still, daily() | {"config": {"changed": True}})
    await step(still, clock, 12)
    # The task of the first day had not ended, so the new generation takes it over.
    assert await days(still) == ["2025-06-01", "2025-06-02"]


async def test_reactivated_generation_makes_up_for_the_days_it_missed(still: System, clock: ManualClock) -> None:
    await deploy(still, daily())
    first = await active_job(still)
    await step(still, clock, 24)
    await deploy(still, daily() | {"config": {"changed": True}})
    await step(still, clock, 48)
    reply = await still.user("POST", "/v1/dags/feeds/rollback", json={})
    assert reply.status_code == 200, reply.text
    await step(still, clock, 24)
    assert await active_job(still) == first
    assert await days(still) == ["2025-06-01", "2025-06-02", "2025-06-03", "2025-06-04"]


@pytest.mark.parametrize("point", ["schedule.before_commit", "trigger.before_commit"])
async def test_failed_pass_leaves_no_interval_out(still: System, clock: ManualClock, point: str) -> None:
    await deploy(still, daily())
    await step(still, clock, 15)

    async def fail() -> None:
        raise RuntimeError("stopped here")

    failpoints.arm(point, fail)
    try:
        with pytest.raises(RuntimeError, match="stopped here"):
            await step(still, clock, 1)
    finally:
        failpoints.disarm(point)
    await step(still, clock, 24)
    assert await days(still) == ["2025-06-01", "2025-06-02"]


async def test_concurrent_schedulers_make_each_hour_once(still: System, clock: ManualClock) -> None:
    clock.advance((datetime(2025, 10, 25, 22, 10, tzinfo=UTC) - START).total_seconds())
    await deploy(still, daily("hourly", schedule="5 * * * *"))
    many = [Scheduler(still.kernel.stores.database, still.kernel.settings) for _ in range(3)]
    for _ in range(7):
        clock.advance(3600)
        await asyncio.gather(*(one.run_once() for one in many))
    hours = ["T00", "T01", "T02+01:00", "T02+02:00", "T03", "T04", "T05"]
    assert await days(still, "hourly Europe/Berlin") == [f"2025-10-26{hour}" for hour in hours]


async def test_source_list_shows_the_next_interval(still: System, clock: ManualClock) -> None:
    await deploy(still, daily())
    await step(still, clock, 1)
    (source,) = (await still.user("GET", "/v1/dags/feeds/sources")).json()["sources"]
    shown = ("partition", "next_at", "next_start_date", "next_end_date", "catch_up")
    assert {name: source[name] for name in shown} == {
        "partition": "daily Europe/Berlin",
        "next_at": "2025-06-02T04:00:00Z",
        "next_start_date": "2025-06-01",
        "next_end_date": "2025-06-01",
        "catch_up": "all",
    }


def test_backlog_is_processed_in_passes_without_a_gap() -> None:
    cron = Cron(Schedule("0 * * * *"), timedelta(seconds=60), CatchUp.ALL, 100)
    calendar = Calendar(Every.HOURLY)
    now = START + timedelta(days=30)
    covered, since, made, more = Covered.of(cron, calendar, START, START), START, [], True
    while more:
        due, covered, more = covered.due(since, now)
        assert len(due) <= 100
        since = due[-1].start
        made += [partition for one in due for partition in one.partitions]
    assert len(made) == 30 * 24
    assert all(one[1] + 1 == other[0] for one, other in pairwise(made))


@pytest.mark.slow
@pytest.mark.crash
async def test_killed_scheduler_neither_loses_nor_doubles_an_interval(state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path) as system:
        await deploy(system, source_job(kind="cron", schedule="* * * * *") | {"partition": "hourly"})

        async def followed() -> int:
            return int(await system.value("select count(*) from interlock.cron_state where next_at > now()"))

        async def disconnected() -> bool:
            query = "select count(*) from pg_stat_activity where application_name = 'interlock-scheduler'"
            return bool(await system.value(query) == 0)

        async with process(state_url, tmp_path) as first:
            await until(followed)
            first.kill()
            assert await first.wait() == -signal.SIGKILL
        await until(disconnected)
        await system.value(
            "update interlock.cron_state set next_at = now(), last_at = now() - interval '6 hours',"
            " covered_to = date_trunc('hour', now() at time zone 'UTC') at time zone 'UTC' - interval '6 hours'"
        )
        async with process(state_url, tmp_path) as one, process(state_url, tmp_path) as other:
            await until(followed)
            for each in (one, other):
                each.kill()
                await each.wait()
        found = [msgspec.json.decode(payload)["start"] for payload in await _payloads(system)]
        made = sorted(found)
        assert len(made) == len(set(made))
        assert made == [made[0] + 3600 * n for n in range(len(made))]
        assert len(made) >= 6
