"""Retention of ended runs: the period comes from the submission, or else from the setting."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from interlock.clock import ManualClock
from tests.support.sharded_runs import submit_sharded
from tests.support.system import System, running

DAY = 86_400


@pytest.fixture
async def system(state_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[System]:
    async with running(state_url, tmp_path, clock, retention_days=14) as opened:
        yield opened


async def ended(system: System, run: dict[str, Any]) -> dict[str, Any]:
    claims = await system.claim_many(run_id=run["run_id"], start=0, end=9)
    for claim in claims["claims"]:
        assert (await system.complete(claim)).status_code == 200
    await system.settle()
    return await system.run(run["run_id"])


async def kept(system: System, *runs: dict[str, Any]) -> list[bool]:
    while await system.pass_of("retention"):
        continue
    await system.settle()
    return [(await system.user("GET", f"/v1/runs/{run['run_id']}")).status_code == 200 for run in runs]


@pytest.mark.parametrize("submit", [System.submit, submit_sharded], ids=["shard 0", "own shard"])
async def test_run_is_kept_for_as_long_as_its_submission_says(system: System, clock: ManualClock, submit: Any) -> None:
    short, plain, long = [
        await ended(system, await submit(system, [1, 2, 3], **given))
        for given in ({"retention_days": 2}, {}, {"retention_days": 30.5})
    ]
    assert [run["retention_days"] for run in (short, plain, long)] == [2, 14, 30.5]
    for days, there in ((1.9, [True, True, True]), (0.2, [False, True, True]), (12, [False, False, True])):
        clock.advance(days * DAY)
        assert await kept(system, short, plain, long) == there
    clock.advance(17 * DAY)
    assert await kept(system, long) == [False]
    assert await system.value("select count(*) from interlock.tasks") == 0
    assert await system.value("select count(*) from pg_tables where tablename ~ '^tasks_[1-9]'") == 0


async def test_run_that_goes_on_is_kept_however_short_its_retention(system: System, clock: ManualClock) -> None:
    run = await system.submit([1], retention_days=0.001)
    clock.advance(DAY)
    assert await kept(system, run) == [True]


async def test_job_shows_it_and_a_rerun_is_kept_as_long(system: System) -> None:
    run = await ended(system, await system.submit([1], name="daily", retention_days=3))
    assert (await system.user("GET", "/v1/jobs/daily")).json()["run"]["retention_days"] == 3
    again = await system.user("POST", "/v1/jobs/daily/rerun", json={})
    assert again.status_code == 201, again.text
    assert (await system.run(again.json()["run_id"]))["retention_days"] == run["retention_days"]


@pytest.mark.parametrize("days", [0, -1, 3661, "long", True])
async def test_retention_out_of_bounds_is_refused(system: System, days: Any) -> None:
    reply = await system.user("POST", "/v1/jobs", json={"operator": "echo", "tasks": [1], "retention_days": days})
    assert reply.status_code == 400
    assert "retention_days" in reply.text
