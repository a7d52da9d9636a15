"""The life cycle of a task over HTTP, with a clock that only the test advances."""

from __future__ import annotations

from interlock.clock import ManualClock
from tests.support.system import System, fence


async def test_claimed_task_completes_with_its_result(still: System) -> None:
    task_id = await still.one()
    claim = await still.claim(task_id)
    assert claim["status"] == "Claimed"
    assert claim["attempt"] == 1
    assert claim["task"]["operator"] == "echo"
    assert claim["task"]["payload"] == {"n": 1}
    reply = await still.complete(claim, result={"ok": True})
    assert reply.status_code == 200, reply.text
    task = await still.task(task_id)
    assert task["status"] == "Completed"
    assert task["result"] == {"ok": True}


async def test_second_worker_does_not_get_a_claimed_task(still: System) -> None:
    task_id = await still.one()
    await still.claim(task_id)
    assert await still.claim(task_id, "other") == {
        "status": "NotClaimed",
        "reason": "AlreadyRunning",
        "task_id": task_id,
    }


async def test_failed_attempt_is_retried_after_its_backoff(still: System, clock: ManualClock) -> None:
    task_id = await still.one(policy={"max_attempts": 2, "backoff_seconds": 10, "jitter": 0})
    reply = await still.complete(await still.claim(task_id), "Failed", error_class="Boom", error_message="no")
    assert reply.json()["status"] == "Failed"
    await still.settle()
    assert (await still.task(task_id))["status"] == "Failed"
    clock.advance(10)
    await still.settle()
    task = await still.task(task_id)
    assert (task["status"], task["attempt"]) == ("Queued", 2)
    await still.complete(await still.claim(task_id), "Failed", error_class="Boom", error_message="again")
    task = await still.task(task_id)
    assert (task["status"], task["dead"], task["error_message"]) == ("Failed", True, "again")
    attempts = (await still.user("GET", f"/v1/tasks/{task_id}/attempts")).json()["attempts"]
    assert [(a["attempt"], a["outcome"], a["error_class"]) for a in attempts] == [
        (1, "Failed", "Boom"),
        (2, "Failed", "Boom"),
    ]


async def test_expired_lease_ends_the_attempt_and_a_late_completion_still_counts(
    still: System, clock: ManualClock
) -> None:
    task_id = await still.one(policy={"lease_seconds": 30, "backoff_seconds": 5, "jitter": 0})
    claim = await still.claim(task_id)
    clock.advance(31)
    await still.settle()
    assert (await still.task(task_id))["status"] == "Failed"
    reply = await still.complete(claim)
    assert reply.status_code == 200, reply.text
    assert (await still.task(task_id))["status"] == "Completed"
    attempts = (await still.user("GET", f"/v1/tasks/{task_id}/attempts")).json()["attempts"]
    assert [(a["attempt"], a["outcome"]) for a in attempts] == [(1, "Completed")]


async def test_completion_is_fenced_off_once_a_newer_attempt_has_started(still: System, clock: ManualClock) -> None:
    task_id = await still.one(policy={"lease_seconds": 30, "backoff_seconds": 0, "jitter": 0})
    stale = await still.claim(task_id)
    clock.advance(31)
    await still.settle()
    fresh = await still.claim(task_id)
    assert fresh["attempt"] == 2
    reply = await still.complete(stale)
    assert reply.status_code == 409
    assert reply.json()["code"] == "fenced"
    assert reply.json()["stale"] == "attempt"
    assert (await still.complete(fresh)).status_code == 200


async def test_heartbeat_extends_the_lease_but_not_past_the_hard_timeout(still: System, clock: ManualClock) -> None:
    task_id = await still.one(policy={"lease_seconds": 30, "timeout_seconds": 50, "max_attempts": 1})
    claim = await still.claim(task_id)
    clock.advance(25)
    reply = await still.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim) | {"progress": 0.5})
    assert reply.status_code == 200, reply.text
    assert reply.json()["cancel_requested"] is False
    assert (await still.task(task_id))["progress"] == 0.5
    clock.advance(26)
    await still.settle()
    task = await still.task(task_id)
    assert (task["status"], task["dead"], task["error_class"]) == ("Failed", True, "HardTimeout")


async def test_run_ends_when_its_last_task_does(still: System) -> None:
    accepted = await still.submit([1, 2, 3])
    for task_id in await still.task_ids(accepted["run_id"]):
        await still.complete(await still.claim(task_id))
    await still.settle()
    run = (await still.user("GET", f"/v1/runs/{accepted['run_id']}")).json()
    assert run["state"] == "Completed"
    assert run["counts"] == {"Queued": 0, "Running": 0, "Completed": 3, "Failed": 0, "Canceled": 0, "dead": 0}
