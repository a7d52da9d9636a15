"""Late reports of the last attempt: they withdraw the dead letter, and the run counts the reported outcome."""

from __future__ import annotations

from typing import Any

import pytest

from interlock import failpoints
from interlock.clock import ManualClock
from tests.support.system import System, fence

LAST = {"lease_seconds": 30, "max_attempts": 1}


async def dead_letter(system: System, clock: ManualClock, **job: Any) -> dict[str, Any]:
    """Returns the claim of a last attempt that the reaper has ended, which also ended the run."""
    claim = await system.claim(await system.one(policy=LAST, **job))
    clock.advance(31)
    await system.settle()
    task = await system.task(claim["task_id"])
    assert (task["status"], task["dead"], task["error_class"]) == ("Failed", True, "LeaseExpired")
    return claim


async def run_of(system: System, claim: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """Returns the state and the nonzero counters of a task's run, after folding."""
    await system.settle()
    run = await system.run(claim["task"]["run_id"])
    return run["state"], {name: n for name, n in run["counts"].items() if n}


async def attempts(system: System, task_id: str) -> list[tuple[int, str]]:
    reply = await system.user("GET", f"/v1/tasks/{task_id}/attempts")
    return [(a["attempt"], a["outcome"]) for a in reply.json()["attempts"]]


async def test_late_completion_of_the_last_attempt_withdraws_the_dead_letter(still: System, clock: ManualClock) -> None:
    claim = await dead_letter(still, clock)
    assert await run_of(still, claim) == ("Failed", {"Failed": 1, "dead": 1})
    reply = await still.complete(claim, result={"late": True})
    assert (reply.status_code, reply.json()["status"]) == (200, "Completed")
    task = await still.task(claim["task_id"])
    assert (task["status"], task["dead"], task["result"]) == ("Completed", False, {"late": True})
    assert await attempts(still, claim["task_id"]) == [(1, "Completed")]
    assert await run_of(still, claim) == ("Completed", {"Completed": 1})
    assert (await still.complete(claim, result={"late": True})).json()["duplicate"] is True


async def test_late_failure_of_the_last_attempt_keeps_the_run_ended(still: System, clock: ManualClock) -> None:
    claim = await dead_letter(still, clock)
    _, counts = await run_of(still, claim)
    ended = (await still.run(claim["task"]["run_id"]))["ended_at"]
    clock.advance(5)
    reply = await still.complete(claim, "Failed", error_class="Boom", error_message="disk full")
    assert reply.status_code == 200, reply.text
    task = await still.task(claim["task_id"])
    assert (task["status"], task["dead"], task["error_class"]) == ("Failed", True, "Boom")
    assert await attempts(still, claim["task_id"]) == [(1, "Failed")]
    assert await run_of(still, claim) == ("Failed", counts)
    assert (await still.run(claim["task"]["run_id"]))["ended_at"] == ended
    assert (await still.complete(claim)).status_code == 409


async def test_late_completion_after_a_redrive_is_refused(still: System, clock: ManualClock) -> None:
    claim = await dead_letter(still, clock)
    reply = await still.user("POST", f"/v1/tasks/{claim['task_id']}/retry")
    assert reply.json()["status"] == "Queued"
    refused = await still.complete(claim)
    assert (refused.status_code, refused.json()["stale"]) == (409, "attempt")
    assert (await still.task(claim["task_id"]))["status"] == "Queued"


async def test_late_completion_in_a_deleted_job_is_refused(still: System, clock: ManualClock) -> None:
    claim = await dead_letter(still, clock, name="doomed")
    assert (await still.user("DELETE", "/v1/jobs/doomed")).status_code in (200, 202, 204)
    refused = await still.complete(claim)
    assert (refused.status_code, refused.json()["stale"]) == (409, "status")
    status = await still.value("select status::text from interlock.tasks where task_id = $1::uuid", claim["task_id"])
    assert status == "Failed"


async def test_late_completion_in_a_canceled_run_is_refused(still: System, clock: ManualClock) -> None:
    accepted = await still.submit([1, 2], policy=LAST)
    first, _ = await still.task_ids(accepted["run_id"])
    claim = await still.claim(first)
    clock.advance(31)
    await still.settle()
    assert (await still.user("POST", f"/v1/runs/{accepted['run_id']}/cancel")).status_code == 200
    refused = await still.complete(claim)
    assert (refused.status_code, refused.json()["stale"]) == (409, "status")
    assert await run_of(still, claim) == ("Canceled", {"Failed": 1, "dead": 1, "Canceled": 1})


async def test_late_completion_in_a_run_stopped_by_its_tolerance_counts(still: System, clock: ManualClock) -> None:
    accepted = await still.submit([1, 2], policy=LAST, limits={"tolerated_failure_share": 0})
    first, _ = await still.task_ids(accepted["run_id"])
    claim = await still.claim(first)
    clock.advance(31)
    await still.settle()
    assert await run_of(still, claim) == ("Failed", {"Failed": 1, "dead": 1, "Canceled": 1})
    assert (await still.complete(claim)).status_code == 200
    assert await run_of(still, claim) == ("Failed", {"Completed": 1, "Canceled": 1})


async def test_late_completion_of_many_last_attempts_withdraws_each(still: System, clock: ManualClock) -> None:
    accepted = await still.submit(list(range(5)), policy=LAST)
    claims = (await still.claim_many(run_id=accepted["run_id"], start=0, end=4))["claims"]
    clock.advance(31)
    await still.settle()
    items = [fence(claim) | {"status": "Completed"} for claim in claims]
    await still.user("POST", f"/v1/tasks/{claims[2]['task_id']}/retry")
    reply = (await still.worker("POST", "/internal/task-complete", json={"items": items})).json()
    assert (reply["accepted"], [r["task_id"] for r in reply["refused"]]) == (4, [claims[2]["task_id"]])
    assert await run_of(still, claims[0]) == ("Running", {"Completed": 4, "Queued": 1})


async def test_late_completion_that_fails_to_commit_keeps_the_dead_letter(still: System, clock: ManualClock) -> None:
    claim = await dead_letter(still, clock)

    async def broken() -> None:
        raise ConnectionResetError("the test broke it")

    failpoints.arm("complete.before_commit", broken)
    try:
        assert (await still.complete(claim)).status_code >= 500
    finally:
        failpoints.disarm("complete.before_commit")
    assert await run_of(still, claim) == ("Failed", {"Failed": 1, "dead": 1})
    assert (await still.complete(claim)).status_code == 200
    assert await run_of(still, claim) == ("Completed", {"Completed": 1})


async def test_late_completion_notifies_webhooks_and_gets_a_new_receipt(still: System, clock: ManualClock) -> None:
    hook = {"name": "ends", "url": "https://example.com/hook", "events": ["run.failed", "run.completed"]}
    assert (await still.user("POST", "/v1/webhooks", json=hook)).status_code == 201
    claim = await dead_letter(still, clock, name="told")
    first = (await still.user("GET", "/v1/jobs/told/receipt")).json()["receipt"]
    assert (first["state"], first["completed"], first["failed"]) == ("Failed", 0, 1)
    clock.advance(5)
    assert (await still.complete(claim)).status_code == 200
    between = await still.user("GET", "/v1/jobs/told/receipt")
    assert between.json().get("receipt", first) == first
    assert await run_of(still, claim) == ("Completed", {"Completed": 1})
    second = (await still.user("GET", "/v1/jobs/told/receipt")).json()["receipt"]
    assert (second["state"], second["completed"], second["failed"]) == ("Completed", 1, 0)
    told = "select array_agg(event order by delivery_id) from interlock.webhook_deliveries"
    assert await still.value(told) == ["run.failed", "run.completed"]


async def test_receipt_is_not_signed_between_a_late_completion_and_the_new_end(
    still: System, clock: ManualClock
) -> None:
    claim = await dead_letter(still, clock, name="between")
    clock.advance(5)
    assert (await still.complete(claim)).status_code == 200
    early = await still.user("GET", "/v1/jobs/between/receipt")
    assert (early.status_code, early.json()["code"]) == (409, "run_not_ended")
    assert await run_of(still, claim) == ("Completed", {"Completed": 1})
    receipt = (await still.user("GET", "/v1/jobs/between/receipt")).json()["receipt"]
    assert (receipt["state"], receipt["completed"]) == ("Completed", 1)


@pytest.mark.parametrize("renew", [False, True])
async def test_heartbeat_reports_a_paused_source(still: System, renew: bool) -> None:
    task_id = await still.one()
    claim = await still.claim(task_id)
    job = claim["task"]["job_id"]
    await still.value("update interlock.jobs set source = '{}' where job_id = $1::uuid", job)
    await still.value(
        "insert into interlock.pauses (job_id, cause_id, bulk, path, reason)"
        " values ($1::uuid, $1::uuid, false, '{}', 'behind')",
        job,
    )
    beat = fence(claim) | ({"token": True} if renew else {})
    reply = await still.attempt("/v1/task/heartbeat", claim["capability_token"], beat)
    assert reply.json().get("paused") is True, reply.text
