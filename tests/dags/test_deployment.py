"""Deploying DAGs over HTTP: files, plans, versions and permissions."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from interlock.wire.access import KeyRequest, Role
from tests.support.code_bundles import upload, zipped
from tests.support.dags import deploy
from tests.support.system import System

CHAIN = """
name: chain
jobs:
  - {name: follow, operator: echo, activation: source, source: {kind: manual}, outputs: [blocks]}
  - {name: derive, operator: echo, inputs: [{from: {job: follow, output: blocks}}], outputs: [facts]}
publish:
  facts: {from: {job: derive, output: facts}}
"""


async def post(system: System, content: str | bytes, media_type: str | None = "application/yaml", **more: Any) -> Any:
    headers = {"Content-Type": media_type} if media_type else {}
    return await system.user("POST", "/v1/dags", content=content, headers=headers, **more)


def refused(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    problem: dict[str, Any] = reply.json()
    assert (reply.status_code, problem["code"]) == (status, code), problem
    return problem


async def test_first_deploy_is_current_immediately(system: System) -> None:
    deployed = await deploy(system, CHAIN)
    assert deployed["state"] == "Current"
    assert [(job["name"], job["change"]) for job in deployed["plan"]] == [("derive", "added"), ("follow", "added")]
    shown = (await system.user("GET", "/v1/dags/chain")).json()
    assert [job["name"] for job in shown["jobs"]] == ["derive", "follow"]
    assert shown["publish"] == ["facts"]
    assert (shown["current"]["deployed_by"], shown["building"], shown["progress"]) == ("root", None, [])
    listed = (await system.user("GET", "/v1/dags")).json()["dags"]
    assert [(dag["name"], dag["current"]["content_hash"]) for dag in listed] == [("chain", deployed["content_hash"])]


async def test_tasks_of_a_dags_job_are_found_by_both_its_names(shared: System) -> None:
    text = CHAIN.replace("name: chain", "name: named").replace("facts:", "f1:")
    await deploy(shared, text)
    trigger = {"events": [{"payload": {"n": 1}}]}
    assert (await shared.user("POST", "/v1/dags/named/jobs/follow/events", json=trigger)).status_code == 200
    reply = await shared.user("GET", "/v1/tasks?job=named/follow")
    assert reply.status_code == 200
    assert (await shared.user("GET", "/v1/tasks?job=follow")).status_code == 404
    assert (await shared.user("GET", "/v1/tasks?job=other/follow")).status_code == 404


async def test_same_content_in_another_layout_changes_nothing(shared: System) -> None:
    text = CHAIN.replace("name: chain", "name: twice")
    first = await deploy(shared, text.replace("facts:", "f2:"))
    again = await deploy(shared, "# The same.\n" + text.replace("facts:", "f2:"))
    assert again["dag_version"] == first["dag_version"]
    assert {job["change"] for job in again["plan"]} == {"kept"}
    versions = (await shared.user("GET", "/v1/dags/twice/versions")).json()["versions"]
    assert [version["state"] for version in versions] == ["Current"]


@pytest.mark.parametrize("media_type", ["application/yaml", "text/plain; charset=utf-8", "application/x-yaml", None])
async def test_file_may_be_sent_as_yaml(shared: System, media_type: str | None) -> None:
    text = CHAIN.replace("name: chain", "name: typed").replace("facts:", "f3:")
    assert (await post(shared, text.encode(), media_type)).status_code == 200


async def test_file_may_be_sent_within_json_and_in_no_other_type(shared: System) -> None:
    text = CHAIN.replace("name: chain", "name: typed").replace("facts:", "f3:")
    assert (await shared.user("POST", "/v1/dags", json={"yaml": text})).status_code == 200
    refused(await shared.user("POST", "/v1/dags", json={"yaml": text, "more": 1}), 400, "invalid_request")
    refused(await post(shared, text, "application/xml"), 415, "unsupported_media_type")


async def test_dry_run_returns_the_plan_and_writes_nothing(system: System) -> None:
    planned = await deploy(system, CHAIN, dry_run="true")
    assert (planned["dry_run"], planned["dag_version"], planned["state"]) == (True, None, None)
    assert [job["new_versions"] for job in planned["plan"]] == [["facts"], ["blocks"]]
    refused(await system.user("GET", "/v1/dags/chain"), 404, "not_found")
    assert await system.value("select count(*) from interlock.jobs") == 0
    await deploy(system, CHAIN)
    planned = await deploy(system, CHAIN.replace("operator: echo, inputs", "operator: sleep, inputs"), dry_run="true")
    assert [(job["name"], job["change"]) for job in planned["plan"]] == [("derive", "changed"), ("follow", "kept")]
    assert await system.value("select count(*) from interlock.dag_versions") == 1


async def test_file_with_problems_is_refused_with_all_of_them(shared: System) -> None:
    text = CHAIN.replace("operator: echo, activation", "operator: ecko, activation").replace(
        "job: follow", "job: folow"
    )
    problem = refused(await post(shared, text), 400, "invalid_dag")
    told = [(each["line"], each["suggestion"]) for each in problem["problems"]]
    assert told == [(4, "write echo"), (5, "write follow")]
    assert all(each["column"] > 1 and each["message"] for each in problem["problems"])
    problem = refused(await post(shared, "name: [", "text/yaml"), 400, "invalid_dag")
    assert problem["problems"]
    unknown = CHAIN.replace("{job: follow, output: blocks}", "{dataset: nothing}")
    problem = refused(await post(shared, unknown), 400, "invalid_dag")
    assert problem["problems"][0]["line"] == 5
    assert "no DAG publishes 'nothing'" in problem["detail"]


async def test_own_operator_can_be_declared(shared: System) -> None:
    text = (
        CHAIN.replace("name: chain", "name: own").replace("facts:", "f4:").replace("operator: echo", "operator: mine")
    )
    refused(await post(shared, text), 400, "invalid_dag")
    refused(await post(shared, text, params={"operator": ["mine", "other"]}), 400, "unknown_operator")
    await shared.declare("mine")
    assert (await post(shared, text, params={"operator": ["mine", "other"]})).status_code == 200
    odd = text.replace("operator: mine", "operator: 'not a name'")
    refused(await post(shared, odd, params={"operator": "not a name"}), 400, "invalid_dag")


async def test_runtime_without_a_runner_is_refused(shared: System) -> None:
    bundle = await upload(shared, zipped())
    code = f"config: {{bundle: 'sha256:{bundle['sha256']}', entrypoint: main.handler}}"
    text = CHAIN.replace("operator: echo, inputs", f"operator: udf, runtime: lambda, {code}, inputs")
    refused(await post(shared, text), 400, "runtime_without_runner")
    capped = CHAIN.replace("operator: echo, inputs", "operator: echo, scaling: {max_concurrency_per_key: 1}, inputs")
    assert (await post(shared, capped)).status_code == 400


async def test_file_that_is_too_large_is_refused(shared: System) -> None:
    refused(await post(shared, CHAIN + "#" * 1_000_000), 413, "dag_too_large")


async def test_reader_may_not_deploy(shared: System) -> None:
    await deploy(shared, CHAIN)
    reader = (
        await shared.kernel.access.principals.create_key(
            KeyRequest(user="reader", role=Role.READER), shared.org_id, granted_by=None
        )
    ).key
    for path in ("/v1/dags", "/v1/dags/chain", "/v1/dags/chain/versions", "/v1/dags/chain/document"):
        assert (await shared.user("GET", path, key=reader)).status_code == 200
    refused(await post(shared, CHAIN, key=reader), 403, "forbidden")
    for action in ("rollback", "cutover", "purge"):
        refused(await shared.user("POST", f"/v1/dags/chain/{action}", key=reader, json={}), 403, "forbidden")


async def test_another_org_sees_nothing_and_may_reuse_names(shared: System) -> None:
    await deploy(shared, CHAIN)
    org = await shared.kernel.access.principals.create_org("others")
    key = (
        await shared.kernel.access.principals.create_key(
            KeyRequest(user="x", role=Role.ADMIN), org.org_id, granted_by=None
        )
    ).key
    assert (await shared.user("GET", "/v1/dags", key=key)).json()["dags"] == []
    for path in ("", "/versions", "/document"):
        refused(await shared.user("GET", f"/v1/dags/chain{path}", key=key), 404, "not_found")
    for action, body in (("rollback", {}), ("cutover", {}), ("purge", {"version": "abcd"})):
        refused(await shared.user("POST", f"/v1/dags/chain/{action}", key=key, json=body), 404, "not_found")
    reads = "name: spy\njobs:\n  - {name: a, operator: echo, inputs: [{from: {dataset: facts}}]}\n"
    refused(await post(shared, reads, key=key), 400, "invalid_dag")
    job = (await shared.user("GET", "/v1/dags/chain")).json()["jobs"][0]["job_id"]
    refused(await shared.user("GET", f"/v1/jobs/{job}", key=key), 404, "not_found")
    assert (await post(shared, CHAIN, key=key)).status_code == 200


async def test_jobs_of_a_dag_are_read_by_id_and_never_submitted_to_by_name(shared: System) -> None:
    await deploy(shared, CHAIN)
    jobs = (await shared.user("GET", "/v1/dags/chain")).json()["jobs"]
    derive = (await shared.user("GET", f"/v1/jobs/{jobs[0]['job_id']}")).json()
    assert (derive["dag_name"], derive["name"]) == ("chain", "derive")
    refused(await shared.user("GET", "/v1/jobs/derive"), 404, "not_found")
    refused(await shared.user("POST", "/v1/jobs", json={"name": "derive", "tasks": [1]}), 404, "not_found")
    submitted = await shared.submit([1], name="derive", operator="sleep", update=True)
    assert submitted["job_id"] != jobs[0]["job_id"]
    assert (await shared.user("GET", f"/v1/jobs/{jobs[0]['job_id']}")).json()["operator"] == "echo"
    output = {name: jobs[0]["outputs"][0][name] for name in ("dataset_uuid", "dataset_version")}
    foreign = {"operator": "echo", "tasks": [1], "outputs": [output]}
    refused(await shared.user("POST", "/v1/jobs", json=foreign), 409, "dataset_of_a_dag")


async def test_output_keeps_its_dataset_through_all_versions(system: System) -> None:
    uuids = set()
    for operator in ("echo", "sleep", "fail"):
        await deploy(system, CHAIN.replace("operator: echo, inputs", f"operator: {operator}, inputs"))
        jobs = (await system.user("GET", "/v1/dags/chain")).json()["jobs"]
        uuids.add(jobs[0]["outputs"][0]["dataset_uuid"])
    await deploy(
        system, "name: chain\njobs: [{name: other, operator: echo, activation: source, source: {kind: manual}}]"
    )
    assert [job["name"] for job in (await system.user("GET", "/v1/dags/chain")).json()["jobs"]] == ["other"]
    await deploy(system, CHAIN)
    uuids.add((await system.user("GET", "/v1/dags/chain")).json()["jobs"][0]["outputs"][0]["dataset_uuid"])
    assert len(uuids) == 1


async def test_canonical_document_deploys_the_same(shared: System) -> None:
    deployed = await deploy(shared, CHAIN)
    shown = await shared.user("GET", "/v1/dags/chain/document")
    assert shown.json()["content_hash"] == deployed["content_hash"]
    document = httpx.Response(200, content=shown.content).json()["document"]
    reply = await shared.user(
        "POST", "/v1/dags", json={"yaml": httpx.Request("POST", "http://x", json=document).content.decode()}
    )
    assert reply.json()["dag_version"] == deployed["dag_version"]


async def test_versions_and_dags_are_paginated(system: System) -> None:
    for number in range(3):
        await deploy(system, CHAIN.replace("outputs: [facts]", f"outputs: [facts], config: {{n: {number}}}"))
        await deploy(system, CHAIN.replace("name: chain", f"name: dag{number}").replace("facts: {", f"f{number}: {{"))
    for path, items in (("/v1/dags", "dags"), ("/v1/dags/chain/versions", "versions")):
        whole = (await system.user("GET", path)).json()[items]
        first = (await system.user("GET", f"{path}?limit=2")).json()
        rest = (await system.user("GET", f"{path}?limit=2&cursor={first['next_cursor']}")).json()
        assert first[items] + rest[items] == whole
    refused(await system.user("GET", "/v1/dags/chain/versions?cursor=x"), 400, "bad_cursor")


async def test_ambiguous_version_prefix_is_refused(system: System) -> None:
    hashes = [
        (await deploy(system, CHAIN.replace("outputs: [facts]", f"outputs: [facts], config: {{n: {n}}}")))[
            "content_hash"
        ]
        for n in range(3)
    ]
    refused(await system.user("POST", "/v1/dags/chain/rollback", json={"to": "0000"}), 404, "not_found")
    refused(await system.user("POST", "/v1/dags/chain/rollback", json={"to": "xyz!"}), 400, "invalid_request")
    await system.value("update interlock.dag_versions set content_hash = 'abcd' || content_hash returning 1")
    refused(await system.user("POST", "/v1/dags/chain/rollback", json={"to": "abcd"}), 400, "ambiguous_version")
    back = await system.user("POST", "/v1/dags/chain/rollback", json={"to": f"abcd{hashes[0]}"[:20]})
    assert back.json()["state"] == "Current"
    again = await system.user("POST", "/v1/dags/chain/rollback", json={"to": f"abcd{hashes[0]}"[:20]})
    assert again.json()["dag_version"] == back.json()["dag_version"]


async def test_concurrent_deploys_end_with_one_current_version(system: System) -> None:
    texts = [CHAIN.replace("outputs: [facts]", f"outputs: [facts], config: {{n: {n}}}") for n in range(8)]
    replies = await asyncio.gather(*(post(system, text) for text in texts for _ in range(2)))
    assert {reply.status_code for reply in replies} == {200}
    versions = (await system.user("GET", "/v1/dags/chain/versions")).json()["versions"]
    assert sorted(version["state"] for version in versions) == ["Current"] + ["Retired"] * 7
    current = next(version for version in versions if version["state"] == "Current")
    assert current["content_hash"] in {reply.json()["content_hash"] for reply in replies}
    wrong = """
        select (select count(*) from interlock.jobs where current and active)
             - (select count(*) from interlock.jobs j
                join interlock.dag_version_jobs m on m.job_id = j.job_id
                join interlock.dag_versions v on v.dag_version = m.dag_version and v.state = 'Current'
                join interlock.dataset_versions w on w.job_id = j.job_id
                join interlock.datasets d on d.current_version = w.dataset_version
                where j.current and j.active)"""
    assert await system.value(wrong) == 0
    assert await system.value("select count(*) from interlock.jobs where current") == 2
