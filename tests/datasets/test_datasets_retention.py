"""Retention in DAGs: the rows it deletes, and those it must keep."""

from __future__ import annotations

from itertools import pairwise

import pytest

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.clock import ManualClock
from interlock.settings import Settings
from interlock.tasks import retention
from tests.support.datasets import CHAIN, bring, built, claim_of, deploy, finish, got, scope, waiting, work
from tests.support.system import System, fence

DAY = 86_400
KEPT = Settings.model_fields["retention_days"].default * DAY


async def swept(system: System) -> None:
    while await system.pass_of("retention"):
        continue


async def tasks(system: System, job: str) -> int:
    found: int = await system.value(
        "select count(*) from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id where j.name = $1", job
    )
    return found


async def test_ended_dag_tasks_are_deleted_and_their_outputs_stay(still: System, clock: ManualClock) -> None:
    await built(still, (0, 9), (10, 19))
    clock.advance(KEPT - DAY)
    await swept(still)
    assert await tasks(still, "double") == 2
    clock.advance(2 * DAY)
    await swept(still)
    for job in ("feed", "double", "total"):
        assert await tasks(still, job) == 0
    for table in ("attempts", "output_commits", "dataset_events"):
        assert await still.value(f"select count(*) from interlock.{table}") == 0
    page = await got(still, "/v1/datasets/doubled/partitions")
    assert [one["partition_key"] for one in page["partitions"]] == ["0-9", "10-19"]
    found = await got(still, "/v1/dags/chain/jobs/double/explain?start=0&end=9")
    assert found["reason"] == "done"


async def test_deleted_task_is_not_created_again(still: System, clock: ManualClock) -> None:
    await built(still, (0, 9))
    clock.advance(KEPT + DAY)
    await swept(still)
    while await still.pass_of("scopes"):
        continue
    await still.settle()
    assert await tasks(still, "double") == 0
    await bring(still, scope(0, 9))
    assert await work(still, "chain", "double") == ["0-9"]


async def test_task_of_an_unfinished_scope_is_kept(still: System, clock: ManualClock) -> None:
    await deploy(still, CHAIN.replace("operator: echo", "operator: echo\n    max_attempts: 1"))
    await bring(still, scope(0, 9))
    (task_id,) = await waiting(still, "chain", "double")
    await still.complete(await still.claim(task_id), "Failed", error_class="DiskFull", error_message="no room left")
    clock.advance(KEPT + DAY)
    await swept(still)
    assert (await still.task(task_id))["dead"]
    assert (await still.user("POST", f"/v1/tasks/{task_id}/retry")).status_code == 200
    assert await work(still, "chain", "double") == ["0-9"]
    clock.advance(KEPT + DAY)
    await swept(still)
    assert await tasks(still, "double") == 0


async def test_current_task_of_a_stream_is_kept(still: System, clock: ManualClock) -> None:
    await deploy(still, CHAIN.replace("operator: echo", "operator: echo\n    max_attempts: 1"))
    await bring(still, {"cursor": 9})
    (task_id,) = await waiting(still, "chain", "double")
    await still.complete(await still.claim(task_id), "Failed", error_class="DiskFull", error_message="no room left")
    # Marks its scope as done, so that only the stream still refers to it.
    await still.value("update interlock.materialisations set done_commit = input_commit returning 1")
    clock.advance(KEPT + DAY)
    await swept(still)
    assert (await still.task(task_id))["dead"]


async def test_task_of_an_always_on_source_is_kept(still: System, clock: ManualClock) -> None:
    await deploy(still, CHAIN)
    claim = await claim_of(still, "chain", "feed")
    await still.value(
        "insert into interlock.source_tasks (job_id, task_id) select job_id, task_id from interlock.tasks"
        " where task_id = $1 returning 1",
        claim["task_id"],
    )
    await finish(still, claim, scope(0, 9))
    clock.advance(KEPT + DAY)
    await swept(still)
    assert (await still.task(claim["task_id"]))["status"] == "Completed"


async def test_unfinished_or_recently_ended_task_is_kept(still: System, clock: ManualClock) -> None:
    await deploy(still, CHAIN)
    await bring(still, scope(0, 9), scope(10, 19))
    first, second = await waiting(still, "chain", "double")
    clock.advance(2 * KEPT)
    claim = await still.claim(first)
    await finish(still, claim, scope(*[claim["task"]["payload"][end] for end in ("start", "end")]))
    await swept(still)
    assert (await still.task(first))["status"] == "Completed"
    assert (await still.task(second))["status"] == "Queued"


async def test_old_events_of_a_live_producer_are_deleted(still: System, clock: ManualClock) -> None:
    await deploy(still, CHAIN.replace("operator: echo", "operator: echo\n    timeout_seconds: 604800", 1))
    claim = await claim_of(still, "chain", "feed")
    ref = {name: claim["task"]["outputs"][0][name] for name in ("dataset_uuid", "dataset_version")}

    async def tell(cursor: int) -> None:
        reply = await still.attempt(
            "/v1/task/events", claim["capability_token"], fence(claim) | {"events": [ref | {"cursor": cursor}]}
        )
        assert reply.status_code == 200, reply.text

    await tell(1)
    await tell(2)
    await still.value("update interlock.dataset_events set accepted_at = accepted_at - interval '31 days' returning 1")
    await tell(3)
    await swept(still)
    events = await got(still, "/v1/datasets/chain:feed:blocks/events")
    assert [event["cursor"] for event in events["events"]] == [3]
    assert (await got(still, "/v1/datasets/chain:feed:blocks"))["versions"][0]["cursor"] == 3


async def test_retention_works_in_batches_and_pages_of_jobs(
    still: System, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await built(still, (0, 9), (10, 19), (20, 29))
    clock.advance(KEPT + DAY)
    monkeypatch.setattr(retention, "_BATCH", 2)
    monkeypatch.setattr(retention, "_JOBS", 1)
    left = [await still.value("select count(*) from interlock.tasks")]
    service = next(one for one in dispatcher_services(still.kernel) if one.name == "retention")
    while left[-1]:
        await service.run_once()
        left.append(await still.value("select count(*) from interlock.tasks"))
        assert len(left) < 30
    assert left[0] == 9
    assert max(before - after for before, after in pairwise(left)) == 2


async def test_tasks_of_runs_are_left_to_their_runs(still: System, clock: ManualClock) -> None:
    task_id = await still.one(name="plain")
    await still.complete(await still.claim(task_id))
    await still.settle()
    clock.advance(KEPT - DAY)
    await swept(still)
    assert (await still.task(task_id))["status"] == "Completed"
