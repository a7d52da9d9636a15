"""Receipts: the signed outcome of every task of a run, verifiable by any holder."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from interlock.access import jwt
from interlock.jobs import receipt_verification, receipts
from interlock.jobs.receipt_verification import digests as computed
from interlock.stores.signers import public_key
from interlock.wire.access import KeyRequest, Role
from tests.jobs.test_results import claimed, report
from tests.support.system import System, fence


async def receipt_of(system: System, job_id: str, **more: Any) -> Any:
    reply = await system.user("GET", f"/v1/jobs/{job_id}/receipt", **more)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def mixed(system: System, tasks: int = 6) -> dict[str, Any]:
    """Returns an ended run: every third task failed, every fourth canceled, the others completed."""
    accepted = await system.submit([{"n": n} for n in range(tasks)], policy={"max_attempts": 1})
    claims = (await system.claim_many(run_id=accepted["run_id"], start=0, end=tasks - 1))["claims"]
    ends = ["Failed" if n % 3 == 1 else "Canceled" if n % 4 == 3 else "Completed" for n in range(tasks)]
    items = [fence(c) | {"status": ends[c["task"]["index"]]} for c in claims]
    reply = await system.worker("POST", "/internal/task-complete", json={"items": items})
    assert reply.json()["accepted"] == tasks
    await system.pass_of("run-counters")
    return accepted | {"ends": dict(enumerate(ends))}


async def test_receipt_covers_every_task_and_is_verifiable(shared: System) -> None:
    run = await mixed(shared)
    reply = await receipt_of(shared, run["job_id"])
    receipt = reply["receipt"]
    assert reply["state"] == "Signed"
    counts = {name: receipt[name] for name in ("total", "indexes", "completed", "failed", "canceled", "complete")}
    assert counts == {"total": 6, "indexes": 6, "completed": 3, "failed": 2, "canceled": 1, "complete": True}
    assert receipt["state"] == "CompletedWithFailures"
    assert computed(UUID(run["run_id"]), 6, run["ends"].items()) == (receipt["ids"], receipt["outcomes"])
    other = run["ends"] | {5: "Failed"}
    ids, outcomes = computed(UUID(run["run_id"]), 6, other.items())
    assert (ids == receipt["ids"], outcomes == receipt["outcomes"]) == (True, False)


async def test_receipt_is_signed_by_a_published_key_and_is_not_a_token(shared: System) -> None:
    run = await mixed(shared)
    reply = await receipt_of(shared, run["job_id"])
    published = (await shared.user("GET", "/v1/receipt-keys")).json()["keys"]
    assert reply["key"] in published
    payload = jwt.payload_of(reply["signed"], public_key(reply["key"]))
    assert payload is not None
    assert payload == reply["receipt"] | {"iss": "interlock", "aud": receipt_verification.AUDIENCE}
    as_token = await shared.attempt("/v1/task/heartbeat", reply["signed"], {})
    assert as_token.status_code == 401


async def test_receipt_stays_the_same_until_a_retry_reopens_the_run(shared: System) -> None:
    run = await mixed(shared)
    first = await receipt_of(shared, run["job_id"])
    assert await receipt_of(shared, run["job_id"]) == first
    failed = (await shared.user("GET", f"/v1/tasks?run={run['run_id']}&status=Failed")).json()["tasks"][0]["task_id"]
    await shared.user("POST", f"/v1/tasks/{failed}/retry")
    claim = await shared.claim(failed)
    await shared.pass_of("run-counters")
    assert (await shared.user("GET", f"/v1/jobs/{run['job_id']}/receipt")).status_code == 409
    await shared.complete(claim)
    await shared.pass_of("run-counters")
    second = await receipt_of(shared, run["job_id"])
    assert (second["receipt"]["completed"], second["receipt"]["failed"]) == (4, 1)
    assert second["receipt"]["ids"] == first["receipt"]["ids"]


async def test_large_run_is_walked_over_several_calls(shared: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of two tasks, and two blocks per call."""
    for module in (receipt_verification, receipts):
        monkeypatch.setattr(module, "BLOCK", 2)
    monkeypatch.setattr(receipts, "_BLOCKS_AT_ONCE", 2)
    run = await mixed(shared, 7)
    seen = [await receipt_of(shared, run["job_id"]) for _ in range(3)]
    assert [(one["state"], one["walked"], one["of"]) for one in seen[:2]] == [("Pending", 4, 7), ("Signed", 7, 7)]
    assert seen[2] == seen[1]
    receipt = seen[1]["receipt"]
    assert computed(UUID(run["run_id"]), 7, run["ends"].items()) == (receipt["ids"], receipt["outcomes"])


async def test_deduplicated_items_do_not_count_as_missing(shared: System) -> None:
    items = [{"k": "a"}, {"k": "a"}, {"k": "b"}]
    accepted = await shared.submit(items, name="deduplicated", dedupe_by="/k")
    group = (await shared.claim_many(run_id=accepted["run_id"], start=0, end=2, grouped=True, tokens=False))["groups"][
        0
    ]
    kept = sorted(task[1] for task in group["tasks"])
    await report(shared, group, dict.fromkeys(kept))
    await shared.pass_of("run-counters")
    receipt = (await receipt_of(shared, accepted["job_id"]))["receipt"]
    assert (receipt["total"], receipt["indexes"], receipt["complete"]) == (2, 3, True)
    ends = [(index, "Completed") for index in kept]
    assert computed(UUID(accepted["run_id"]), 3, ends) == (receipt["ids"], receipt["outcomes"])


async def test_unfinished_run_has_no_receipt_and_other_orgs_see_none(shared: System) -> None:
    group = await claimed(shared, 1)
    early = await shared.user("GET", f"/v1/jobs/{group['job_id']}/receipt")
    assert (early.status_code, early.json()["code"]) == (409, "run_not_ended")
    org = await shared.kernel.access.principals.create_org("without")
    request = KeyRequest(user="them", role=Role.ADMIN)
    key = (await shared.kernel.access.principals.create_key(request, org.org_id, granted_by=None)).key
    assert (await shared.user("GET", f"/v1/jobs/{group['job_id']}/receipt", key=key)).status_code == 404


async def test_empty_run_has_a_receipt(shared: System) -> None:
    accepted = await shared.submit([])
    receipt = (await receipt_of(shared, accepted["job_id"]))["receipt"]
    assert (receipt["total"], receipt["complete"]) == (0, True)
    assert computed(UUID(accepted["run_id"]), 0, []) == (receipt["ids"], receipt["outcomes"])
