"""Dead tasks of a run by error class: stored counters, which follow every transition of a task."""

from __future__ import annotations

from typing import Any

from interlock.clock import ManualClock
from tests.support.system import System, fence


async def started(system: System, tasks: int, **policy: Any) -> tuple[str, list[dict[str, Any]]]:
    accepted = await system.submit(list(range(tasks)), policy={"max_attempts": 1} | policy)
    claims = (await system.claim_many(run_id=accepted["run_id"], start=0, end=tasks - 1))["claims"]
    return accepted["run_id"], claims


async def end(system: System, claims: list[dict[str, Any]], *error_classes: str | None) -> None:
    items = [
        fence(claim) | {"status": "Failed"} | ({} if error_class is None else {"error_class": error_class})
        for claim, error_class in zip(claims, error_classes, strict=True)
    ]
    reply = await system.worker("POST", "/internal/task-complete", json={"items": items})
    assert reply.status_code == 200, reply.text


async def errors(system: System, run_id: str) -> dict[str, int]:
    await system.pass_of("run-counters")
    run = await system.run(run_id)
    counted = {one["error_class"]: one["tasks"] for one in run["errors"]}
    assert sum(counted.values()) == run["counts"]["dead"]
    job = (await system.user("GET", f"/v1/jobs/{run['job_id']}")).json()
    assert job["run"]["errors"] == run["errors"]
    listed = (await system.user("GET", "/v1/runs")).json()["runs"]
    assert next(one for one in listed if one["run_id"] == run_id)["errors"] == run["errors"]
    return counted


async def test_dead_tasks_are_counted_by_class_most_frequent_first(still: System) -> None:
    run_id, claims = await started(still, 6)
    await end(still, claims[:5], "DiskFull", "Timeout", "DiskFull", None, "DiskFull")
    assert await errors(still, run_id) == {"DiskFull": 3, "(none)": 1, "Timeout": 1}
    await end(still, claims[5:], "Timeout")
    assert list((await errors(still, run_id)).items()) == [("DiskFull", 3), ("Timeout", 2), ("(none)", 1)]


async def test_failure_that_is_retried_is_not_counted(still: System) -> None:
    run_id, claims = await started(still, 1, max_attempts=2)
    await end(still, claims, "DiskFull")
    assert await errors(still, run_id) == {}


async def test_redriven_task_is_no_longer_counted(still: System) -> None:
    run_id, claims = await started(still, 3)
    await end(still, claims, "DiskFull", "DiskFull", "Timeout")
    reply = await still.user("POST", "/v1/tasks/redrive", json={"run": run_id, "error_class": "DiskFull", "limit": 1})
    assert reply.json()["matched"] == 1
    assert await errors(still, run_id) == {"DiskFull": 1, "Timeout": 1}


async def test_lost_lease_is_counted_until_the_late_report(still: System, clock: ManualClock) -> None:
    run_id, claims = await started(still, 2)
    clock.advance(600)
    await still.pass_of("reaper")
    assert await errors(still, run_id) == {"LeaseExpired": 2}
    await end(still, claims[:1], "DiskFull")
    late = {"items": [fence(claims[1]) | {"status": "Completed"}]}
    assert (await still.worker("POST", "/internal/task-complete", json=late)).status_code == 200
    assert await errors(still, run_id) == {"DiskFull": 1}


async def test_classes_beyond_the_hundredth_are_counted_together(still: System) -> None:
    run_id, claims = await started(still, 105)
    await end(still, claims[:60], *(f"E{n}" for n in range(60)))
    await errors(still, run_id)
    await end(still, claims[60:], *(f"E{n}" for n in range(60, 105)))
    counted = await errors(still, run_id)
    assert (len(counted), counted["(other)"]) == (101, 5)
    await still.user("POST", "/v1/tasks/redrive", json={"run": run_id})
    assert await errors(still, run_id) == {}
