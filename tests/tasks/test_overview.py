"""The dashboard's reads: overview, failures of an org and of a run, timelines and durations, sampled when large."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest

from interlock.tasks import overview
from interlock.tasks.overview import buckets, shape
from tests.support.system import System


async def get(system: System, path: str, key: str | None = None) -> Any:
    reply: httpx.Response = await system.user("GET", path, key=key)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def mixed_run(system: System, completed: int, failed: int, name: str) -> dict[str, Any]:
    """Submits a run in which tasks complete, and others fail for good with one of two errors."""
    accepted = await system.submit([{"n": n} for n in range(completed + failed)], name=name, policy={"max_attempts": 1})
    for index, task_id in enumerate(await system.task_ids(accepted["run_id"])):
        claim = await system.claim(task_id)
        if index < completed:
            await system.complete(claim, result={"n": index})
            continue
        error = {"error_class": "Timeout", "error_message": f"host 'a{index}' gave no answer in {index} s"}
        if index == completed:
            error = {"error_class": "Broken", "error_message": None}  # type: ignore[dict-item]
        await system.complete(claim, "Failed", **error)
    await system.pass_of("run-counters")
    return accepted


async def test_overview_shows_throughput_queues_live_runs_and_failures(system: System) -> None:
    ended = await mixed_run(system, 3, 2, "ended")
    live = await system.submit([{}], name="live")
    found = await get(system, "/v1/overview")
    assert [(m["completed"], m["failed"], m["canceled"]) for m in found["minutes"]] == [(3, 2, 0)]
    assert [run["run_id"] for run in found["runs"]] == [live["run_id"]]
    assert found["runs"][0]["job"]["name"] == "live"
    assert {one["run_id"] for one in found["failures"]} == {ended["run_id"]}
    assert {queue["queue"] for queue in found["queues"]} == set(system.kernel.settings.queues)
    assert "interlock-test" in {process["name"] for process in found["processes"]}


async def test_retried_task_counts_each_attempt_that_failed(system: System) -> None:
    task_id = await system.one(policy={"max_attempts": 2, "backoff_seconds": 0.001})
    await system.complete(await system.claim(task_id), "Failed", error_class="Broken")
    await system.user("POST", f"/v1/tasks/{task_id}/retry")
    await system.complete(await system.claim(task_id))
    await system.pass_of("run-counters")
    (minute,) = (await get(system, "/v1/overview"))["minutes"]
    assert (minute["completed"], minute["failed"]) == (1, 1)


async def test_newest_failures_come_first(system: System) -> None:
    await mixed_run(system, 0, 3, "nightly")
    failures = (await get(system, "/v1/failures?limit=2"))["failures"]
    assert [one["index"] for one in failures] == [2, 1]
    assert failures[0]["error_class"] == "Timeout"


async def test_failed_tasks_are_grouped_by_class_and_shape_of_the_message(system: System) -> None:
    run = await mixed_run(system, 1, 4, "nightly")
    found = await get(system, f"/v1/runs/{run['run_id']}/failures")
    groups = [(group["error_class"], group["shape"], group["tasks"]) for group in found["groups"]]
    assert groups == [("Timeout", "host … gave no answer in … s", 3), ("Broken", "", 1)]
    assert (found["sampled"], found["looked_at"], found["failed"]) == (False, 4, 4)


async def test_large_number_of_failures_is_sampled_and_says_so(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "FAILED_TASKS", 3)
    run = await mixed_run(system, 0, 5, "nightly")
    found = await get(system, f"/v1/runs/{run['run_id']}/failures")
    assert (found["sampled"], found["looked_at"], found["failed"]) == (True, 3, 5)


async def test_timeline_shows_attempts_of_all_outcomes(system: System) -> None:
    run = await mixed_run(system, 2, 1, "nightly")
    found = await get(system, f"/v1/runs/{run['run_id']}/timeline")
    assert [(one["index"], one["outcome"]) for one in found["attempts"]] == [
        (0, "Completed"),
        (1, "Completed"),
        (2, "Failed"),
    ]
    assert (found["sampled"], found["looked_at"], found["of"]) == (False, 3, 3)
    assert all(one["worker_id"] == "test" and one["ended_at"] for one in found["attempts"])


async def test_large_run_is_sampled_evenly(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "TIMELINE_TASKS", 4)
    monkeypatch.setattr(overview, "DURATION_TASKS", 4)
    run = await mixed_run(system, 12, 0, "nightly")
    timeline = await get(system, f"/v1/runs/{run['run_id']}/timeline")
    assert [one["index"] for one in timeline["attempts"]] == [0, 3, 6, 9]
    assert (timeline["sampled"], timeline["looked_at"], timeline["of"]) == (True, 4, 12)
    durations = await get(system, f"/v1/runs/{run['run_id']}/durations")
    assert (durations["sampled"], sum(bucket["tasks"] for bucket in durations["buckets"])) == (True, 4)


async def test_run_that_has_not_begun_has_an_empty_timeline(system: System) -> None:
    run = await system.submit([{}, {}], name="waiting")
    assert (await get(system, f"/v1/runs/{run['run_id']}/timeline"))["attempts"] == []
    durations = await get(system, f"/v1/runs/{run['run_id']}/durations")
    assert (durations["buckets"], durations["p50"], durations["longest"]) == ([], None, [])


async def test_another_org_sees_no_run_no_failure_and_no_count(system: System) -> None:
    run = await mixed_run(system, 1, 1, "secret-job")
    await system.submit([{}], name="secret-live")
    await system.user("POST", "/v1/orgs", json={"name": "elsewhere"})
    made = await system.user("POST", "/v1/keys", json={"user": "x", "role": "admin", "org": "elsewhere"})
    key = made.json()["key"]
    found = await get(system, "/v1/overview", key=key)
    assert (found["minutes"], found["runs"], found["failures"]) == ([], [], [])
    assert (await get(system, "/v1/failures", key=key))["failures"] == []
    for what in ("failures", "timeline", "durations"):
        reply = await system.user("GET", f"/v1/runs/{run['run_id']}/{what}", key=key)
        assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (None, ""),
        ("no route to 10.0.0.1:80", "no route to …"),
        ("task 76815754-70d0-78f2-f0b3-295c320bc086 is gone", "task … is gone"),
        ("key \"a b\" and 'c'", "key … and …"),
        ("0xdeadBEEF at a94a8fe5ccb19ba61c4c0873d391e987", "… at …"),
        ("x" * 5000, "x" * 300),
    ],
)
def test_shape_of_a_message_leaves_out_what_differs(message: str | None, found: str) -> None:
    assert shape(message) == found


@pytest.mark.parametrize("seconds", [[0.0], [0.0, 0.0], [1.0, 1.0], [0.001, 1000.0], [1.0, 2.0, 4.0, 8.0, 1e5]])
def test_histogram_counts_each_duration_once(seconds: list[float]) -> None:
    found = buckets(seconds)
    assert sum(bucket.tasks for bucket in found) == len(seconds)
    assert all(one.to_seconds <= other.from_seconds * 1.001 for one, other in pairwise(found))


# Filters of the list of tasks


async def found(system: System, query: str) -> list[int]:
    """Returns the indexes of the tasks that a filter finds, over pages of one."""
    indexes: list[int] = []
    cursor = ""
    while True:
        page = await get(system, f"/v1/tasks?limit=1&{query}{cursor}")
        indexes += [task["index"] for task in page["tasks"]]
        if page["next_cursor"] is None:
            return indexes
        cursor = f"&cursor={page['next_cursor']}"


async def test_tasks_are_filtered_by_what_no_index_covers(system: System) -> None:
    run = await mixed_run(system, 2, 3, "nightly")
    of_run = f"run={run['run_id']}"
    assert await found(system, f"{of_run}&error_class=Timeout") == [3, 4]
    assert await found(system, f"{of_run}&status=Failed&error_class=Broken") == [2]
    assert await found(system, f"{of_run}&worker=test") == [0, 1, 2, 3, 4]
    assert await found(system, f"{of_run}&worker=another") == []
    assert await found(system, "job=nightly&created_before=2020-01-01T00:00:00Z") == []
    assert await found(system, "operator=echo&status=Completed&created_after=2020-01-01T00:00:00") == [0, 1]
    assert await found(system, "operator=other") == []
    assert await found(system, "dag=other") == []


@pytest.mark.parametrize("query", ["operator=echo&job=nightly", "dag=x&run=76815754-70d0-78f2-f0b3-295c320bc086"])
async def test_filters_that_contradict_each_other_are_refused(shared: System, query: str) -> None:
    reply = await shared.user("GET", f"/v1/tasks?{query}")
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_filter")
