"""Backfills: a range is counted, ingested, handed out in small steps, stopped and resumed, and never computed twice.

The behaviour is the same for tasks in the shared shard of small runs and in a shard of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from interlock import failpoints
from interlock.clock import ManualClock
from interlock.jobs import backfills
from interlock.wire.access import KeyRequest, Role
from tests.support.deployed_dags import DeployedDags
from tests.support.staged_lists import Intake, intake

DAG = """
name: chain
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
  - name: sum
    operator: echo
    inputs: [{ from: { job: clean, output: clean } }]
    outputs: [sums]
"""

BOTH = """
name: chain
jobs:
  - { name: left, activation: source, source: { kind: manual }, operator: echo, outputs: [out] }
  - { name: right, activation: source, source: { kind: manual }, operator: echo, outputs: [out] }
  - name: clean
    operator: echo
    inputs: [{ from: { job: left, output: out } }, { from: { job: right, output: out } }]
    outputs: [clean]
"""


def ranges(count: int, first: int = 0) -> list[tuple[int, int]]:
    return [(10 * n, 10 * n + 9) for n in range(first, first + count)]


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm("ingest.before_hand_out_commit")


@pytest.fixture
def tens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hands out ten tasks at a time, in one message."""
    monkeypatch.setattr(backfills, "_MAX_TASKS", 10)
    monkeypatch.setattr(backfills, "_MAX_WAITING", 40)


@pytest.fixture(params=[10_000, 3], ids=["among small runs", "in its own shard"])
async def site(
    request: pytest.FixtureRequest, state_url: str, tmp_path: Path, clock: ManualClock
) -> AsyncIterator[Intake]:
    async with intake(state_url, tmp_path, clock, shard_threshold=request.param) as made:
        yield made


@pytest.fixture
async def flow(site: Intake) -> DeployedDags:
    """A flow with twenty-five partitions, all of them done."""
    found = DeployedDags(site.system)
    await found.start(DAG)
    await found.report("chain", "feed", *ranges(25))
    await found.finish_all("chain", "clean")
    await found.finish_all("chain", "sum")
    return found


async def start(flow: DeployedDags, first: int, last: int, job: str = "clean", **more: Any) -> dict[str, Any]:
    reply = await flow.system.user(
        "POST", f"/v1/dags/chain/jobs/{job}/backfills", json={"start": first, "end": last} | more
    )
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def started(flow: DeployedDags, first: int, last: int, job: str = "clean", **more: Any) -> str:
    run_id: str = (await start(flow, first, last, job, **more))["backfill"]["run_id"]
    return run_id


async def shown(flow: DeployedDags, run_id: str) -> dict[str, Any]:
    reply = await flow.system.user("GET", f"/v1/backfills/{run_id}")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def act(flow: DeployedDags, run_id: str, action: str) -> Any:
    return await flow.system.user("POST", f"/v1/backfills/{run_id}/{action}")


async def made(site: Intake) -> None:
    """Ingests, and hands out every task that can be handed out."""
    await site.drain()
    while await site.pass_of("held_runs"):
        continue


async def test_dry_run_counts_and_shows_scopes_and_starts_nothing(site: Intake, flow: DeployedDags) -> None:
    answer = await start(flow, 35, 204, dry_run=True)
    assert (answer["scopes"], answer["more"], answer["backfill"]) == (18, False, None)
    assert [(scope["start"], scope["end"]) for scope in answer["first"]] == ranges(10, first=3)
    assert (await flow.system.user("GET", "/v1/backfills")).json()["backfills"] == []


async def test_done_scopes_and_everything_downstream_are_recomputed(site: Intake, flow: DeployedDags) -> None:
    run_id = await started(flow, 35, 64, reason="wrong decimals")
    await made(site)
    assert await flow.finish_all("chain", "clean") == ranges(4, first=3)
    assert await flow.finish_all("chain", "sum") == ranges(4, first=3)
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"], found["total"]) == ("Done", "Completed", 4, 4)
    assert (found["counts"]["Completed"], found["reason"], found["requested_by"]) == (4, "wrong decimals", "root")
    assert found["ended_at"] is not None
    run = await flow.system.run(run_id)
    assert (run["state"], run["total"]) == ("Completed", 4)


@pytest.mark.parametrize(("priority", "lane"), [("bulk", 1), ("normal", 0)])
async def test_backfill_tasks_have_its_run_and_its_priority(
    site: Intake, flow: DeployedDags, priority: str, lane: int
) -> None:
    run_id = await started(flow, 0, 49, priority=priority)
    await made(site)
    page = (await flow.system.user("GET", f"/v1/tasks?run={run_id}")).json()["tasks"]
    assert [(task["index"], task["priority"]) for task in page] == [(n, priority) for n in range(5)]
    assert [task["payload"]["partition_key"] for task in page] == [f"{a}-{b}" for a, b in ranges(5)]
    assert await site.indexes_of_messages(run_id) == [0, 1, 2, 3, 4]
    lanes = "select array_agg(priority) from interlock.queue_messages where dedupe_key = $1 || ':0'"
    assert await flow.system.value(lanes, run_id) == [lane]


async def test_tasks_are_handed_out_in_ranges_and_each_scope_once(site: Intake, flow: DeployedDags, tens: None) -> None:
    run_id = await started(flow, 0, 249)
    await site.drain()
    for expected in (10, 20, 25):
        found = await shown(flow, run_id)
        assert (found["made"], found["total"], found["counts"]["Queued"]) == (expected, 25, 25)
        await site.pass_of("held_runs")
    assert await flow.finish_all("chain", "clean") == ranges(25)


async def test_crash_between_ranges_neither_repeats_nor_skips_a_scope(
    site: Intake, flow: DeployedDags, tens: None
) -> None:
    passes = 0

    async def break_() -> None:
        nonlocal passes
        passes += 1
        if passes % 2:
            raise failpoints.FailpointError("ingest.before_hand_out_commit")

    run_id = await started(flow, 0, 249)
    failpoints.arm("ingest.before_hand_out_commit", break_)
    await site.drain()
    while (await shown(flow, run_id))["state"] == "Running":
        try:
            await site.pass_of("held_runs")
        except failpoints.FailpointError:
            continue
    assert passes >= 6
    assert await site.indexes_of_messages(run_id) == list(range(25))
    assert await flow.finish_all("chain", "clean") == ranges(25)
    await flow.system.settle()
    assert (await shown(flow, run_id))["run_state"] == "Completed"


async def test_paused_backfill_hands_out_no_tasks_until_resumed(site: Intake, flow: DeployedDags, tens: None) -> None:
    run_id = await started(flow, 0, 249)
    await site.drain()
    paused = (await act(flow, run_id, "pause")).json()
    assert (paused["state"], paused["run_state"]) == ("Paused", "Paused")
    assert (await act(flow, run_id, "pause")).status_code == 200
    await made(site)
    assert len(await flow.finish_all("chain", "clean")) == 10
    await flow.system.settle()
    assert (await shown(flow, run_id))["run_state"] == "Paused"
    assert (await act(flow, run_id, "resume")).json()["state"] == "Running"
    await made(site)
    assert await flow.finish_all("chain", "clean") == ranges(15, first=10)
    await flow.system.settle()
    assert (await shown(flow, run_id))["run_state"] == "Completed"
    refused = await act(flow, run_id, "pause")
    assert (refused.status_code, refused.json()["code"]) == (409, "backfill_ended")


async def test_backfill_paused_before_its_ingest_stays_paused(site: Intake, flow: DeployedDags) -> None:
    run_id = await started(flow, 0, 249)
    assert (await shown(flow, run_id))["run_state"] == "Ingesting"
    await act(flow, run_id, "pause")
    await made(site)
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"], found["total"]) == ("Paused", "Paused", 0, 25)
    job = await flow.job_id("chain", "clean")
    for action in ("pause", "resume"):
        refused = await flow.system.user("POST", f"/v1/jobs/{job}/{action}")
        assert (refused.status_code, refused.json()["code"]) == (409, "job_of_a_dag")
        await flow.run("run-wakes", "reconciler")
        assert (await shown(flow, run_id))["run_state"] == "Paused"
    assert await site.indexes_of_messages(run_id) == []
    assert (await act(flow, run_id, "resume")).json()["run_state"] == "Running"
    await made(site)
    assert await site.indexes_of_messages(run_id) == list(range(25))


async def test_backfill_of_a_paused_dag_gets_its_messages_back(site: Intake, flow: DeployedDags, tens: None) -> None:
    run_id = await started(flow, 0, 249)
    await site.drain()
    sent = await site.indexes_of_messages(run_id)
    await flow.act("chain", "pause")
    claimed = await flow.system.claim_many(run_id=run_id, start=0, end=9)
    assert claimed["claims"] == []
    await flow.system.value("delete from interlock.queue_messages returning 1")
    await flow.act("chain", "resume")
    await flow.run("run-wakes")
    assert await site.indexes_of_messages(run_id) == sent != []
    assert len(await flow.finish_all("chain", "clean")) == 10


@pytest.mark.parametrize("path", ["/v1/backfills/{}/cancel", "/v1/runs/{}/cancel"])
async def test_canceled_backfill_ends_with_its_existing_tasks(
    site: Intake, flow: DeployedDags, tens: None, path: str
) -> None:
    run_id = await started(flow, 0, 249)
    await site.drain()
    done = await flow.finish((await flow.waiting("chain", "clean"))[0])
    assert (await flow.system.user("POST", path.format(run_id))).status_code == 200
    await made(site)
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"], found["total"]) == ("Canceled", "Canceled", 10, 25)
    assert (found["counts"]["Completed"], found["counts"]["Canceled"]) == (1, 24)
    assert await flow.finish_all("chain", "sum") == [done]


async def test_backfill_canceled_before_its_ingest_has_no_task(site: Intake, flow: DeployedDags) -> None:
    run_id = await started(flow, 0, 249)
    await act(flow, run_id, "cancel")
    await made(site)
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"], found["total"]) == ("Canceled", "Canceled", 0, 0)
    assert await flow.waiting("chain", "clean") == []


async def test_empty_backfill_ends_immediately(site: Intake, flow: DeployedDags) -> None:
    run_id = await started(flow, 10_000, 20_000)
    await made(site)
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"]) == ("Done", "Completed", 0)


async def test_canceled_backfill_leaves_a_change_to_its_own_task(site: Intake, flow: DeployedDags) -> None:
    await flow.report("chain", "feed", (0, 9))
    (own,) = await flow.waiting("chain", "clean")
    run_id = await started(flow, 0, 9)
    await made(site)
    await act(flow, run_id, "cancel")
    assert await flow.waiting("chain", "clean") == [own]
    await flow.finish(own)
    undone = "select count(*) from interlock.materialisations where job_id = $1 and done_commit < input_commit"
    assert await flow.system.value(undone, await flow.job_id("chain", "clean")) == 0


async def test_scope_of_a_dead_task_is_completed_by_the_backfill(site: Intake, flow: DeployedDags) -> None:
    await flow.report("chain", "feed", (0, 9))
    (own,) = await flow.waiting("chain", "clean")
    await flow.system.user("POST", f"/v1/tasks/{own}/cancel")
    undone = "select count(*) from interlock.materialisations where job_id = $1 and done_commit < input_commit"
    assert await flow.system.value(undone, await flow.job_id("chain", "clean")) == 1
    await started(flow, 0, 9)
    await made(site)
    await flow.finish_all("chain", "clean")
    assert await flow.system.value(undone, await flow.job_id("chain", "clean")) == 0


async def test_newer_change_gets_its_own_task_during_a_backfill(site: Intake, flow: DeployedDags) -> None:
    await flow.report("chain", "feed", (0, 9))
    (own,) = await flow.waiting("chain", "clean")
    await flow.system.user("POST", f"/v1/tasks/{own}/cancel")
    run_id = await started(flow, 0, 9)
    await made(site)
    await flow.report("chain", "feed", (0, 9))
    assert len(await flow.waiting("chain", "clean")) == 2
    await act(flow, run_id, "cancel")
    assert await flow.finish_all("chain", "clean") == [(0, 9)]


async def test_only_scopes_that_every_input_has_are_computed(site: Intake) -> None:
    flow = DeployedDags(site.system)
    await flow.start(BOTH)
    await flow.report("chain", "left", *ranges(6))
    await flow.report("chain", "right", *ranges(3), (30, 34))
    await flow.finish_all("chain", "clean")
    assert (await start(flow, 0, 100, dry_run=True))["scopes"] == 3
    await started(flow, 0, 100)
    await made(site)
    assert await flow.finish_all("chain", "clean") == ranges(3)


async def test_each_input_has_its_own_scopes_with_wait_for_any(site: Intake, tens: None) -> None:
    flow = DeployedDags(site.system)
    await flow.start(BOTH.replace("    outputs: [clean]", "    wait_for: any\n    outputs: [clean]"))
    await flow.report("chain", "left", *ranges(12))
    await flow.report("chain", "right", *ranges(12))
    await flow.finish_all("chain", "clean")
    assert (await start(flow, 5, 114, dry_run=True))["scopes"] == 24
    run_id = await started(flow, 5, 114)
    await made(site)
    assert await flow.finish_all("chain", "clean") == ranges(12) * 2
    assert (await shown(flow, run_id))["made"] == 24


async def test_stream_ranges_that_were_read_are_read_again(site: Intake) -> None:
    flow = DeployedDags(site.system)
    await flow.start(DAG)
    for cursor in (9, 14, 39):
        await flow.report("chain", "feed", cursor)
        await flow.finish_all("chain", "clean")
    assert (await start(flow, 12, 20, dry_run=True))["scopes"] == 2
    await started(flow, 12, 20)
    await made(site)
    (first, second) = await flow.waiting("chain", "clean")
    payload = (await site.system.task(first))["payload"]
    assert (payload["changed_start"], payload["changed_end"]) == (10, 14)
    assert [await flow.finish(first), await flow.finish(second)] == [(10, 14), (15, 39)]
    await flow.report("chain", "feed", 49)
    assert await flow.finish_all("chain", "clean") == [(40, 49)]


async def test_backfill_leaves_half_of_the_queue_to_current_work(site: Intake) -> None:
    flow = DeployedDags(site.system)
    await flow.start(DAG.replace("    outputs: [clean]\n", "    outputs: [clean]\n    max_queue_depth: 8\n"))
    for scope in ranges(12):
        await flow.report("chain", "feed", scope)
        await flow.finish_all("chain", "clean")
    run_id = await started(flow, 0, 119)
    done = 0
    while (await shown(flow, run_id))["state"] == "Running":
        await made(site)
        waiting = await flow.waiting("chain", "clean")
        assert len(waiting) <= 4
        done += len(await flow.finish_all("chain", "clean"))
        await flow.run("run-counters", "pressure")
        assert await flow.pauses() == []
    assert done + len(await flow.finish_all("chain", "clean")) == 12


@pytest.mark.parametrize(("priority", "makes"), [("bulk", 0), ("normal", 25)])
async def test_backpressure_pauses_a_bulk_backfill_first(site: Intake, priority: str, makes: int) -> None:
    flow = DeployedDags(site.system)
    await flow.start(DAG.replace("    outputs: [sums]\n", "    outputs: [sums]\n    max_queue_depth: 20\n"))
    await flow.report("chain", "feed", *ranges(25))
    await flow.finish_all("chain", "clean")
    run_id = await started(flow, 0, 249, priority=priority)
    if priority == "normal":
        await started(flow, 0, 249)
    await flow.run("pressure")
    assert {pause["level"] for pause in await flow.pauses()} == {"bulk"}
    await made(site)
    assert (await shown(flow, run_id))["made"] == makes
    await flow.finish_all("chain", "sum")
    await flow.run("pressure")
    await made(site)
    assert (await shown(flow, run_id))["made"] == 25


async def test_backfill_of_a_replaced_generation_ends(site: Intake, flow: DeployedDags, tens: None) -> None:
    run_id = await started(flow, 0, 249)
    await site.drain()
    await flow.system.value("update interlock.jobs set active = false where dag_name = 'chain' and name = 'clean'")
    await made(site)
    await flow.run("run-cancels")
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"]) == ("Canceled", "Canceled", 10)


async def test_impossible_backfill_is_refused_with_a_reason(site: Intake, flow: DeployedDags) -> None:
    system = flow.system

    async def refused(path: str, body: dict[str, Any], **more: Any) -> tuple[int, str]:
        reply = await system.user("POST", f"/v1/dags/{path}/backfills", json=body, **more)
        return reply.status_code, reply.json()["code"]

    assert await refused("chain/jobs/feed", {"start": 0, "end": 1}) == (409, "no_inputs")
    assert await refused("chain/jobs/none", {"start": 0, "end": 1}) == (404, "not_found")
    assert await refused("none/jobs/clean", {"start": 0, "end": 1}) == (404, "not_found")
    assert await refused("chain/jobs/clean", {"start": 2, "end": 1}) == (400, "bad_range")
    assert (await refused("chain/jobs/clean", {"start": 2}))[0] == 400
    org = await system.kernel.access.principals.create_org("other")
    key = await system.kernel.access.principals.create_key(
        KeyRequest(user="other", role=Role.ADMIN), org.org_id, granted_by=None
    )
    assert (await refused("chain/jobs/clean", {"start": 0, "end": 1}, key=key.key))[0] == 404
    run_id = await started(flow, 0, 9)
    for method, path in [("GET", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/cancel")]:
        assert (await system.user(method, f"/v1/backfills/{run_id}{path}", key=key.key)).status_code == 404
    assert (await system.user("GET", "/v1/backfills", key=key.key)).json()["backfills"] == []


async def test_backfills_are_listed_newest_first_in_pages(site: Intake, flow: DeployedDags) -> None:
    runs = [await started(flow, 0, 9) for _ in range(3)]
    first = (await flow.system.user("GET", "/v1/backfills?limit=2")).json()
    rest = (await flow.system.user("GET", f"/v1/backfills?limit=2&cursor={first['next_cursor']}")).json()
    assert [b["run_id"] for b in first["backfills"] + rest["backfills"]] == runs[::-1]
    assert rest["next_cursor"] is None
