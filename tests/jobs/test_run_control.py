"""Pause, resume, cancel and delete, in every state of a run; deadlines, and the limit on failures."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from interlock.clock import ManualClock
from tests.support.sharded_runs import submit_sharded
from tests.support.system import System, fence

TASKS = [{"n": n} for n in range(250)]


async def submitted(system: System, own: bool, tasks: list[Any], **job: Any) -> dict[str, Any]:
    return await (submit_sharded(system, tasks, **job) if own else system.submit(tasks, **job))


async def control(system: System, run: dict[str, Any], what: str) -> dict[str, Any]:
    reply = await system.user("POST", f"/v1/jobs/{run['job_id']}/{what}")
    assert reply.status_code == 200, reply.text
    job: dict[str, Any] = reply.json()
    return job


async def drained(system: System) -> list[dict[str, Any]]:
    """Receives all messages and claims their tasks, as a worker does. Returns the claims."""
    claims: list[dict[str, Any]] = []
    while messages := await system.receive(max_messages=100):
        for message in messages:
            body = message["body"]
            what = {"task_id": body["task_id"]} if "task_id" in body else {"run_id": body["run_id"]}
            what |= {name: body[name] for name in ("start", "end") if name in body}
            receipt = {"queue": "platform", "message_id": message["message_id"], "receipt": message["receipt"]}
            reply = await system.worker(
                "POST", "/internal/task-claim", json={"worker_id": "test", "message": receipt} | what
            )
            found = reply.json()
            claims += [one for one in found.get("claims", [found]) if one.get("status") == "Claimed"]
    return claims


async def messages(system: System) -> int:
    count: int = await system.value("select count(*) from interlock.queue_messages")
    return count


@pytest.mark.parametrize("own", [False, True], ids=["shard 0", "own shard"])
async def test_paused_run_starts_nothing_and_redelivers_no_messages(still: System, own: bool) -> None:
    run = await submitted(still, own, TASKS)
    begun = await still.claim_many(run_id=run["run_id"], start=0, end=9)
    assert (await control(still, run, "pause"))["state"] == "Paused"
    assert await drained(still) == []
    assert await messages(still) == 0
    assert await still.pass_of("reconciler") == 0
    for claim in begun["claims"]:
        assert (await still.complete(claim)).status_code == 200
    await still.settle()
    seen = await still.run(run["run_id"])
    assert (seen["state"], seen["counts"]["Completed"]) == ("Paused", 10)
    assert (await control(still, run, "resume"))["state"] == "Running"
    await still.settle()
    assert await messages(still) == 3
    rest = await drained(still)
    assert len(rest) == 240
    for claim in rest:
        await still.complete(claim)
    await still.settle()
    assert (await still.run(run["run_id"]))["state"] == "Completed"


async def test_single_task_of_a_paused_run_is_not_due(still: System) -> None:
    run = await still.submit([{"n": 1}], name="named")
    await control(still, run, "pause")
    (task_id,) = await still.task_ids(run["run_id"])
    assert (await still.claim(task_id))["reason"] == "NotDue"
    assert (await still.user("POST", "/v1/jobs/named/resume")).json()["state"] == "Running"
    assert (await still.claim(task_id))["status"] == "Claimed"


async def test_resumed_run_of_a_runtime_without_a_queue_continues(still: System) -> None:
    run = await still.submit([{"n": 1}, {"n": 2}], runtime="dispatcher")
    await control(still, run, "pause")
    await still.settle()
    assert (await still.run(run["run_id"]))["counts"]["Queued"] == 2
    await control(still, run, "resume")
    while (await still.run(run["run_id"]))["state"] != "Completed":
        await still.settle()
        await still.kernel.tasks.inline.drain(5)


@pytest.mark.parametrize("own", [False, True], ids=["shard 0", "own shard"])
async def test_paused_run_can_be_canceled(still: System, own: bool) -> None:
    run = await submitted(still, own, TASKS)
    await control(still, run, "pause")
    await control(still, run, "cancel")
    await still.settle()
    assert (await still.run(run["run_id"]))["state"] == "Canceled"
    for what in ("pause", "resume", "cancel"):
        assert (await control(still, run, what))["state"] == "Canceled"


@pytest.mark.parametrize("own", [False, True], ids=["shard 0", "own shard"])
@pytest.mark.parametrize("state", ["Running", "Paused", "Completed"])
async def test_job_is_deleted_in_every_state_and_leaves_nothing(still: System, own: bool, state: str) -> None:
    run = await submitted(still, own, TASKS[:20], name="gone", policy={"max_attempts": 1})
    reply = await still.claim_many(run_id=run["run_id"], start=0, end=19)
    first, *others = reply["claims"]
    await still.complete(first, "Failed", error_class="E", error_message="m")
    if state == "Completed":
        for claim in others:
            await still.complete(claim)
    if state == "Paused":
        await control(still, run, "pause")
    await still.settle()
    assert (await still.user("DELETE", "/v1/jobs/gone")).json()["job_id"] == run["job_id"]
    for path in ("/v1/jobs/gone", f"/v1/jobs/{run['job_id']}", f"/v1/runs/{run['run_id']}"):
        assert (await still.user("GET", path)).status_code == 404, path
    assert (await still.user("DELETE", "/v1/jobs/gone")).status_code == 404
    again = await still.submit([{"n": 1}], name="gone")
    assert again["job_id"] != run["job_id"]
    while await still.pass_of("run-deletions"):
        continue
    for table in ("tasks", "runs", "jobs"):
        assert await still.value(f"select count(*) from interlock.{table}") == 1, table
    assert await still.value("select count(*) from interlock.attempts") == 0
    if state != "Completed":
        assert (await still.complete(others[0])).status_code == 409


async def test_interrupted_deletion_resumes(still: System) -> None:
    """The shard is deleted but the run is not: the next pass finishes the deletion."""
    run = await submit_sharded(still, TASKS[:5])
    shard = await still.value("select shard from interlock.runs where run_id = $1", UUID(run["run_id"]))
    await still.user("DELETE", f"/v1/jobs/{run['job_id']}")
    await still.value(f"drop table interlock.tasks_{shard}")
    while await still.pass_of("run-deletions"):
        continue
    assert await still.value("select count(*) from interlock.runs") == 0


async def test_expired_run_is_deleted_with_its_shard(still: System, clock: ManualClock) -> None:
    run = await submit_sharded(still, TASKS[:5])
    for claim in (await still.claim_many(run_id=run["run_id"], start=0, end=4))["claims"]:
        await still.complete(claim)
    await still.settle()
    clock.advance(400 * 86_400)
    await still.pass_of("retention")
    assert (await still.user("GET", f"/v1/runs/{run['run_id']}")).status_code == 404
    await still.pass_of("run-deletions")
    assert await still.value("select count(*) from interlock.tasks") == 0
    assert await still.value("select count(*) from interlock.runs") == 0


@pytest.mark.parametrize("own", [False, True], ids=["shard 0", "own shard"])
async def test_run_past_its_deadline_is_stopped_with_a_reason(still: System, clock: ManualClock, own: bool) -> None:
    run = await submitted(still, own, TASKS, limits={"deadline_seconds": 60})
    (claim,) = (await still.claim_many(run_id=run["run_id"], start=0, end=0))["claims"]
    await still.complete(claim)
    clock.advance(61)
    await still.settle()
    seen = await still.run(run["run_id"])
    assert (seen["state"], seen["counts"]["Canceled"]) == ("Failed", 249)
    assert seen["reason"] == "1 of 250 tasks had ended at the deadline"


async def test_run_that_is_over_in_time_has_met_its_deadline(still: System, clock: ManualClock) -> None:
    run = await still.submit([{"n": 1}], limits={"deadline_seconds": 60})
    (claim,) = (await still.claim_many(run_id=run["run_id"], start=0, end=0))["claims"]
    await still.complete(claim)
    await still.settle()
    clock.advance(61)
    await still.settle()
    assert (await still.run(run["run_id"]))["state"] == "Completed"


async def test_run_with_more_failures_than_it_tolerates_is_stopped(still: System) -> None:
    run = await still.submit(TASKS[:10], limits={"tolerated_failure_share": 0.1}, policy={"max_attempts": 1})
    claims = (await still.claim_many(run_id=run["run_id"], start=0, end=3))["claims"]
    await still.complete(claims[0], "Failed", error_class="E")
    await still.settle()
    assert (await still.run(run["run_id"]))["state"] == "Running"
    await still.complete(claims[1], "Failed", error_class="E")
    await still.settle()
    released = {"items": [fence(claim) for claim in claims[2:]]}
    assert (await still.worker("POST", "/internal/task-release", json=released)).status_code == 200
    await still.settle()
    seen = await still.run(run["run_id"])
    assert (seen["state"], seen["counts"]["Failed"], seen["counts"]["Canceled"]) == ("Failed", 2, 8)
    assert seen["reason"] == "2 of 10 tasks have failed for good; the run tolerates a share of 0.1"


async def test_job_of_a_dag_cannot_be_deleted_alone(still: System) -> None:
    run = await still.submit([{"n": 1}], name="part")
    await still.value("update interlock.jobs set dag_name = 'whole' where job_id = $1", UUID(run["job_id"]))
    refused = await still.user("DELETE", f"/v1/jobs/{run['job_id']}")
    assert refused.status_code == 409, refused.text
    assert refused.json()["code"] == "job_of_a_dag"
