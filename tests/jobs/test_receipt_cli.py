"""`interlock job` and `interlock receipt` on a finished run."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from interlock.cli.app import execute
from tests.jobs.test_receipts import mixed
from tests.jobs.test_results import LONG, claimed, report
from tests.support.system import System


@pytest.fixture
def connected(shared: System, monkeypatch: pytest.MonkeyPatch) -> System:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", shared.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", shared.admin_key)
    return shared


async def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Runs in a thread, because commands run their own event loop."""
    code = await asyncio.to_thread(execute, [str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def written(folder: Path, run_id: str, ends: list[tuple[int, str]]) -> None:
    """Writes an export of one part, in the format of the operator."""
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"index": n, "status": s}) + "\n" for n, s in ends).encode()
    part: dict[str, Any] = {
        "name": "part-000000.jsonl",
        "rows": len(ends),
        "bytes": len(lines),
        "first": 0,
        "last": len(ends) - 1,
    }
    part["sha256"] = hashlib.sha256(lines).hexdigest()
    manifest = {"export_id": str(uuid4()), "run_id": run_id, "format": "jsonl", "rows": len(ends), "bytes": len(lines)}
    (folder / part["name"]).write_bytes(lines)
    (folder / "manifest.json").write_text(json.dumps(manifest | {"parts": [part]}))


async def test_receipt_is_saved_and_verified_offline(
    connected: System, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await mixed(connected)
    receipt, keys, export = (tmp_path / name for name in ("receipt.json", "keys.json", "export"))
    code, printed = await run(capsys, "job", "receipt", done["job_id"], "--file", receipt)
    assert (code, "complete" in printed) == (0, True), printed
    code, printed = await run(capsys, "receipt", "keys")
    keys.write_text(printed)
    written(export, done["run_id"], list(done["ends"].items()))
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", "http://127.0.0.1:9")
    kid = json.loads(printed)["keys"][0]["kid"]
    for trust in (["--keys", keys], ["--kid", kid]):
        code, printed = await run(capsys, "receipt", "verify", receipt, *trust, "--export", export)
        assert (code, printed.count("\n- ")) == (0, 3), printed


async def test_invalid_receipt_is_refused_with_a_reason(
    connected: System, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done = await mixed(connected)
    good, bad, export = (tmp_path / name for name in ("good.json", "bad.json", "export"))
    await run(capsys, "job", "receipt", done["job_id"], "--file", good)
    document: dict[str, Any] = json.loads(good.read_text())
    kid = document["key"]["kid"]
    head, payload, signature = document["signed"].split(".")
    forgeries: list[tuple[dict[str, Any], str]] = [
        ({"receipt": document["receipt"] | {"failed": 0, "completed": 5}}, "differs from the signed one"),
        ({"signed": f"{head}.{payload[:-4]}AAAA.{signature}"}, "signature is not a receipt signature of key"),
        ({"signed": None}, "not signed"),
        ({"key": document["key"] | {"x": document["key"]["y"]}}, "not among the trusted keys"),
        ({"receipt": 1}, "not a receipt"),
    ]
    for change, why in forgeries:
        bad.write_text(json.dumps(document | change))
        code, printed = await run(capsys, "receipt", "verify", bad, "--kid", kid)
        assert (code, why in printed) == (1, True), (change, printed)
    code, printed = await run(capsys, "receipt", "verify", good, "--kid", "another")
    assert (code, "not among the trusted keys" in printed) == (1, True)
    assert (await run(capsys, "receipt", "verify", good))[0] == 2
    ends = list(done["ends"].items())
    for wrong in (ends[:-1], [*ends, ends[0]], [(0, "Failed"), *ends[1:]], [(0, "Running"), *ends[1:]]):
        written(export, done["run_id"], wrong)
        assert (await run(capsys, "receipt", "verify", good, "--kid", kid, "--export", export))[0] == 1, wrong
    written(export, done["run_id"], ends)
    (export / "part-000000.jsonl").write_text("")
    code, printed = await run(capsys, "receipt", "verify", good, "--kid", kid, "--export", export)
    assert (code, "does not match the checksum in the manifest" in printed) == (1, True), printed


async def test_results_and_tasks_of_a_job_are_read(
    connected: System, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    group = await claimed(connected, 3)
    await report(connected, group, {0: LONG, 1: 1, 2: None})
    await connected.pass_of("run-counters")
    code, printed = await run(capsys, "job", "results", group["job_id"])
    assert (code, [json.loads(line)["result"] for line in printed.splitlines()]) == (0, [LONG, 1, None])
    file = tmp_path / "results.jsonl"
    code, printed = await run(capsys, "job", "results", group["job_id"], "--limit", "2", "--file", file)
    assert (code, len(file.read_text().splitlines())) == (0, 2), printed
    code, printed = await run(capsys, "job", "tasks", group["job_id"], "-o", "json")
    assert [task["index"] for task in json.loads(printed)["tasks"]] == [0, 1, 2]
    code, printed = await run(capsys, "job", "tasks", group["job_id"], "--index", "0", "-o", "json")
    assert json.loads(printed)["result"] == LONG
    code, printed = await run(capsys, "job", "watch", group["job_id"])
    assert (code, "Completed" in printed) == (0, True)


async def test_job_is_paused_resumed_canceled_and_deleted(
    connected: System, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = (await connected.submit([1, 2]))["job_id"]
    for word, state in (("pause", "Paused"), ("resume", "Running")):
        code, printed = await run(capsys, "job", word, job_id, "-o", "json")
        assert (code, json.loads(printed)["state"]) == (0, state)
    code, printed = await run(capsys, "job", "cancel", job_id, "--yes", "-o", "json")
    assert (code, json.loads(printed)["run"]["cancel_requested"]) == (0, True)
    code, printed = await run(capsys, "job", "delete", job_id, "--yes")
    assert (code, job_id in printed) == (0, True)
    assert (await run(capsys, "job", "show", job_id))[0] == 1
