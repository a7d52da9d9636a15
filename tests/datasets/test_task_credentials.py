"""Credentials of attempts for objects in a directory: their reach, and their end with the lease."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from interlock import failpoints
from interlock.access.object_tokens import LEASE_SECONDS
from interlock.apps.app import open_app
from interlock.client import Fence, TaskClient
from interlock.clock import ManualClock
from interlock.errors import Forbidden
from tests.support.dataset_files import marked, path_of
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System, fence, running
from tests.support.token_parts import part

DAG = """
name: chain
jobs:
  - { name: feed, operator: echo, activation: source, source: { kind: manual }, outputs: [logs] }
  - { name: other, operator: echo, activation: source, source: { kind: manual }, outputs: [logs] }
  - { name: derive, operator: echo, inputs: [{ from: { job: feed, output: logs } }], outputs: [facts] }
"""

RANGES = """
name: ranges
jobs:
  - { name: feed, operator: echo, activation: source, source: { kind: manual }, outputs: [logs] }
  - name: tens
    runtime: dispatcher
    operator: range_splitter
    inputs: [{ from: { job: feed, output: logs }, where: "topic0 = 'a'" }]
    outputs: [tens]
    config: { size: 10 }
  - name: fives
    runtime: dispatcher
    operator: range_splitter
    inputs: [{ from: { job: tens, output: tens } }]
    outputs: [fives]
    config: { size: 5 }
  - name: sum
    operator: echo
    inputs: [{ from: { job: fives, output: fives }, where: "removed = false" }]
    outputs: [sums]
"""

READER = """
name: reader
jobs:
  - name: tens
    runtime: dispatcher
    operator: range_splitter
    inputs: [{ from: { dataset: feed_logs } }]
    outputs: [tens]
    config: { size: 10 }
  - { name: sum, operator: echo, inputs: [{ from: { job: tens, output: tens } }], outputs: [sums] }
"""

PUBLISHER = """
name: publisher
jobs:
  - name: feed
    operator: echo
    activation: source
    source: { kind: manual }
    outputs: [logs]
    config: { n: NUMBER }
publish:
  feed_logs: { from: { job: feed, output: logs } }
"""


async def asked(system: System, claim: dict[str, Any], **other: Any) -> httpx.Response:
    return await system.attempt("/v1/task/credentials", claim["capability_token"], fence(claim) | other)


async def minted(system: System, claim: dict[str, Any]) -> dict[str, Any]:
    reply = await asked(system, claim)
    assert reply.status_code == 200, reply.text
    given: dict[str, Any] = reply.json()
    return given


class Holder:
    """A client that has only an object token."""

    def __init__(self, system: System, given: dict[str, Any]) -> None:
        self._system = system
        self._given = given

    async def ask(self, method: str, uri: str, query: str = "", **more: Any) -> httpx.Response:
        key = uri.removeprefix(f"{self._system.kernel.settings.objects_root}/")
        url = f"{self._given['endpoint']}/v1/objects/{key}{query}"
        headers = {"Authorization": f"Bearer {self._given['object_token']}"}
        return await self._system.http.request(method, url, headers=headers, **more)

    async def list(self, prefix: str) -> httpx.Response:
        key = prefix.removeprefix(f"{self._system.kernel.settings.objects_root}/")
        headers = {"Authorization": f"Bearer {self._given['object_token']}"}
        url = f"{self._given['endpoint']}/v1/objects"
        return await self._system.http.get(url, headers=headers, params={"prefix": key})

    async def listed(self, prefix: str) -> set[str]:
        reply = await self.list(prefix)
        assert reply.status_code == 200, reply.text
        return {f"{self._system.kernel.settings.objects_root}/{one['key']}" for one in reply.json()["objects"]}


async def holder(system: System, claim: dict[str, Any]) -> Holder:
    return Holder(system, await minted(system, claim))


@pytest.fixture
async def flow(still: System) -> DeployedDags:
    flow = DeployedDags(still)
    await flow.start(DAG)
    return flow


async def started(flow: DeployedDags, job: str, dag: str = "chain") -> dict[str, Any]:
    """Starts an attempt of the job that has written a file and has not reported it."""
    task_id = uuid4()
    await flow.system.value(
        "insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)"
        ' values ($1, $2, $3, 3, 0, \'{"start": 0, "end": 9}\')',
        task_id,
        flow.system.org_id,
        await flow.job_id(dag, job),
    )
    claim = await flow.system.claim(str(task_id))
    marked(claim["task"]["outputs"][0]["write_prefix"], "0_9.parquet")
    return claim


def file_of(claim: dict[str, Any]) -> str:
    return f"{claim['task']['outputs'][0]['write_prefix']}0_9.parquet"


async def committed(flow: DeployedDags, claim: dict[str, Any]) -> str:
    """Completes the attempt with its file, which counts from now on. Returns the file."""
    grant = claim["task"]["outputs"][0]
    scope = {name: grant[name] for name in ("dataset_uuid", "dataset_version")} | {"start": 0, "end": 9}
    output = scope | {"output_index": 0} | marked(grant["write_prefix"], "0_9.parquet")
    reply = await flow.system.complete(claim, outputs=[output], events=[scope])
    assert reply.status_code == 200, reply.text
    await flow.run("router")
    return file_of(claim)


async def derive(flow: DeployedDags) -> dict[str, Any]:
    return await flow.system.claim((await flow.waiting("chain", "derive"))[0])


# Granted prefixes


async def test_credentials_cover_the_prefixes_until_the_lease_ends(flow: DeployedDags) -> None:
    await committed(flow, await started(flow, "feed"))
    claim = await derive(flow)
    reply = await asked(flow.system, claim)
    given, output = reply.json(), claim["task"]["outputs"][0]
    assert reply.headers["cache-control"] == "no-store"
    assert given["scheme"] == "file"
    assert given["read_prefixes"] == [claim["task"]["inputs"][0]["read_prefix"]]
    assert given["write_prefixes"] == sorted([output["write_prefix"], output["buffer_prefix"]])
    assert datetime.fromisoformat(given["expiration"]) == datetime.fromisoformat(claim["lease_expires_at"])
    token = part(given["object_token"], 1)
    assert (token["aud"], token["sub"]) == ("trace.objects", f"task:{claim['task_id']}")
    assert claim["lease_token"] not in str(token)
    assert not {"access_key_id", "secret_access_key", "session_token"} & given.keys()


async def header_alone(system: System, claim: dict[str, Any]) -> httpx.Response:
    headers = {"X-Trace-Task-Capability": claim["capability_token"]}
    return await system.http.post(f"{system.internal_url}/v1/task/credentials", headers=headers)


async def test_credentials_need_only_the_authorization_header(flow: DeployedDags, clock: ManualClock) -> None:
    claim = await started(flow, "feed")
    reply = await header_alone(flow.system, claim)
    assert reply.status_code == 200, reply.text
    assert reply.json()["write_prefixes"] == (await minted(flow.system, claim))["write_prefixes"]
    assert (await Holder(flow.system, reply.json()).ask("GET", file_of(claim))).status_code == 200
    assert (await asked(flow.system, claim, task_id=str(uuid4()))).status_code == 403
    assert (await asked(flow.system, claim, lease_token=str(uuid4()))).status_code == 409
    clock.advance(10)
    await flow.system.worker("POST", "/internal/task-release", json={"items": [fence(claim)]})
    assert (await header_alone(flow.system, claim)).status_code == 409
    again = await flow.system.claim(claim["task_id"])
    assert again["attempt"] == claim["attempt"]
    assert (await header_alone(flow.system, claim)).status_code == 409
    assert (await header_alone(flow.system, again)).status_code == 200


async def test_client_of_an_attempt_fetches_credentials(flow: DeployedDags) -> None:
    claim = await started(flow, "feed")
    held = Fence(UUID(claim["task_id"]), claim["attempt"], UUID(claim["lease_token"]))
    async with TaskClient(flow.system.internal_url, claim["capability_token"], held) as attempt:
        given = await attempt.credentials()
    assert (given.scheme, given.endpoint) == ("file", flow.system.gateway_url)
    assert claim["task"]["outputs"][0]["write_prefix"] in given.write_prefixes
    assert (await flow.system.kernel.access.object_tokens.verify(given.object_token or "")).task_id == held.task_id


async def test_attempt_reads_committed_files_and_writes_its_prefix(flow: DeployedDags) -> None:
    file = await committed(flow, await started(flow, "feed"))
    claim = await derive(flow)
    holder_ = await holder(flow.system, claim)
    own = f"{claim['task']['outputs'][0]['write_prefix']}deep/er/part.parquet"
    batch = f"{claim['task']['outputs'][0]['buffer_prefix']}batch.jsonl"
    assert (await holder_.ask("GET", file)).status_code == 200
    assert (await holder_.ask("HEAD", file)).status_code == 200
    for mine in (own, batch):
        assert (await holder_.ask("PUT", mine, content=b"rows")).status_code == 200
        assert (await holder_.ask("GET", mine)).content == b"rows"
        assert path_of(mine).read_bytes() == b"rows"
    upload = (await holder_.ask("POST", f"{own}2", "?uploads")).json()["upload_id"]
    assert (await holder_.ask("DELETE", f"{own}2", f"?uploadId={upload}")).status_code == 204
    assert own in await holder_.listed(claim["task"]["outputs"][0]["write_prefix"])
    assert file in await holder_.listed(claim["task"]["inputs"][0]["read_prefix"])


async def test_attempt_has_no_access_outside_its_prefixes(flow: DeployedDags) -> None:
    await committed(flow, await started(flow, "feed"))
    claim, stranger = await derive(flow), await started(flow, "other")
    foreign = await committed(flow, stranger)
    holder_ = await holder(flow.system, claim)
    root, (grant,) = flow.system.kernel.settings.objects_root, claim["task"]["outputs"]
    next_attempt = grant["write_prefix"].removesuffix("1/") + "2/x"
    longer_attempt = grant["write_prefix"].removesuffix("1/") + "11/x"
    for uri in (foreign, next_attempt, longer_attempt, f"{root}/x", f"{root}/dataset/x", f"{root}/buffers/x/y"):
        for method in ("GET", "HEAD", "PUT"):
            assert (await holder_.ask(method, uri)).status_code == 403, (method, uri)
        assert (await holder_.ask("POST", uri, "?uploads")).status_code == 403, uri
        assert (await holder_.ask("DELETE", uri, "?uploadId=x")).status_code == 403, uri
    read = claim["task"]["inputs"][0]["read_prefix"]
    for uri in (f"{read}x", f"{read}_attempts/{claim['task_id']}/1/x"):
        assert (await holder_.ask("PUT", uri, content=b"x")).status_code == 403, uri
        assert (await holder_.ask("GET", uri)).status_code == 403, uri
    for prefix in (f"{root}/dataset/", f"{root}/buffers/", read.rsplit("/", 2)[0] + "/"):
        assert (await holder_.list(prefix)).status_code == 403, prefix


async def test_files_of_other_attempts_are_visible_once_committed(flow: DeployedDags) -> None:
    seen = await committed(flow, await started(flow, "feed"))
    claim, running = await derive(flow), await started(flow, "feed")
    holder_ = await holder(flow.system, claim)
    read = claim["task"]["inputs"][0]["read_prefix"]
    beside = f"{running['task']['outputs'][0]['write_prefix']}_marker.json"
    for uri in (file_of(running), beside):
        assert (await holder_.ask("GET", uri)).status_code == 403, uri
    assert file_of(running) not in await holder_.listed(read)
    assert await holder_.listed(running["task"]["outputs"][0]["write_prefix"]) == set()
    now_seen = await committed(flow, running)
    assert (await holder_.ask("GET", now_seen)).status_code == 200
    # The replaced file stays readable for attempts that received it as an input before.
    assert {seen, now_seen} <= await holder_.listed(read)


async def test_file_whose_task_was_deleted_long_ago_is_still_read(flow: DeployedDags) -> None:
    producer = await started(flow, "feed")
    await minted(flow.system, producer)
    file = await committed(flow, producer)
    claim = await derive(flow)
    await flow.system.value("delete from interlock.tasks where task_id = $1", producer["task_id"])
    holder_ = await holder(flow.system, claim)
    assert (await holder_.ask("GET", file)).status_code == 403
    # No sweep of the attempt is pending: its leftover files have been checked.
    await flow.system.value("delete from interlock.file_sweeps where task_id = $1", producer["task_id"])
    assert (await holder_.ask("GET", file)).status_code == 200


async def test_uncommitted_files_of_an_attempt_are_swept(flow: DeployedDags, clock: ManualClock) -> None:
    failed, done = await started(flow, "feed"), await started(flow, "feed")
    batches = [f"{claim['task']['outputs'][0]['buffer_prefix']}junk" for claim in (failed, done)]
    for claim, batch in zip((failed, done), batches, strict=True):
        assert (await (await holder(flow.system, claim)).ask("PUT", batch, content=b"x")).status_code == 200
    await flow.system.complete(failed, "Failed", error_class="Oops")
    await committed(flow, done)
    clock.advance(2 * 3600)
    await flow.run("sweep")
    assert not any(path_of(uri).exists() for uri in (file_of(failed), *batches))
    assert path_of(file_of(done)).exists()


async def test_task_without_files_gets_no_credentials_and_a_reason(still: System) -> None:
    reply = await asked(still, await still.claim(await still.one()))
    assert (reply.status_code, reply.json()["code"]) == (403, "nothing_granted")


async def test_s3_without_a_role_names_the_missing_setting(state_url: str, tmp_path: Path) -> None:
    outputs = [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}]
    async with running(state_url, tmp_path, objects_url="s3://some-bucket/root") as system:
        claim = await system.claim(await system.one(outputs=outputs))
        reply = await asked(system, claim)
        assert (reply.status_code, reply.json()["code"]) == (503, "no_credentials_role")
        assert "credentials_role_arn" in reply.json()["detail"]


async def test_prefix_outside_the_object_root_is_not_granted(state_url: str, tmp_path: Path) -> None:
    """Simulates a restart with another objects_url: the token still names the old one."""
    outputs = [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}]
    async with running(state_url, tmp_path) as system:
        claim = await system.claim(await system.one(outputs=outputs))
        async with open_app(
            system.kernel.settings.model_copy(update={"objects_url": "file:///elsewhere"}), process="test"
        ) as after:
            claims = await after.access.tokens.verify(claim["capability_token"])
            with pytest.raises(Forbidden) as refusal:
                await after.datasets.credentials.mint(claims)
    assert refusal.value.code == "bad_prefix"


async def test_grants_too_large_for_a_token_are_still_given(still: System) -> None:
    outputs = [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())} for _ in range(60)]
    claim = await still.claim(await still.one(outputs=outputs))
    assert "capability_id" in part(claim["capability_token"], 1)
    given = await minted(still, claim)
    assert len(given["write_prefixes"]) == 120
    assert len(given["object_token"]) < 2000
    holder_ = Holder(still, given)
    last = claim["task"]["outputs"][-1]
    assert (await holder_.ask("PUT", f"{last['write_prefix']}x", content=b"x")).status_code == 200
    assert (await holder_.ask("PUT", f"{last['write_prefix']}../x", content=b"x")).status_code in (400, 403)
    another = await still.claim(await still.one(outputs=outputs))
    theirs = another["task"]["outputs"][-1]["write_prefix"]
    assert (await holder_.ask("PUT", f"{theirs}x", content=b"x")).status_code == 403


# Attempts that get credentials


async def test_credentials_are_for_the_attempt_of_the_token(flow: DeployedDags) -> None:
    claim, other = await started(flow, "feed"), await started(flow, "feed")
    for wrong in ({"task_id": other["task_id"]}, {"attempt": 2}):
        reply = await asked(flow.system, claim, **wrong)
        assert (reply.status_code, reply.json()["code"]) == (403, "token_mismatch")
    reply = await asked(flow.system, claim, lease_token=other["lease_token"])
    assert (reply.status_code, reply.json()["stale"]) == (409, "lease_token")
    reply = await asked(flow.system, claim | {"capability_token": "x.y.z"})
    assert reply.status_code == 401


async def test_ended_attempt_gets_no_credentials_and_loses_existing_ones(
    flow: DeployedDags, clock: ManualClock
) -> None:
    claim = await started(flow, "feed")
    holder_ = await holder(flow.system, claim)
    assert (await holder_.ask("GET", file_of(claim))).status_code == 200
    await flow.system.complete(claim, "Failed", error_class="Oops")
    clock.advance(LEASE_SECONDS)
    reply = await holder_.ask("GET", file_of(claim))
    assert (reply.status_code, reply.json()["code"]) == (401, "token_expired")
    reply = await asked(flow.system, claim)
    assert (reply.status_code, reply.json()["code"]) == (409, "fenced")


async def test_cancel_ends_credentials_of_a_running_attempt(flow: DeployedDags, clock: ManualClock) -> None:
    claim = await started(flow, "feed")
    holder_ = await holder(flow.system, claim)
    assert (await flow.system.user("POST", f"/v1/tasks/{claim['task_id']}/cancel")).json()["status"] == "Running"
    reply = await asked(flow.system, claim)
    assert (reply.status_code, reply.json()["stale"]) == (409, "status")
    clock.advance(LEASE_SECONDS)
    assert (await holder_.ask("PUT", file_of(claim), content=b"x")).status_code == 401


async def test_expired_lease_gets_no_credentials_reaped_or_not(flow: DeployedDags, clock: ManualClock) -> None:
    claim = await started(flow, "feed")
    holder_ = await holder(flow.system, claim)
    clock.advance(61)
    assert (await holder_.ask("GET", file_of(claim))).status_code == 401
    reply = await asked(flow.system, claim)
    assert (reply.status_code, reply.json()["stale"]) == (409, "lease_token")
    await flow.run("reaper")
    reply = await asked(flow.system, claim)
    assert (reply.status_code, reply.json()["stale"]) == (409, "status")


async def test_heartbeat_extends_the_next_credentials_with_the_lease(flow: DeployedDags, clock: ManualClock) -> None:
    claim = await started(flow, "feed")
    first = await minted(flow.system, claim)
    clock.advance(40)
    beat = await flow.system.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim))
    second = await minted(flow.system, claim)
    assert second["expiration"] == beat.json()["lease_expires_at"]
    clock.advance(40)
    assert (await Holder(flow.system, first).ask("GET", file_of(claim))).status_code == 401
    assert (await Holder(flow.system, second).ask("GET", file_of(claim))).status_code == 200


async def test_credentials_of_another_lease_are_refused(flow: DeployedDags, clock: ManualClock) -> None:
    claim = await started(flow, "feed")
    holder_ = await holder(flow.system, claim)
    await flow.system.worker("POST", "/internal/task-release", json={"items": [fence(claim)]})
    again = await flow.system.claim(claim["task_id"])
    assert again["attempt"] == claim["attempt"]
    clock.advance(LEASE_SECONDS)
    assert (await holder_.ask("GET", file_of(claim))).status_code == 401
    assert (await (await holder(flow.system, again)).ask("GET", file_of(again))).status_code == 200
    assert (await asked(flow.system, claim)).status_code == 409


async def test_cancel_waits_for_credentials_being_issued(flow: DeployedDags) -> None:
    """The next request for credentials sees the cancel; no granted prefix is left unrecorded."""
    claim = await started(flow, "feed")
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def stop() -> None:
        reached.set()
        await go_on.wait()

    failpoints.arm("credentials.before_commit", stop)
    try:
        minting = asyncio.create_task(asked(flow.system, claim))
        await reached.wait()
        canceling = asyncio.create_task(flow.system.user("POST", f"/v1/tasks/{claim['task_id']}/cancel"))
        go_on.set()
        assert (await minting).status_code == 200
        assert (await canceling).status_code == 200
    finally:
        failpoints.disarm("credentials.before_commit")
    assert (await asked(flow.system, claim)).status_code == 409


# Ranges


async def worked(flow: DeployedDags) -> None:
    while await flow.run("router", "relay", "retries"):
        await flow.system.kernel.tasks.inline.drain(20)


async def test_ranges_grant_access_to_the_dataset_they_were_cut_from(still: System) -> None:
    flow = DeployedDags(still)
    await flow.start(RANGES)
    file = await committed(flow, await started(flow, "feed", "ranges"))
    await worked(flow)
    claim = await still.claim((await flow.waiting("ranges", "sum"))[0])
    (read,) = claim["task"]["inputs"]
    version = str(await flow.version("ranges", "feed"))
    assert (read["dataset_version"], read["storage"]) == (version, "parquet")
    assert read["where"] == '("removed" = FALSE) AND ("topic0" = \'a\')'
    assert (read["start"], read["end"]) in [(0, 4), (5, 9)]
    beat = await still.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim) | {"token": True})
    for token in (claim["capability_token"], beat.json()["capability_token"]):
        granted = part(token, 1)
        assert [each["dataset_version"] for each in granted["datasets"]] == [version]
        assert granted["datasets"][0]["storage_ref"]["prefix"] == read["read_prefix"].removeprefix("file://")
        assert granted["s3"]["read_prefixes"] == [read["read_prefix"]]
    fetched = await still.worker("GET", f"/internal/task-fetch?task_id={claim['task_id']}")
    assert fetched.json()["task"]["inputs"] == claim["task"]["inputs"]
    assert (await (await holder(still, claim)).ask("GET", file)).status_code == 200


async def test_readers_of_ranges_follow_a_dataset_to_its_next_version(still: System) -> None:
    """Nothing about the reader itself has changed, but the dispatchers' cached data about it must not be stale."""
    flow = DeployedDags(still)
    await flow.start(PUBLISHER.replace("NUMBER", "1"))
    await flow.start(READER)
    await committed(flow, await started(flow, "feed", "publisher"))
    await worked(flow)
    before = await still.claim((await flow.waiting("reader", "sum"))[0])
    await still.complete(before, "Canceled")
    await flow.start(PUBLISHER.replace("NUMBER", "2"))
    new = str(await flow.version("publisher", "feed"))
    assert new != before["task"]["inputs"][0]["dataset_version"]
    await committed(flow, await started(flow, "feed", "publisher"))
    await flow.run("scopes")
    await worked(flow)
    after = await still.claim((await flow.waiting("reader", "sum"))[0])
    assert after["task"]["job_id"] == before["task"]["job_id"]
    assert after["task"]["inputs"][0]["dataset_version"] == new
