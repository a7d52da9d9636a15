"""The life cycle of tasks in a dedicated shard. Seen from outside, it is the same as in shard 0."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from interlock.tasks.shards import shard_of
from tests.support.sharded_runs import submit_sharded
from tests.support.system import System, fence

TASKS = [{"n": n} for n in range(10)]


async def claimed(system: System, run: dict[str, Any], start: int = 0, end: int = 9) -> list[dict[str, Any]]:
    reply = await system.claim_many(run_id=run["run_id"], start=start, end=end)
    found: list[dict[str, Any]] = reply["claims"]
    return sorted(found, key=lambda claim: claim["task"]["index"])


async def shard(system: System, run: dict[str, Any]) -> int:
    number: int = await system.value("select shard from interlock.runs where run_id = $1", UUID(run["run_id"]))
    return number


async def statuses(system: System, run: dict[str, Any]) -> list[str]:
    reply = await system.user("GET", f"/v1/tasks?run={run['run_id']}&limit=1000")
    return [task["status"] for task in reply.json()["tasks"]]


async def test_tasks_are_claimed_by_range_and_completed_by_shard_tokens(still: System) -> None:
    run = await submit_sharded(still, TASKS)
    claims = await claimed(still, run)
    assert len(claims) == 10
    assert {shard_of(UUID(claim["lease_token"])) for claim in claims} == {await shard(still, run)}
    assert (
        await still.attempt("/v1/task/heartbeat", claims[0]["capability_token"], fence(claims[0]))
    ).status_code == 200
    for claim in claims:
        assert (await still.complete(claim, result={"ok": 1})).status_code == 200
    assert (await still.complete(claims[0], result={"ok": 1})).json()["duplicate"]
    await still.settle()
    seen = await still.run(run["run_id"])
    assert (seen["state"], seen["counts"]["Completed"]) == ("Completed", 10)
    assert await statuses(still, run) == ["Completed"] * 10


async def test_batch_that_spans_shards_counts_in_each(still: System) -> None:
    runs = [await submit_sharded(still, TASKS), await still.submit(TASKS), await submit_sharded(still, TASKS)]
    ranges = [{"run_id": run["run_id"], "start": 0, "end": 9} for run in runs]
    reply = await still.claim_many(ranges=ranges, tokens=False, grouped=True)
    groups = [
        {"run_id": group["run_id"], "attempt": group["attempt"], "lease_token": group["lease_token"]}
        | {"indexes": [index for _, index, _ in group["tasks"]], "results": [{} for _ in group["tasks"]]}
        for group in reply["groups"]
    ]
    assert len(groups) == 3
    done = await still.worker("POST", "/internal/task-complete", json={"groups": groups})
    assert done.json() == {"accepted": 30}
    await still.settle()
    assert [(await still.run(run["run_id"]))["state"] for run in runs] == ["Completed"] * 3


async def test_failed_task_is_retried_dies_and_is_redriven(still: System) -> None:
    run = await submit_sharded(still, TASKS, policy={"max_attempts": 2, "backoff_seconds": 10, "jitter": 0})
    (claim,) = await claimed(still, run, 3, 3)
    await still.complete(claim, "Failed", error_class="ValueError", error_message="no")
    still.kernel.stores.clock.advance(11)  # type: ignore[attr-defined]
    assert await still.pass_of("retries") == 1
    bodies = [message["body"] for message in await still.receive(max_messages=10)]
    assert {"job_id": run["job_id"], "run_id": run["run_id"], "start": 3, "end": 3} in bodies
    (claim,) = await claimed(still, run, 3, 3)
    assert claim["attempt"] == 2
    await still.complete(claim, "Failed", error_class="ValueError", error_message="no")
    task_id = claim["task_id"]
    assert (await still.task(task_id))["dead"]
    attempts = (await still.user("GET", f"/v1/tasks/{task_id}/attempts")).json()["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["Failed", "Failed"]
    explained = (await still.user("GET", f"/v1/tasks/{task_id}/explain")).json()
    assert explained["status"] == "Failed"
    page = (await still.user("GET", f"/v1/tasks?run={run['run_id']}&status=Failed")).json()
    assert [task["task_id"] for task in page["tasks"]] == [task_id]
    redriven = await still.user("POST", f"/v1/tasks/{task_id}/retry")
    assert redriven.json()["status"] == "Queued", redriven.text
    (claim,) = await claimed(still, run, 3, 3)
    assert claim["attempt"] == 3


async def test_attempt_without_heartbeats_is_reaped_and_its_late_report_still_counts(still: System) -> None:
    run = await submit_sharded(still, TASKS, policy={"lease_seconds": 5})
    claims = await claimed(still, run)
    still.kernel.stores.clock.advance(6)  # type: ignore[attr-defined]
    assert await still.pass_of("reaper") == 10
    assert (await still.task(claims[0]["task_id"]))["status"] == "Failed"
    assert (await still.complete(claims[0])).status_code == 200
    await still.pass_of("run-counters")
    assert (await still.run(run["run_id"]))["counts"] | {"Completed": 1, "Failed": 9} == (
        await still.run(run["run_id"])
    )["counts"]


async def test_canceled_run_ends_its_released_tasks(still: System) -> None:
    run = await submit_sharded(still, TASKS)
    held = await claimed(still, run, 0, 1)
    assert (await still.user("POST", f"/v1/runs/{run['run_id']}/cancel")).status_code == 200
    released = [fence(claim) for claim in held]
    assert (await still.worker("POST", "/internal/task-release", json={"items": released})).status_code in (200, 201)
    await still.settle()
    assert (await still.run(run["run_id"]))["state"] == "Canceled"
    assert await statuses(still, run) == ["Canceled"] * 10


async def test_lost_messages_of_a_shard_are_found(still: System) -> None:
    run = await submit_sharded(still, TASKS)
    await still.value("delete from interlock.queue_messages")
    still.kernel.stores.clock.advance(3600)  # type: ignore[attr-defined]
    assert await still.pass_of("reconciler") == 10
    bodies = [message["body"] for message in await still.receive(max_messages=100)]
    assert sorted(body["start"] for body in bodies) == list(range(10))
    assert {body["run_id"] for body in bodies} == {run["run_id"]}


async def test_capped_job_parks_and_wakes_across_shards(still: System) -> None:
    run = await submit_sharded(still, TASKS, name="capped", scaling={"max_concurrency": 2})
    first = await claimed(still, run)
    assert len(first) == 2
    for claim in first:
        await still.complete(claim)
    bodies = [message["body"] for message in await still.receive(max_messages=100)]
    woken = [body["start"] for body in bodies if body["start"] == body["end"]]
    assert len(woken) >= 2
    assert len(await claimed(still, run, woken[0], woken[0])) == 1


async def test_token_of_one_shard_changes_nothing_in_another(still: System) -> None:
    mine, other = await submit_sharded(still, TASKS), await submit_sharded(still, TASKS)
    (claim,) = await claimed(still, mine, 0, 0)
    forged = UUID(int=(await shard(still, other)) << 96 | UUID(claim["lease_token"]).int & ((1 << 96) - 1))
    refused = await still.complete(claim | {"lease_token": str(forged)})
    assert refused.status_code == 409
    assert (await still.task(claim["task_id"]))["status"] == "Running"
