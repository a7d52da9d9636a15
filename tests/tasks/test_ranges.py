"""Range operators in the dispatcher: their events and their state are committed atomically, and once."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest

from interlock import failpoints
from interlock.clock import ManualClock
from interlock.dags import range_operators
from interlock.dags.partitioning import AGGREGATOR
from interlock.tasks.inline_runtime import Call, InlineOperator, InlineRunner, Reaction
from interlock.tasks.outbox_relay import TaskRef
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System

DAG = """
name: chain
jobs:
  - name: feed
    activation: source
    source: { kind: manual }
    operator: echo
    outputs: [raw]
  - name: hours
    runtime: dispatcher
    operator: OPERATOR
    inputs: [{ from: { job: feed, output: raw } }]
    outputs: [hours]
    config: { size: 10 }
    backoff_seconds: 0
    jitter: 0
  - name: sum
    operator: echo
    inputs: [{ from: { job: hours, output: hours } }]
    outputs: [sums]
"""


def tens(count: int, first: int = 0) -> list[tuple[int, int]]:
    return [(10 * n, 10 * n + 9) for n in range(first, first + count)]


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(range_operators, "STEP", 3)
    yield
    for name in ("complete.before_commit", "events.before_commit"):
        failpoints.disarm(name)


async def deployed(system: System, operator: str) -> DeployedDags:
    flow = DeployedDags(system)
    await flow.start(DAG.replace("OPERATOR", operator))
    return flow


async def worked(flow: DeployedDags) -> None:
    """Runs the loops until the dispatcher has no work left."""
    while await flow.run("router", "relay", "retries"):
        await flow.system.kernel.tasks.inline.drain(20)


async def events_of(flow: DeployedDags, start: int) -> int:
    return int(
        await flow.system.value(
            "select count(*) from interlock.dataset_events where dataset_version = $1 and range_start = $2",
            await flow.version("chain", "hours"),
            start,
        )
    )


async def kept(flow: DeployedDags) -> str:
    return str(await flow.system.value("select state from interlock.operator_state"))


async def test_partition_is_split_and_each_chunk_is_a_task_downstream(still: System) -> None:
    flow = await deployed(still, "range_splitter")
    await flow.report("chain", "feed", (5, 114))
    await worked(flow)
    chunks = [(5, 9), *tens(10, first=1), (110, 114)]
    assert await flow.partitions("chain", "hours") == chunks
    assert sorted(await flow.finish_all("chain", "sum")) == chunks


async def test_stream_becomes_ranges_as_they_are_completed(still: System) -> None:
    flow = await deployed(still, "range_aggregator")
    await flow.report("chain", "feed", 8)
    await worked(flow)
    assert await flow.partitions("chain", "hours") == []
    await flow.report("chain", "feed", 95)
    await worked(flow)
    assert await flow.partitions("chain", "hours") == tens(9)
    assert await kept(flow) == '{"next":90}'
    await flow.report("chain", "feed", 99)
    await worked(flow)
    assert sorted(await flow.finish_all("chain", "sum")) == tens(10)
    assert [await events_of(flow, start) for start, _ in tens(10)] == [1] * 10


async def test_rewritten_part_of_a_stream_emits_its_ranges_again(still: System) -> None:
    flow = await deployed(still, "range_aggregator")
    await flow.report("chain", "feed", 95)
    await worked(flow)
    await flow.finish_all("chain", "sum")
    await flow.report("chain", "feed", (19, 30))
    await worked(flow)
    assert sorted(await flow.finish_all("chain", "sum")) == tens(3, first=1)
    await flow.report("chain", "feed", (92, 95))
    await worked(flow)
    assert await flow.waiting("chain", "sum") == []
    assert await kept(flow) == '{"next":90}'


async def test_rewrites_that_wait_together_are_all_emitted(still: System) -> None:
    flow = await deployed(still, "range_aggregator")
    await flow.report("chain", "feed", 95)
    await worked(flow)
    await flow.finish_all("chain", "sum")
    await flow.report("chain", "feed", (12, 13))
    await flow.report("chain", "feed", (61, 62))
    assert len(await flow.waiting("chain", "hours")) == 1
    await worked(flow)
    assert {(10, 19), (60, 69)} <= set(await flow.finish_all("chain", "sum"))


@pytest.mark.parametrize("name", ["complete.before_commit", "events.before_commit"])
async def test_crashed_dispatcher_emits_nothing_twice_and_skips_nothing(
    still: System, clock: ManualClock, name: str
) -> None:
    flow = await deployed(still, "range_aggregator")
    await flow.report("chain", "feed", 95)
    passes = 0

    async def break_() -> None:
        nonlocal passes
        passes += 1
        if passes == 2 or name == "complete.before_commit":
            failpoints.disarm(name)
            raise ConnectionError("the process is gone")

    failpoints.arm(name, break_)
    await worked(flow)
    clock.advance(3600)
    await flow.run("reaper")
    await worked(flow)
    assert await flow.partitions("chain", "hours") == tens(9)
    assert [await events_of(flow, start) for start, _ in tens(9)] == [1] * 9
    assert await kept(flow) == '{"next":90}'


async def test_concurrently_changed_state_uses_up_no_attempt(still: System) -> None:
    flow = await deployed(still, "range_aggregator")
    await flow.report("chain", "feed", 15)
    await worked(flow)
    await flow.report("chain", "feed", 35)
    (task_id,) = await flow.waiting("chain", "hours")
    calls = 0

    async def overtaken(call: Call) -> Reaction:
        nonlocal calls
        calls += 1
        if calls == 1:
            moved = """update interlock.operator_state set version = version + 1, state = '{"next": 20}'"""
            await still.value(moved)
        return await range_operators.aggregate(call)

    parts = still.kernel
    slow = {AGGREGATOR: InlineOperator(overtaken, stateful=True)}
    runner = InlineRunner(
        parts.stores.database, parts.tasks.claims, parts.tasks.attempts, parts.tasks.effects, parts.stores.wakeups, slow
    )
    assert await runner.invoke("dispatcher", TaskRef(UUID(task_id)))
    await runner.drain(20)
    task = await still.task(task_id)
    assert (task["status"], task["attempt"], calls) == ("Completed", 1, 2)
    assert await flow.partitions("chain", "hours") == [(0, 9), (20, 29)]
    assert await kept(flow) == '{"next":30}'


async def test_simultaneous_partitions_become_ranges_without_a_failure(still: System) -> None:
    flow = await deployed(still, "range_aggregator")
    fives = [(5 * n, 5 * n + 4) for n in range(40)]
    await flow.report("chain", "feed", *fives)
    await worked(flow)
    assert await flow.partitions("chain", "hours") == tens(20)
    assert await kept(flow) == '{"next":0,"there":[[0,199]]}'
    assert await still.value("select count(*) from interlock.attempts") == 0
    await flow.report("chain", "feed", (15, 19))
    await worked(flow)
    assert [await events_of(flow, start) for start in (0, 10, 20)] == [1, 2, 1]


async def test_invalid_operator_output_is_a_failed_attempt(still: System) -> None:
    flow = await deployed(still, "range_splitter")
    await still.value(
        "update interlock.dataset_versions set progress = 'cursor', cursor = 3 where dataset_version = $1",
        await flow.version("chain", "hours"),
    )
    await flow.report("chain", "feed", (0, 19))
    (task_id,) = await flow.waiting("chain", "hours")
    await worked(flow)
    task = await still.task(task_id)
    assert (task["status"], task["dead"], task["error_class"]) == ("Failed", True, "scope_kind")
