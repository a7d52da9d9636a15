"""Ids by their first characters, wherever a request names a task, a run or a job."""

from __future__ import annotations

from uuid import UUID

import pytest

from interlock.errors import BadRequest, NotFound
from interlock.http.prefixes import only, span_of
from tests.support.system import System, other_org


async def test_task_is_found_by_its_first_characters(system: System) -> None:
    task_id = await system.one()
    for prefix in (task_id[:18], task_id[:20].upper(), task_id.replace("-", "")[:16]):
        for path in ("", "/attempts", "/explain"):
            reply = await system.user("GET", f"/v1/tasks/{prefix}{path}")
            assert reply.status_code == 200, reply.text
        assert (await system.user("GET", f"/v1/tasks/{prefix}")).json()["task_id"] == task_id
    assert (await system.user("POST", f"/v1/tasks/{task_id[:18]}/cancel")).json()["status"] == "Canceled"


async def test_run_and_job_are_found_by_their_first_characters(system: System) -> None:
    accepted = await system.submit([1, 2], name="fetch")
    run, job = accepted["run_id"][:20], accepted["job_id"][:20]
    assert (await system.user("GET", f"/v1/runs/{run}")).json()["run_id"] == accepted["run_id"]
    assert len((await system.user("GET", f"/v1/tasks?run={run}")).json()["tasks"]) == 2
    for path in (
        f"/v1/jobs/{job}",
        f"/v1/jobs/{job}/runs",
        f"/v1/jobs/{job}/tasks/1?run={run}",
        f"/v1/tasks?job={job}",
    ):
        assert (await system.user("GET", path)).status_code == 200, path
    canceled = await system.user("POST", "/v1/tasks/cancel", json={"run": run})
    assert canceled.json()["matched"] == 2


async def test_name_takes_precedence_over_a_prefix(system: System) -> None:
    first = await system.submit([1])
    named = await system.submit([1], name=first["job_id"][:8])
    found = await system.user("GET", f"/v1/jobs/{first['job_id'][:8]}")
    assert found.json()["job_id"] == named["job_id"]


async def test_ambiguous_prefix_lists_the_candidates(system: System) -> None:
    ids = [(await system.submit([1]))["run_id"] for _ in range(2)]
    reply = await system.user("GET", f"/v1/runs/{ids[0][:5]}")
    assert (reply.status_code, reply.json()["code"]) == (400, "ambiguous_id")
    assert set(ids) <= set(reply.json()["candidates"])
    assert ids[0] in reply.json()["detail"]


async def test_prefix_of_another_orgs_id_finds_nothing(system: System) -> None:
    accepted = await system.submit([1])
    task_id = (await system.task_ids(accepted["run_id"]))[0]
    stranger = await other_org(system)
    for path in (
        f"/v1/tasks/{task_id[:18]}",
        f"/v1/runs/{accepted['run_id'][:18]}",
        f"/v1/jobs/{accepted['job_id'][:18]}",
    ):
        assert (await system.user("GET", path, key=stranger)).status_code == 404, path


@pytest.mark.parametrize("text", ["abc", "not-an-id", "0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b0", "..", "%00%00%00%00"])
async def test_text_that_is_no_prefix_is_refused_with_the_reason(system: System, text: str) -> None:
    for kind in ("tasks", "runs"):
        reply = await system.user("GET", f"/v1/{kind}/{text}")
        assert reply.status_code in (400, 404), reply.text
    assert (await system.user("GET", f"/v1/jobs/{text}")).status_code == 404


def test_span_covers_exactly_the_ids_with_the_prefix() -> None:
    span = span_of("0198C6f2-7d1e")
    assert span == {
        "low": UUID("0198c6f2-7d1e-0000-0000-000000000000"),
        "high": UUID("0198c6f2-7d1e-ffff-ffff-ffffffffffff"),
    }
    assert span_of("0" * 33) is None
    assert span_of("\N{ARABIC-INDIC DIGIT ZERO}" * 4) is None


def test_at_most_ten_candidates_are_listed() -> None:
    found = [UUID(int=n) for n in range(11)]
    with pytest.raises(BadRequest, match="and more") as caught:
        only("0000", "run", found)
    assert len(caught.value.extra["candidates"]) == 10
    with pytest.raises(NotFound):
        only("0000", "run", [])
