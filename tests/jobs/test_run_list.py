"""The list of all runs of an org, newest first."""

from __future__ import annotations

from tests.http.test_pages import walked
from tests.support.system import System, other_org


async def ended(system: System, name: str, status: str) -> str:
    run_id: str = (await system.submit([1], name=name, policy={"max_attempts": 1}))["run_id"]
    claim = await system.claim((await system.task_ids(run_id))[0])
    more = {"error_class": "Broken"} if status == "Failed" else {}
    await system.complete(claim, status, **more)
    await system.pass_of("run-counters")
    return run_id


async def test_runs_of_all_jobs_are_listed_newest_first(system: System) -> None:
    runs = [await ended(system, name, status) for name in ("a", "b") for status in ("Completed", "Failed", "Completed")]
    for limit in (1, 2, 100):
        found = await walked(system, "/v1/runs", "runs", limit)
        assert [run["run_id"] for run in found] == runs[::-1]
        assert found[0]["job"] == {"dag_name": None, "name": "b"}
        failed = await walked(system, "/v1/runs?state=Failed", "runs", limit)
        assert [run["run_id"] for run in failed] == [runs[4], runs[1]]
        of_job = await walked(system, "/v1/runs?job=a&state=Completed", "runs", limit)
        assert [run["run_id"] for run in of_job] == [runs[2], runs[0]]
        assert [run["run_id"] for run in await walked(system, "/v1/jobs/a/runs", "runs", limit)] == runs[2::-1]


async def test_runs_of_other_orgs_and_deleted_runs_are_not_listed(system: System) -> None:
    await ended(system, "a", "Completed")
    assert await walked_by(system, await other_org(system)) == []
    await system.user("DELETE", "/v1/jobs/a")
    assert await walked(system, "/v1/runs", "runs", 10) == []


async def walked_by(system: System, key: str) -> list[object]:
    reply = await system.user("GET", "/v1/runs", key=key)
    assert reply.status_code == 200
    runs: list[object] = reply.json()["runs"]
    return runs


async def test_tasks_are_listed_newest_run_first(system: System) -> None:
    first = (await system.submit([1, 2], name="a"))["run_id"]
    second = (await system.submit([1, 2], name="a"))["run_id"]
    third = (await system.submit([1, 2], name="b"))["run_id"]
    found = await walked(system, "/v1/tasks", "tasks", 2)
    assert [(task["run_id"], task["index"]) for task in found] == [
        (run, index) for run in (third, second, first) for index in (0, 1)
    ]
