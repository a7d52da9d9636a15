"""Sources that are always on: they keep one task, which is restarted after every outcome."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from interlock.clock import ManualClock
from interlock.dags.sources import LONGEST_WAIT_SECONDS, STEADY_SECONDS, AlwaysOn
from interlock.wire.access import Role
from tests.support.dataset_files import marked
from tests.support.source_dags import active_job, deploy, hold_back, let_go, other_key, source_job
from tests.support.system import System, fence

ALWAYS: dict[str, Any] = {"kind": "always_on"}


async def state(system: System) -> dict[str, Any]:
    reply = await system.user("GET", "/v1/dags/feeds/sources")
    assert reply.status_code == 200, reply.text
    (source,) = [one for one in reply.json()["sources"] if one["current"]]
    found: dict[str, Any] = source
    return found


async def started(system: System) -> str:
    await deploy(system, source_job(**ALWAYS))
    await system.pass_of("sources")
    task_id = (await state(system))["task_id"]
    assert task_id is not None
    return str(task_id)


async def test_always_on_source_gets_one_task_with_its_producer(still: System) -> None:
    await deploy(still, source_job(**ALWAYS))
    assert (await state(still))["state"] == "starting"
    assert await still.pass_of("sources") == 1
    assert await still.pass_of("sources") == 0
    shown = await state(still)
    assert (shown["state"], shown["attempt"], shown["restarts"]) == ("queued", 1, 0)
    (message,) = await still.receive()
    assert message["body"] == {"task_id": shown["task_id"]}
    claim = await still.claim(shown["task_id"])
    assert claim["task"]["payload"] == {"producer": shown["task_id"]}
    assert (await state(still))["state"] == "running"


async def test_always_on_job_has_no_hard_timeout(still: System) -> None:
    await started(still)
    (job,) = (await still.user("GET", "/v1/jobs")).json()["jobs"]
    assert job["policy"]["timeout_seconds"] is None


@pytest.mark.parametrize(
    ("status", "cause"), [("Completed", "returned"), ("Failed", "failed"), ("Canceled", "canceled")]
)
async def test_ended_source_restarts_under_the_same_task_id(
    still: System, clock: ManualClock, status: str, cause: str
) -> None:
    task_id = await started(still)
    claim = await still.claim(task_id)
    assert (await still.complete(claim, status, error_class="Down", error_message="no route")).status_code == 200
    assert await still.pass_of("sources") == 0  # the restart is delayed
    assert (await state(still))["state"] == "restarting"
    clock.advance(2)
    assert await still.pass_of("sources") == 1
    again = await still.claim(task_id)
    assert again["attempt"] == 2
    assert again["task"]["payload"] == {"producer": task_id}
    history = (await still.user("GET", f"/v1/tasks/{task_id}/attempts")).json()["attempts"]
    assert [one["outcome"] for one in history] == [status, None]
    assert (await state(still))["last_error"] == (None if status == "Completed" else "Down: no route")
    # The previous attempt is fenced off.
    assert (await still.complete(claim, "Completed")).status_code == 409


async def test_repeatedly_reaped_source_restarts(still: System, clock: ManualClock) -> None:
    task_id = await started(still)
    await still.claim(task_id)
    clock.advance(3_601)
    await still.pass_of("reaper")
    clock.advance(10)
    assert await still.pass_of("sources") == 1
    assert (await still.claim(task_id))["attempt"] == 2


async def test_quick_restarts_back_off_and_a_long_run_restarts_immediately(still: System, clock: ManualClock) -> None:
    task_id = await started(still)
    for seconds in (1, 2, 4, 8, 16, 32, 64, 128, 256, LONGEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS):
        await still.complete(await still.claim(task_id), "Failed")
        clock.advance(seconds - 0.5)
        assert await still.pass_of("sources") == 0
        clock.advance(0.5)
        assert await still.pass_of("sources") == 1
    claim = await still.claim(task_id)
    for _ in range(int(STEADY_SECONDS) // 30):
        clock.advance(30)
        beat = await still.worker("POST", "/internal/task-heartbeat", json={"items": [fence(claim)]})
        assert beat.json()["items"], beat.text
    ended = await still.worker("POST", "/internal/task-complete", json={"items": [fence(claim) | {"status": "Failed"}]})
    assert ended.json()["accepted"] == 1
    clock.advance(1)
    assert await still.pass_of("sources") == 1
    assert (await state(still))["restarts"] == 1


async def test_only_the_newest_attempts_of_a_source_are_kept(still: System, clock: ManualClock) -> None:
    task_id = await started(still)
    await still.complete(await still.claim(task_id), "Failed")
    await still.value(
        "insert into interlock.attempts (task_id, attempt, lease_token, outcome, started_at, ended_at)"
        " select $1, -n, gen_random_uuid(), 'Failed', now(), now() from generate_series(1, 150) n",
        task_id,
    )
    clock.advance(2)
    await still.pass_of("sources")
    assert await still.value("select count(*) from interlock.attempts where task_id = $1", task_id) <= 101


async def test_concurrent_dispatchers_start_and_restart_a_source_once(still: System, clock: ManualClock) -> None:
    await deploy(still, source_job(**ALWAYS))
    loops = [
        AlwaysOn(still.kernel.stores.database, still.kernel.settings, still.kernel.stores.wakeups) for _ in range(4)
    ]
    assert sum(await asyncio.gather(*(loop.run_once() for loop in loops))) == 1
    await still.complete(await still.claim((await state(still))["task_id"]), "Failed")
    clock.advance(5)
    assert sum(await asyncio.gather(*(loop.run_once() for loop in loops))) == 1


async def test_inactive_job_loses_its_task_and_regains_it_with_its_id(still: System, clock: ManualClock) -> None:
    task_id = await started(still)
    claim = await still.claim(task_id)
    job_id = await active_job(still)
    await still.value("update interlock.jobs set active = false where job_id = $1", job_id)
    assert await still.pass_of("sources") == 1
    beat = await still.worker("POST", "/internal/task-heartbeat", json={"items": [fence(claim)]})
    assert beat.json()["items"][0]["cancel_requested"]
    await still.complete(claim, "Canceled")
    clock.advance(600)
    assert await still.pass_of("sources") == 0
    assert (await still.task(task_id))["status"] == "Canceled"
    assert await still.value("select count(*) from interlock.source_tasks") == 0
    await still.value("update interlock.jobs set active = true where job_id = $1", job_id)
    assert await still.pass_of("sources") == 1
    assert (await still.claim(task_id))["attempt"] == 2


async def test_events_of_all_restarts_have_the_same_producer(still: System, clock: ManualClock) -> None:
    task_id = await started(still)
    for cursor in (5, 9):
        claim = await still.claim(task_id)
        output = claim["task"]["outputs"][0]
        event = {"dataset_uuid": output["dataset_uuid"], "dataset_version": output["dataset_version"], "cursor": cursor}
        reply = await still.attempt("/v1/task/events", claim["capability_token"], fence(claim) | {"events": [event]})
        assert reply.status_code == 200, reply.text
        await still.complete(claim, "Failed")
        clock.advance(5)
        await still.pass_of("sources")
    assert await still.value("select count(distinct task_id) from interlock.dataset_events") == 1
    (output,) = (await state(still))["outputs"]
    assert (output["output"], output["cursor"], output["last_scope"]) == ("out", 9, "9")


async def test_outputs_are_committed_with_every_return(still: System, clock: ManualClock) -> None:
    task_id = await started(still)
    for end in (9, 19):
        claim = await still.claim(task_id)
        grant = claim["task"]["outputs"][0]
        output = {name: grant[name] for name in ("dataset_uuid", "dataset_version")}
        output |= marked(grant["write_prefix"]) | {"start": end - 9, "end": end}
        reply = await still.complete(claim, outputs=[output])
        assert reply.status_code == 200, reply.text
        clock.advance(5)
        assert await still.pass_of("sources") == 1
    assert await still.value("select count(*) from interlock.partitions") == 2


async def test_paused_source_is_notified_and_not_started(still: System, clock: ManualClock) -> None:
    task_id = await started(still)
    claim = await still.claim(task_id)
    job_id = await active_job(still)

    async def paused() -> bool:
        beat = await still.worker("POST", "/internal/task-heartbeat", json={"items": [fence(claim)]})
        return bool(beat.json()["items"][0].get("paused", False))

    assert not await paused()
    await hold_back(still, job_id, bulk=True)
    assert not await paused()  # a hold on bulk work does not affect it
    await let_go(still, job_id)
    await hold_back(still, job_id)
    assert await paused()
    shown = await state(still)
    assert (shown["state"], shown["paused"]) == ("paused", "a full queue")
    await still.complete(claim, "Failed")
    clock.advance(600)
    assert await still.pass_of("sources") == 0
    await let_go(still, job_id)
    assert await still.pass_of("sources") == 1


async def test_task_without_a_source_gets_no_pause_notification(still: System) -> None:
    claim = await still.claim(await still.one())
    beat = await still.worker("POST", "/internal/task-heartbeat", json={"items": [fence(claim)]})
    assert "paused" not in beat.json()["items"][0]


async def test_sources_are_shown_to_readers_of_their_org(still: System) -> None:
    await started(still)
    reader = await other_key(still, Role.READER)
    assert (await still.user("GET", "/v1/dags/feeds/sources", key=reader)).status_code == 200
    stranger = await other_key(still, Role.ADMIN, "strangers")
    assert (await still.user("GET", "/v1/dags/feeds/sources", key=stranger)).status_code == 404
    assert (await still.user("GET", "/v1/dags/nothing/sources")).status_code == 404
