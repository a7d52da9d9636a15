"""Status of runs with many readers: rate and ETA come from Valkey, or from Postgres if Valkey has no data."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from valkey.asyncio import Valkey

from interlock.clock import ManualClock
from interlock.stores.embedded import EmbeddedValkey
from interlock.tasks import runs
from tests.support.system import System, running, until


@pytest.fixture
async def watched(state_url: str, tmp_path: Path, clock: ManualClock, valkey: EmbeddedValkey) -> AsyncIterator[System]:
    async with running(state_url, tmp_path, clock, valkey_url=await valkey.start()) as system:
        yield system


async def progress(system: System, clock: ManualClock, run: dict[str, Any], first: int, last: int) -> None:
    """Completes the tasks from `first` to `last` and updates the counters."""
    for claim in (await system.claim_many(run_id=run["run_id"], start=first, end=last))["claims"]:
        await system.complete(claim)
    await system.pass_of("run-counters")


async def seen(system: System, run: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (await system.user("GET", f"/v1/jobs/{run['job_id']}")).json()["run"]
    return found


async def test_status_shows_the_recent_rate_and_its_eta(watched: System, clock: ManualClock) -> None:
    run = await watched.submit([0] * 100)
    assert "rate" not in await seen(watched, run) or (await seen(watched, run))["rate"] is None
    clock.advance(1000)
    await progress(watched, clock, run, 0, 9)
    for n in range(1, 9):
        clock.advance(5)
        await progress(watched, clock, run, n * 10, n * 10 + 9)
    view = await seen(watched, run)
    assert view["rate"] == pytest.approx(2)
    assert view["eta_seconds"] == pytest.approx(5)


async def test_without_valkey_the_rate_is_the_average_of_the_run(
    watched: System, clock: ManualClock, valkey: EmbeddedValkey
) -> None:
    run = await watched.submit([0] * 100)
    clock.advance(10)
    await progress(watched, clock, run, 0, 49)
    async with Valkey.from_url(await valkey.start()) as client:
        await client.flushall()
    view = await seen(watched, run)
    assert (view["rate"], view["eta_seconds"]) == (pytest.approx(5), pytest.approx(10))


async def test_status_of_a_large_run_is_cached_briefly(
    watched: System, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_LARGE", 1)
    monkeypatch.setattr(runs, "_FRESH_MS", 60_000)
    monkeypatch.setattr(runs, "_KEPT_MS", 60_000)
    run = await watched.submit([0] * 10)
    before = await seen(watched, run)
    await progress(watched, clock, run, 0, 4)
    assert await seen(watched, run) == before
    paused = await watched.user("POST", f"/v1/jobs/{run['job_id']}/pause")
    assert paused.json()["state"] == "Paused"
    view = await seen(watched, run)
    assert (view["state"], view["counts"]["Completed"]) == ("Paused", 5)
    other = await watched.kernel.access.principals.create_org("other")
    assert watched.org_id != other.org_id


async def test_stale_status_is_served_while_one_caller_refreshes_it(
    watched: System, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_LARGE", 1)
    monkeypatch.setattr(runs, "_FRESH_MS", 0)
    monkeypatch.setattr(runs, "_KEPT_MS", 60_000)
    run = await watched.submit([0] * 10)
    before = await seen(watched, run)
    await progress(watched, clock, run, 0, 4)
    monkeypatch.setattr(runs, "_FRESH_MS", 1)  # for this long, no other request computes a new status
    assert await seen(watched, run) == before

    async def renewed() -> bool:
        return bool((await seen(watched, run))["counts"]["Completed"] == 5)

    await until(renewed)


async def test_status_is_read_while_valkey_is_killed(
    state_url: str, tmp_path: Path, clock: ManualClock, valkey: EmbeddedValkey
) -> None:
    async with running(state_url, tmp_path, clock, valkey_url=await valkey.start()) as system:
        run = await system.submit([0] * 10)
        await valkey.stop()
        try:
            clock.advance(5)
            await progress(system, clock, run, 0, 4)
            assert (await seen(system, run))["rate"] == pytest.approx(1)
        finally:
            await valkey.start()
