"""Results, receipts and reruns of a run with its own shard: the same as those of a small run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from interlock.jobs.receipt_verification import digests
from tests.conftest import copied
from tests.jobs.test_results import LONG, packs_of, report
from tests.support.staged_lists import Intake, intake
from tests.support.system import fence

TASKS = 60


@pytest.fixture(scope="module")
async def made(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    folder: Path = tmp_path_factory.mktemp("large")
    async with (
        copied(postgres_url, template) as url,
        intake(url, folder, sync_threshold=10, shard_threshold=5) as started,
    ):
        yield started


async def ended(made: Intake) -> dict[str, Any]:
    """Returns an ended run: every tenth task failed, the others have a result, and every third of those is long."""
    run = await made.ingested(b"".join(b'{"n": %d}\n' % n for n in range(TASKS)), policy={"max_attempts": 1})
    assert await made.shard(run["run_id"]) != 0
    wanted = {"run_id": run["run_id"], "start": 0, "end": TASKS - 1, "grouped": True, "tokens": False}
    group = (await made.system.claim_many(**wanted))["groups"][0]
    results = {n: LONG | {"n": n} if n % 3 == 0 else n for n in range(TASKS) if n % 10}
    assert (await report(made.system, group, results))["accepted"] == len(results)
    failed = [
        fence(group | {"task_id": task[0]}) | {"status": "Failed", "result": LONG, "error_class": "Oops"}
        for task in group["tasks"]
        if task[1] % 10 == 0
    ]
    reply = await made.system.worker("POST", "/internal/task-complete", json={"items": failed})
    assert reply.json()["accepted"] == TASKS // 10
    await made.system.pass_of("run-counters")
    return run | {"results": results}


async def test_long_results_are_packed_and_read_by_index_and_url(made: Intake) -> None:
    run = await ended(made)
    system = made.system
    assert len(await packs_of(system, run["run_id"])) == 2, "one per report"
    for index in (1, 3, 33, 59):
        reply = await system.user("GET", f"/v1/jobs/{run['job_id']}/tasks/{index}")
        task = reply.json()
        assert (reply.status_code, task["index"], task["result"]) == (200, index, run["results"][index])
        assert (await system.http.get(task["result_url"])).json() == run["results"][index]
        assert (await system.task(task["task_id"]))["result"] == run["results"][index]


async def test_receipt_covers_every_task_and_failed_ones_are_rerun(made: Intake) -> None:
    run = await ended(made)
    reply = (await made.system.user("GET", f"/v1/jobs/{run['job_id']}/receipt")).json()
    receipt = reply["receipt"]
    assert (receipt["total"], receipt["completed"], receipt["failed"], receipt["complete"]) == (60, 54, 6, True)
    ends = [(n, "Completed" if n % 10 else "Failed") for n in range(TASKS)]
    assert digests(UUID(run["run_id"]), TASKS, ends) == (receipt["ids"], receipt["outcomes"])
    again = await made.system.user("POST", f"/v1/jobs/{run['job_id']}/rerun", json={"status": ["Failed"]})
    assert again.status_code == 201
    assert list((await made.payloads(again.json()["run_id"])).values()) == [{"n": n} for n in range(0, TASKS, 10)]


async def test_deleted_run_takes_its_results_and_receipt_with_it(made: Intake) -> None:
    run = await ended(made)
    await made.system.user("GET", f"/v1/jobs/{run['job_id']}/receipt")
    assert (await made.system.user("DELETE", f"/v1/jobs/{run['job_id']}")).status_code == 200
    while await made.system.pass_of("run-deletions"):
        continue
    kept = "select count(*) from interlock.run_receipts where run_id = $1"
    assert await made.system.value(kept, UUID(run["run_id"])) == 0
    due = "select due_at < 'infinity' from interlock.file_sweeps where place like '%' || $1 || '%'"
    assert await made.system.value(due, run["run_id"]) is True
    assert (await made.system.user("GET", f"/v1/results/{run['run_id']}/1")).status_code == 404
