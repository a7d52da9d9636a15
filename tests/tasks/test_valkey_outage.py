"""Limits during a Valkey outage: limited work waits, reports the reason, and resumes when Valkey is back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from valkey.asyncio import Valkey

from interlock.clock import ManualClock
from interlock.http.request_limits import RequestLimit
from interlock.stores.embedded import EmbeddedValkey
from interlock.tasks.limits import Deferrals
from interlock.telemetry import REGISTRY
from tests.support.system import System, running, until, valkey_is_back
from tests.tasks.test_concurrency_limits import running_now, taken

TASKS = [{"url": f"https://one.example/{n}"} for n in range(40)]
LIMITS = {
    "max_concurrency": {"max_concurrency": 5},
    "rate": {"rate": {"key": "host", "per_second": 5}},
}


@pytest.fixture
async def limited(state_url: str, tmp_path: Path, clock: ManualClock, valkey: EmbeddedValkey) -> AsyncIterator[System]:
    url = await valkey.start()
    async with Valkey.from_url(url) as client:
        await client.flushall()
    async with running(state_url, tmp_path, clock, valkey_url=url) as system:
        yield system
    await valkey.start()


def held_back(limit: str) -> float:
    return REGISTRY.get_sample_value("interlock_limits_unavailable_total", {"limit": limit}) or 0.0


async def reason(system: System, run_id: str) -> Any:
    (task_id, *_) = await system.task_ids(run_id)
    return (await system.user("GET", f"/v1/tasks/{task_id}/explain")).json()["reason"]


@contextmanager
def frozen(server: EmbeddedValkey) -> Iterator[None]:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("limit", LIMITS)
async def test_limited_run_waits_during_a_valkey_outage_and_resumes(
    limited: System, clock: ManualClock, valkey: EmbeddedValkey, limit: str
) -> None:
    await valkey.stop()
    before = held_back(limit)
    run = await limited.submit(TASKS, limits=LIMITS[limit])
    other = await limited.submit([1, 2])
    claims = await taken(limited)
    assert {claim["task"]["run_id"] for claim in claims} == {other["run_id"]}
    assert held_back(limit) > before
    assert await reason(limited, run["run_id"]) == "limit_unavailable"
    # The message of the run stays in the queue, so no loop has to recover it.
    assert await limited.value("select count(*) from interlock.queue_messages where dead_at is null") == 1
    clock.advance(60)
    assert await taken(limited) == []
    await valkey.start()
    await valkey_is_back(limited)
    clock.advance(60)

    async def begins() -> list[dict[str, Any]]:
        clock.advance(2)
        return await taken(limited)

    claims = await until(begins)
    assert 0 < len(claims) <= 10
    assert await reason(limited, run["run_id"]) != "limit_unavailable"


@pytest.mark.parametrize("limit", LIMITS)
async def test_hanging_valkey_starts_no_limited_task(limited: System, valkey: EmbeddedValkey, limit: str) -> None:
    await limited.submit(TASKS, limits=LIMITS[limit])
    with frozen(valkey):
        assert await taken(limited) == []
    assert await running_now(limited) == 0


async def test_running_tasks_complete_in_a_valkey_outage_and_free_slots(
    limited: System, clock: ManualClock, valkey: EmbeddedValkey
) -> None:
    run = await limited.submit(TASKS[:5], limits=LIMITS["max_concurrency"])
    claims = await taken(limited)
    assert len(claims) == 5
    await valkey.stop()
    for claim in claims:
        assert (await limited.complete(claim)).status_code == 200
    await limited.settle()
    assert (await limited.run(run["run_id"]))["state"] == "Completed"


async def test_task_without_a_rate_key_starts_without_valkey(limited: System, valkey: EmbeddedValkey) -> None:
    await valkey.stop()
    await limited.submit([{"tenant": "a"}, {}], limits={"rate": {"key": "/tenant", "per_second": 1}})
    assert [claim["task"]["payload"] for claim in await taken(limited)] == [{}]


@pytest.mark.parametrize("limit", LIMITS)
async def test_without_a_valkey_url_no_limited_task_starts(
    state_url: str, tmp_path: Path, clock: ManualClock, limit: str
) -> None:
    async with running(state_url, tmp_path, clock) as system:
        run = await system.submit(TASKS, limits=LIMITS[limit])
        assert await taken(system) == []
        assert await reason(system, run["run_id"]) == "limit_unavailable"


def test_dispatcher_without_a_valkey_url_does_not_start(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    environment["INTERLOCK_STATE_URL"] = "postgresql://nobody@127.0.0.1:1/none"
    program = str(Path(sys.executable).with_name("interlock"))
    command = [program, "dispatcher", "--dir", str(tmp_path), "--internal", "127.0.0.1:0"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert "INTERLOCK_VALKEY_URL is not set" in ended.stderr + ended.stdout


# Parts


def test_deferred_ranges_come_back_spread_out() -> None:
    now = [100.0]
    deferrals = Deferrals(seconds=lambda: now[0], uniform=lambda: 0.5)
    delays = [deferrals.next("rate") for _ in range(500)]
    assert (delays[0], delays[-1]) == (1.0, 10.0)
    assert max(Deferrals(seconds=lambda: 0.5, uniform=lambda: 1.0).next("rate") for _ in range(3)) == 1.5
    now[0] += 1
    assert deferrals.next("rate") == 1.0


async def test_gateway_without_valkey_admits_the_limit_in_each_second() -> None:
    now = [100.25]
    limit = RequestLimit(None, 2, seconds=lambda: now[0])
    assert [await limit.wait("key") for _ in range(4)] == [None, None, 0.75, 0.75]
    assert await limit.wait("other") is None
    now[0] = 101.0
    assert await limit.wait("key") is None
