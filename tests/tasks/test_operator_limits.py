"""Operator names at the gateway: refused unless built in or declared by a worker, and allowed for the org."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from interlock.tasks.operators import refusal
from interlock.wire.access import KeyRequest, Role
from tests.support.system import System

NAMES = ["cProfile:run", "subprocess:getoutput", "linecache:getlines", "list_load", "buffer_load", "nobody"]
DAG = "name: {name}\njobs:\n  - {{name: a, activation: source, source: {{kind: manual}}, operator: '{operator}'}}\n"


async def post(system: System, **job: Any) -> tuple[int, dict[str, Any]]:
    reply = await system.user("POST", "/v1/jobs", json={"tasks": [1]} | job)
    return reply.status_code, reply.json()


async def deploy(system: System, operator: str, name: str = "d", query: str = "") -> tuple[int, dict[str, Any]]:
    text = DAG.format(name=name, operator=operator)
    reply = await system.user("POST", f"/v1/dags{query}", content=text, headers={"Content-Type": "application/yaml"})
    return reply.status_code, reply.json()


async def limit(system: System, operators: list[str] | None, org: str = "test") -> dict[str, Any]:
    reply = await system.user("POST", f"/v1/orgs/{org}/operators", json={"operators": operators})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = (await system.user("GET", f"/v1/orgs/{org}/operators")).json()
    assert found == reply.json()
    return found


async def own_org(system: System) -> str:
    name: str = await system.value("select name from interlock.orgs limit 1")
    return name


@pytest.mark.parametrize("runtime", ["platform", "spark", "dispatcher", "udf"])
@pytest.mark.parametrize("name", NAMES)
async def test_name_that_no_worker_declared_is_refused(shared: System, name: str, runtime: str) -> None:
    jobs: list[dict[str, Any]] = [{"operator": name}, {"operator": "python", "config": {"function": name}}]
    jobs += [{"operator": "spark_map", "config": {"operator": name}}]
    code = "operator_not_inline" if runtime == "dispatcher" else "unknown_operator"
    for job in jobs:
        ways: list[dict[str, Any]] = [{}, {"open": True, "tasks": None}, {"async": True}]
        for more in ways:
            status, problem = await post(shared, **job, runtime=runtime, **more)
            assert (status, problem["code"]) == (400, code), problem


async def test_refusal_says_what_to_do_and_what_is_near(shared: System) -> None:
    await shared.declare("words:count", "words:shout")
    _, problem = await post(shared, operator="words:cuont")
    assert "Did you mean words:count" in problem["detail"]
    assert "interlock serve worker --runtime platform --operators DIR_OR_MODULE" in problem["detail"]
    # A name declared for one queue is unknown in another.
    status, _ = await post(shared, operator="words:count", runtime="spark")
    assert status == 400


async def test_declared_name_is_taken_and_stays_known_while_workers_restart(still: System, clock: Any) -> None:
    await still.declare("mine:work", "short")
    assert (await post(still, operator="mine:work"))[0] == 201
    assert (await post(still, operator="python", config={"function": "mine:work"}))[0] == 201
    assert (await deploy(still, "short"))[0] == 200
    clock.advance(6 * 86_400)
    assert (await deploy(still, "mine:work", "e"))[0] == 400  # no worker is live
    assert (await deploy(still, "mine:work", "e", "?force=true"))[0] == 200
    clock.advance(2 * 86_400)
    await still.declare("other:work")
    assert await still.value("select array_agg(operator) from interlock.operators") == ["other:work"]
    assert (await deploy(still, "short", "f"))[0] == 400


@pytest.mark.parametrize("name", ["cProfile:run", "nobody:nothing", "list_load"])
async def test_deploy_of_an_undeclared_operator_is_refused(shared: System, name: str) -> None:
    status, problem = await deploy(shared, name)
    assert status == 400
    assert problem["code"] in ("unknown_operator", "invalid_dag")


async def test_report_needs_a_worker_token_of_that_queue(shared: System) -> None:
    body = {"queue": "platform", "worker_id": "eve", "operators": ["os:system"]}
    reply = await shared.user("POST", "/internal/operators", json=body)
    assert reply.status_code in (401, 404)


async def test_org_is_held_to_its_operators_when_it_submits_and_deploys(system: System) -> None:
    await system.declare("acme.jobs:one", "other:two")
    org = await own_org(system)
    await limit(system, ["echo", "acme.*", "python"], org)
    for operator, config, status in (
        ("echo", {}, 201),
        ("acme.jobs:one", {}, 201),
        ("python", {"function": "acme.jobs:one"}, 201),
        ("sleep", {}, 403),
        ("other:two", {}, 403),
        ("python", {"function": "other:two"}, 403),
    ):
        assert (await post(system, operator=operator, config=config))[0] == status, operator
    assert (await deploy(system, "sleep"))[0] == 403
    assert (await deploy(system, "echo"))[0] == 200
    assert (await limit(system, None, org))["operators"] is None
    assert (await post(system, operator="sleep"))[0] == 201


async def test_limit_ends_attempts_of_jobs_that_are_older(system: System) -> None:
    task_id = await system.one(operator="sleep", policy={"max_attempts": 1})
    run = await system.submit([1, 2], operator="sleep", policy={"max_attempts": 1})
    await limit(system, ["echo"], await own_org(system))
    assert (await system.claim(task_id))["status"] != "Claimed"
    task = await system.task(task_id)
    assert (task["status"], task["error_class"]) == ("Failed", "OperatorNotAllowed")
    batch = await system.claim_many(run_id=run["run_id"], start=0, end=1, tokens=False, grouped=True)
    assert [claim for claim in batch["claims"] if claim["status"] == "Claimed"] == []
    assert batch.get("groups", []) == []


async def test_limited_org_exports_a_run(system: System) -> None:
    """No user can name the operators of the platform's own tasks, so a limit does not list them."""
    run = await system.submit([1], operator="sleep")
    (claim,) = (await system.claim_many(run_id=run["run_id"], start=0, end=0))["claims"]
    assert (await system.complete(claim)).status_code == 200
    await system.pass_of("run-counters")
    await limit(system, ["echo"], await own_org(system))
    view = (await system.user("POST", f"/v1/jobs/{run['job_id']}/exports", json={"format": "jsonl"})).json()
    while await system.pass_of("exports"):
        continue
    view = (await system.user("GET", f"/v1/jobs/{run['job_id']}/exports/{view['export_id']}")).json()
    assert (await system.claim(view["task_id"]))["status"] == "Claimed"


@pytest.mark.parametrize("operator", ["batch_query", "buffer_load", "list_load", "run_export"])
def test_no_limit_applies_to_tasks_of_the_platform(operator: str) -> None:
    org = UUID(int=1)
    assert refusal({org: ("echo",)}, org, operator, b"{}") is None
    assert refusal({org: ("echo",)}, org, "sleep", b"{}") is not None


async def test_rollback_to_an_operator_outside_the_limit_is_refused(system: System) -> None:
    org = await own_org(system)
    for operator in ("sleep", "echo"):
        assert (await deploy(system, operator))[1]["state"] == "Current"
    await limit(system, ["echo"], org)
    reply = await system.user("POST", "/v1/dags/d/rollback", json={})
    assert (reply.status_code, reply.json()["code"]) == (403, "operator_not_allowed")
    assert "Job 'a'" in reply.json()["detail"]
    await limit(system, None, org)
    assert (await system.user("POST", "/v1/dags/d/rollback", json={})).status_code == 200


async def test_only_the_platform_scope_limits_an_org(system: System) -> None:
    org = await own_org(system)
    identity = await system.kernel.access.principals.authenticate(system.admin_key)
    request = KeyRequest(user="local", role=Role.ADMIN, scopes=["admin", "jobs:write"])
    made = await system.kernel.access.principals.create_key(request, identity.org_id, granted_by=identity)
    for method, body in (("POST", {"operators": None}), ("GET", None)):
        reply = await system.user(
            method, f"/v1/orgs/{org}/operators", json=body, headers={"Authorization": f"Bearer {made.key}"}
        )
        assert reply.status_code == 403
    assert (await system.user("GET", "/v1/orgs/nobody/operators")).status_code == 404
    for wrong in (["a b"], ["*x"], [""], "echo", [1]):
        reply = await system.user("POST", f"/v1/orgs/{org}/operators", json={"operators": wrong})
        assert reply.status_code == 400
