"""Cancel in every state, retry, redrive and release, and the resulting state of the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from uuid import uuid4

import pytest

from interlock import failpoints
from interlock.clock import ManualClock
from tests.support.system import System, fence

ONE_ATTEMPT = {"max_attempts": 1}
SLOW_RETRY = {"max_attempts": 3, "backoff_seconds": 600, "jitter": 0}


async def cancel(system: System, task_id: str) -> dict[str, Any]:
    reply = await system.user("POST", f"/v1/tasks/{task_id}/cancel")
    assert reply.status_code == 200, reply.text
    task: dict[str, Any] = reply.json()
    return task


async def changed(system: System, path: str, **body: Any) -> dict[str, Any]:
    reply = await system.user("POST", path, json=body) if body else await system.user("POST", path)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def heartbeat(system: System, claim: dict[str, Any]) -> Any:
    return await system.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim))


async def release(system: System, *claims: dict[str, Any]) -> int:
    reply = await system.worker("POST", "/internal/task-release", json={"items": [fence(c) for c in claims]})
    return int(reply.json()["released"])


async def outcomes(system: System, task_id: str) -> list[tuple[int, str]]:
    reply = await system.user("GET", f"/v1/tasks/{task_id}/attempts")
    return [(a["attempt"], a["outcome"]) for a in reply.json()["attempts"]]


async def counts(system: System, run_id: str) -> dict[str, int]:
    await system.settle()
    return {name: n for name, n in (await system.run(run_id))["counts"].items() if n}


# Cancel, by state


async def test_queued_task_is_canceled_immediately_and_its_message_finds_nothing(still: System) -> None:
    task_id = await still.one()
    assert (await cancel(still, task_id))["status"] == "Canceled"
    (message,) = await still.receive()
    receipt = {"queue": "platform", "message_id": message["message_id"], "receipt": message["receipt"]}
    assert (await still.claim_many(**message["body"], message=receipt))["claims"] == []
    assert (await still.claim(task_id))["reason"] == "Canceled"
    assert await still.value("select count(*) from interlock.queue_messages") == 0


async def test_running_attempt_learns_of_the_cancel_and_reports_it(still: System) -> None:
    task_id = await still.one()
    claim = await still.claim(task_id)
    task = await cancel(still, task_id)
    assert (task["status"], task["cancel_requested"]) == ("Running", True)
    fetched = await still.worker("GET", f"/internal/task-fetch?task_id={task_id}")
    assert fetched.json()["status"] == "Canceled"
    assert (await heartbeat(still, claim)).json()["cancel_requested"] is True
    reply = await still.complete(claim, "Canceled")
    assert reply.json()["status"] == "Canceled"
    assert await outcomes(still, task_id) == [(1, "Canceled")]
    assert (await heartbeat(still, claim)).status_code == 409


async def test_failure_after_a_cancel_counts_as_the_cancel(still: System) -> None:
    task_id = await still.one(policy=SLOW_RETRY)
    claim = await still.claim(task_id)
    await cancel(still, task_id)
    assert (await still.complete(claim, "Failed", error_class="Killed")).json()["status"] == "Canceled"
    again = await still.complete(claim, "Failed", error_class="Killed")
    assert (again.status_code, again.json().get("duplicate")) == (200, True)


async def test_completion_after_a_cancel_request_counts(still: System) -> None:
    task_id = await still.one()
    claim = await still.claim(task_id)
    await cancel(still, task_id)
    assert (await still.complete(claim, result=7)).json()["status"] == "Completed"
    assert (await still.task(task_id))["result"] == 7


async def test_reaper_cancels_a_canceled_attempt_without_heartbeats(still: System, clock: ManualClock) -> None:
    task_id = await still.one(policy={"lease_seconds": 30})
    claim = await still.claim(task_id)
    await cancel(still, task_id)
    clock.advance(31)
    await still.settle()
    assert (await still.task(task_id))["status"] == "Canceled"
    assert await outcomes(still, task_id) == [(1, "Canceled")]
    reply = await still.complete(claim)
    assert (reply.status_code, reply.json()["stale"]) == (409, "status")


async def test_cancel_of_a_task_waiting_for_its_retry_is_final(still: System, clock: ManualClock) -> None:
    task_id = await still.one(policy=SLOW_RETRY)
    await still.complete(await still.claim(task_id), "Failed")
    assert (await cancel(still, task_id))["status"] == "Canceled"
    clock.advance(3600)
    await still.settle()
    task = await still.task(task_id)
    assert (task["status"], task["retry_at"]) == ("Canceled", None)


async def test_late_reply_after_a_cancel_is_fenced(still: System, clock: ManualClock) -> None:
    task_id = await still.one(policy=SLOW_RETRY | {"lease_seconds": 30})
    claim = await still.claim(task_id)
    clock.advance(31)
    await still.settle()
    assert (await cancel(still, task_id))["status"] == "Canceled"
    assert (await still.complete(claim)).status_code == 409
    assert (await still.task(task_id))["status"] == "Canceled"


@pytest.mark.parametrize("end", ["Completed", "Failed", "Canceled"])
async def test_cancel_does_not_change_an_ended_task(still: System, end: str) -> None:
    task_id = await still.one(policy=ONE_ATTEMPT)
    await still.complete(await still.claim(task_id), end)
    before = await still.task(task_id)
    assert await cancel(still, task_id) == before
    assert before["status"] == end


async def test_cancels_and_completions_at_once_leave_exact_counts(still: System) -> None:
    accepted = await still.submit(list(range(40)), policy=ONE_ATTEMPT)
    ids = await still.task_ids(accepted["run_id"])
    claims = [await still.claim(task_id) for task_id in ids[:20]]
    await asyncio.gather(
        *(cancel(still, task_id) for task_id in ids),
        *(still.complete(claim, "Completed" if n % 2 else "Failed") for n, claim in enumerate(claims)),
        *(still.claim(task_id) for task_id in ids[20:]),
    )
    await still.settle()
    truth = Counter([(await still.task(task_id))["status"] for task_id in ids])
    found = await counts(still, accepted["run_id"])
    assert found.pop("dead", 0) == truth["Failed"]
    assert found == truth
    assert truth["Completed"] == 10


# Cancel of many tasks


async def test_cancel_by_filter_counts_first_and_cancels_only_matches(still: System) -> None:
    first = await still.submit([0, 1, 2, 3], name="crawl", policy=SLOW_RETRY)
    second = await still.submit([0, 1], name="crawl", policy=SLOW_RETRY)
    other = await still.submit([0], name="other")
    ids = await still.task_ids(first["run_id"])
    await still.claim(ids[0])
    await still.complete(await still.claim(ids[1]), "Failed")
    await still.complete(await still.claim(ids[2]))
    path = "/v1/tasks/cancel"
    assert await changed(still, path, job="crawl", dry_run=True) == {"matched": 5, "dry_run": True, "remaining": False}
    assert (await changed(still, path, run=first["run_id"], dry_run=True))["matched"] == 3
    for status, expected in (("Queued", 1), ("Running", 1), ("Failed", 1)):
        reply = await changed(still, path, run=first["run_id"], status=status, dry_run=True)
        assert reply["matched"] == expected
    assert await counts(still, first["run_id"]) == {"Queued": 1, "Running": 1, "Failed": 1, "Completed": 1}
    assert (await changed(still, path, run=first["run_id"], status="Queued"))["matched"] == 1
    assert (await changed(still, path, job=first["job_id"]))["matched"] == 4
    assert (await changed(still, path, job="crawl"))["matched"] == 0
    assert await counts(still, first["run_id"]) == {"Running": 1, "Completed": 1, "Canceled": 2}
    assert await counts(still, second["run_id"]) == {"Canceled": 2}
    assert await counts(still, other["run_id"]) == {"Queued": 1}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "filter_missing"),
        ({"job": "none-such"}, 404, "not_found"),
        ({"run": str(uuid4())}, 404, "not_found"),
        ({"job": "x", "status": "Completed"}, 400, "bad_request"),
        ({"job": "x", "status": "Gone"}, 400, "invalid_request"),
        ({"job": "\x00"}, 404, "not_found"),
        ({"jobs": "x"}, 400, "invalid_request"),
    ],
)
async def test_empty_filter_is_refused(shared: System, body: dict[str, Any], status: int, code: str) -> None:
    reply = await shared.user("POST", "/v1/tasks/cancel", json=body)
    assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text


async def test_canceled_run_ends_when_its_last_attempt_has_reported(still: System) -> None:
    accepted = await still.submit(list(range(5)), policy=ONE_ATTEMPT)
    run_id = accepted["run_id"]
    ids = await still.task_ids(run_id)
    running = await still.claim(ids[0])
    await still.complete(await still.claim(ids[1]))
    await still.complete(await still.claim(ids[2]), "Failed")
    assert (await changed(still, f"/v1/runs/{run_id}/cancel"))["matched"] == 3
    await still.settle()
    assert ((await still.run(run_id))["state"], (await still.run(run_id))["cancel_requested"]) == ("Running", True)
    await still.complete(running, "Canceled")
    assert await counts(still, run_id) == {"Completed": 1, "Failed": 1, "dead": 1, "Canceled": 3}
    assert (await still.run(run_id))["state"] == "Canceled"
    assert (await changed(still, f"/v1/runs/{run_id}/cancel"))["matched"] == 0


async def test_retry_due_in_a_canceled_run_is_canceled(still: System, clock: ManualClock) -> None:
    """The cancel is durable: the loop cancels tasks that the first sweep could not see."""
    accepted = await still.submit([0, 1])
    claims = [await still.claim(task_id) for task_id in await still.task_ids(accepted["run_id"])]
    assert await release(still, claims[1]) == 1
    await changed(still, f"/v1/runs/{accepted['run_id']}/cancel")
    assert await release(still, claims[0]) == 1
    assert await counts(still, accepted["run_id"]) == {"Canceled": 2}
    assert (await still.run(accepted["run_id"]))["state"] == "Canceled"


# Retry and redrive


async def test_retried_dead_letter_gets_a_fresh_set_of_attempts(still: System, clock: ManualClock) -> None:
    task_id = await still.one(policy={"max_attempts": 2, "backoff_seconds": 0, "jitter": 0})
    for _ in range(2):
        await still.complete(await still.claim(task_id), "Failed")
        await still.settle()
    assert (await still.task(task_id))["dead"] is True
    reply = await still.user("POST", f"/v1/tasks/{task_id}/retry")
    task = reply.json()
    assert (reply.status_code, task["status"], task["attempt"], task["dead"]) == (200, "Queued", 3, False)
    await still.complete(await still.claim(task_id), "Failed")
    await still.settle()
    assert (await still.task(task_id))["status"] == "Queued"
    assert (await still.complete(await still.claim(task_id))).status_code == 200
    ended = [(1, "Failed"), (2, "Failed"), (3, "Failed"), (4, "Completed")]
    assert await outcomes(still, task_id) == ended


async def test_manual_retry_of_a_waiting_task_uses_its_own_attempts(still: System) -> None:
    task_id = await still.one(policy=SLOW_RETRY)
    await still.complete(await still.claim(task_id), "Failed")
    assert (await still.user("POST", f"/v1/tasks/{task_id}/retry")).json()["attempt"] == 2
    assert len(await still.receive(max=10)) == 2
    assert (await still.claim(task_id))["attempt"] == 2
    explained = (await still.user("GET", f"/v1/tasks/{task_id}/explain")).json()
    assert explained["facts"]["max_attempts"] == 3


@pytest.mark.parametrize("status", ["Queued", "Running", "Completed", "Canceled"])
async def test_only_a_failed_task_can_be_retried(still: System, status: str) -> None:
    task_id = await still.one()
    if status != "Queued":
        claim = await still.claim(task_id)
        if status != "Running":
            await still.complete(claim, status)
    reply = await still.user("POST", f"/v1/tasks/{task_id}/retry")
    assert (reply.status_code, reply.json()["code"]) == (409, "not_failed")
    assert (await still.task(task_id))["status"] == status


async def test_non_retryable_error_class_makes_a_dead_letter(still: System) -> None:
    task_id = await still.one(policy={"max_attempts": 5, "non_retryable": ["BadInput"]})
    await still.complete(await still.claim(task_id), "Failed", error_class="BadInput")
    task = await still.task(task_id)
    assert (task["status"], task["dead"], task["attempt"]) == ("Failed", True, 1)


async def test_redrive_takes_dead_letters_by_filter(still: System) -> None:
    accepted = await still.submit(list(range(6)), name="letters", policy=ONE_ATTEMPT)
    ids = await still.task_ids(accepted["run_id"])
    for n, task_id in enumerate(ids[:5]):
        await still.complete(await still.claim(task_id), "Failed", error_class="A" if n < 2 else "B")
    path = "/v1/tasks/redrive"
    assert (await changed(still, path, job="letters", dry_run=True))["matched"] == 5
    assert (await changed(still, path, run=accepted["run_id"], error_class="A", dry_run=True))["matched"] == 2
    assert (await changed(still, path, job="letters", limit=2, dry_run=True))["matched"] == 2
    assert (await changed(still, path, job="letters", error_class="A"))["matched"] == 2
    limited = await changed(still, path, job="letters", limit=2)
    assert (limited["matched"], limited["remaining"]) == (2, True)
    assert await counts(still, accepted["run_id"]) == {"Queued": 5, "Failed": 1, "dead": 1}
    assert (await still.user("POST", path, json={"job": "letters", "error_class": "a\x00"})).status_code == 400


async def test_redriven_run_is_reopened_and_ends_with_its_new_outcome(still: System) -> None:
    accepted = await still.submit([0], policy=ONE_ATTEMPT)
    run_id, (task_id,) = accepted["run_id"], await still.task_ids(accepted["run_id"])
    await still.complete(await still.claim(task_id), "Failed")
    await still.settle()
    ended = await still.run(run_id)
    assert (ended["state"], ended["ended_at"] is not None) == ("Failed", True)
    await still.user("POST", f"/v1/tasks/{task_id}/retry")
    assert ((await still.run(run_id))["state"], (await still.run(run_id))["ended_at"]) == ("Running", None)
    await still.complete(await still.claim(task_id))
    await still.settle()
    run = await still.run(run_id)
    assert (run["state"], run["counts"]["Completed"], run["counts"]["Failed"]) == ("Completed", 1, 0)


async def test_retry_concurrent_with_the_end_of_its_run_leaves_it_open(still: System) -> None:
    accepted = await still.submit([0], policy=ONE_ATTEMPT)
    run_id, (task_id,) = accepted["run_id"], await still.task_ids(accepted["run_id"])
    await still.complete(await still.claim(task_id), "Failed")

    retries: list[asyncio.Task[Any]] = []

    async def meanwhile() -> None:
        failpoints.disarm("fold.before_commit")
        retries.append(asyncio.create_task(still.user("POST", f"/v1/tasks/{task_id}/retry")))

    failpoints.arm("fold.before_commit", meanwhile)
    try:
        assert await still.pass_of("run-counters") == 1
    finally:
        failpoints.disarm("fold.before_commit")
    assert (await retries[0]).status_code == 200
    await still.settle()
    run = await still.run(run_id)
    assert (run["state"], run["ended_at"], run["counts"]["Queued"]) == ("Running", None, 1)
    await still.complete(await still.claim(task_id))
    await still.settle()
    assert (await still.run(run_id))["state"] == "Completed"


async def test_retry_in_a_canceled_run_is_not_canceled_again(still: System) -> None:
    accepted = await still.submit([0, 1], policy=ONE_ATTEMPT)
    run_id = accepted["run_id"]
    ids = await still.task_ids(run_id)
    await still.complete(await still.claim(ids[0]), "Failed")
    await changed(still, f"/v1/runs/{run_id}/cancel")
    await still.settle()
    assert (await still.run(run_id))["state"] == "Canceled"
    await still.user("POST", f"/v1/tasks/{ids[0]}/retry")
    await still.settle()
    assert (await still.task(ids[0]))["status"] == "Queued"
    assert (await still.complete(await still.claim(ids[0]))).status_code == 200
    await still.settle()
    assert (await still.run(run_id))["state"] == "CompletedWithFailures"


# Release


async def test_released_attempt_is_not_used_up(still: System) -> None:
    task_id = await still.one(policy=ONE_ATTEMPT)
    first = await still.claim(task_id, "first")
    assert await release(still, first) == 1
    task = await still.task(task_id)
    assert (task["status"], task["attempt"]) == ("Queued", 1)
    assert [message["body"] for message in await still.receive(max=10)][-1] == {"task_id": task_id}
    second = await still.claim(task_id, "second")
    assert (second["attempt"], second["lease_token"] != first["lease_token"]) == (1, True)
    for stale in (await heartbeat(still, first), await still.complete(first)):
        assert (stale.status_code, stale.json()["stale"]) == (409, "lease_token")
    assert await release(still, first) == 0
    assert (await still.complete(second)).status_code == 200
    assert await outcomes(still, task_id) == [(1, "Released"), (1, "Completed")]


async def test_batch_release_releases_held_tasks_and_skips_the_rest(still: System) -> None:
    accepted = await still.submit([0, 1, 2])
    claims = [await still.claim(task_id) for task_id in await still.task_ids(accepted["run_id"])]
    await still.complete(claims[1])
    stranger = claims[2] | {"lease_token": str(uuid4())}
    assert await release(still, claims[0], claims[1], stranger, claims[0]) == 1
    assert await counts(still, accepted["run_id"]) == {"Queued": 1, "Running": 1, "Completed": 1}


# Run states


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        (["Completed", "Completed"], "Completed"),
        (["Completed", "Failed"], "CompletedWithFailures"),
        (["Failed", "Failed"], "Failed"),
        (["Canceled", "Canceled"], "Canceled"),
        (["Canceled", "Completed"], "CompletedWithFailures"),
    ],
)
async def test_outcomes_of_its_tasks_decide_the_state_of_a_run(still: System, ends: list[str], state: str) -> None:
    accepted = await still.submit(list(range(len(ends))), policy=ONE_ATTEMPT)
    assert accepted["state"] == "Running"
    for task_id, end in zip(await still.task_ids(accepted["run_id"]), ends, strict=True):
        await still.complete(await still.claim(task_id), end)
    await still.settle()
    run = await still.run(accepted["run_id"])
    assert (run["state"], run["ended_at"] is not None) == (state, True)
    job = (await still.user("GET", f"/v1/jobs/{accepted['job_id']}")).json()
    assert (job["state"], job["run"]["run_id"]) == (state, accepted["run_id"])


async def test_run_with_a_task_waiting_for_its_retry_has_not_ended(still: System) -> None:
    accepted = await still.submit([0], policy=SLOW_RETRY)
    await still.complete(await still.claim((await still.task_ids(accepted["run_id"]))[0]), "Failed")
    assert await counts(still, accepted["run_id"]) == {"Failed": 1}
    assert (await still.run(accepted["run_id"]))["state"] == "Running"
