"""Fair shares of the workers: between large runs, between orgs, and between slow and quick runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from interlock.tasks import postgres_queue
from interlock.tasks.queue import Outgoing
from tests.support.sharded_runs import submit_sharded
from tests.support.system import System, running

SIZE = 100


@pytest.fixture
async def system(state_url: str, tmp_path: Path) -> AsyncIterator[System]:
    async with running(state_url, tmp_path, bulk_share=0.2) as opened:
        yield opened


async def large(system: System, count: int) -> str:
    """Creates a run of `count` tasks in a dedicated shard, loaded and enqueued as after an ingest. Returns its id."""
    accepted = await submit_sharded(system, [{"n": n} for n in range(SIZE)])
    run_id, chunks = UUID(accepted["run_id"]), count // SIZE
    async with system.kernel.stores.database.transaction() as connection:
        shard = await connection.fetchval(
            "update interlock.runs set total = $2::bigint, queued = $2::bigint, last_index = $2::bigint - 1"
            " where run_id = $1 returning shard",
            run_id,
            count,
        )
        await connection.execute(
            f"insert into interlock.tasks_{shard:d} (task_id, task_index, payload)"
            " select interlock.run_task_id($1, i), i, '{}' from generate_series($2::bigint, $3::bigint - 1) i",
            run_id,
            SIZE,
            count,
        )
        await connection.execute("delete from interlock.queue_messages where share_id = $1", run_id)
        await connection.execute(
            "insert into interlock.queue_messages (queue, priority, org_id, share_id, dedupe_key, body)"
            " select 'platform', 1, $4, $1::uuid, $1::uuid || ':' || c, json_build_object('job_id', $5::uuid,"
            " 'run_id', $1::uuid, 'start', c * $2::int, 'end', (c + 1) * $2::int - 1)"
            " from generate_series(0, $3::int - 1) c",
            run_id,
            SIZE,
            chunks,
            system.org_id,
            UUID(accepted["job_id"]),
        )
    return str(run_id)


async def claimed(system: System, limit: int) -> list[dict[str, Any]]:
    """Claims the tasks of up to `limit` messages and returns them in groups, as a worker gets them."""
    messages = await system.receive(max=limit)
    ranges = [
        {name: message["body"][name] for name in ("run_id", "start", "end")}
        | {"message": {"queue": "platform"} | {name: message[name] for name in ("message_id", "receipt")}}
        for message in messages
    ]
    if not ranges:
        return []
    groups: list[dict[str, Any]] = (await system.claim_many(ranges=ranges, tokens=False, grouped=True))["groups"]
    return groups


async def complete(system: System, groups: list[dict[str, Any]]) -> Counter[str]:
    """Completes all tasks of the groups and returns their number by run."""
    done: Counter[str] = Counter()
    reports = []
    for group in groups:
        indexes = [task[1] for task in group["tasks"]]
        fence = {name: group[name] for name in ("run_id", "attempt", "lease_token")}
        reports.append(fence | {"indexes": indexes, "results": [{}] * len(indexes)})
        done[group["run_id"]] += len(indexes)
    if reports:
        reply = await system.worker("POST", "/internal/task-complete", json={"groups": reports})
        assert reply.json()["accepted"] == done.total()
    return done


async def rounds(system: System, count: int, limit: int = 10) -> Counter[str]:
    done: Counter[str] = Counter()
    for _ in range(count):
        done += await complete(system, await claimed(system, limit))
    return done


@pytest.mark.slow
async def test_second_large_run_gets_an_equal_share_from_its_start(system: System) -> None:
    first = await large(system, 100_000)
    assert (await rounds(system, 5))[first] == 5_000
    second = await large(system, 100_000)
    await rounds(system, 5)  # until the queue has noticed that the second waits
    quarter = await rounds(system, 25)
    assert quarter.total() == 25_000
    assert 1 / 1.5 <= quarter[first] / quarter[second] <= 1.5
    last = await rounds(system, 30)
    assert 1 / 1.5 <= last[first] / last[second] <= 1.5


@pytest.mark.slow
async def test_small_run_beside_a_huge_one_ends_within_a_few_rounds(system: System) -> None:
    await large(system, 1_000_000)
    await rounds(system, 3)
    small = await system.submit([{"n": n} for n in range(10)])
    await rounds(system, 2)
    await system.pass_of("run-counters")
    assert (await system.run(small["run_id"]))["state"] == "Completed"


async def test_small_run_does_not_wait_behind_a_thousand_messages(system: System) -> None:
    for _ in range(20):
        await system.submit([{"n": n} for n in range(900)])
    await rounds(system, 1)
    small = await system.submit([{"n": n} for n in range(10)])
    done: Counter[str] = Counter()
    for _ in range(8):
        done += await rounds(system, 1)
    assert done[small["run_id"]] == 10


async def test_long_tasks_leave_half_of_the_slots_to_short_ones(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow tasks run until the end; quick tasks end immediately, long before the queue reads the shares again."""
    monkeypatch.setattr(postgres_queue, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(postgres_queue, "_LOOK_SHARE", 1.0)
    slow, quick = await large(system, 10_000), await large(system, 10_000)
    held, done = 0, 0
    for _ in range(40):
        groups = await claimed(system, 2)
        staying = [group for group in groups if group["run_id"] == slow]
        held += sum(len(group["tasks"]) for group in staying)
        done += (await complete(system, [group for group in groups if group["run_id"] == quick]))[quick]
    assert done >= 2 * held > 0


async def test_org_with_many_runs_gets_no_more_than_one_with_one(system: System) -> None:
    queue, here, there, alone = system.kernel.tasks.queue, uuid4(), uuid4(), uuid4()
    for run_id in [uuid4() for _ in range(50)]:
        messages = [Outgoing("{}", 1, org_id=here, share_id=run_id) for _ in range(20)]
        await queue.send("work", messages)
    await queue.send("work", [Outgoing('{"alone": true}', 1, org_id=there, share_id=alone) for _ in range(400)])
    received = [await queue.receive("work", wait_seconds=0, limit=10, visibility_seconds=60) for _ in range(60)]
    bodies = Counter(message.body for batch in received for message in batch)
    assert bodies.total() == 600
    assert 200 <= bodies['{"alone": true}'] <= 330


async def test_new_share_in_the_normal_lane_does_not_wait_for_a_reload(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_queue, "_LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(postgres_queue, "_OLDEST_SHARE", 0.0)
    for run_id in (await large(system, 10_000), await large(system, 10_000)):
        assert run_id
    await rounds(system, 3)
    small = await system.submit([{"n": n} for n in range(10)])
    assert (await rounds(system, 1))[small["run_id"]] == 10


async def test_messages_without_a_share_are_received_too(system: System) -> None:
    """Messages from before the introduction of shares have no org and no share."""
    queue = system.kernel.tasks.queue
    for n in range(4):
        await queue.send("work", [Outgoing(f'"{n}"', org_id=uuid4(), share_id=uuid4()) for _ in range(50)])
    await queue.send("work", [Outgoing('"nobody"') for _ in range(50)])
    seen = Counter[str]()
    while batch := await queue.receive("work", wait_seconds=0, limit=10, visibility_seconds=60):
        seen.update(message.body for message in batch)
    assert seen == {'"0"': 50, '"1"': 50, '"2"': 50, '"3"': 50, '"nobody"': 50}


async def test_explain_shows_a_task_waiting_for_its_share(system: System) -> None:
    first, second = await large(system, 1_000), await system.submit([{"n": 1}], priority="bulk")
    task_id = (await system.task_ids(second["run_id"]))[0]
    await system.receive(max=1)
    answer = (await system.user("GET", f"/v1/tasks/{task_id}/explain")).json()
    assert answer["reason"] == "waiting_for_turn", answer
    assert "shares the workers of 'platform' with 1 more runs or jobs" in answer["detail"]
    assert first not in answer["detail"]
