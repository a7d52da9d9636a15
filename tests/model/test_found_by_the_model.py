"""Defects that the state machine has found, each as the shortest example that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.system import System, fence


async def test_failure_without_error_class_is_retried_despite_non_retryable(still: System) -> None:
    first, second = [await still.one(policy={"non_retryable": ["Fatal"]}) for _ in range(2)]
    claims = [await still.claim(task_id) for task_id in (first, second)]
    items = [fence(claims[0]) | {"status": "Failed"}, fence(claims[1]) | {"status": "Completed"}]
    reply = await still.worker("POST", "/internal/task-complete", json={"items": items})
    assert (reply.status_code, reply.json()["accepted"]) == (200, 2)
    failed = await still.task(first)
    assert (failed["status"], failed["dead"], failed["retry_at"] is not None) == ("Failed", False, True)
    assert (await still.task(second))["status"] == "Completed"


async def one_by_one(still: System, claim: dict[str, Any]) -> dict[str, Any]:
    return {"items": [fence(claim) | {"status": "Completed"}]}


async def by_index(still: System, claim: dict[str, Any]) -> dict[str, Any]:
    lease = {"attempt": claim["attempt"], "lease_token": claim["lease_token"]}
    return {"groups": [lease | {"run_id": claim["task"]["run_id"], "indexes": [0], "results": [None]}]}


@pytest.mark.parametrize("form", [one_by_one, by_index])
async def test_slot_is_freed_even_if_the_cap_was_removed_meanwhile(still: System, form: Any) -> None:
    job = {"name": "capped", "operator": "echo"}
    claim = await still.claim(await still.one(**job, scaling={"max_concurrency": 1}))
    await still.submit([], **job, update=True)
    reply = await still.worker("POST", "/internal/task-complete", json=await form(still, claim))
    assert (reply.status_code, reply.json()["accepted"]) == (200, 1)
    assert await still.value("select count(*) from interlock.slots") == 0
    # A slot that stayed would be missing as soon as there is a cap again.
    again = await still.one(**job, scaling={"max_concurrency": 1}, update=True)
    assert (await still.claim(again))["status"] == "Claimed"


@pytest.mark.parametrize("others", [0, 1], ids=["nothing left to cancel", "one left to cancel"])
async def test_task_retried_after_its_run_was_canceled_is_not_canceled(still: System, others: int) -> None:
    """The cancel had reached the task while it was dead; a later retry wants it to run."""
    accepted = await still.submit([{"n": n} for n in range(1 + others)], policy={"max_attempts": 1})
    first, *rest = await still.task_ids(accepted["run_id"])
    await still.complete(await still.claim(first), "Failed", error_class="Oops")
    for other in rest:
        await still.claim(other)
    canceled = await still.user("POST", f"/v1/runs/{accepted['run_id']}/cancel")
    assert canceled.json()["matched"] == others
    assert (await still.user("POST", f"/v1/tasks/{first}/retry")).status_code == 200
    assert await still.pass_of("run-cancels") == 0
    assert (await still.task(first))["status"] == "Queued"
