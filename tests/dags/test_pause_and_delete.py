"""A DAG is paused, resumed and deleted with its sources; nothing that happens meanwhile is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from interlock.failpoints import FailpointError, arm, disarm
from tests.dags.test_cutover import READER, chain, states
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System, other_org

MANUAL = """
name: calls
jobs:
  - {name: called, operator: echo, activation: source, source: {kind: manual}, outputs: []}
  - {name: always, operator: echo, activation: source, source: {kind: always_on}, outputs: [beats]}
"""


@pytest.fixture
async def chained(system: System) -> DeployedDags:
    """A DAG with three partitions, processed by every job."""
    deployed = DeployedDags(system)
    await deployed.deploy(chain())
    await deployed.emit("chain", "follow", (0, 9), (10, 19), (20, 29))
    assert await deployed.work("chain", "derive", "roll") == 6
    return deployed


async def act(deployed: DeployedDags, action: str, dag: str = "chain", **body: Any) -> dict[str, Any]:
    return await deployed.act(dag, action, body)


async def delete(deployed: DeployedDags, dag: str = "chain", *, code: int = 200, **query: Any) -> dict[str, Any]:
    reply = await deployed.system.user("DELETE", f"/v1/dags/{dag}", params=query)
    assert reply.status_code == code, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def claims(deployed: DeployedDags, *task_ids: str) -> list[str]:
    """Tries to claim tasks. Returns what became of each claim."""
    batch = await deployed.system.claim_many(task_ids=list(task_ids))
    return [claim["status"] for claim in batch["claims"]]


async def messages(system: System) -> int:
    count: int = await system.value("select count(*) from interlock.queue_messages")
    return count


@contextmanager
def dying(place: str) -> Iterator[None]:
    async def die() -> None:
        raise FailpointError(place)

    arm(place, die)
    try:
        yield
    finally:
        disarm(place)


# Pause


async def test_paused_dag_hands_out_no_queued_task_and_lets_a_running_one_end(chained: DeployedDags) -> None:
    await chained.emit("chain", "follow", (30, 39), (40, 49))
    await chained.route()
    first, second = await chained.waiting("chain", "derive")
    running = await chained.system.claim(first)
    shown = await act(chained, "pause", reason="the node is down")
    assert (shown["paused"]["by"], shown["paused"]["reason"]) == ("root", "the node is down")
    assert all(job["paused"] for job in shown["jobs"])
    assert await chained.system.receive() != []
    assert await claims(chained, second) == ["NotClaimed"]
    assert (await chained.complete(running)).status_code == 200
    await chained.route()
    assert await chained.waiting("chain", "roll") == []
    explained = (await chained.system.user("GET", f"/v1/tasks/{second}/explain")).json()
    assert explained["reason"] == "dag_paused"
    assert "interlock dag resume chain" in explained["detail"]


async def test_resume_works_off_what_was_recorded_during_the_pause(chained: DeployedDags) -> None:
    await chained.emit("chain", "follow", (30, 39))
    await chained.route()
    (queued,) = await chained.waiting("chain", "derive")
    await act(chained, "pause")
    assert await claims(chained, queued) == ["NotClaimed"]
    await chained.system.value("delete from interlock.queue_messages returning 1")
    await chained.emit("chain", "follow", (40, 49), (50, 59))
    await chained.route()
    assert len(await chained.waiting("chain", "derive")) == 1
    assert await chained.system.pass_of("reconciler") == 0
    shown = await act(chained, "resume")
    assert shown["paused"] is None
    assert await chained.system.pass_of("job-wakes") == 3
    assert await messages(chained.system) == 1
    assert await chained.work("chain", "derive", "roll") == 6
    assert len(await chained.partitions("chain", "roll")) == 6


async def test_pause_is_idempotent_and_keeps_its_first_reason(chained: DeployedDags) -> None:
    first = await act(chained, "pause", reason="one")
    assert await act(chained, "pause", reason="two") == first
    assert (await act(chained, "resume"))["paused"] is None
    assert (await act(chained, "resume"))["paused"] is None
    assert await chained.system.value("select count(*) from interlock.pauses") == 0


async def test_triggers_and_always_on_sources_wait_for_the_resume(system: System) -> None:
    deployed = DeployedDags(system)
    await deployed.deploy(MANUAL)
    await act(deployed, "pause", "calls")
    sent = await system.user("POST", "/v1/dags/calls/jobs/called/events", json={"events": [{"payload": {"n": 1}}]})
    assert sent.status_code == 200, sent.text
    await deployed.run("triggers", "sources")
    assert await system.value("select count(*) from interlock.tasks") == 0
    listed = (await system.user("GET", "/v1/dags/calls/sources")).json()["sources"]
    assert {(one["job"], one["state"], one["paused"]) for one in listed} == {
        ("called", "paused", "paused by root"),
        ("always", "paused", "paused by root"),
    }
    await act(deployed, "resume", "calls")
    await deployed.run("triggers", "sources")
    assert await system.value("select count(*) from interlock.tasks") == 2


async def test_version_deployed_during_a_pause_is_built_after_the_resume(chained: DeployedDags) -> None:
    await act(chained, "pause")
    assert (await chained.deploy(chain(2)))["state"] == "Building"
    await chained.route()
    assert await chained.work("chain", "derive", "roll") == 0
    assert await chained.system.pass_of("cutover") == 0
    await act(chained, "resume")
    assert await chained.work("chain", "derive", "roll") == 6
    assert await chained.system.pass_of("cutover") == 1
    assert await states(chained) == ["Current", "Retired"]


async def test_pause_during_a_cutover_holds_the_new_generation(chained: DeployedDags) -> None:
    await chained.deploy(chain(2))
    await chained.work("chain", "derive", "roll")
    await act(chained, "pause")
    assert await chained.system.pass_of("cutover") == 1
    shown = await chained.view("chain")
    assert all(job["paused"] for job in shown["jobs"])
    assert shown["paused"] is not None
    held = await chained.system.value("select count(*) from interlock.pauses")
    assert held == len(shown["jobs"])
    await chained.emit("chain", "follow", (30, 39))
    assert await chained.work("chain", "derive", "roll") == 0
    await act(chained, "rollback")
    assert all(job["paused"] for job in (await chained.view("chain"))["jobs"])
    await act(chained, "resume")
    assert await chained.work("chain", "derive", "roll") > 0
    assert len(await chained.partitions("chain", "roll")) == 4


async def test_backpressure_leaves_the_pause_of_a_dag_alone(chained: DeployedDags) -> None:
    await act(chained, "pause")
    await chained.run("pressure")
    assert await chained.system.value("select count(*) from interlock.pauses") == 3
    listed = (await chained.system.user("GET", "/v1/pauses")).json()["pauses"]
    assert {one["reason"] for one in listed} == {"paused by root"}


@pytest.mark.parametrize("action", ["pause", "resume", "cancel"])
async def test_action_on_a_single_job_of_a_dag_says_what_to_use(chained: DeployedDags, action: str) -> None:
    job_id = await chained.job_id("chain", "derive")
    reply = await chained.system.user("POST", f"/v1/jobs/{job_id}/{action}")
    assert (reply.status_code, reply.json()["code"]) == (409, "job_of_a_dag")
    assert "interlock task cancel --job chain/derive" in reply.json()["detail"] or (
        f"interlock dag {action} chain" in reply.json()["detail"]
    )


@pytest.mark.parametrize("action", ["pause", "resume"])
async def test_crash_before_the_commit_changes_nothing(chained: DeployedDags, action: str) -> None:
    if action == "resume":
        await act(chained, "pause")
    before = await chained.view("chain")
    with dying("dag_control.before_commit"):
        reply = await chained.system.user("POST", f"/v1/dags/chain/{action}", json={})
    assert reply.status_code == 500
    assert await chained.view("chain") == before
    assert (await act(chained, action))["paused"] != before["paused"]


async def test_job_of_a_dag_is_found_by_dag_and_name(chained: DeployedDags) -> None:
    job_id = str(await chained.job_id("chain", "derive"))
    for name in ("chain%2Fderive", "chain%2fderive", job_id[:20]):
        found = await chained.system.user("GET", f"/v1/jobs/{name}")
        assert (found.status_code, found.json().get("job_id")) == (200, job_id), found.text
    for path in ("/v1/jobs/chain%2Fderive/tasks", "/v1/jobs/chain%2Fderive/runs", "/v1/tasks?job=chain/derive"):
        assert (await chained.system.user("GET", path)).status_code == 200, path
    assert (await chained.system.user("GET", "/v1/jobs/chain%2Fabsent")).status_code == 404


# Delete


async def test_dry_run_of_a_deletion_shows_its_effect_and_changes_nothing(chained: DeployedDags) -> None:
    await chained.deploy(READER)
    before = await chained.view("chain")
    answer = await delete(chained, dry_run=True)
    assert (answer["jobs"], answer["readers"], answer["dry_run"]) == (["derive", "follow", "roll"], ["reader"], True)
    assert {(one["job"], one["output"], one["partitions"]) for one in answer["outputs"]} == {
        ("follow", "blocks", 3),
        ("derive", "facts", 3),
        ("roll", "sums", 3),
    }
    assert await chained.view("chain") == before


async def test_deleted_dag_stops_and_its_data_stays_readable(chained: DeployedDags) -> None:
    await chained.emit("chain", "follow", (30, 39))
    await chained.route()
    (queued,) = await chained.waiting("chain", "derive")
    await delete(chained)
    for path in ("/v1/dags/chain", "/v1/dags/chain/versions", "/v1/jobs/chain%2Fderive"):
        assert (await chained.system.user("GET", path)).status_code == 404, path
    assert (await chained.system.user("GET", "/v1/dags")).json()["dags"] == []
    assert (await chained.system.user("GET", "/v1/jobs")).json()["jobs"] == []
    await chained.run("retirement")
    assert (await chained.system.task(queued))["status"] == "Canceled"
    facts = (await chained.system.user("GET", "/v1/datasets/facts")).json()
    assert facts["names"] == ["facts"]
    assert (await delete(chained, code=404))["detail"].startswith("DAG 'chain' was deleted by root")


async def test_deploy_restores_a_deleted_dag_with_its_data(chained: DeployedDags) -> None:
    old = await chained.job_id("chain", "derive")
    await delete(chained)
    await chained.run("retirement")
    assert (await chained.deploy(chain()))["state"] == "Current"
    assert await chained.job_id("chain", "derive") == old
    assert len(await chained.partitions("chain", "roll")) == 3
    await chained.emit("chain", "follow", (30, 39))
    assert await chained.work("chain", "derive", "roll") == 2


async def test_deletion_during_a_build_gives_up_both_versions(chained: DeployedDags) -> None:
    await chained.deploy(chain(2))
    await chained.route()
    await act(chained, "pause")
    await delete(chained)
    assert await chained.system.pass_of("cutover") == 0
    assert await chained.system.value("select count(*) from interlock.jobs where active or paused") == 0
    assert await chained.system.value("select count(*) from interlock.pauses") == 0
    await chained.run("retirement")
    assert await chained.work("chain", "derive", "roll") == 0


async def test_purge_deletes_the_data_in_steps_that_survive_a_crash(chained: DeployedDags) -> None:
    await chained.deploy(chain(2))
    await chained.work("chain", "derive", "roll")
    assert await chained.system.pass_of("cutover") == 1
    await delete(chained, purge=True)
    with dying("retirement.before_commit"), pytest.raises(FailpointError):
        await chained.run("retirement")
    assert await chained.system.value("select count(*) from interlock.partitions") > 0
    await chained.system.value("update interlock.tasks set status = 'Canceled' where status = 'Running' returning 1")
    while await chained.run("retirement"):
        continue
    assert await chained.system.value("select count(*) from interlock.partitions") == 0
    assert await chained.system.value("select count(*) from interlock.edges") == 0
    assert (await chained.system.user("GET", "/v1/datasets")).json()["datasets"] == []
    assert (await chained.system.user("GET", "/v1/datasets/facts")).status_code == 404
    deployed = await chained.deploy(chain())
    assert deployed["state"] == "Current"
    assert await chained.partitions("chain", "derive") == []


async def test_data_that_another_dag_reads_is_not_purged(chained: DeployedDags) -> None:
    await chained.deploy(READER)
    refused = await delete(chained, purge=True, code=409)
    assert (refused["code"], "'reader'" in refused["detail"]) == ("publication_in_use", True)
    assert (await chained.view("chain"))["current"] is not None
    assert (await delete(chained))["readers"] == ["reader"]


async def test_crash_before_the_commit_of_a_deletion_changes_nothing(chained: DeployedDags) -> None:
    before = await chained.view("chain")
    with dying("dag_control.before_commit"):
        await delete(chained, code=500)
    assert await chained.view("chain") == before
    await delete(chained)


async def test_another_org_cannot_pause_or_delete_a_dag(chained: DeployedDags) -> None:
    stranger = await other_org(chained.system)
    for method, path in (("POST", "/pause"), ("POST", "/resume"), ("DELETE", "")):
        reply = await chained.system.user(method, f"/v1/dags/chain{path}", key=stranger, json={})
        assert reply.status_code == 404, reply.text
    assert (await chained.view("chain"))["paused"] is None
