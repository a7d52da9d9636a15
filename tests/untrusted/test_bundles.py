"""Bundles: uploaded once, immutable, and deleted only when no job uses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from interlock.clock import ManualClock
from interlock.failpoints import arm, disarm
from tests.conftest import copied
from tests.support.code_bundles import HANDLER, sha256, upload, zipped
from tests.support.system import System, running

RUNNER = "http://127.0.0.1:9"
"""An address without a listener: these tests run no code."""


@pytest.fixture(scope="module")
async def shared(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    async with (
        copied(postgres_url, template) as url,
        running(url, tmp_path_factory.mktemp("bundles"), runner_url=RUNNER, bundle_limit_bytes=100_000) as started,
    ):
        yield started


def content(marker: str) -> bytes:
    return zipped({"main.py": f"# {marker}\n{HANDLER}", "lib/__init__.py": "", "web.js": "", "code.py": ""})


def stored(system: System, digest: str) -> Path:
    root = Path(system.kernel.access.objects.root.removeprefix("file://"))
    return root / "bundles" / str(system.org_id) / f"{digest}.zip"


def udf(bundle: str, entrypoint: str = "main.handler", name: str = "code", **more: Any) -> str:
    return f"""
name: {name}
jobs:
  - name: feed
    operator: udf
    runtime: {more.get("runtime", "lambda")}
    activation: source
    source: {{kind: manual}}
    config: {{bundle: "{bundle}", entrypoint: {entrypoint}, threshold: 7}}
"""


async def deploy(system: System, yaml: str) -> Any:
    return await system.user("POST", "/v1/dags", content=yaml, headers={"Content-Type": "application/yaml"})


async def config_of(system: System, dag: str) -> dict[str, Any]:
    """Returns the config of the job in the DAG's current version."""
    found: dict[str, Any] = json.loads(
        await system.value("select config::text from interlock.jobs where dag_name = $1 and current", dag)
    )
    return found


async def test_upload_is_stored_by_digest_and_lists_its_content(shared: System) -> None:
    data = content("kept")
    view = await upload(shared, data, "kept")
    assert view["sha256"] == sha256(data)
    assert view["names"] == ["kept"]
    assert (view["files"], view["size_bytes"], view["uploaded_by"]) == (4, len(data), "root")
    assert view["modules"] == {"main": "python", "lib": "python", "web": "node", "code": "python"}
    assert stored(shared, sha256(data)).read_bytes() == data


async def test_same_content_is_one_bundle_with_another_name(shared: System) -> None:
    data = content("again")
    first = await upload(shared, data, "first-name")
    second = await upload(shared, data, "second-name")
    assert second == first | {"names": ["first-name", "second-name"]}


async def test_name_moves_to_the_newest_upload(shared: System) -> None:
    old, new = await upload(shared, content("old"), "moving"), await upload(shared, content("new"), "moving")
    found = (await shared.user("GET", "/v1/bundles/moving")).json()
    assert found["sha256"] == new["sha256"] != old["sha256"]
    assert (await shared.user("GET", f"/v1/bundles/{old['sha256'][:12]}")).json()["names"] == []


async def test_bundles_are_listed_by_pages(shared: System) -> None:
    digests = {(await upload(shared, content(f"page {n}")))["sha256"] for n in range(3)}
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await shared.user("GET", f"/v1/bundles?limit=2&cursor={cursor}")).json()
        seen += [each["sha256"] for each in page["bundles"]]
        cursor = page["next_cursor"]
    assert digests <= set(seen)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"no zip at all", 400, "bad_bundle"),
        (b"", 400, "bad_bundle"),
        (zipped({"../up.py": ""}), 400, "bad_bundle"),
        (zipped({"noise": b"\0" * 200_000}), 413, "bundle_too_large"),
    ],
)
async def test_invalid_bundle_is_refused_and_leaves_nothing(
    shared: System, body: bytes, status: int, code: str
) -> None:
    reply = await shared.user("POST", "/v1/bundles", content=body, headers={"Content-Type": "application/zip"})
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert not stored(shared, sha256(body)).exists()


async def test_upload_requires_the_zip_type_and_a_valid_name(shared: System) -> None:
    reply = await shared.user("POST", "/v1/bundles", content=b"{}", headers={"Content-Type": "application/json"})
    assert reply.status_code == 415
    reply = await shared.user("POST", "/v1/bundles?name=sha256:abc", content=zipped())
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_bundle_name")


async def test_another_org_sees_nothing_of_a_bundle(shared: System) -> None:
    view = await upload(shared, content("secret"), "secret")
    org = await shared.user("POST", "/v1/orgs", json={"name": "strangers"})
    assert org.status_code == 201
    made = await shared.user("POST", "/v1/keys", json={"user": "s", "role": "admin", "org": "strangers"})
    stranger = made.json()["key"]
    for which in ("secret", view["sha256"], view["sha256"][:12]):
        assert (await shared.user("GET", f"/v1/bundles/{which}", key=stranger)).status_code == 404
        assert (await shared.user("DELETE", f"/v1/bundles/{which}", key=stranger)).status_code == 404
    assert (await shared.user("GET", "/v1/bundles", key=stranger)).json()["bundles"] == []
    reply = await shared.user(
        "POST", "/v1/dags", key=stranger, content=udf("secret"), headers={"Content-Type": "application/yaml"}
    )
    assert "there is no bundle 'secret'" in reply.text


async def test_reader_may_not_upload(shared: System) -> None:
    made = await shared.user("POST", "/v1/keys", json={"user": "r", "role": "reader"})
    reader = made.json()["key"]
    assert (await shared.user("GET", "/v1/bundles", key=reader)).status_code == 200
    assert (await shared.user("POST", "/v1/bundles", key=reader, content=zipped())).status_code == 403


# Jobs


async def test_deployed_job_is_pinned_to_the_digest_of_its_bundle(shared: System) -> None:
    old = await upload(shared, content("pinned 1"), "pinned")
    first = await deploy(shared, udf("pinned", name="pinning"))
    assert first.status_code == 200, first.text
    new = await upload(shared, content("pinned 2"), "pinned")
    config = await config_of(shared, "pinning")
    assert config == {
        "bundle": f"sha256:{old['sha256']}",
        "entrypoint": "main.handler",
        "language": "python",
        "threshold": 7,
    }
    again = await deploy(shared, udf("pinned", name="pinning"))
    assert again.json()["content_hash"] != first.json()["content_hash"]
    config = await config_of(shared, "pinning")
    assert config["bundle"] == f"sha256:{new['sha256']}"


@pytest.mark.parametrize(
    ("yaml", "what"),
    [
        (udf("nowhere"), "there is no bundle 'nowhere'"),
        (udf("sha256:" + "0" * 64), "there is no bundle"),
        (udf("checked", "absent.handler"), "has no module 'absent'"),
        (udf("checked", "code.handler"), "is also in Python's standard library"),
        (udf("checked", "bootstrap"), "has no module 'bootstrap'"),
        (udf("checked", "handler"), "needs an entrypoint"),
        (udf("no/name"), "needs a bundle"),
        (udf("checked", runtime="platform"), "needs a runtime for untrusted code"),
        (udf("checked").replace("operator: udf", "operator: echo"), "runs only bundles"),
    ],
)
async def test_invalid_bundle_in_a_dag_is_reported_with_its_line(shared: System, yaml: str, what: str) -> None:
    await upload(shared, content("checked"), "checked")
    reply = await deploy(shared, yaml)
    assert reply.status_code == 400
    problem = next(each for each in reply.json()["problems"] if what in each["message"])
    assert problem["line"] > 3
    assert problem["suggestion"]


async def test_ad_hoc_job_is_checked_and_pinned_too(shared: System) -> None:
    view = await upload(shared, content("ad hoc"), "ad-hoc")
    config = {"bundle": "ad-hoc", "entrypoint": "main.handler"}
    job = {"operator": "udf", "runtime": "lambda", "name": "by-hand", "config": config}
    await shared.submit([], **job)
    kept = (await shared.user("GET", "/v1/jobs/by-hand")).json()["config"]
    assert kept["bundle"] == f"sha256:{view['sha256']}"
    for wrong in (
        job | {"runtime": "platform"},
        job | {"operator": "echo"},
        job | {"config": config | {"entrypoint": "absent.handler"}},
        job | {"config": {"entrypoint": "main.handler"}},
    ):
        reply = await shared.user("POST", "/v1/jobs", json=wrong | {"tasks": [], "name": None})
        assert (reply.status_code, reply.json()["code"]) == (400, "bad_udf"), wrong


async def test_bundle_that_a_job_uses_is_not_deleted(shared: System) -> None:
    view = await upload(shared, content("used"), "used")
    assert (await deploy(shared, udf("used", name="user"))).status_code == 200
    reply = await shared.user("DELETE", "/v1/bundles/used")
    assert (reply.status_code, reply.json()["code"]) == (409, "bundle_in_use")
    assert "user/feed" in reply.json()["detail"]
    assert stored(shared, view["sha256"]).exists()


# Deletion, and cleanup after crashes


async def test_deleted_bundle_is_gone_and_its_zip_is_swept(still: System, clock: ManualClock) -> None:
    view = await upload(still, content("doomed"), "doomed")
    assert (await still.user("DELETE", "/v1/bundles/doomed")).json()["sha256"] == view["sha256"]
    assert (await still.user("GET", f"/v1/bundles/{view['sha256']}")).status_code == 404
    await still.pass_of("bundle_sweep")
    assert stored(still, view["sha256"]).exists()
    clock.advance(2 * 3600)
    assert await still.pass_of("bundle_sweep") == 1
    assert not stored(still, view["sha256"]).exists()


async def test_bundle_that_comes_back_before_the_sweep_stays(still: System, clock: ManualClock) -> None:
    view = await upload(still, content("back"))
    await still.user("DELETE", f"/v1/bundles/{view['sha256']}")
    await upload(still, content("back"))
    clock.advance(2 * 3600)
    assert await still.pass_of("bundle_sweep") == 0
    assert stored(still, view["sha256"]).exists()


async def test_zip_of_a_failed_upload_is_swept(still: System, clock: ManualClock) -> None:
    async def die() -> None:
        raise RuntimeError("died")

    arm("bundle.stored", die)
    try:
        with_error = await still.user(
            "POST", "/v1/bundles", content=content("torn"), headers={"Content-Type": "application/zip"}
        )
    finally:
        disarm("bundle.stored")
    assert with_error.status_code == 500
    digest = sha256(content("torn"))
    assert stored(still, digest).exists()
    assert (await still.user("GET", f"/v1/bundles/{digest}")).status_code == 404
    clock.advance(2 * 3600)
    assert await still.pass_of("bundle_sweep") == 1
    assert not stored(still, digest).exists()


async def test_concurrent_job_and_delete_do_not_both_succeed(shared: System) -> None:
    view = await upload(shared, content("raced"), "raced")
    held, go = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        held.set()
        await go.wait()

    arm("deploy.before_commit", wait)
    try:
        deploying = asyncio.create_task(deploy(shared, udf("raced", name="racing")))
        await held.wait()
        deleting = asyncio.create_task(shared.user("DELETE", "/v1/bundles/raced"))
        await _blocked(shared)
        go.set()
        deployed, deleted = await asyncio.gather(deploying, deleting)
    finally:
        disarm("deploy.before_commit")
    assert deployed.status_code == 200, deployed.text
    assert (deleted.status_code, deleted.json()["code"]) == (409, "bundle_in_use")
    assert stored(shared, view["sha256"]).exists()


async def _blocked(system: System) -> None:
    from tests.support.polls import answered

    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    await answered(lambda: system.value(waiting))
