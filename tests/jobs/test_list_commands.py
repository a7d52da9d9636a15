"""`interlock job submit --file`, `add` and `close`, and the calls of the SDK behind them."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from interlock.cli.app import execute
from interlock.client import Client
from interlock.wire.jobs import ListFormat
from tests.conftest import copied
from tests.support.s3 import S3
from tests.support.staged_lists import Intake, intake


@pytest.fixture(scope="module")
async def door(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    async with copied(postgres_url, template) as url, intake(url, tmp_path_factory.mktemp("lists")) as started:
        yield started


@pytest.fixture
def connected(door: Intake, monkeypatch: pytest.MonkeyPatch) -> Intake:
    monkeypatch.setenv("INTERLOCK_GATEWAY_URL", door.system.gateway_url)
    monkeypatch.setenv("INTERLOCK_API_KEY", door.system.admin_key)
    return door


async def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    code = await asyncio.to_thread(execute, [str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize(
    ("name", "content", "payloads"),
    [
        ("urls.txt", b"https://a\nhttps://b\n", {0: "https://a", 1: "https://b"}),
        ("list.jsonl.gz", gzip.compress(b'{"n": 1}\n2\n'), {0: {"n": 1}, 1: 2}),
        ("table.csv", b"a,b\n1,2\n", {0: {"a": "1", "b": "2"}}),
    ],
    # Fixed ids, because gzip stores the time: test processes that start in different seconds would disagree on ids.
    ids=["lines", "packed", "table"],
)
async def test_file_is_uploaded_and_becomes_a_run(
    connected: Intake, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes, payloads: object
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    code, said = await run(capsys, "job", "submit", "--operator", "echo", "--file", file, "--output", "json")
    assert code == 0, said
    accepted = json.loads(said)
    assert (accepted["state"], accepted["total"]) == ("Ingesting", None)
    await connected.drain()
    assert await connected.payloads(accepted["run_id"]) == payloads


async def test_open_run_is_added_to_and_closed(connected: Intake, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = await run(capsys, "job", "submit", "--operator", "echo", "--name", "found", "--open")
    assert code == 0, said
    code, said = await run(capsys, "job", "add", "found", "--task", "1", "--task", "[2]", "--output", "json")
    assert (code, json.loads(said)["first_index"], json.loads(said)["added"]) == (0, 0, 2), said
    code, said = await run(capsys, "job", "close", "found", "--output", "json")
    assert (code, json.loads(said)["total"]) == (0, 2), said
    code, said = await run(capsys, "job", "add", "found", "--task", "3")
    assert (code, "accepts no more tasks" in said) == (1, True), said


async def test_conflicting_options_are_a_usage_error(
    connected: Intake, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "list"
    file.write_bytes(b"1\n")
    for more in (["--open"], ["--task", "1"]):
        code, said = await run(capsys, "job", "submit", "--operator", "echo", "--file", file, *more)
        assert (code, "--file cannot be combined with" in said) == (2, True), said


async def test_long_file_is_uploaded_in_parts_with_progress(connected: Intake, tmp_path: Path) -> None:
    file = tmp_path / "list"
    file.write_bytes(b"".join(b"%d\n" % n for n in range(1000)))
    told: list[tuple[int, int]] = []
    async with Client(connected.system.gateway_url, connected.system.admin_key) as client:
        source = await client.lists.put(
            file, ListFormat.JSONL, part_bytes=500, on_sent=lambda sent, total: told.append((sent, total))
        )
    assert told[-1] == (3890, 3890)
    assert len(told) > 5
    reply = await connected.system.user(
        "POST",
        "/v1/jobs",
        json={"operator": "echo", "source": {"upload_id": str(source.upload_id), "sha256": source.sha256}},
    )
    await connected.drain()
    assert await connected.payloads(reply.json()["run_id"]) == {n: n for n in range(1000)}


async def test_lists_in_s3_are_put_with_presigned_urls_and_read_from_there(
    s3: S3, state_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    content = b"".join(b"%d\n" % n for n in range(300))
    async with intake(state_url, tmp_path, objects_url=s3.root, shard_threshold=50) as door:
        run = await door.ingested(content, gzip.compress(content))
        assert (run["state"], run["total"], run["reason"]) == ("Running", 600, None)
        changed = await door.submit(content)
        prefix = await door.system.value(
            "select source ->> 'prefix' from interlock.ingests where run_id = $1::text::uuid", changed["run_id"]
        )
        await door.system.kernel.access.objects.put(f"{prefix}00001", content.replace(b"0", b"1"))
        await door.drain()
        assert (await door.system.run(changed["run_id"]))["state"] == "Failed"
