"""Concurrency limits of runs: they are exact, ended tasks wake waiting ones, and state that Valkey lost is repaired."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from valkey.asyncio import Valkey

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.clock import ManualClock
from interlock.stores.embedded import EmbeddedValkey
from tests.support.sharded_runs import submit_sharded
from tests.support.system import System, fence, running, valkey_is_back

TASKS = [{"n": n} for n in range(250)]
LIMITED = {"limits": {"max_concurrency": 30}}


@pytest.fixture
async def limited(state_url: str, tmp_path: Path, clock: ManualClock, valkey: EmbeddedValkey) -> AsyncIterator[System]:
    url = await valkey.start()
    async with Valkey.from_url(url) as client:
        await client.flushall()
    async with running(state_url, tmp_path, clock, valkey_url=url) as system:
        yield system


async def taken(system: System) -> list[dict[str, Any]]:
    """Receives and claims until the queue is empty, and returns all claims."""
    claims: list[dict[str, Any]] = []
    while messages := await system.receive(max_messages=100):
        ranges = [
            {name: message["body"][name] for name in ("run_id", "start", "end")}
            | {"message": {"queue": "platform"} | {name: message[name] for name in ("message_id", "receipt")}}
            for message in messages
        ]
        claims += (await system.claim_many(ranges=ranges))["claims"]
    return claims


async def running_now(system: System) -> int:
    count: int = await system.value("select count(*) from interlock.tasks where status = 'Running'")
    return count


@pytest.mark.parametrize("own", [False, True], ids=["shard 0", "own shard"])
async def test_limit_is_never_exceeded_and_ended_tasks_wake_waiting_ones(limited: System, own: bool) -> None:
    run = await (submit_sharded if own else System.submit)(limited, TASKS, **LIMITED)
    held = await taken(limited)
    assert (len(held), await running_now(limited)) == (30, 30)
    assert await limited.value("select count(*) from interlock.queue_messages") == 0
    done = 0
    while held:
        for claim in held[:7]:
            assert (await limited.complete(claim)).status_code == 200
        done += len(held[:7])
        held = held[7:] + await taken(limited)
        assert len(held) == await running_now(limited) == min(30, 250 - done)
    await limited.settle()
    assert (await limited.run(run["run_id"]))["state"] == "Completed"


async def test_grouped_completions_releases_and_failures_free_their_slots(limited: System, clock: ManualClock) -> None:
    run = await limited.submit(TASKS[:100], policy={"backoff_seconds": 5, "jitter": 0, "lease_seconds": 60}, **LIMITED)
    first = await taken(limited)
    groups = [
        {"run_id": run["run_id"], "attempt": 1, "lease_token": claim["lease_token"]}
        | {"indexes": [claim["task"]["index"]], "results": [{}]}
        for claim in first[:10]
    ]
    await limited.worker("POST", "/internal/task-complete", json={"groups": groups})
    await limited.worker("POST", "/internal/task-release", json={"items": [fence(claim) for claim in first[10:15]]})
    await limited.complete(first[15], "Failed", error_class="E")
    second = await taken(limited)
    assert (len(second), await running_now(limited)) == (16, 30)
    clock.advance(61)
    assert await limited.pass_of("reaper") == 30
    clock.advance(10)
    await limited.settle()
    assert len(await taken(limited)) == 30


async def test_slots_held_by_a_crash_are_freed(limited: System, valkey: EmbeddedValkey) -> None:
    run = await limited.submit(TASKS, **LIMITED)
    assert len(await taken(limited)) == 30
    async with Valkey.from_url(await valkey.start()) as client:
        await client.set(f"interlock:places:{run['run_id']}", 50)
    keeping = next(service for service in dispatcher_services(limited.kernel) if service.name == "run-turns")
    await keeping.run_once()
    assert await keeping.run_once() == 1
    async with Valkey.from_url(await valkey.start()) as client:
        assert int(await client.get(f"interlock:places:{run['run_id']}") or 0) == 30
    assert len(await taken(limited)) == 0


async def work_off(system: System, clock: ManualClock, held: list[dict[str, Any]]) -> None:
    """Completes the held claims and claims newly sent tasks until the queue is empty, without the reconciler."""
    while held:
        for claim in held:
            assert (await system.complete(claim)).status_code == 200
        await system.settle()
        clock.advance(1)  # a range that could not be added to the waiting list is sent again
        held = await taken(system)
        assert await running_now(system) <= 30
    await system.settle()


@pytest.mark.parametrize("own", [False, True], ids=["shard 0", "own shard"])
async def test_ranges_lost_by_valkey_resume_with_the_next_freed_slot(
    limited: System, clock: ManualClock, valkey: EmbeddedValkey, own: bool
) -> None:
    run = await (submit_sharded if own else System.submit)(limited, TASKS, **LIMITED)
    held = await taken(limited)
    async with Valkey.from_url(await valkey.start()) as client:
        await client.flushall()
    await work_off(limited, clock, held)
    assert (await limited.run(run["run_id"]))["state"] == "Completed"


async def test_counting_loop_resends_ranges_of_a_lost_list_once(limited: System, valkey: EmbeddedValkey) -> None:
    """The loop works although no permit is released or requested."""
    await limited.submit(TASKS, **LIMITED)
    await taken(limited)
    async with Valkey.from_url(await valkey.start()) as client:
        await client.flushall()
    await limited.pass_of("run-counters")
    assert [await limited.pass_of("run-turns"), await limited.pass_of("run-turns")] == [1, 0]
    assert await limited.pass_of("run-wakes") == 1
    assert await limited.value("select count(*) from interlock.queue_messages") > 0


async def test_list_without_a_counter_is_processed(limited: System, valkey: EmbeddedValkey) -> None:
    """Simulates a flush of Valkey between the refusal of a permit and the range's entry in the waiting list."""
    run = await limited.submit(TASKS, **LIMITED)
    await taken(limited)
    async with Valkey.from_url(await valkey.start()) as client:
        await client.delete(f"interlock:places:{run['run_id']}")
        before = await client.llen(f"interlock:waiting:{run['run_id']}")
        await limited.pass_of("run-turns")
        assert await client.llen(f"interlock:waiting:{run['run_id']}") == before - 1
    assert await limited.value("select count(*) from interlock.queue_messages") == 1


async def test_waiting_ranges_resume_when_valkey_is_back(state_url: str, tmp_path: Path, clock: ManualClock) -> None:
    server = EmbeddedValkey(tmp_path / "valkey", name="mortal", log=tmp_path / "valkey.log")
    async with running(state_url, tmp_path, clock, valkey_url=await server.start()) as system:
        run = await system.submit(TASKS, **LIMITED)
        held = await taken(system)
        await server.stop()
        await work_off(system, clock, held)
        assert await running_now(system) == 0
        await server.start()
        await valkey_is_back(system)
        clock.advance(60)  # past every deferral
        await work_off(system, clock, await taken(system))
        assert (await system.run(run["run_id"]))["state"] == "Completed"


async def test_rate_limited_inline_task_keeps_its_wake_up(limited: System, clock: ManualClock) -> None:
    rate = {"rate": {"key": "/h", "per_second": 1}}
    run = await limited.submit([{"h": 1}] * 3, operator="echo", runtime="dispatcher", limits=rate)
    owed = "select count(*) from interlock.outbox where kind = 'invoke'"
    for left in (2, 1, 0):
        assert await limited.pass_of("relay") == 1
        assert await limited.value(owed) == left
        clock.advance(60)
    await limited.kernel.tasks.inline.drain(20)
    statuses = {(await limited.task(task_id))["status"] for task_id in await limited.task_ids(run["run_id"])}
    assert statuses == {"Completed"}
