"""Failing jobs of DAGs: listed while their tasks are failed, and no longer."""

from __future__ import annotations

from typing import Any

from interlock.clock import ManualClock
from interlock.tasks.operators import LIVE_SECONDS
from tests.dags.test_deployment import CHAIN, post, refused
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System


async def failures(system: System, **parameters: str) -> list[dict[str, Any]]:
    reply = await system.user("GET", "/v1/failing-jobs", params=parameters)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["failures"]
    return found


async def failed(dags: DeployedDags, **more: Any) -> str:
    """Deploys a chain, lets its second job fail once, and returns the task's id."""
    await dags.start(CHAIN)
    await dags.report("chain", "follow", (0, 9))
    await dags.route()
    (task_id,) = await dags.waiting("chain", "derive")
    await fail(dags.system, task_id, **more)
    return task_id


async def fail(system: System, task_id: str, **more: Any) -> None:
    error = {"error_class": "Boom", "error_message": "first line\nsecond line"} | more
    assert (await system.complete(await system.claim(task_id), "Failed", **error)).status_code == 200


async def test_failed_task_of_a_dag_is_listed_with_its_error(still: System) -> None:
    task_id = await failed(DeployedDags(still))
    (one,) = await failures(still)
    assert (one["dag"], one["job"], one["failing"], one["dead"]) == ("chain", "derive", 1, 0)
    assert (one["task_id"], one["error_class"], one["error_message"]) == (task_id, "Boom", "first line")
    assert await failures(still, dag="chain") == [one]
    assert await failures(still, dag="other") == []


async def test_error_is_over_once_its_task_is_retried(still: System, clock: ManualClock) -> None:
    dags = DeployedDags(still)
    task_id = await failed(dags)
    clock.advance(3600)
    await still.pass_of("retries")
    assert await failures(still) == []
    await dags.finish(task_id)
    assert await failures(still) == []


async def test_dead_letter_is_listed_until_its_scope_is_done(still: System, clock: ManualClock) -> None:
    dags = DeployedDags(still)
    task_id = await failed(dags)
    for _ in range(2):
        clock.advance(3600)
        await still.pass_of("retries")
        await fail(still, task_id)
    assert [one["dead"] for one in await failures(still)] == [1]
    dags.producers.clear()  # the capability token of the first one has expired
    await dags.report("chain", "follow", (0, 9))
    await dags.route()
    await dags.work("chain", "derive")
    assert await failures(still) == []


async def test_other_orgs_do_not_see_the_failures_of_a_dag(still: System) -> None:
    await failed(DeployedDags(still))
    other = await still.kernel.access.principals.create_org("other")
    assert (await still.kernel.dags.reads.failures(other.org_id, None, 10)).failures == []


async def test_deploy_needs_a_live_worker_unless_it_is_forced(still: System, clock: ManualClock) -> None:
    text = CHAIN.replace("name: derive, operator: echo", "name: derive, operator: 'own:work'")
    await still.declare("own:work")
    assert (await post(still, text)).status_code == 200
    clock.advance(LIVE_SECONDS + 1)
    other = text.replace("name: chain", "name: later").replace("facts:", "later_facts:")
    problem = refused(await post(still, other), 400, "unknown_operator")
    assert "own:work" in problem["detail"]
    assert "--force" in problem["detail"]
    assert (await still.user("GET", "/v1/dags/later")).status_code == 404
    headers = {"Content-Type": "application/yaml"}
    forced = await still.user("POST", "/v1/dags?force=true", content=other, headers=headers)
    assert forced.status_code == 200, forced.text
