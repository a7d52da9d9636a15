"""Exports of whole runs: staged by the dispatcher, written by Spark, with a manifest that lists every file."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from interlock.cli.app import execute
from interlock.jobs import exports
from interlock.jobs.receipt_verification import digests, full_id
from interlock.spark.attempt import run_operator
from interlock.spark.context import TaskContext
from interlock.spark.operators import resolve
from interlock.wire.access import KeyRequest, Role
from interlock.wire.attempts import DataReply, TaskData
from interlock.workers.failures import BadConfig, FileMissing
from interlock.workers.protocol import Assignment, Work
from tests.jobs.test_results import packs_of
from tests.spark.local_attempts import Link, task
from tests.support.system import System, fence, until

TASKS = 7
LONG = "ü\n" * 1000


@pytest.fixture(autouse=True)
def _small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "STRETCH", 3)


async def ended(system: System) -> dict[str, Any]:
    """Returns a run in which task 1 has failed, 2 was canceled, and 3 and 6 have long results."""
    payloads = [{"n": n, "text": "a\nb"} for n in range(TASKS)]
    accepted = await system.submit(payloads, policy={"max_attempts": 1})
    claims = (await system.claim_many(run_id=accepted["run_id"], start=0, end=TASKS - 1))["claims"]
    ends: dict[int, dict[str, Any]] = {
        n: {"status": "Completed", "result": {"text": LONG, "n": n} if n % 3 == 0 and n else n} for n in range(TASKS)
    }
    ends[1] = {"status": "Failed", "error_class": "Oops", "error_message": "it broke"}
    ends[2] = {"status": "Canceled"}
    items = [fence(claim) | ends[claim["task"]["index"]] for claim in claims]
    assert (await system.worker("POST", "/internal/task-complete", json={"items": items})).status_code == 200
    await system.pass_of("run-counters")
    return accepted | {"ends": ends}


async def exported(system: System, job_id: str, **body: Any) -> dict[str, Any]:
    reply = await system.user("POST", f"/v1/jobs/{job_id}/exports", json=body)
    assert reply.status_code == 202, reply.text
    view: dict[str, Any] = reply.json()
    assert (view["state"], view["staged"], view["of"]) == ("Staging", 0, TASKS)
    while await system.pass_of("exports"):
        continue
    return await seen(system, view)


async def seen(system: System, view: dict[str, Any], **more: Any) -> dict[str, Any]:
    reply = await system.user("GET", f"/v1/jobs/{view['job_id']}/exports/{view['export_id']}", params=more)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def data_of(system: System, claim: dict[str, Any]) -> TaskData:
    reply = await system.worker("POST", "/internal/task-data", json={"items": [fence(claim)]})
    return msgspec.json.decode(reply.content, type=DataReply).items[0]


def run(spark: SparkSession, data: TaskData) -> dict[str, Any]:
    work = Work("run_export", ("", "export"), None, 1, b"{}", [], [])
    context = TaskContext(work, Assignment(1, data.task_id, None, b"{}"), Link(), spark, data)
    result: dict[str, Any] = run_operator(resolve("run_export"), spark, context, data)[0]
    return result


async def made(spark: SparkSession, system: System, view: dict[str, Any]) -> dict[str, Any]:
    claim = await system.claim(view["task_id"])
    result = await asyncio.to_thread(run, spark, await data_of(system, claim))
    assert (await system.complete(claim, result=result)).status_code == 200
    return await seen(system, view)


async def parts_of(system: System, view: dict[str, Any]) -> list[bytes]:
    """Downloads the parts by their signed URLs, and checks them against the manifest."""
    manifest = (await system.http.get(view["manifest_url"])).json()
    assert [part["name"] for part in manifest["parts"]] == [part["name"] for part in view["parts"]]
    found = [(await system.http.get(part["url"])).content for part in view["parts"]]
    for content, part in zip(found, manifest["parts"], strict=True):
        assert (len(content), hashlib.sha256(content).hexdigest()) == (part["bytes"], part["sha256"])
    assert [(part["first"], part["last"], part["rows"]) for part in manifest["parts"]] == [
        (0, 2, 3),
        (3, 5, 3),
        (6, 6, 1),
    ]
    assert (manifest["rows"], view["rows"], view["bytes"]) == (TASKS, TASKS, sum(map(len, found)))
    return found


async def test_json_lines_contain_every_task_and_match_the_receipt(spark: SparkSession, shared: System) -> None:
    done = await ended(shared)
    view = await made(spark, shared, await exported(shared, done["job_id"], format="jsonl"))
    rows = [json.loads(line) for part in await parts_of(shared, view) for line in part.splitlines()]
    for index, row in enumerate(rows):
        assert row["payload"] == {"n": index, "text": "a\nb"}
        assert row["id"] == full_id(UUID(done["run_id"]), index).hex()
        assert UUID(row["task_id"]).hex == row["id"][:32]
        assert row["result"] == done["ends"][index].get("result")
    assert (rows[1]["error_class"], rows[1]["error_message"]) == ("Oops", "it broke")
    receipt = (await shared.user("GET", f"/v1/jobs/{done['job_id']}/receipt")).json()["receipt"]
    listed = [(row["index"], row["status"]) for row in rows]
    assert digests(UUID(done["run_id"]), TASKS, listed) == (receipt["ids"], receipt["outcomes"])


async def test_parquet_and_zip_contain_the_same_tasks(spark: SparkSession, shared: System) -> None:
    done = await ended(shared)
    view = await made(spark, shared, await exported(shared, done["job_id"]))
    rows = [row for part in await parts_of(shared, view) for row in pq.read_table(io.BytesIO(part)).to_pylist()]
    assert [row["index"] for row in rows] == list(range(TASKS))
    assert [row["result"] and json.loads(row["result"]) for row in rows] == [
        done["ends"][n].get("result") for n in range(TASKS)
    ]
    assert rows[0]["ended_at"] is not None
    view = await made(spark, shared, await exported(shared, done["job_id"], format="zip"))
    names = set()
    for part in await parts_of(shared, view):
        with zipfile.ZipFile(io.BytesIO(part)) as archive:
            names |= set(archive.namelist())
            if "results/3.json" in archive.namelist():
                assert json.loads(archive.read("results/3.json")) == done["ends"][3]["result"]
    assert names == {"tasks.jsonl", *(f"results/{n}.json" for n in (0, 3, 4, 5, 6))}


async def test_export_command_downloads_and_verifies_against_the_receipt(
    spark: SparkSession,
    shared: System,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", shared.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", shared.admin_key)
    done = await ended(shared)
    words = ["job", "export", done["job_id"], "--to", str(tmp_path / "out")]
    command = asyncio.create_task(asyncio.to_thread(execute, words))
    latest = "select export_id from interlock.exports where run_id = $1"
    export_id = await until(lambda: shared.value(latest, UUID(done["run_id"])))
    while await shared.pass_of("exports"):
        continue
    await made(spark, shared, await seen(shared, {"job_id": done["job_id"], "export_id": export_id}))
    assert await command == 0
    receipt = tmp_path / "receipt.json"
    await asyncio.to_thread(execute, ["job", "receipt", done["job_id"], "--file", str(receipt)])
    kid = json.loads(receipt.read_text())["key"]["kid"]
    words = ["receipt", "verify", str(receipt), "--kid", kid, "--export", str(tmp_path / "out")]
    assert await asyncio.to_thread(execute, words) == 0
    assert "exactly these tasks" in capsys.readouterr().out


async def test_export_parts_are_paginated_and_visible_only_to_their_org(spark: SparkSession, shared: System) -> None:
    done = await ended(shared)
    view = await made(spark, shared, await exported(shared, done["job_id"]))
    first = await seen(shared, view, limit=2)
    assert ([part["name"][:11] for part in first["parts"]], first["next_cursor"]) == (
        ["part-000000", "part-000001"],
        "2",
    )
    rest = await seen(shared, view, limit=2, cursor="2")
    assert ([part["name"] for part in rest["parts"]], rest["next_cursor"]) == (["part-000002.parquet"], None)
    org = await shared.kernel.access.principals.create_org("exporting")
    key = (
        await shared.kernel.access.principals.create_key(
            KeyRequest(user="x", role=Role.ADMIN), org.org_id, granted_by=None
        )
    ).key
    path = f"/v1/jobs/{done['job_id']}/exports"
    assert (await shared.user("GET", f"{path}/{view['export_id']}", key=key)).status_code == 404
    assert (await shared.user("POST", path, key=key, json={})).status_code == 404


async def test_same_idempotency_key_creates_one_export(shared: System) -> None:
    done = await ended(shared)
    headers = {"Idempotency-Key": "once"}
    path = f"/v1/jobs/{done['job_id']}/exports"
    twice = [(await shared.user("POST", path, json={"format": "zip"}, headers=headers)).json() for _ in range(2)]
    assert twice[0]["export_id"] == twice[1]["export_id"]
    assert (await shared.user("POST", path, json={"format": "jsonl"}, headers=headers)).status_code == 409


async def test_missing_pack_fails_the_export_with_a_message(spark: SparkSession, shared: System) -> None:
    done = await ended(shared)
    view = await exported(shared, done["job_id"])
    for uri in await packs_of(shared, done["run_id"]):
        await shared.kernel.access.objects.delete(uri)
    claim = await shared.claim(view["task_id"])
    with pytest.raises(FileMissing, match="no longer exists"):
        await asyncio.to_thread(run, spark, await data_of(shared, claim))
    await shared.complete(claim, "Failed", error_class="FileMissing", error_message="a pack is gone")
    await shared.value(
        "update interlock.tasks set dead = true, retry_at = null where task_id = $1", UUID(view["task_id"])
    )
    found = await seen(shared, view)
    assert (found["state"], found["error"]) == ("Failed", "a pack is gone")


async def test_running_run_and_forged_export_task_are_refused(spark: SparkSession, shared: System) -> None:
    accepted = await shared.submit([1])
    early = await shared.user("POST", f"/v1/jobs/{accepted['job_id']}/exports", json={})
    assert (early.status_code, early.json()["code"]) == (409, "run_not_ended")
    made_up = await shared.made_up("run_export")
    assert (await data_of(shared, await shared.claim(made_up))).run_export is None
    with pytest.raises(BadConfig, match="run_export runs only in tasks that an export creates"):
        run(spark, task([], []))
