"""Explanations of the state of a scope, and of a task under backpressure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.datasets.test_datasets_inputs import TWO
from tests.support.datasets import CHAIN, bring, built, deploy, got, job_id, scope, waiting, work
from tests.support.system import System


async def explained(system: System, dag: str, job: str, start: int, end: int) -> dict[str, Any]:
    return await got(system, f"/v1/dags/{dag}/jobs/{job}/explain?start={start}&end={end}")


async def paused(system: System, *, bulk: bool = False) -> None:
    await system.value(
        "insert into interlock.pauses (job_id, cause_id, bulk, path, reason)"
        " values ($1, $2, $3, array[$2, $1]::uuid[], 'total has 5 tasks waiting') returning 1",
        await job_id(system, "chain", "double"),
        await job_id(system, "chain", "total"),
        bulk,
    )


async def test_scope_that_no_input_has_is_explained_as_missing(still: System) -> None:
    await deploy(still, CHAIN)
    found = await explained(still, "chain", "double", 0, 9)
    assert (found["reason"], found["task_id"]) == ("input_missing", None)
    assert "chain:feed:blocks" in found["detail"]
    assert found["facts"]["missing"][0]["dataset"] == "chain:feed:blocks"


async def test_missing_input_is_named_by_its_published_name(still: System) -> None:
    await deploy(still, CHAIN)
    await bring(still, scope(0, 9))
    found = await explained(still, "chain", "total", 0, 9)
    assert (found["reason"], found["detail"]) == ("input_missing", "0-9 is not in doubled yet.")


async def test_scope_is_in_progress_then_done_by_its_task(still: System) -> None:
    await deploy(still, CHAIN)
    await bring(still, scope(0, 9))
    (task_id,) = await waiting(still, "chain", "double")
    found = await explained(still, "chain", "double", 3, 4)
    assert (found["reason"], found["task_id"]) == ("in_progress", task_id)
    assert found["facts"] == {"scope": "0-9", "status": "Queued"}
    await work(still, "chain", "double")
    found = await explained(still, "chain", "double", 0, 9)
    assert (found["reason"], found["task_id"]) == ("done", task_id)


async def test_explanation_of_a_range_is_that_of_its_first_unfinished_scope(still: System) -> None:
    await built(still, (0, 9), (20, 29))
    await bring(still, scope(10, 19))
    assert (await explained(still, "chain", "double", 0, 29))["facts"]["scope"] == "10-19"


async def test_dead_letter_and_canceled_task_are_explained_with_a_fix(still: System) -> None:
    await deploy(still, CHAIN.replace("operator: echo", "operator: echo\n    max_attempts: 1"))
    await bring(still, scope(0, 9), scope(10, 19))
    first, second = await waiting(still, "chain", "double")
    await still.complete(await still.claim(first), "Failed", error_class="DiskFull", error_message="no room left")
    await still.user("POST", f"/v1/tasks/{second}/cancel")
    reasons = {}
    for start in (0, 10):
        found = await explained(still, "chain", "double", start, start + 9)
        reasons[found["task_id"]] = found["reason"]
    assert reasons == {first: "dead_letter", second: "canceled"}


async def test_paused_job_is_explained_with_cause_path_and_time(still: System) -> None:
    await deploy(still, CHAIN)
    await paused(still)
    assert (await explained(still, "chain", "double", 0, 9))["reason"] == "input_missing"
    await bring(still, scope(0, 9))
    found = await explained(still, "chain", "double", 0, 9)
    assert found["reason"] == "paused"
    assert found["facts"]["path"] == ["total", "double"]
    assert "total has 5 tasks waiting" in found["detail"]
    assert found["facts"]["since"] == still.kernel.stores.clock.now().isoformat().replace("+00:00", "Z")


async def test_bulk_pause_does_not_pause_a_normal_job(still: System) -> None:
    await deploy(still, CHAIN)
    await paused(still, bulk=True)
    await bring(still, scope(0, 9))
    assert (await explained(still, "chain", "double", 0, 9))["reason"] == "in_progress"


async def test_different_bounds_of_inputs_are_explained(still: System) -> None:
    await deploy(still, TWO.replace("WAIT", "all"))
    await bring(still, scope(0, 9), dag="two", job="left")
    assert "two:right:b" in (await explained(still, "two", "join", 0, 9))["detail"]
    await bring(still, scope(0, 19), dag="two", job="right")
    found = await explained(still, "two", "join", 0, 9)
    assert found["reason"] == "bounds_differ"
    assert "two:right:b has 0-19" in found["detail"]


async def test_one_input_is_enough_with_wait_for_any(still: System) -> None:
    await deploy(still, TWO.replace("WAIT", "any"))
    assert (await explained(still, "two", "join", 0, 9))["reason"] == "input_missing"
    await bring(still, scope(0, 9), dag="two", job="right")
    for start, end in ((0, 9), (5, 6)):
        assert (await explained(still, "two", "join", start, end))["reason"] == "in_progress"


async def test_stream_is_missing_beyond_its_cursor_and_done_where_read(still: System) -> None:
    await deploy(still, CHAIN)
    await bring(still, {"cursor": 9})
    await work(still, "chain", "double")
    assert (await explained(still, "chain", "double", 0, 5))["reason"] == "done"
    found = await explained(still, "chain", "double", 10, 19)
    assert (found["reason"], found["facts"]["missing"][0]["cursor"]) == ("input_missing", 9)


async def test_unrouted_scope_is_explained_as_not_given_yet(still: System) -> None:
    await deploy(still, CHAIN)
    await paused(still)
    await bring(still, scope(0, 9))
    await still.value("delete from interlock.pauses returning 1")
    assert (await explained(still, "chain", "double", 0, 9))["reason"] == "not_given_yet"
    while await still.pass_of("scopes"):
        continue
    assert (await explained(still, "chain", "double", 0, 9))["reason"] == "in_progress"


async def test_source_receives_no_scopes(still: System) -> None:
    await deploy(still, CHAIN)
    assert (await explained(still, "chain", "feed", 0, 9))["reason"] == "source"


@pytest.mark.parametrize("path", ["nothing/jobs/double", "chain/jobs/nothing", "chain/jobs/%00"])
async def test_unknown_job_is_not_found(shared: System, path: str) -> None:
    assert (await shared.user("GET", f"/v1/dags/{path}/explain?start=0&end=9")).status_code == 404


@pytest.mark.parametrize("span", ["", "?start=0", "?start=9&end=0", "?start=x&end=9", f"?start=0&end={2**63}"])
async def test_malformed_range_is_refused(shared: System, span: str) -> None:
    assert (await shared.user("GET", f"/v1/dags/chain/jobs/double/explain{span}")).status_code == 400


async def test_explanation_of_a_task_names_the_pause_of_its_job(still: System) -> None:
    await deploy(still, CHAIN)
    await bring(still, scope(0, 9))
    (task_id,) = await waiting(still, "chain", "double")
    before = await got(still, f"/v1/tasks/{task_id}/explain")
    assert "paused_since" not in before["facts"]
    await paused(still)
    after = await got(still, f"/v1/tasks/{task_id}/explain")
    assert after["reason"] == before["reason"]
    assert after["facts"]["pause_path"] == ["total", "double"]
    assert "total has 5 tasks waiting (total <- double)" in after["detail"]
    await work(still, "chain", "double")
    assert "waiting" not in (await got(still, f"/v1/tasks/{task_id}/explain"))["detail"]
