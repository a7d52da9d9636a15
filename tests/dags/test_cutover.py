"""A changed DAG is built next to the current version, replaces it when it is complete, and can be rolled back."""

from __future__ import annotations

from typing import Any

import pytest

from interlock.failpoints import FailpointError, arm, disarm
from tests.support.dags import deploy
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System

CHAIN = """
name: chain
jobs:
  - {name: follow, operator: echo, activation: source, source: {kind: manual}, outputs: [blocks]}
  - {name: derive, operator: echo, inputs: [{from: {job: follow, output: blocks}}], outputs: [facts],
     config: {version: VERSION}, priority: PRIORITY}
  - {name: roll, operator: echo, inputs: [{from: {job: derive, output: facts}}], outputs: [sums]}
publish:
  facts: {from: {job: derive, output: facts}}
"""
READER = """
name: reader
jobs:
  - {name: look, operator: echo, inputs: [{from: {dataset: facts}}], outputs: [seen]}
"""


def chain(version: int = 1, priority: str = "normal") -> str:
    return CHAIN.replace("VERSION", str(version)).replace("PRIORITY", priority)


@pytest.fixture
async def chained(system: System) -> DeployedDags:
    """A DAG with three partitions, processed by every job."""
    deployed = DeployedDags(system)
    await deployed.deploy(chain())
    await deployed.emit("chain", "follow", (0, 9), (10, 19), (20, 29))
    assert await deployed.work("chain", "derive", "roll") == 6
    return deployed


async def states(deployed: DeployedDags) -> list[str]:
    reply = await deployed.system.user("GET", "/v1/dags/chain/versions")
    return [version["state"] for version in reply.json()["versions"]]


async def test_changed_job_and_its_downstream_are_built_next_to_the_current_version(chained: DeployedDags) -> None:
    old = {name: await chained.job_id("chain", name) for name in ("follow", "derive", "roll")}
    deployed = await chained.deploy(chain(2))
    assert deployed["state"] == "Building"
    changes = {job["name"]: (job["change"], job["new_versions"]) for job in deployed["plan"]}
    assert changes == {"follow": ("kept", []), "derive": ("changed", ["facts"]), "roll": ("downstream", ["sums"])}
    assert [job["inputs"][0]["partitions"] for job in deployed["plan"] if job["inputs"]] == [3, 3]
    shown = await chained.view("chain")
    assert {job["name"]: job["job_id"] for job in shown["jobs"]} == {name: str(job_id) for name, job_id in old.items()}
    assert {each["name"]: each["complete"] for each in shown["progress"]} == {"derive": False, "roll": True}
    assert await chained.system.pass_of("cutover") == 0
    assert await chained.work("chain", "derive", "roll") == 6
    assert await chained.system.pass_of("cutover") == 1
    shown = await chained.view("chain")
    new = {job["name"]: job for job in shown["jobs"]}
    assert new["follow"]["job_id"] == str(old["follow"])
    assert new["derive"]["job_id"] != str(old["derive"])
    assert (shown["current"]["content_hash"], shown["building"]) == (deployed["content_hash"], None)
    for name in ("derive", "roll"):
        generation = await chained.job_id("chain", name)
        version = await chained.version_of(generation)
        made = await chained.locations(version)
        assert set(made) == {(0, 9), (10, 19), (20, 29)}
        assert all(where.startswith(str(version)) for where in made.values())
        assert (
            await chained.system.value(
                "select current_version from interlock.datasets where dag_name = 'chain' and job_name = $1", name
            )
            == version
        )
    assert await states(chained) == ["Current", "Retired"]


async def test_version_is_complete_only_when_everything_downstream_is(chained: DeployedDags) -> None:
    await chained.deploy(chain(2))
    assert await chained.work("chain", "derive") == 3
    assert await chained.system.pass_of("cutover") == 0
    await chained.work("chain", "roll")
    assert await chained.system.pass_of("cutover") == 1


async def test_change_during_a_build_reaches_both_generations(chained: DeployedDags) -> None:
    await chained.deploy(chain(2))
    await chained.emit("chain", "follow", (30, 39))
    await chained.work("chain", "derive", "roll")
    for job_id in await chained.generations("chain", "roll"):
        assert len(await chained.locations(await chained.version_of(job_id))) == 4
    assert await chained.system.pass_of("cutover") == 1
    await chained.emit("chain", "follow", (40, 49))
    await chained.work("chain", "derive", "roll")
    old, new = [
        await chained.locations(await chained.version_of(job)) for job in await chained.generations("chain", "roll")
    ]
    assert (len(old), len(new)) == (4, 5)


async def test_tuning_changes_a_job_in_place_and_builds_nothing(chained: DeployedDags) -> None:
    old = await chained.job_id("chain", "derive")
    deployed = await chained.deploy(chain(1, "bulk"))
    assert deployed["state"] == "Current"
    assert {job["name"]: job["change"] for job in deployed["plan"]} == {
        "follow": "kept",
        "derive": "tuned",
        "roll": "kept",
    }
    assert await chained.job_id("chain", "derive") == old
    assert (await chained.system.user("GET", f"/v1/jobs/{old}")).json()["priority"] == "bulk"
    await chained.act("chain", "rollback")
    assert (await chained.system.user("GET", f"/v1/jobs/{old}")).json()["priority"] == "normal"
    assert await states(chained) == ["Retired", "Current"]


async def test_rollback_swaps_back_and_processes_what_it_missed(chained: DeployedDags) -> None:
    first = {name: await chained.job_id("chain", name) for name in ("derive", "roll")}
    await chained.deploy(chain(2))
    await chained.work("chain", "derive", "roll")
    assert await chained.system.pass_of("cutover") == 1
    await chained.emit("chain", "follow", (30, 39))
    await chained.work("chain", "derive", "roll")
    back = await chained.act("chain", "rollback")
    assert back["state"] == "Current"
    assert {name: await chained.job_id("chain", name) for name in first} == first
    assert await chained.work("chain", "derive", "roll") == 2
    for job_id in first.values():
        assert len(await chained.locations(await chained.version_of(job_id))) == 4
    assert (await chained.deploy(chain(2)))["state"] == "Current"
    assert await states(chained) == ["Current", "Retired"]


async def test_tasks_of_a_retired_generation_are_recreated_on_rollback(
    chained: DeployedDags,
) -> None:
    first = await chained.job_id("chain", "derive")
    await chained.emit("chain", "follow", (30, 39), (40, 49))
    await chained.route()
    running = await chained.system.claim(str((await chained.waiting_of(first))[0]))
    await chained.deploy(chain(2))
    await chained.act("chain", "cutover")
    assert await chained.system.pass_of("retirement") == 2
    assert await chained.waiting_of(first) == []
    statuses = (
        "select array_agg(status::text order by task_id) from interlock.tasks where job_id = $1 and cancel_requested"
    )
    assert await chained.system.value(statuses, first) == ["Running", "Canceled"]
    # A running task may end, and commits to the version of its own generation.
    assert (await chained.complete(running)).status_code == 200
    assert len(await chained.locations(await chained.version_of(first))) == 4
    await chained.act("chain", "rollback")
    while await chained.system.pass_of("retirement"):
        continue
    await chained.work("chain", "derive", "roll")
    assert len(await chained.locations(await chained.version_of(first))) == 5
    assert len(await chained.locations(await chained.version("chain", "roll"))) == 5


async def test_readers_of_another_dag_follow_the_swap_and_reread_everything(chained: DeployedDags) -> None:
    await deploy(chained.system, READER)
    reader = DeployedDags(chained.system)
    look = await reader.job_id("reader", "look")
    assert await reader.work("reader", "look") == 3
    await chained.deploy(chain(2))
    await chained.work("chain", "derive", "roll")
    assert await chained.system.pass_of("cutover") == 1
    version = await chained.version("chain", "derive")
    inputs = await chained.system.value("select inputs from interlock.jobs where job_id = $1", look)
    assert str(version) in inputs
    assert await reader.work("reader", "look") == 3
    await chained.act("chain", "rollback")
    assert await reader.work("reader", "look") == 3


async def test_published_name_read_by_another_dag_cannot_be_removed(chained: DeployedDags) -> None:
    await deploy(chained.system, READER)
    without = chain(2).replace("publish:\n  facts: {from: {job: derive, output: facts}}", "")
    elsewhere = chain(1).replace(
        "facts: {from: {job: derive, output: facts}}", "facts: {from: {job: roll, output: sums}}"
    )
    for text in (without, elsewhere):
        reply = await chained.system.user(
            "POST", "/v1/dags", content=text, headers={"Content-Type": "application/yaml"}
        )
        assert (reply.status_code, reply.json()["code"]) == (409, "publication_in_use")
        assert "'reader'" in reply.json()["detail"]
    taken = READER.replace("outputs: [seen]}", "outputs: [seen]}\npublish:\n  facts: {from: {job: look, output: seen}}")
    reply = await chained.system.user(
        "POST",
        "/v1/dags",
        content=taken.replace("name: reader", "name: thief").replace("dataset: facts", "dataset: factz"),
        headers={"Content-Type": "application/yaml"},
    )
    problems = reply.json()["problems"]
    assert reply.status_code == 400
    assert [(each["line"], each["suggestion"]) for each in problems] == [
        (4, "write facts"),
        (6, "publish it under another name"),
    ]


async def test_newer_deploy_abandons_the_build(chained: DeployedDags) -> None:
    await chained.deploy(chain(2))
    await chained.work("chain", "derive")
    abandoned = (await chained.generations("chain", "derive"))[-1]
    await chained.deploy(chain(3))
    assert await states(chained) == ["Building", "Abandoned", "Current"]
    while await chained.system.pass_of("retirement"):
        continue
    assert await chained.locations(await chained.version_of(abandoned)) == {}
    await chained.work("chain", "derive", "roll")
    assert await chained.system.pass_of("cutover") == 1
    again = await chained.deploy(chain(2))
    assert again["state"] == "Building"
    assert await states(chained) == ["Building", "Current", "Abandoned", "Retired"]


async def test_deploy_of_the_current_file_abandons_the_build(chained: DeployedDags) -> None:
    first = await chained.deploy(chain())
    building = await chained.deploy(chain(2))
    assert await chained.deploy(chain(2)) == building
    assert (await chained.deploy(chain()))["dag_version"] == first["dag_version"]
    assert await states(chained) == ["Abandoned", "Current"]
    refused = await chained.act("chain", "cutover", status=409)
    assert refused["code"] == "nothing_building"


async def test_purge_of_a_retired_version_deletes_everything_only_it_has(chained: DeployedDags) -> None:
    old = {name: await chained.job_id("chain", name) for name in ("follow", "derive", "roll")}
    first, second = (await chained.deploy(chain()))["content_hash"], (await chained.deploy(chain(2)))["content_hash"]
    for version in (first, second):
        assert (await chained.act("chain", "purge", {"version": version[:10]}, status=409))["code"] == "version_in_use"
    await chained.work("chain", "derive", "roll")
    assert await chained.system.pass_of("cutover") == 1
    assert (await chained.act("chain", "purge", {"version": first[:10]}))["state"] == "Purged"
    while await chained.system.pass_of("retirement"):
        continue
    for name in ("derive", "roll"):
        assert await chained.locations(await chained.version_of(old[name])) == {}
        for table in ("edges", "materialisations"):
            left = f"select count(*) from interlock.{table} where job_id = $1"
            assert await chained.system.value(left, old[name]) == 0
    assert len(await chained.locations(await chained.version_of(old["follow"]))) == 3
    assert (await chained.act("chain", "rollback", status=409))["code"] == "nothing_retired"
    assert (await chained.act("chain", "rollback", {"to": first[:12]}, status=409))["code"] == "not_retired"


async def test_stream_is_read_to_its_end_before_the_cutover(system: System) -> None:
    chained = DeployedDags(system)
    await chained.deploy(chain())
    await chained.emit("chain", "follow", 99)
    assert await chained.work("chain", "derive", "roll") == 2
    await chained.deploy(chain(2))
    assert (await chained.view("chain"))["progress"][0]["unread"] == 100
    await chained.emit("chain", "follow", 149)
    await chained.work("chain", "derive", "roll")
    assert await chained.system.pass_of("cutover") == 1
    new = await chained.locations(await chained.version("chain", "roll"))
    assert set(new) == {(0, 99), (100, 149)} or set(new) == {(0, 149)}


async def test_always_on_source_catches_up_before_the_cutover(system: System) -> None:
    chained = DeployedDags(system)
    text = chain().replace("kind: manual", "kind: always_on")
    await chained.deploy(text)
    await chained.emit("chain", "follow", 99)
    building = await chained.deploy(text.replace("outputs: [blocks]}", "outputs: [blocks], config: {from: 5}}"))
    assert building["state"] == "Building"
    assert (await chained.view("chain"))["progress"][1]["catching_up"] is True
    new = (await chained.generations("chain", "follow"))[-1]
    await chained.emit("chain", "follow", 98, job_id=new)
    await chained.work("chain", "derive", "roll")
    assert await chained.system.pass_of("cutover") == 0
    await chained.emit("chain", "follow", 99, job_id=new)
    await chained.work("chain", "derive", "roll")
    assert await chained.system.pass_of("cutover") == 1


async def test_accepted_triggers_of_a_source_go_to_its_successor(system: System) -> None:
    chained = DeployedDags(system)
    await chained.deploy(chain())
    old = await chained.job_id("chain", "follow")
    told = "/v1/dags/chain/jobs/follow/events"
    for number in range(3):
        reply = await system.user("POST", told, json={"events": [{"payload": {"n": number}}]})
        assert reply.status_code in (200, 201, 202), reply.text
    await system.pass_of("triggers")
    assert len(await chained.waiting_of(old)) == 3
    await chained.deploy(chain().replace("outputs: [blocks]}", "outputs: [blocks], config: {from: 5}}"))
    new = await chained.job_id("chain", "follow")
    assert new != old
    assert await system.pass_of("retirement") == 3
    await system.pass_of("triggers")
    assert await chained.waiting_of(old) == []
    assert len(await chained.waiting_of(new)) == 3
    payloads = "select array_agg((payload ->> 'n')::int order by task_id) from interlock.tasks where job_id = $1"
    assert await system.value(payloads, new) == [0, 1, 2]


@pytest.mark.parametrize("place", ["deploy.before_commit", "cutover.before_commit"])
async def test_crash_before_the_commit_changes_nothing(chained: DeployedDags, place: str) -> None:
    before = await _registry(chained)
    if place == "cutover.before_commit":
        await chained.deploy(chain(2))
        await chained.work("chain", "derive", "roll")
        before = await _registry(chained)

    async def die() -> None:
        raise FailpointError(place)

    arm(place, die)
    try:
        if place == "cutover.before_commit":
            with pytest.raises(FailpointError):
                await chained.system.pass_of("cutover")
        else:
            reply = await chained.system.user("POST", "/v1/dags", json={"yaml": chain(2)})
            assert reply.status_code == 500
    finally:
        disarm(place)
    assert await _registry(chained) == before
    await chained.deploy(chain(2))
    await chained.work("chain", "derive", "roll")
    assert await chained.system.pass_of("cutover") == 1


async def _registry(chained: DeployedDags) -> Any:
    return await chained.system.value(
        "select (select json_agg(v order by v.dag_version) from interlock.dag_versions v)::text"
        " || (select json_agg((j.job_id, j.current, j.active) order by j.job_id) from interlock.jobs j)::text"
        " || (select json_agg(d order by d.dataset_uuid) from interlock.datasets d)::text"
        " || (select count(*) from interlock.edges)"
    )
