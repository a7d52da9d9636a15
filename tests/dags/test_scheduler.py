"""Cron sources: started by `interlock serve scheduler`, with a manual clock and as a process."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from interlock.apps.scheduler import scheduler
from interlock.clock import ManualClock
from interlock.dags.scheduler import Scheduler
from interlock.settings import Settings
from tests.support.deployment import clean_environment
from tests.support.source_dags import active_job, deploy, hold_back, let_go, make_tasks, payloads, source_job
from tests.support.system import System, running, until

NOON = datetime(2025, 6, 1, 12, 0, 30, tzinfo=UTC)
EVERY_TEN: dict[str, Any] = {"kind": "cron", "schedule": "*/10 * * * *", "misfire_grace": "1m"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


def cron(system: System) -> Scheduler:
    return Scheduler(system.kernel.stores.database, system.kernel.settings)


async def starts(system: System, job_id: UUID | None = None) -> list[str]:
    """Returns the time of day of each created task, in order of creation."""
    await make_tasks(system)
    found = await payloads(system, job_id or await active_job(system))
    return [msgspec.json.decode(payload)["scheduled_at"].partition("T")[2].removesuffix(":00Z") for payload in found]


async def walk(system: System, clock: ManualClock, minutes: int) -> None:
    for _ in range(minutes):
        clock.advance(60)
        await cron(system).run_once()


async def test_schedule_starts_with_its_deployment(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(**EVERY_TEN))
    await walk(still, clock, 25)
    assert await starts(still) == ["12:10", "12:20"]
    (source,) = (await still.user("GET", "/v1/dags/feeds/sources")).json()["sources"]
    assert source["next_at"] == "2025-06-01T12:30:00Z"


async def test_schedule_uses_its_time_zone(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(kind="cron", schedule="15 14 * * *", timezone="Europe/Paris"))
    await walk(still, clock, 20)
    assert await starts(still) == ["12:15"]


@pytest.mark.parametrize(
    ("catch_up", "made"),
    [
        ({"catch_up": "none"}, ["13:30"]),
        ({}, ["13:20", "13:30"]),
        ({"catch_up": "all"}, ["12:10", "12:20", "12:30", "12:40", "12:50", "13:00", "13:10", "13:20", "13:30"]),
        ({"catch_up": "all", "max_catch_up": 3}, ["13:10", "13:20", "13:30"]),
    ],
)
async def test_missed_starts_follow_the_catch_up_policy(
    still: System, clock: ManualClock, catch_up: dict[str, Any], made: list[str]
) -> None:
    await deploy(still, source_job(**EVERY_TEN, **catch_up))
    await cron(still).run_once()
    clock.advance(90 * 60)
    await cron(still).run_once()
    assert await starts(still) == made


async def test_clock_set_back_starts_nothing_twice(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(**EVERY_TEN, catch_up="all"))
    await walk(still, clock, 30)
    clock.advance(-25 * 60)
    await walk(still, clock, 40)
    assert await starts(still) == ["12:10", "12:20", "12:30", "12:40"]


async def test_lost_schedule_state_repeats_no_start(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(**EVERY_TEN))
    await walk(still, clock, 10)
    assert await starts(still) == ["12:10"]
    await still.value("delete from interlock.cron_state")
    await cron(still).run_once()
    assert await starts(still) == ["12:10"]


async def test_changed_schedule_starts_from_now(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(**EVERY_TEN))
    await walk(still, clock, 12)
    await deploy(still, source_job(**EVERY_TEN | {"schedule": "*/7 * * * *", "catch_up": "all"}))
    await walk(still, clock, 10)
    assert await starts(still) == ["12:10", "12:14", "12:21"]


async def test_reactivated_job_does_not_catch_up(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(**EVERY_TEN, catch_up="all"))
    job_id = await active_job(still)
    await walk(still, clock, 1)
    await still.value("update interlock.jobs set active = false")
    await walk(still, clock, 60)
    await still.value("update interlock.jobs set active = true")
    await walk(still, clock, 10)
    assert await starts(still, job_id) == ["13:10"]


async def test_starts_of_a_paused_job_wait(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(**EVERY_TEN))
    job_id = await active_job(still)
    await hold_back(still, job_id)
    await walk(still, clock, 25)
    assert await starts(still) == []
    await let_go(still, job_id)
    assert await starts(still) == ["12:10", "12:20"]


async def test_concurrent_schedulers_create_each_start_once(still: System, clock: ManualClock) -> None:
    jobs = [source_job(f"s{n}", **EVERY_TEN) for n in range(20)]
    await deploy(still, *jobs)
    many = [cron(still) for _ in range(5)]
    for _ in range(12):
        clock.advance(60)
        await asyncio.gather(*(one.run_once() for one in many))
    for job in jobs:
        assert await starts(still, await active_job(still, job["name"])) == ["12:10"]


async def test_invalid_schedule_is_reported_and_blocks_no_other(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job("good", **EVERY_TEN), source_job("bad", **EVERY_TEN))
    await still.value(
        "update interlock.jobs set source = source || '{\"timezone\": \"Mars/Olympus\"}' where name = 'bad'"
    )
    await walk(still, clock, 12)
    assert await starts(still, await active_job(still, "good")) == ["12:10"]
    assert await starts(still, await active_job(still, "bad")) == []


# The scheduler as a process


@asynccontextmanager
async def process(state_url: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts a scheduler and waits until it handles signals and runs its loop."""
    settings = {"state_url": state_url, "dir": str(folder), "schedule_seconds": "0.05", "log_format": "json"}
    command = (sys.executable, "-m", "interlock.cli", "serve", "scheduler")
    started = await asyncio.create_subprocess_exec(*command, env=clean_environment(settings), stderr=PIPE)
    try:
        assert started.stderr is not None
        async for line in started.stderr:
            if msgspec.json.decode(line)["event"] == "started":
                break
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def _let_time_pass(system: System, minutes: int) -> Any:
    """Sets the state to that of a schedule last evaluated the given number of minutes ago."""
    return await system.value(
        "update interlock.cron_state set next_at = now(),"
        " last_at = date_trunc('minute', now()) - make_interval(mins => $1) - interval '1 s' returning last_at",
        minutes,
    )


@pytest.mark.slow
async def test_killed_scheduler_resumes_without_loss_or_duplicates(state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path) as system:
        schedule: dict[str, Any] = {"kind": "cron", "schedule": "* * * * *", "misfire_grace": "1s", "catch_up": "all"}
        await deploy(system, source_job(**schedule))

        async def followed() -> int:
            return int(await system.value("select count(*) from interlock.cron_state where next_at > now()"))

        async def disconnected() -> bool:
            query = "select count(*) from pg_stat_activity where application_name = 'interlock-scheduler'"
            return bool(await system.value(query) == 0)

        async with process(state_url, tmp_path) as first:
            await until(followed)
            first.kill()
            await first.wait()
        assert first.returncode == -signal.SIGKILL
        await until(disconnected)
        since = await _let_time_pass(system, 5)
        async with process(state_url, tmp_path) as one, process(state_url, tmp_path) as other:
            await until(followed)
            for each in (one, other):
                each.terminate()
                assert await each.wait() == 0
        await make_tasks(system)
        found = await payloads(system, await active_job(system))
        times = [datetime.fromisoformat(msgspec.json.decode(payload)["scheduled_at"]) for payload in found]
        # Two schedulers create tasks concurrently, in no particular order.
        made = sorted(time for time in times if time > since)
        assert len(made) >= 6
        assert made == [made[0] + timedelta(minutes=n) for n in range(len(made))]
        assert len(set(times)) == len(times)


async def test_scheduler_process_needs_only_the_database(state_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    async with scheduler(Settings(state_url=state_url, dir=folder)) as service:
        assert await service.run_once() == 0
    assert not folder.exists()
