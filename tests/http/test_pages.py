"""Cursor pages: every item exactly once, for every filter and page size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.system import System

STATUSES = ["Queued", "Running", "Completed", "Failed", "Canceled"]


async def walked(system: System, path: str, items: str, limit: int) -> list[dict[str, Any]]:
    """Reads all pages."""
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        more = f"&cursor={cursor}" if cursor else ""
        reply = await system.user("GET", f"{path}{'&' if '?' in path else '?'}limit={limit}{more}")
        assert reply.status_code == 200, reply.text
        assert len(reply.json()[items]) <= limit
        found += reply.json()[items]
        cursor = reply.json()["next_cursor"]
    return found


async def populated(system: System) -> dict[str, dict[str, Any]]:
    """Creates three jobs, one with two runs and a gap, with tasks in every status. Returns each task's view."""
    runs = [
        (await system.submit(list(range(7)), name="first", policy={"max_attempts": 1}))["run_id"],
        (await system.submit([{"k": n // 2} for n in range(8)], name="second", dedupe_by="/k"))["run_id"],
        (await system.submit([{"k": n} for n in range(3, 9)], name="second", dedupe_by="/k"))["run_id"],
        (await system.submit([1], policy={"max_attempts": 1}))["run_id"],
    ]
    ids = [task_id for run_id in runs for task_id in await system.task_ids(run_id)]
    for n, task_id in enumerate(ids):
        status = STATUSES[n % 5]
        if status == "Canceled":
            await system.user("POST", f"/v1/tasks/{task_id}/cancel")
        elif status != "Queued":
            claim = await system.claim(task_id)
            if status != "Running":
                await system.complete(claim, status)
    return {task_id: await system.task(task_id) for task_id in ids}


@pytest.mark.parametrize("limit", [2, 1000])
async def test_task_pages_contain_every_task_once(still: System, limit: int) -> None:
    tasks = await populated(still)
    by_run = Counter(task["run_id"] for task in tasks.values())
    filters = [("", list(tasks.values()))]
    filters += [
        (f"job={name}", [t for t in tasks.values() if t["job"]["name"] == name]) for name in ("first", "second")
    ]
    filters += [(f"run={run_id}", [t for t in tasks.values() if t["run_id"] == run_id]) for run_id in by_run]
    for query, expected in filters:
        for status in [None, *STATUSES]:
            path = f"/v1/tasks?{query}&status={status}" if status else f"/v1/tasks?{query}"
            found = await walked(still, path, "tasks", limit)
            wanted = [task for task in expected if status in (None, task["status"])]
            assert sorted(found, key=str) == sorted(wanted, key=str), path
            in_run = [task["index"] for task in found if task["run_id"] == found[0]["run_id"]]
            assert in_run == sorted(in_run)


@pytest.mark.parametrize("limit", [1, 2, 1000])
async def test_pages_of_jobs_and_runs_come_newest_first(still: System, limit: int) -> None:
    jobs = [(await still.submit([n]))["job_id"] for n in range(5)]
    runs = [(await still.submit([n], name="again"))["run_id"] for n in range(5)]
    found = await walked(still, "/v1/jobs", "jobs", limit)
    assert [job["job_id"] for job in found][1:] == jobs[::-1]
    assert found[0]["run"]["run_id"] == runs[-1]
    again = await walked(still, "/v1/jobs/again/runs", "runs", limit)
    assert [run["run_id"] for run in again] == runs[::-1]


async def test_page_continues_at_its_cursor_after_tasks_changed_status(still: System) -> None:
    accepted = await still.submit(list(range(6)))
    page = (await still.user("GET", f"/v1/tasks?run={accepted['run_id']}&limit=3")).json()
    for task in page["tasks"]:
        await still.complete(await still.claim(task["task_id"]))
    rest = await still.user("GET", f"/v1/tasks?run={accepted['run_id']}&limit=3&cursor={page['next_cursor']}")
    assert [task["index"] for task in rest.json()["tasks"]] == [3, 4, 5]
