"""Tasks of a run once more, as a run of their own: a few at once, many by way of a list that is ingested."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from interlock.bulk import reruns
from interlock.wire import KeyRequest, Role
from tests.conftest import copied
from tests.ingests import Intake, intake
from tests.integration.test_receipts import mixed
from tests.system import System, fence


@pytest.fixture(scope="module")
async def made(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    """Ten tasks are many here, and five make a shard of its own."""
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


async def test_the_error_class_of_the_last_attempt_decides(made: Intake) -> None:
    accepted = await made.system.submit([{"n": n} for n in range(4)], policy={"max_attempts": 1})
    claims = (await made.system.claim_many(run_id=accepted["run_id"], start=0, end=3))["claims"]
    items = [fence(c) | {"status": "Failed", "error_class": "AB"[c["task"]["index"] % 2]} for c in claims]
    await made.system.worker("POST", "/internal/task-complete", json={"items": items})
    new = await rerun(made.system, accepted["job_id"], error_class="B")
    assert list((await made.payloads(new["run_id"])).values()) == [{"n": 1}, {"n": 3}]


async def test_a_failed_task_that_will_be_tried_again_is_left_to_its_own_run(made: Intake) -> None:
    accepted = await made.system.submit([1, 2], policy={"max_attempts": 2, "backoff_seconds": 3600})
    claims = (await made.system.claim_many(run_id=accepted["run_id"], start=0, end=1))["claims"]
    items = [fence(claim) | {"status": "Failed"} for claim in claims]
    await made.system.worker("POST", "/internal/task-complete", json={"items": items})
    assert (await rerun(made.system, accepted["job_id"], status=["Failed"]))["total"] == 0


async def test_many_are_copied_and_ingested_into_a_shard_of_their_own(
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
        assert await made.shard(new["run_id"]) not in (0, await made.shard(first["run_id"]))
    assert await made.system.value("select count(*) from interlock.reruns") == 0


async def test_many_of_which_none_match_is_a_run_of_nothing(made: Intake) -> None:
    first = await made.ingested(b"".join(b"%d\n" % n for n in range(150)))
    new = await rerun(made.system, first["job_id"], code=202, status=["Completed"])
    while await made.system.pass_of("reruns"):
        continue
    await made.drain()
    run = await made.system.run(new["run_id"])
    assert (run["state"], run["total"]) == ("Completed", 0)


async def test_a_run_that_is_run_again_while_it_runs_is_not_touched(made: Intake) -> None:
    accepted = await made.system.submit([1, 2, 3])
    await made.system.claim_many(run_id=accepted["run_id"], start=0, end=0)
    assert (await rerun(made.system, accepted["job_id"]))["total"] == 3
    counts = (await made.system.run(accepted["run_id"]))["counts"]
    assert counts["Queued"] + counts["Running"] == 3


async def test_a_rerun_is_made_once_refused_while_a_list_is_read_and_not_for_others(made: Intake) -> None:
    system = made.system
    accepted = await system.submit([1])
    headers = {"Idempotency-Key": "again"}
    path = f"/v1/jobs/{accepted['job_id']}/rerun"
    twice = [(await system.user("POST", path, json={}, headers=headers)).json() for _ in range(2)]
    assert twice[0] == twice[1]
    reading = await made.submit(b"1\n2\n")
    early = await system.user("POST", f"/v1/jobs/{reading['job_id']}/rerun", json={})
    assert (early.status_code, early.json()["code"]) == (409, "run_ingesting")
    org = await system.kernel.principals.create_org("again")
    request = KeyRequest(user="x", role=Role.ADMIN)
    key = (await system.kernel.principals.create_key(request, org.org_id, granted_by=None)).key
    assert (await system.user("POST", path, key=key, json={})).status_code == 404
