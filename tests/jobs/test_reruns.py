"""Reruns of tasks as a new run: few are written synchronously, many are copied to a list that is ingested."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from interlock import failpoints
from interlock.jobs import reruns
from interlock.jobs.run_sources import part_uri
from interlock.jobs.staged_lists import upload_prefix
from interlock.jobs.submission import RunSettings
from interlock.wire.access import KeyRequest, Role
from tests.conftest import copied
from tests.jobs.test_receipts import mixed
from tests.support.staged_lists import Intake, intake
from tests.support.system import System, fence


@pytest.fixture(scope="module")
async def made(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    """Here ten tasks count as many, and five get their own shard."""
    folder: Path = tmp_path_factory.mktemp("reruns")
    async with (
        copied(postgres_url, template) as url,
        intake(url, folder, sync_threshold=10, shard_threshold=5) as started,
    ):
        yield started


async def rerun(system: System, job_id: str, *, code: int = 201, **body: Any) -> Any:
    reply = await system.user("POST", f"/v1/jobs/{job_id}/rerun", json=body)
    assert reply.status_code == code, reply.text
    return reply.json()


async def test_all_or_failed_or_canceled_tasks_run_again_with_their_payloads(made: Intake) -> None:
    done = await mixed(made.system)
    statuses = ("Failed", "Canceled", "Completed")
    wanted = {status: [n for n, end in done["ends"].items() if end == status] for status in statuses}
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, list(range(6))),
        ({"status": ["Failed"]}, wanted["Failed"]),
        ({"status": ["Failed", "Canceled"]}, sorted(wanted["Failed"] + wanted["Canceled"])),
        ({"status": ["Completed"]}, wanted["Completed"]),
        ({"first": 2, "last": 3}, [2, 3]),
        ({"status": ["Failed"], "error_class": "Other"}, []),
        ({"first": 100}, []),
    ]
    for filters, indexes in cases:
        new = await rerun(made.system, done["job_id"], run=done["run_id"], **filters)
        assert (new["job_id"], new["total"]) == (done["job_id"], len(indexes))
        assert new["run_id"] != done["run_id"]
        assert await made.payloads(new["run_id"]) == dict(enumerate({"n": n} for n in indexes))
        assert await made.indexes_of_messages(new["run_id"]) == list(range(len(indexes)))


async def origins(made: Intake, run_id: str) -> list[tuple[int, int | None]]:
    tasks = (await made.system.user("GET", f"/v1/tasks?run={run_id}&limit=1000")).json()["tasks"]
    return [(task["index"], task["origin_index"]) for task in tasks]


async def test_rerun_keeps_the_first_index_of_each_task(made: Intake) -> None:
    accepted = await made.system.submit([{"n": n} for n in range(8)], policy={"max_attempts": 1})
    run_id, job_id = accepted["run_id"], accepted["job_id"]
    await _fail(made.system, run_id, lambda index: index % 2 == 1)
    assert (await origins(made, run_id))[1] == (1, None)
    once = await rerun(made.system, job_id, status=["Failed"])
    assert await origins(made, once["run_id"]) == [(0, 1), (1, 3), (2, 5), (3, 7)]
    assert (await made.system.run(once["run_id"]))["rerun_of"] == run_id
    await _fail(made.system, once["run_id"], lambda index: index in (1, 3))
    twice = await rerun(made.system, job_id, status=["Failed"])
    assert await origins(made, twice["run_id"]) == [(0, 3), (1, 7)]
    found = await made.system.user("GET", f"/v1/jobs/{job_id}/tasks/1")
    assert found.json()["origin_index"] == 7


async def _fail(system: System, run_id: str, fails: Callable[[int], bool]) -> None:
    claims = (await system.claim_many(run_id=run_id, start=0, end=99))["claims"]
    items = [
        fence(claim) | {"status": "Failed" if fails(claim["task"]["index"]) else "Completed", "error_class": "Broken"}
        for claim in claims
    ]
    await system.worker("POST", "/internal/task-complete", json={"items": items})


async def test_error_class_of_the_last_attempt_decides(made: Intake) -> None:
    accepted = await made.system.submit([{"n": n} for n in range(4)], policy={"max_attempts": 1})
    claims = (await made.system.claim_many(run_id=accepted["run_id"], start=0, end=3))["claims"]
    items = [fence(c) | {"status": "Failed", "error_class": "AB"[c["task"]["index"] % 2]} for c in claims]
    await made.system.worker("POST", "/internal/task-complete", json={"items": items})
    new = await rerun(made.system, accepted["job_id"], error_class="B")
    assert list((await made.payloads(new["run_id"])).values()) == [{"n": 1}, {"n": 3}]


async def test_failed_task_with_a_pending_retry_is_not_rerun(made: Intake) -> None:
    accepted = await made.system.submit([1, 2], policy={"max_attempts": 2, "backoff_seconds": 3600})
    claims = (await made.system.claim_many(run_id=accepted["run_id"], start=0, end=1))["claims"]
    items = [fence(claim) | {"status": "Failed"} for claim in claims]
    await made.system.worker("POST", "/internal/task-complete", json={"items": items})
    assert (await rerun(made.system, accepted["job_id"], status=["Failed"]))["total"] == 0


async def test_many_tasks_are_copied_and_ingested_into_their_own_shard(
    made: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reruns, "STRETCH", 7)
    lines = b"".join(b'{"n": %d, \n "x": "a\\nb"}\n'.replace(b"\n ", b" ") % n for n in range(150))
    first = await made.ingested(lines)
    before = await made.payloads(first["run_id"])
    for filters, indexes in (({}, range(150)), ({"first": 20, "last": 139}, range(20, 140))):
        new = await rerun(made.system, first["job_id"], code=202, run=first["run_id"], **filters)
        assert (new["state"], new["total"]) == ("Ingesting", None)
        while await made.system.pass_of("reruns"):
            continue
        await made.drain()
        run = await made.system.run(new["run_id"])
        assert (run["state"], run["total"]) == ("Running", len(indexes))
        assert await made.payloads(new["run_id"]) == {at: before[n] for at, n in enumerate(indexes)}
        assert await origins(made, new["run_id"]) == list(enumerate(indexes))
        assert await made.shard(new["run_id"]) not in (0, await made.shard(first["run_id"]))
    assert await made.system.value("select count(*) from interlock.reruns") == 0


async def test_large_rerun_without_a_match_is_an_empty_run(made: Intake) -> None:
    first = await made.ingested(b"".join(b"%d\n" % n for n in range(150)))
    new = await rerun(made.system, first["job_id"], code=202, status=["Completed"])
    while await made.system.pass_of("reruns"):
        continue
    await made.drain()
    run = await made.system.run(new["run_id"])
    assert (run["state"], run["total"]) == ("Completed", 0)


async def test_rerun_of_a_running_run_does_not_change_it(made: Intake) -> None:
    accepted = await made.system.submit([1, 2, 3])
    await made.system.claim_many(run_id=accepted["run_id"], start=0, end=0)
    assert (await rerun(made.system, accepted["job_id"]))["total"] == 3
    counts = (await made.system.run(accepted["run_id"]))["counts"]
    assert counts["Queued"] + counts["Running"] == 3


async def test_rerun_is_idempotent_and_refused_during_ingest_or_for_other_orgs(made: Intake) -> None:
    system = made.system
    accepted = await system.submit([1])
    headers = {"Idempotency-Key": "again"}
    path = f"/v1/jobs/{accepted['job_id']}/rerun"
    twice = [(await system.user("POST", path, json={}, headers=headers)).json() for _ in range(2)]
    assert twice[0] == twice[1]
    reading = await made.submit(b"1\n2\n")
    early = await system.user("POST", f"/v1/jobs/{reading['job_id']}/rerun", json={})
    assert (early.status_code, early.json()["code"]) == (409, "run_ingesting")
    org = await system.kernel.access.principals.create_org("again")
    request = KeyRequest(user="x", role=Role.ADMIN)
    key = (await system.kernel.access.principals.create_key(request, org.org_id, granted_by=None)).key
    assert (await system.user("POST", path, key=key, json={})).status_code == 404


# Settings


LIMITS = {
    "max_concurrency": 3,
    "rate": {"key": "host", "per_second": 7.5},
    "tolerated_failure_share": 0.25,
    "deadline_seconds": 3600.0,
}
NOT_SETTINGS = {
    "run_id", "org_id", "job_id", "shard", "state", "total", "last_index", "range_size", "latched", "swept_index",
    "cancel_requested", "queued", "running", "completed", "failed", "dead", "canceled", "created_at", "ended_at",
    "cancel_index", "paused", "ingesting", "wake_index", "reason", "delete_requested", "open", "errors", "rerun_of",
    "deadline_at",  # follows from created_at and deadline_seconds
    "priority", "held_from",  # of backfills, which cannot be rerun
}  # fmt: skip


async def settings_of(system: System, run_id: str) -> dict[str, Any]:
    columns = [field.name for field in fields(RunSettings)]
    async with system.kernel.stores.database.connection() as connection:
        row = await connection.fetchrow(
            f"select {', '.join(columns)}, extract(epoch from deadline_at - created_at) as deadline"
            " from interlock.runs where run_id = $1::text::uuid",
            run_id,
        )
    assert row is not None
    assert row["deadline"] == row["deadline_seconds"]
    return {name: row[name] for name in columns}


async def test_every_column_of_a_run_is_a_setting_that_a_rerun_keeps_or_its_own_state(made: Intake) -> None:
    columns = await made.system.value(
        "select array_agg(column_name::text) from information_schema.columns"
        " where table_schema = 'interlock' and table_name = 'runs'"
    )
    assert set(columns) == NOT_SETTINGS | {field.name for field in fields(RunSettings)}


@pytest.mark.parametrize("tasks", [3, 30], ids=["a few", "many"])
async def test_rerun_keeps_every_setting_of_its_run(made: Intake, tasks: int) -> None:
    lines = b"".join(b'{"url": "http://h/%d"}\n' % n for n in range(tasks))
    first = await made.ingested(lines, limits=LIMITS, retention_days=30.0)
    kept = await settings_of(made.system, first["run_id"])
    assert None not in kept.values()
    new = await rerun(made.system, first["job_id"], code=201 if tasks == 3 else 202)
    assert await settings_of(made.system, new["run_id"]) == kept


async def test_rerun_of_a_run_stopped_by_its_deadline_has_the_same_time_again(made: Intake) -> None:
    first = await made.system.submit([1], limits={"deadline_seconds": 60})
    past = "update interlock.runs set deadline_at = interlock.clock() where run_id = $1::text::uuid"
    await made.system.value(past, first["run_id"])
    assert await made.system.pass_of("run-deadlines") == 1
    new = await rerun(made.system, first["job_id"])
    assert (await settings_of(made.system, new["run_id"]))["deadline_seconds"] == 60


# Runs whose ingest did not succeed


async def failed_ingest(made: Intake, **job: Any) -> dict[str, Any]:
    run = await made.ingested(b"1\nnot json\n", **job)
    assert (run["state"], run["total"]) == ("Failed", 0)
    return run


async def test_rerun_of_a_failed_ingest_ingests_the_same_list_again(made: Intake) -> None:
    first = await failed_ingest(made, limits=LIMITS)
    new = await rerun(made.system, first["job_id"], code=202)
    assert (new["state"], new["total"], new["run_id"] != first["run_id"]) == ("Ingesting", None, True)
    assert (await settings_of(made.system, new["run_id"])) == (await settings_of(made.system, first["run_id"]))
    await made.drain()
    again = await made.system.run(new["run_id"])
    assert (again["state"], again["reason"]) == ("Failed", first["reason"])


async def test_rerun_makes_the_tasks_of_a_list_whose_ingest_was_given_up(made: Intake) -> None:
    async def away() -> None:
        raise ConnectionResetError("the store is away")

    accepted = await made.submit(b"1\n2\n")
    for _ in range(made.system.kernel.settings.ingest_tries):
        failpoints.arm("ingest.before_small_commit", away)
        try:
            await made.visible()
            await made.drain()
        finally:
            failpoints.disarm("ingest.before_small_commit")
    assert (await made.system.run(accepted["run_id"]))["state"] == "Failed"
    new = await rerun(made.system, accepted["job_id"], code=202)
    await made.drain()
    assert await made.payloads(new["run_id"]) == {0: 1, 1: 2}
    assert (await made.system.run(new["run_id"]))["state"] == "Running"


async def test_rerun_of_a_run_canceled_in_mid_ingest_ingests_its_list(made: Intake) -> None:
    accepted = await made.submit(b"1\n2\n3\n")
    await made.system.user("POST", f"/v1/runs/{accepted['run_id']}/cancel")
    await made.drain()
    canceled = await made.system.run(accepted["run_id"])
    assert (canceled["state"], canceled["total"]) == ("Canceled", 0)
    new = await rerun(made.system, accepted["job_id"], code=202)
    await made.drain()
    assert await made.payloads(new["run_id"]) == {0: 1, 1: 2, 2: 3}


@pytest.mark.parametrize("filters", [{"status": ["Failed"]}, {"error_class": "X"}, {"first": 1}, {"last": 1}])
async def test_filter_on_a_run_without_tasks_is_refused(made: Intake, filters: dict[str, Any]) -> None:
    first = await failed_ingest(made)
    refused = await rerun(made.system, first["job_id"], code=409, **filters)
    assert refused["code"] == "run_not_ingested"


async def test_rerun_of_a_failed_ingest_whose_list_is_gone_or_changed_is_refused(made: Intake) -> None:
    system, upload = made.system, "select source ->> 'upload_id' from interlock.ingests where run_id = $1::text::uuid"
    expired = await failed_ingest(made)
    past = "update interlock.uploads set sweep_at = interlock.clock() where upload_id = $1::text::uuid"
    await system.value(past, await system.value(upload, expired["run_id"]))
    assert (await rerun(system, expired["job_id"], code=409))["code"] == "list_gone"
    changed = await failed_ingest(made)
    org = await system.value("select org_id from interlock.runs where run_id = $1::text::uuid", changed["run_id"])
    prefix = upload_prefix(system.kernel.access.objects.root, org, await system.value(upload, changed["run_id"]))
    await system.kernel.access.objects.put(part_uri(prefix, 1), b"1\n2\n")
    assert (await rerun(system, changed["job_id"], code=409))["code"] == "list_gone"
    jobs = [expired["job_id"], changed["job_id"]]
    assert await system.value("select count(*) from interlock.runs where job_id = any($1::text[]::uuid[])", jobs) == 2


async def test_rerun_of_an_open_run_says_to_close_it(made: Intake) -> None:
    reply = await made.system.user("POST", "/v1/jobs", json={"operator": "echo", "open": True, "tasks": [1, 2]})
    opened = reply.json()
    refused = await rerun(made.system, opened["job_id"], code=409)
    assert (refused["code"], "close it" in refused["detail"]) == ("run_ingesting", True)
    await made.system.user("POST", f"/v1/jobs/{opened['job_id']}/close")
    assert (await rerun(made.system, opened["job_id"]))["total"] == 2


async def test_large_rerun_whose_run_is_deleted_while_it_is_copied_fails(
    made: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reruns, "STRETCH", 7)
    first = await made.ingested(b"".join(b"%d\n" % n for n in range(150)))
    new = await rerun(made.system, first["job_id"], code=202)
    assert await made.system.pass_of("reruns") == 1
    await made.system.value("delete from interlock.tasks where run_id = $1::text::uuid", first["run_id"])
    await made.system.value("delete from interlock.runs where run_id = $1::text::uuid", first["run_id"])
    while await made.system.pass_of("reruns"):
        continue
    await made.drain()
    run = await made.system.run(new["run_id"])
    assert (run["state"], run["total"]) == ("Failed", 0)
    assert "was deleted" in run["reason"]
    assert (await rerun(made.system, first["job_id"], code=409, run=new["run_id"]))["code"] == "list_gone"


async def test_large_rerun_that_is_canceled_while_it_is_copied_ends_without_a_task(
    made: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reruns, "STRETCH", 7)
    first = await made.ingested(b"".join(b"%d\n" % n for n in range(150)))
    new = await rerun(made.system, first["job_id"], code=202)
    assert await made.system.pass_of("reruns") == 1
    await made.system.user("POST", f"/v1/runs/{new['run_id']}/cancel")
    while await made.system.pass_of("reruns"):
        continue
    await made.drain()
    run = await made.system.run(new["run_id"])
    assert (run["state"], run["total"]) == ("Canceled", 0)
    assert (await rerun(made.system, first["job_id"], code=409, run=new["run_id"]))["code"] == "list_gone"


async def test_run_that_is_being_deleted_is_not_run_again(made: Intake) -> None:
    first = await made.system.submit([1, 2])
    await made.system.value(
        "update interlock.runs set delete_requested = true where run_id = $1::text::uuid", first["run_id"]
    )
    await rerun(made.system, first["job_id"], code=404, run=first["run_id"])
