"""Backpressure: a queue over its limit pauses the jobs that feed it, and no paused work is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interlock import failpoints
from interlock.clock import ManualClock
from interlock.wire.access import KeyRequest, Role
from interlock.wire.dags import PauseLevel
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System, running

UP = """
name: up
jobs:
  - name: feed
    activation: source
    source: { kind: manual }
    operator: echo
    outputs: [raw]
  - name: clean
    operator: echo
    inputs: [{ from: { job: feed, output: raw } }]
    outputs: [clean]
publish:
  clean: { from: { job: clean, output: clean } }
"""

DOWN = """
name: down
jobs:
  - name: rate
    operator: echo
    inputs: [{ from: { dataset: clean } }]
    outputs: [rated]
  - name: sum
    operator: echo
    inputs: [{ from: { job: rate, output: rated } }]
    outputs: [sums]
    max_queue_depth: 5
"""


def ranges(count: int, first: int = 0) -> list[tuple[int, int]]:
    return [(10 * n, 10 * n + 9) for n in range(first, first + count)]


@pytest.fixture
async def flow(still: System) -> DeployedDags:
    """Deploys two DAGs, the second downstream of the first."""
    found = DeployedDags(still)
    await found.start(UP)
    await found.start(DOWN)
    return found


def shown(pauses: list[dict[str, Any]]) -> dict[str, str]:
    return {pause["job"]["name"]: pause["level"] for pause in pauses}


async def test_full_queue_pauses_all_upstream_jobs_across_dags(flow: DeployedDags) -> None:
    await flow.report("down", "rate", *ranges(5))
    await flow.run("pressure")
    assert await flow.pauses() == []
    await flow.report("down", "rate", *ranges(1, first=5))
    await flow.run("pressure")
    pauses = await flow.pauses()
    assert shown(pauses) == {"rate": "all", "clean": "all", "feed": "all"}
    (feed,) = (pause for pause in pauses if pause["job"]["name"] == "feed")
    assert feed["path"] == ["up/feed", "up/clean", "down/rate", "down/sum"]
    assert feed["reason"] == "sum has 6 tasks waiting; its max_queue_depth is 5"
    assert feed["cause"] == {"dag_name": "down", "name": "sum"}


async def test_paused_job_gets_its_tasks_after_the_release(flow: DeployedDags) -> None:
    await flow.report("down", "rate", *ranges(6))
    await flow.run("pressure")
    await flow.report("up", "feed", *ranges(3))
    await flow.run("scopes")
    assert await flow.waiting("up", "clean") == []
    await flow.finish_all("down", "sum")
    await flow.run("pressure", "router", "scopes")
    assert await flow.pauses() == []
    assert await flow.finish_all("up", "clean") == ranges(3)
    assert await flow.finish_all("down", "rate") == ranges(3)


async def test_paused_stream_resumes_at_its_cursor(flow: DeployedDags) -> None:
    await flow.report("up", "feed", 9)
    await flow.report("down", "rate", *ranges(6))
    (first,) = await flow.waiting("up", "clean")
    await flow.run("pressure")
    await flow.report("up", "feed", 29)
    assert await flow.finish(first) == (0, 9)
    assert await flow.waiting("up", "clean") == []
    await flow.finish_all("down", "sum")
    await flow.run("pressure", "router")
    assert await flow.finish_all("up", "clean") == [(10, 29)]


async def test_release_waits_until_the_queue_is_well_below_its_limit(flow: DeployedDags) -> None:
    await flow.report("down", "rate", *ranges(6))
    await flow.run("pressure")
    for left in (5, 4):
        assert len(await flow.pauses()) == 3
        await flow.finish((await flow.waiting("down", "sum"))[0])
        assert len(await flow.waiting("down", "sum")) == left
        await flow.run("pressure")
    assert await flow.pauses() == []
    await flow.report("down", "rate", *ranges(1, first=6))
    await flow.run("pressure")
    assert await flow.pauses() == []


async def test_bulk_work_is_paused_before_normal_work(still: System, clock: ManualClock) -> None:
    flow = DeployedDags(still)
    await flow.start(UP.replace("  - name: clean\n", "  - name: clean\n    priority: bulk\n"))
    await flow.start(DOWN)
    await flow.report("down", "rate", *ranges(6))
    await flow.run("pressure")
    assert shown(await flow.pauses()) == {"rate": "bulk", "clean": "bulk", "feed": "bulk"}
    await flow.report("up", "feed", (0, 9))
    await flow.report("up", "clean", (0, 9))
    assert await flow.waiting("up", "clean") == []
    assert len(await flow.waiting("down", "rate")) == 1
    clock.advance(4)
    await flow.run("pressure")
    assert set(shown(await flow.pauses()).values()) == {"bulk"}
    clock.advance(1)
    await flow.run("pressure")
    assert shown(await flow.pauses()) == {"rate": "all", "clean": "all", "feed": "all"}
    await flow.report("up", "clean", (10, 19))
    assert len(await flow.waiting("down", "rate")) == 1
    assert await still.kernel.dags.pauses.levels() == {PauseLevel.BULK: 0, PauseLevel.ALL: 3}


async def test_queue_back_at_its_limit_is_not_escalated(still: System, clock: ManualClock) -> None:
    flow = DeployedDags(still)
    await flow.start(UP.replace("  - name: clean\n", "  - name: clean\n    priority: bulk\n"))
    await flow.start(DOWN)
    await flow.report("down", "rate", *ranges(6))
    await flow.run("pressure")
    await flow.finish((await flow.waiting("down", "sum"))[0])
    clock.advance(60)
    await flow.run("pressure")
    assert set(shown(await flow.pauses()).values()) == {"bulk"}


async def test_task_that_waits_too_long_pauses_upstream_jobs(still: System, clock: ManualClock) -> None:
    flow = DeployedDags(still)
    await flow.start(UP)
    await flow.start(DOWN.replace("max_queue_depth: 5", "max_queue_age: 60s"))
    await flow.report("down", "rate", (0, 9))
    clock.advance(61)
    await flow.run("pressure")
    (rate,) = (pause for pause in await flow.pauses() if pause["job"]["name"] == "rate")
    assert rate["reason"] == "sum has had a task waiting for 61 s; its max_queue_age is 60 s"
    await flow.finish_all("down", "sum")
    await flow.run("pressure")
    assert await flow.pauses() == []


async def test_tasks_waiting_for_a_retry_count_as_queued(still: System) -> None:
    flow = DeployedDags(still)
    await flow.start(UP)
    await flow.start(DOWN)
    await flow.report("down", "rate", *ranges(6))
    for task_id in await flow.waiting("down", "sum"):
        await still.complete(await still.claim(task_id), "Failed")
    await flow.run("pressure")
    assert len(await flow.pauses()) == 3


async def test_job_stays_paused_until_every_cause_is_gone(still: System) -> None:
    flow = DeployedDags(still)
    await flow.start(UP.replace("    outputs: [clean]\n", "    outputs: [clean]\n    max_queue_depth: 5\n"))
    await flow.start(DOWN)
    await flow.report("up", "feed", *ranges(6))
    await flow.report("down", "rate", *ranges(6))
    await flow.run("pressure")
    causes = {(pause["job"]["name"], pause["cause"]["name"]) for pause in await flow.pauses()}
    assert causes == {("feed", "clean"), ("feed", "sum"), ("clean", "sum"), ("rate", "sum")}
    await flow.finish_all("down", "sum")
    await flow.run("pressure")
    assert {(p["job"]["name"], p["cause"]["name"]) for p in await flow.pauses()} == {("feed", "clean")}


async def test_removed_limit_releases_paused_jobs(flow: DeployedDags) -> None:
    await flow.report("down", "rate", *ranges(6))
    await flow.run("pressure")
    await flow.system.value("update interlock.jobs set max_queue_depth = null")
    await flow.run("pressure")
    assert await flow.pauses() == []


async def test_queue_is_filled_only_up_to_its_limit_after_a_release(still: System) -> None:
    flow = DeployedDags(still)
    await flow.start(UP.replace("    outputs: [clean]\n", "    outputs: [clean]\n    max_queue_depth: 10\n"))
    await flow.start(DOWN)
    await flow.report("down", "rate", *ranges(6))
    await flow.run("pressure")
    for scope in ranges(60):
        await flow.report("up", "feed", scope)
    await flow.finish_all("down", "sum")
    await flow.run("pressure")
    done: list[tuple[int, int]] = []
    while await flow.run("router", "scopes") or await flow.waiting("up", "clean"):
        waiting = await flow.waiting("up", "clean")
        assert len(waiting) <= 10
        done += [await flow.finish(task_id) for task_id in waiting[:4]]
    assert sorted(done) == ranges(60)
    assert await flow.partitions("up", "clean") == ranges(60)


async def test_changes_with_existing_tasks_do_not_count_against_the_limit(still: System) -> None:
    flow = DeployedDags(still)
    await flow.start(UP.replace("    outputs: [clean]\n", "    outputs: [clean]\n    max_queue_depth: 2\n"))
    for scope in ranges(30):
        await flow.report("up", "feed", scope)
        await flow.finish_all("up", "clean")
    claim = await flow.producer(await flow.job_id("up", "feed"))
    assert claim
    await still.value("delete from interlock.outbox where kind = 'route'")
    await flow.report("up", "feed", (300, 309))
    await still.value("delete from interlock.materialisations where range_start = 300")
    await still.value("delete from interlock.tasks where status = 'Queued'")
    assert await flow.run("scopes") > 0
    assert await flow.finish_all("up", "clean") == [(300, 309)]


async def test_failed_pass_changes_nothing_and_the_next_one_succeeds(flow: DeployedDags) -> None:
    async def break_() -> None:
        failpoints.disarm("pressure.before_commit")
        raise failpoints.FailpointError("pressure.before_commit")

    await flow.report("down", "rate", *ranges(6))
    failpoints.arm("pressure.before_commit", break_)
    with pytest.raises(failpoints.FailpointError):
        await flow.run("pressure")
    assert await flow.pauses() == []
    await flow.run("pressure")
    assert len(await flow.pauses()) == 3


async def test_mutually_reading_dags_do_not_pause_the_cause(flow: DeployedDags) -> None:
    edge = await flow.system.value(
        "insert into interlock.edges (job_id, input_index, org_id, dataset_uuid, dataset_version, floating)"
        " select $1, 1, v.org_id, v.dataset_uuid, v.dataset_version, true from interlock.dataset_versions v"
        " where v.dataset_version = $2 returning job_id",
        await flow.job_id("up", "clean"),
        await flow.version("down", "sum"),
    )
    assert edge
    await flow.report("down", "rate", *ranges(6))
    await flow.run("pressure")
    assert shown(await flow.pauses()) == {"rate": "all", "clean": "all", "feed": "all"}


async def test_pauses_are_paginated_and_visible_only_to_their_org(flow: DeployedDags) -> None:
    await flow.report("down", "rate", *ranges(6))
    await flow.run("pressure")
    system, found, cursor = flow.system, list[str](), ""
    while True:
        page = (await system.user("GET", f"/v1/pauses?limit=1{cursor}")).json()
        found += [pause["job"]["name"] for pause in page["pauses"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert sorted(found) == ["clean", "feed", "rate"]
    assert (await system.user("GET", "/v1/pauses?cursor=nonsense")).status_code == 400
    org = await system.kernel.access.principals.create_org("other")
    key = await system.kernel.access.principals.create_key(
        KeyRequest(user="other", role=Role.ADMIN), org.org_id, granted_by=None
    )
    assert (await system.user("GET", "/v1/pauses", key=key.key)).json()["pauses"] == []


async def test_without_patience_all_work_is_paused_immediately(
    state_url: str, tmp_path: Path, clock: ManualClock
) -> None:
    async with running(state_url, tmp_path, clock, backpressure_escalate_seconds=0) as system:
        flow = DeployedDags(system)
        await flow.start(UP.replace("  - name: clean\n", "  - name: clean\n    priority: bulk\n"))
        await flow.start(DOWN)
        await flow.report("down", "rate", *ranges(6))
        await flow.run("pressure", "pressure")
        assert set(shown(await flow.pauses()).values()) == {"all"}
