"""A range is computed again: counted first, ingested, handed out bit by bit, stopped and resumed, and never twice.

Whether its tasks are in the shard of small runs or in one of their own is the same to everybody.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from interlock import failpoints
from interlock.bulk import held
from interlock.clock import ManualClock
from interlock.wire import KeyRequest, Role
from tests.ingests import Intake, intake
from tests.pipelines import Flow

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
    """Ten tasks are handed out at once, in one message."""
    monkeypatch.setattr(held, "_MOST", 10)
    monkeypatch.setattr(held, "_MOST_WAITING", 40)


@pytest.fixture(params=[10_000, 3], ids=["among small runs", "in its own shard"])
async def door(
    request: pytest.FixtureRequest, state_url: str, tmp_path: Path, clock: ManualClock
) -> AsyncIterator[Intake]:
    async with intake(state_url, tmp_path, clock, shard_threshold=request.param) as made:
        yield made


@pytest.fixture
async def flow(door: Intake) -> Flow:
    """Twenty-five partitions, all of them done."""
    found = Flow(door.system)
    await found.deploy(DAG)
    await found.report("chain", "feed", *ranges(25))
    await found.finish_all("chain", "clean")
    await found.finish_all("chain", "sum")
    return found


async def start(flow: Flow, first: int, last: int, job: str = "clean", **more: Any) -> dict[str, Any]:
    reply = await flow.system.user(
        "POST", f"/v1/dags/chain/jobs/{job}/backfills", json={"start": first, "end": last} | more
    )
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def started(flow: Flow, first: int, last: int, job: str = "clean", **more: Any) -> str:
    run_id: str = (await start(flow, first, last, job, **more))["backfill"]["run_id"]
    return run_id


async def shown(flow: Flow, run_id: str) -> dict[str, Any]:
    reply = await flow.system.user("GET", f"/v1/backfills/{run_id}")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def act(flow: Flow, run_id: str, action: str) -> Any:
    return await flow.system.user("POST", f"/v1/backfills/{run_id}/{action}")


async def made(door: Intake) -> None:
    """Until every task that can be handed out is."""
    await door.drain()
    while await door.pass_of("held_runs"):
        continue


async def test_a_dry_run_counts_and_shows_the_first_scopes_and_starts_nothing(door: Intake, flow: Flow) -> None:
    answer = await start(flow, 35, 204, dry_run=True)
    assert (answer["scopes"], answer["more"], answer["backfill"]) == (18, False, None)
    assert [(scope["start"], scope["end"]) for scope in answer["first"]] == ranges(10, first=3)
    assert (await flow.system.user("GET", "/v1/backfills")).json()["backfills"] == []


async def test_done_scopes_are_computed_again_and_everything_downstream_follows(door: Intake, flow: Flow) -> None:
    run_id = await started(flow, 35, 64, reason="wrong decimals")
    await made(door)
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
async def test_its_tasks_are_those_of_its_run_and_of_its_own_priority(
    door: Intake, flow: Flow, priority: str, lane: int
) -> None:
    run_id = await started(flow, 0, 49, priority=priority)
    await made(door)
    page = (await flow.system.user("GET", f"/v1/tasks?run={run_id}")).json()["tasks"]
    assert [(task["index"], task["priority"]) for task in page] == [(n, priority) for n in range(5)]
    assert [task["payload"]["partition_key"] for task in page] == [f"{a}-{b}" for a, b in ranges(5)]
    assert await door.indexes_of_messages(run_id) == [0, 1, 2, 3, 4]
    lanes = "select array_agg(priority) from interlock.queue_messages where dedupe_key = $1 || ':0'"
    assert await flow.system.value(lanes, run_id) == [lane]


async def test_tasks_are_handed_out_in_ranges_and_each_scope_once(door: Intake, flow: Flow, tens: None) -> None:
    run_id = await started(flow, 0, 249)
    await door.drain()
    for expected in (10, 20, 25):
        found = await shown(flow, run_id)
        assert (found["made"], found["total"], found["counts"]["Queued"]) == (expected, 25, 25)
        await door.pass_of("held_runs")
    assert await flow.finish_all("chain", "clean") == ranges(25)


async def test_a_crash_between_ranges_neither_repeats_nor_skips_a_scope(door: Intake, flow: Flow, tens: None) -> None:
    passes = 0

    async def break_() -> None:
        nonlocal passes
        passes += 1
        if passes % 2:
            raise failpoints.FailpointError("ingest.before_hand_out_commit")

    run_id = await started(flow, 0, 249)
    failpoints.arm("ingest.before_hand_out_commit", break_)
    await door.drain()
    while (await shown(flow, run_id))["state"] == "Running":
        try:
            await door.pass_of("held_runs")
        except failpoints.FailpointError:
            continue
    assert passes >= 6
    assert await door.indexes_of_messages(run_id) == list(range(25))
    assert await flow.finish_all("chain", "clean") == ranges(25)
    await flow.system.settle()
    assert (await shown(flow, run_id))["run_state"] == "Completed"


async def test_a_paused_backfill_hands_out_no_more_tasks_until_it_is_resumed(
    door: Intake, flow: Flow, tens: None
) -> None:
    run_id = await started(flow, 0, 249)
    await door.drain()
    paused = (await act(flow, run_id, "pause")).json()
    assert (paused["state"], paused["run_state"]) == ("Paused", "Paused")
    assert (await act(flow, run_id, "pause")).status_code == 200
    await made(door)
    assert len(await flow.finish_all("chain", "clean")) == 10
    await flow.system.settle()
    assert (await shown(flow, run_id))["run_state"] == "Paused"
    assert (await act(flow, run_id, "resume")).json()["state"] == "Running"
    await made(door)
    assert await flow.finish_all("chain", "clean") == ranges(15, first=10)
    await flow.system.settle()
    assert (await shown(flow, run_id))["run_state"] == "Completed"
    refused = await act(flow, run_id, "pause")
    assert (refused.status_code, refused.json()["code"]) == (409, "backfill_ended")


async def test_a_backfill_that_is_paused_before_it_is_ingested_stays_so(door: Intake, flow: Flow) -> None:
    run_id = await started(flow, 0, 249)
    assert (await shown(flow, run_id))["run_state"] == "Ingesting"
    await act(flow, run_id, "pause")
    await made(door)
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"], found["total"]) == ("Paused", "Paused", 0, 25)
    job = await flow.job_id("chain", "clean")
    for action in ("pause", "resume"):
        assert (await flow.system.user("POST", f"/v1/jobs/{job}/{action}")).status_code == 200
        await flow.run("run-wakes", "reconciler")
        assert (await shown(flow, run_id))["run_state"] == "Paused"
    assert await door.indexes_of_messages(run_id) == []
    assert (await act(flow, run_id, "resume")).json()["run_state"] == "Running"
    await made(door)
    assert await door.indexes_of_messages(run_id) == list(range(25))


@pytest.mark.parametrize("path", ["/v1/backfills/{}/cancel", "/v1/runs/{}/cancel"])
async def test_a_canceled_backfill_ends_with_the_tasks_that_it_has(
    door: Intake, flow: Flow, tens: None, path: str
) -> None:
    run_id = await started(flow, 0, 249)
    await door.drain()
    done = await flow.finish((await flow.waiting("chain", "clean"))[0])
    assert (await flow.system.user("POST", path.format(run_id))).status_code == 200
    await made(door)
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"], found["total"]) == ("Canceled", "Canceled", 10, 25)
    assert (found["counts"]["Completed"], found["counts"]["Canceled"]) == (1, 24)
    assert await flow.finish_all("chain", "sum") == [done]


async def test_a_backfill_that_is_canceled_before_it_is_ingested_has_no_task(door: Intake, flow: Flow) -> None:
    run_id = await started(flow, 0, 249)
    await act(flow, run_id, "cancel")
    await made(door)
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"], found["total"]) == ("Canceled", "Canceled", 0, 0)
    assert await flow.waiting("chain", "clean") == []


async def test_a_backfill_of_nothing_ends_at_once(door: Intake, flow: Flow) -> None:
    run_id = await started(flow, 10_000, 20_000)
    await made(door)
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"]) == ("Done", "Completed", 0)


async def test_a_canceled_backfill_leaves_a_change_to_the_task_that_has_it(door: Intake, flow: Flow) -> None:
    await flow.report("chain", "feed", (0, 9), sequence=1)
    (own,) = await flow.waiting("chain", "clean")
    run_id = await started(flow, 0, 9)
    await made(door)
    await act(flow, run_id, "cancel")
    assert await flow.waiting("chain", "clean") == [own]
    await flow.finish(own)
    undone = "select count(*) from interlock.materialisations where job_id = $1 and done_commit < input_commit"
    assert await flow.system.value(undone, await flow.job_id("chain", "clean")) == 0


async def test_a_scope_whose_task_is_dead_is_done_by_the_backfill(door: Intake, flow: Flow) -> None:
    await flow.report("chain", "feed", (0, 9), sequence=1)
    (own,) = await flow.waiting("chain", "clean")
    await flow.system.user("POST", f"/v1/tasks/{own}/cancel")
    undone = "select count(*) from interlock.materialisations where job_id = $1 and done_commit < input_commit"
    assert await flow.system.value(undone, await flow.job_id("chain", "clean")) == 1
    await started(flow, 0, 9)
    await made(door)
    await flow.finish_all("chain", "clean")
    assert await flow.system.value(undone, await flow.job_id("chain", "clean")) == 0


async def test_a_newer_change_gets_a_task_of_its_own_beside_the_backfill(door: Intake, flow: Flow) -> None:
    await flow.report("chain", "feed", (0, 9), sequence=1)
    (own,) = await flow.waiting("chain", "clean")
    await flow.system.user("POST", f"/v1/tasks/{own}/cancel")
    run_id = await started(flow, 0, 9)
    await made(door)
    await flow.report("chain", "feed", (0, 9), sequence=2)
    assert len(await flow.waiting("chain", "clean")) == 2
    await act(flow, run_id, "cancel")
    assert await flow.finish_all("chain", "clean") == [(0, 9)]


async def test_only_scopes_that_every_input_has_are_computed(door: Intake) -> None:
    flow = Flow(door.system)
    await flow.deploy(BOTH)
    await flow.report("chain", "left", *ranges(6))
    await flow.report("chain", "right", *ranges(3), (30, 34))
    await flow.finish_all("chain", "clean")
    assert (await start(flow, 0, 100, dry_run=True))["scopes"] == 3
    await started(flow, 0, 100)
    await made(door)
    assert await flow.finish_all("chain", "clean") == ranges(3)


async def test_each_input_makes_scopes_of_its_own_where_any_will_do(door: Intake, tens: None) -> None:
    flow = Flow(door.system)
    await flow.deploy(BOTH.replace("    outputs: [clean]", "    wait_for: any\n    outputs: [clean]"))
    await flow.report("chain", "left", *ranges(12))
    await flow.report("chain", "right", *ranges(12))
    await flow.finish_all("chain", "clean")
    assert (await start(flow, 5, 114, dry_run=True))["scopes"] == 24
    run_id = await started(flow, 5, 114)
    await made(door)
    assert await flow.finish_all("chain", "clean") == ranges(12) * 2
    assert (await shown(flow, run_id))["made"] == 24


async def test_what_a_job_has_read_of_a_stream_is_read_again(door: Intake) -> None:
    flow = Flow(door.system)
    await flow.deploy(DAG)
    for cursor in (9, 14, 39):
        await flow.report("chain", "feed", cursor)
        await flow.finish_all("chain", "clean")
    assert (await start(flow, 12, 20, dry_run=True))["scopes"] == 2
    await started(flow, 12, 20)
    await made(door)
    (first, second) = await flow.waiting("chain", "clean")
    payload = (await door.system.task(first))["payload"]
    assert (payload["changed_start"], payload["changed_end"]) == (10, 14)
    assert [await flow.finish(first), await flow.finish(second)] == [(10, 14), (15, 39)]
    await flow.report("chain", "feed", 49)
    assert await flow.finish_all("chain", "clean") == [(40, 49)]


async def test_a_backfill_leaves_half_of_the_queue_to_what_happens_now(door: Intake) -> None:
    flow = Flow(door.system)
    await flow.deploy(DAG.replace("    outputs: [clean]\n", "    outputs: [clean]\n    max_queue_depth: 8\n"))
    for scope in ranges(12):
        await flow.report("chain", "feed", scope)
        await flow.finish_all("chain", "clean")
    run_id = await started(flow, 0, 119)
    done = 0
    while (await shown(flow, run_id))["state"] == "Running":
        await made(door)
        waiting = await flow.waiting("chain", "clean")
        assert len(waiting) <= 4
        done += len(await flow.finish_all("chain", "clean"))
        await flow.run("run-counters", "pressure")
        assert await flow.pauses() == []
    assert done + len(await flow.finish_all("chain", "clean")) == 12


@pytest.mark.parametrize(("priority", "makes"), [("bulk", 0), ("normal", 25)])
async def test_backpressure_holds_a_bulk_backfill_back_first(door: Intake, priority: str, makes: int) -> None:
    flow = Flow(door.system)
    await flow.deploy(DAG.replace("    outputs: [sums]\n", "    outputs: [sums]\n    max_queue_depth: 20\n"))
    await flow.report("chain", "feed", *ranges(25))
    await flow.finish_all("chain", "clean")
    run_id = await started(flow, 0, 249, priority=priority)
    if priority == "normal":
        await started(flow, 0, 249)
    await flow.run("pressure")
    assert {pause["level"] for pause in await flow.pauses()} == {"bulk"}
    await made(door)
    assert (await shown(flow, run_id))["made"] == makes
    await flow.finish_all("chain", "sum")
    await flow.run("pressure")
    await made(door)
    assert (await shown(flow, run_id))["made"] == 25


async def test_a_backfill_of_a_generation_that_was_replaced_ends(door: Intake, flow: Flow, tens: None) -> None:
    run_id = await started(flow, 0, 249)
    await door.drain()
    await flow.system.value("update interlock.jobs set active = false where dag_name = 'chain' and name = 'clean'")
    await made(door)
    await flow.run("run-cancels")
    await flow.system.settle()
    found = await shown(flow, run_id)
    assert (found["state"], found["run_state"], found["made"]) == ("Canceled", "Canceled", 10)


async def test_what_cannot_be_backfilled_is_refused_with_a_reason(door: Intake, flow: Flow) -> None:
    system = flow.system

    async def refused(path: str, body: dict[str, Any], **more: Any) -> tuple[int, str]:
        reply = await system.user("POST", f"/v1/dags/{path}/backfills", json=body, **more)
        return reply.status_code, reply.json()["code"]

    assert await refused("chain/jobs/feed", {"start": 0, "end": 1}) == (409, "no_inputs")
    assert await refused("chain/jobs/none", {"start": 0, "end": 1}) == (404, "not_found")
    assert await refused("none/jobs/clean", {"start": 0, "end": 1}) == (404, "not_found")
    assert await refused("chain/jobs/clean", {"start": 2, "end": 1}) == (400, "bad_range")
    assert (await refused("chain/jobs/clean", {"start": 2}))[0] == 400
    org = await system.kernel.principals.create_org("other")
    key = await system.kernel.principals.create_key(
        KeyRequest(user="other", role=Role.ADMIN), org.org_id, granted_by=None
    )
    assert (await refused("chain/jobs/clean", {"start": 0, "end": 1}, key=key.key))[0] == 404
    run_id = await started(flow, 0, 9)
    for method, path in [("GET", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/cancel")]:
        assert (await system.user(method, f"/v1/backfills/{run_id}{path}", key=key.key)).status_code == 404
    assert (await system.user("GET", "/v1/backfills", key=key.key)).json()["backfills"] == []


async def test_backfills_are_listed_newest_first_in_pages(door: Intake, flow: Flow) -> None:
    runs = [await started(flow, 0, 9) for _ in range(3)]
    first = (await flow.system.user("GET", "/v1/backfills?limit=2")).json()
    rest = (await flow.system.user("GET", f"/v1/backfills?limit=2&cursor={first['next_cursor']}")).json()
    assert [b["run_id"] for b in first["backfills"] + rest["backfills"]] == runs[::-1]
    assert rest["next_cursor"] is None
