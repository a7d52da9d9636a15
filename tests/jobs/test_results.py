"""Results of runs: short ones in their rows, long ones packed; read singly, with an API key or a signed URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from interlock.clock import ManualClock
from interlock.tasks.result_packs import results_prefix
from interlock.wire.access import KeyRequest, Role
from tests.support.system import System, running

LONG = {"text": "ü" * 2000}


async def claimed(system: System, tasks: int, **job: Any) -> dict[str, Any]:
    """Submits a run, and claims its tasks as one group."""
    accepted = await system.submit([{"n": n} for n in range(tasks)], **job)
    wanted = {"run_id": accepted["run_id"], "start": 0, "end": tasks - 1, "grouped": True, "tokens": False}
    group: dict[str, Any] = (await system.claim_many(**wanted))["groups"][0]
    return group


async def report(system: System, group: dict[str, Any], results: dict[int, Any]) -> Any:
    named = {name: group[name] for name in ("run_id", "attempt", "lease_token")}
    body = {"groups": [named | {"indexes": list(results), "results": list(results.values())}]}
    reply = await system.worker("POST", "/internal/task-complete", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def by_index(system: System, group: dict[str, Any], index: int, **more: Any) -> Any:
    reply = await system.user("GET", f"/v1/jobs/{group['job_id']}/tasks/{index}", **more)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def packs_of(system: System, run_id: str) -> list[str]:
    prefix = results_prefix(system.kernel.access.objects.root, UUID(run_id))
    return [one.uri async for one in system.kernel.access.objects.list_under(prefix)]


async def test_long_results_of_a_report_are_packed_into_one_object(shared: System) -> None:
    group = await claimed(shared, 5)
    results = {0: {"n": 0}, 1: LONG, 2: None, 3: LONG | {"n": 3}, 4: "x" * 1023}
    assert (await report(shared, group, results))["accepted"] == 5
    assert len(await packs_of(shared, group["run_id"])) == 1
    for index, result in results.items():
        task = await by_index(shared, group, index)
        assert task["result"] == result
        body = await shared.http.get(task["result_url"])
        assert (body.status_code, body.headers["content-type"]) == (200, "application/json")
        assert body.json() == result
        assert task["result_bytes"] == (None if index in (0, 2) else len(body.content))
    in_rows = await shared.value(
        "select array_agg(task_index order by task_index) from interlock.tasks where run_id = $1 and pack is null",
        UUID(group["run_id"]),
    )
    assert in_rows == [0, 2]


async def test_packed_result_is_complete_for_one_task_and_a_size_in_lists(shared: System) -> None:
    group = await claimed(shared, 2)
    await report(shared, group, {0: LONG, 1: 1})
    page = (await shared.user("GET", f"/v1/tasks?run={group['run_id']}")).json()["tasks"]
    assert [(task["result"], task["result_bytes"] is None) for task in page] == [(None, False), (1, True)]
    assert (await shared.task(page[0]["task_id"]))["result"] == LONG


async def test_report_of_one_task_is_packed_as_well(shared: System) -> None:
    task_id = await shared.one()
    claim = await shared.claim(task_id)
    assert (await shared.complete(claim, result=LONG)).status_code == 200
    task = await shared.task(task_id)
    assert (task["result"], task["result_bytes"] is not None) == (LONG, True)
    assert len(await packs_of(shared, task["run_id"])) == 1


async def test_repeated_report_only_leaves_a_pack_deleted_with_the_run(shared: System) -> None:
    group = await claimed(shared, 3)
    results = {n: LONG | {"n": n} for n in range(3)}
    assert (await report(shared, group, results))["accepted"] == 3
    place = "select array_agg(pack order by task_index) from interlock.tasks where run_id = $1"
    before = await shared.value(place, UUID(group["run_id"]))
    assert (await report(shared, group, results))["accepted"] == 3
    assert await shared.value(place, UUID(group["run_id"])) == before
    assert (await by_index(shared, group, 2))["result"] == results[2]


async def test_task_that_fails_after_a_long_result_keeps_the_newer_one(shared: System) -> None:
    task_id = await shared.one(policy={"backoff_seconds": 0, "max_attempts": 2})
    await shared.complete(await shared.claim(task_id), "Failed", result=LONG, error_message="no")
    await shared.user("POST", f"/v1/tasks/{task_id}/retry")
    await shared.complete(await shared.claim(task_id), result={"short": True})
    task = await shared.task(task_id)
    assert (task["result"], task["result_bytes"]) == ({"short": True}, None)


@pytest.fixture(scope="module")
async def other_key(shared: System) -> str:
    org = await shared.kernel.access.principals.create_org("others")
    request = KeyRequest(user="them", role=Role.ADMIN)
    return (await shared.kernel.access.principals.create_key(request, org.org_id, granted_by=None)).key


async def test_other_org_gets_neither_task_nor_result(shared: System, other_key: str) -> None:
    group = await claimed(shared, 1)
    await report(shared, group, {0: LONG})
    for path in (f"/v1/jobs/{group['job_id']}/tasks/0", f"/v1/results/{group['run_id']}/0"):
        assert (await shared.user("GET", path)).status_code == 200
        assert (await shared.user("GET", path, key=other_key)).status_code == 404
        assert (await shared.http.get(shared.gateway_url + path)).status_code == 401


async def test_signed_url_is_for_its_result_alone(shared: System) -> None:
    group = await claimed(shared, 2)
    await report(shared, group, {0: LONG, 1: LONG})
    url: str = (await by_index(shared, group, 0))["result_url"]
    other = await shared.kernel.access.signed_urls.sign(
        "GET", f"{group['run_id']}/0", 60, [("org", str(shared.org_id))]
    )
    for forged in (
        url.replace(f"{group['run_id']}/0", f"{group['run_id']}/1"),
        url.replace(f"org={shared.org_id}", f"org={UUID(int=1)}"),
        url.replace("/v1/results/", "/v1/objects/"),
        other.replace("/v1/objects/", "/v1/results/"),
        url[:-6] + "AAAAAA",
    ):
        assert (await shared.http.get(forged)).status_code == 401, forged
    with_key = await shared.http.get(url, headers={"Authorization": f"Bearer {shared.admin_key}"})
    assert with_key.status_code == 401


async def test_missing_result_is_not_found(shared: System) -> None:
    group = await claimed(shared, 1)
    for path, status in {
        f"/v1/jobs/{group['job_id']}/tasks/1": 404,
        f"/v1/jobs/{group['job_id']}/tasks/-1": 400,
        f"/v1/jobs/{group['job_id']}/tasks/0?run={UUID(int=1)}": 404,
        f"/v1/results/{group['run_id']}/0": 404,
        f"/v1/results/{group['run_id']}/x": 400,
    }.items():
        assert (await shared.user("GET", path)).status_code == status, path
    assert (await by_index(shared, group, 0))["result_url"] is None


async def test_packs_are_deleted_some_time_after_their_run(state_url: str, tmp_path: Path, clock: ManualClock) -> None:
    async with running(state_url, tmp_path, clock, retention_days=1) as still:
        group = await claimed(still, 2)
        await report(still, group, {0: LONG, 1: LONG})
        await still.settle()
        for days, packs in ((0.9, 1), (0.2, 1), (0.1, 0)):
            clock.advance(days * 86_400)
            while await still.pass_of("retention"):
                continue
            await still.pass_of("sweep")
            assert len(await packs_of(still, group["run_id"])) == packs
        assert await still.value("select count(*) from interlock.file_sweeps") == 0
        assert (await still.user("GET", f"/v1/results/{group['run_id']}/0")).status_code == 404
