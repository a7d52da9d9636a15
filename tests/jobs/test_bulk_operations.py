"""Bulk operations: dry runs, filters, each kind, two at a time, crashes between batches, and other orgs."""

from __future__ import annotations

import contextlib
from typing import Any
from uuid import uuid4

import httpx
import pytest

from interlock.failpoints import arm, disarm
from interlock.jobs import bulk_walk
from tests.support.system import System

URL = "/v1/bulk-operations"


async def ask(system: System, kind: str, given: dict[str, Any], **more: Any) -> httpx.Response:
    key = more.pop("key", None)
    return await system.user("POST", URL, json={"kind": kind, "filter": given} | more, key=key)


async def start(system: System, kind: str, given: dict[str, Any], **more: Any) -> dict[str, Any]:
    reply = await ask(system, kind, given, **more)
    assert reply.status_code == 202, reply.text
    view: dict[str, Any] = reply.json()
    return view


async def done(system: System, operation: dict[str, Any]) -> dict[str, Any]:
    """Runs the loop until it has no work, and returns the operation."""
    while await system.pass_of("bulk_operations"):
        continue
    view: dict[str, Any] = (await system.user("GET", f"{URL}/{operation['operation_id']}")).json()
    return view


async def failed_run(system: System, tasks: int, **job: Any) -> dict[str, Any]:
    """Submits a run of which every task is a dead letter."""
    accepted = await system.submit([{"n": n} for n in range(tasks)], policy={"max_attempts": 1}, **job)
    for task_id in await system.task_ids(accepted["run_id"]):
        claim = await system.claim(task_id)
        error = {"error_class": "Broken", "error_message": f"no {task_id}"}
        assert (await system.complete(claim, "Failed", **error)).status_code == 200
    await system.pass_of("run-counters")
    return accepted


async def statuses(system: System, run_id: str) -> set[str]:
    return {task["status"] for task in (await system.user("GET", f"/v1/tasks?run={run_id}")).json()["tasks"]}


async def test_dry_run_counts_and_shows_samples_and_changes_nothing(system: System) -> None:
    run = await failed_run(system, 12, name="nightly")
    reply = await ask(system, "redrive", {"job": "nightly"}, dry_run=True)
    found = reply.json()
    assert (reply.status_code, found["matched"], found["more"], found["unit"]) == (200, 12, False, "tasks")
    assert len(found["samples"]) == 10
    assert found["samples"][0]["job"]["name"] == "nightly"
    assert found["samples"][0]["error_class"] == "Broken"
    assert await statuses(system, run["run_id"]) == {"Failed"}
    assert (await system.user("GET", URL)).json()["operations"] == []


async def test_dry_run_stops_counting_at_its_limit(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    from interlock.jobs import bulk_operations

    monkeypatch.setattr(bulk_operations, "MAX_COUNTED", 5)
    await system.submit([{}] * 8, name="many")
    found = (await ask(system, "cancel", {"job": "many"}, dry_run=True)).json()
    assert (found["matched"], found["more"]) == (5, True)


@pytest.mark.parametrize("given", [{"job": "nightly"}, {"operator": "echo"}, {"run": "itself"}])
async def test_dead_letters_that_match_are_redriven(system: System, given: dict[str, Any]) -> None:
    run = await failed_run(system, 3, name="nightly")
    given = {name: run["run_id"] if name == "run" else value for name, value in given.items()}
    view = await done(system, await start(system, "redrive", given, reason="the host is back"))
    assert (view["state"], view["matched"], view["changed"]) == ("Completed", 3, 3)
    assert (view["requested_by"], view["reason"]) == ("root", "the host is back")
    assert await statuses(system, run["run_id"]) == {"Queued"}


async def test_filter_narrows_by_error_class_worker_and_time(system: System) -> None:
    await failed_run(system, 2, name="nightly")
    for given, matched in (
        ({"error_class": "Broken"}, 2),
        ({"error_class": "Other"}, 0),
        ({"worker": "test"}, 2),
        ({"worker": "another"}, 0),
        ({"created_before": "2020-01-01T00:00:00Z"}, 0),
        ({"created_after": "2020-01-01T00:00:00Z"}, 2),
    ):
        found = (await ask(system, "redrive", {"job": "nightly"} | given, dry_run=True)).json()
        assert found["matched"] == matched, given


async def test_cancel_ends_waiting_tasks_and_asks_running_ones_to_stop(system: System) -> None:
    run = await system.submit([{}, {}, {}], name="long")
    first = (await system.task_ids(run["run_id"]))[0]
    await system.claim(first)
    view = await done(system, await start(system, "cancel", {"run": run["run_id"]}))
    assert (view["changed"], view["progress"]) == (3, 1.0)
    assert (await system.task(first))["cancel_requested"] is True
    assert await statuses(system, run["run_id"]) == {"Running", "Canceled"}


async def test_pause_and_resume_act_on_runs(system: System) -> None:
    run = await system.submit([{}], name="steady")
    view = await done(system, await start(system, "pause", {"job": "steady"}))
    assert (view["unit"], view["changed"]) == ("runs", 1)
    assert (await system.run(run["run_id"]))["state"] == "Paused"
    await done(system, await start(system, "resume", {"operator": "echo"}))
    assert (await system.run(run["run_id"]))["state"] == "Running"


async def test_reprioritised_run_is_received_first(system: System) -> None:
    bulk = await system.submit([{}], name="later", priority="bulk")
    messages = "select priority from interlock.queue_messages where share_id = $1"
    assert await system.value(messages, bulk["run_id"]) == 1
    view = await done(system, await start(system, "reprioritise", {"run": bulk["run_id"]}, priority="normal"))
    assert (view["changed"], view["priority"]) == (1, "normal")
    assert await system.value(messages, bulk["run_id"]) == 0


async def test_tasks_of_no_run_are_included(system: System) -> None:
    run = await failed_run(system, 2, name="events")
    await system.value("update interlock.tasks set run_id = null, task_index = null where run_id = $1", run["run_id"])
    view = await done(system, await start(system, "retry", {"job": "events"}))
    assert (view["matched"], view["changed"]) == (2, 2)


async def test_two_people_on_one_run_retry_each_task_once(system: System) -> None:
    run = await failed_run(system, 4, name="shared")
    ours = await start(system, "retry", {"run": run["run_id"]})
    theirs = await start(system, "retry", {"job": "shared"})
    views = [await done(system, one) for one in (ours, theirs)]
    assert sum(view["changed"] for view in views) == 4
    assert await system.value("select max(attempt) from interlock.tasks where run_id = $1", run["run_id"]) == 2


async def test_crash_between_batches_repeats_nothing(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_walk, "BATCH", 2)
    run = await failed_run(system, 7, name="large")
    view = await start(system, "retry", {"run": run["run_id"]})
    passes = 0

    async def crash() -> None:
        nonlocal passes
        passes += 1
        if passes % 2 == 0:
            raise RuntimeError("killed before the commit")

    arm("bulk_operation.before_commit", crash)
    try:
        for _ in range(12):
            with contextlib.suppress(RuntimeError):
                await system.pass_of("bulk_operations")
    finally:
        disarm("bulk_operation.before_commit")
    assert passes > 2
    view = await done(system, view)
    assert (view["state"], view["matched"], view["changed"], view["skipped"]) == ("Completed", 7, 7, 0)
    assert await system.value("select max(attempt) from interlock.tasks where run_id = $1", run["run_id"]) == 2


async def test_task_that_fails_again_is_left_alone(system: System) -> None:
    run = await failed_run(system, 1, name="stubborn")
    later = await start(system, "redrive", {"job": "stubborn"})
    (task_id,) = await system.task_ids(run["run_id"])
    await system.user("POST", f"/v1/tasks/{task_id}/retry")
    await system.complete(await system.claim(task_id), "Failed", error_class="Broken")
    view = await done(system, later)
    assert (view["state"], view["matched"]) == ("Completed", 0)


async def test_canceled_operation_stops_and_keeps_what_it_did(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_walk, "BATCH", 2)
    run = await failed_run(system, 6, name="large")
    view = await start(system, "retry", {"run": run["run_id"]})
    await system.pass_of("bulk_operations")
    stopped = await system.user("POST", f"{URL}/{view['operation_id']}/cancel")
    assert (stopped.status_code, stopped.json()["cancel_requested"]) == (200, True)
    view = await done(system, view)
    assert (view["state"], view["changed"]) == ("Canceled", 2)
    again = await system.user("POST", f"{URL}/{view['operation_id']}/cancel")
    assert (again.status_code, again.json()["code"]) == (409, "operation_ended")


async def test_request_repeated_with_its_key_starts_one_operation(system: System) -> None:
    await system.submit([{}], name="once")
    body = {"kind": "cancel", "filter": {"job": "once"}}
    headers = {"Idempotency-Key": str(uuid4())}
    ids = {(await system.user("POST", URL, json=body, headers=headers)).json()["operation_id"] for _ in range(2)}
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("kind", "given", "more", "code"),
    [
        ("cancel", {}, {}, "filter_missing"),
        ("cancel", {"status": "Queued"}, {}, "filter_missing"),
        ("retry", {"operator": "echo", "status": "Queued"}, {}, "bad_filter"),
        ("cancel", {"operator": "echo", "status": "Completed"}, {}, "bad_filter"),
        ("pause", {"operator": "echo", "status": "Queued"}, {}, "bad_filter"),
        ("cancel", {"operator": "echo", "job": "a"}, {}, "bad_filter"),
        ("cancel", {"operator": "echo"}, {"priority": "bulk"}, "bad_filter"),
        ("reprioritise", {"operator": "echo"}, {}, "bad_filter"),
        ("retry", {"operator": "a\x00b"}, {}, "bad_filter"),
        ("retry", {"colour": "red"}, {}, "invalid_request"),
        ("explode", {"operator": "echo"}, {}, "invalid_request"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
async def test_filter_that_means_nothing_is_refused(
    shared: System, kind: str, given: dict[str, Any], more: dict[str, Any], code: str, dry_run: bool
) -> None:
    reply = await ask(shared, kind, given, dry_run=dry_run, **more)
    assert (reply.status_code, reply.json()["code"]) == (400, code), reply.text


async def test_another_org_neither_sees_nor_touches_anything(system: System) -> None:
    run = await failed_run(system, 1, name="secret-job")
    operation = await start(system, "cancel", {"job": "secret-job"})
    await system.user("POST", "/v1/orgs", json={"name": "elsewhere"})
    made = await system.user("POST", "/v1/keys", json={"user": "x", "role": "admin", "org": "elsewhere"})
    key = made.json()["key"]
    for given in ({"job": "secret-job"}, {"run": run["run_id"]}, {"job": run["job_id"]}):
        for dry_run in (True, False):
            assert (await ask(system, "retry", given, dry_run=dry_run, key=key)).status_code == 404
    assert (await ask(system, "retry", {"operator": "echo"}, dry_run=True, key=key)).json()["matched"] == 0
    view = await start(system, "retry", {"operator": "echo"}, key=key)
    await done(system, operation)
    assert await statuses(system, run["run_id"]) == {"Failed"}
    listed = (await system.user("GET", URL, key=key)).json()["operations"]
    assert [one["operation_id"] for one in listed] == [view["operation_id"]]
    for method, path in (("GET", ""), ("POST", "/cancel")):
        reply = await system.user(method, f"{URL}/{operation['operation_id']}{path}", key=key)
        assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
