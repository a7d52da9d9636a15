"""Ingest processes that kill themselves after every step. Each line of a list, or scope of a backfill, is one task."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import copied
from tests.crash.seed import ROUNDS, random_for
from tests.support.deployed_dags import DeployedDags
from tests.support.deployment import Process
from tests.support.polls import answered
from tests.support.staged_lists import Intake, intake

_OF_LARGE = (
    "ingest.received",
    "ingest.before_shard_commit",
    "ingest.shard_created",
    "ingest.chunk_loaded",
    "ingest.loaded",
    "ingest.before_loaded_commit",
    "ingest.finished",
    "ingest.before_total_commit",
    "ingest.counted",
    "ingest.before_enqueue_commit",
    "ingest.enqueued",
    "ingest.before_latch_commit",
    "ingest.latched",
)
_OF_BAD = ("ingest.before_end_commit", "ingest.failed")
_OF_LISTS = (*_OF_LARGE, *_OF_BAD, "ingest.before_small_commit", "upload_sweep.before_forgotten")
_OF_BACKFILLS = (
    *(point for point in _OF_LARGE if point != "ingest.before_enqueue_commit"),
    "ingest.before_small_commit",
    "ingest.before_hand_out_commit",
)
CASES = {("ingest", point) for point in (*_OF_LISTS, *_OF_BACKFILLS)}
LINES = 45_000
"""Long enough for two chunks."""


@pytest.fixture
async def door(postgres_url: str, template: str, tmp_path: Path) -> AsyncIterator[Intake]:
    async with copied(postgres_url, template) as url, intake(url, tmp_path / "system") as made:
        yield made


def _process(door: Intake, name: str, folder: Path) -> Process:
    settings = {
        "state_url": door.system.kernel.settings.state_url.get_secret_value(),  # type: ignore[union-attr]
        "objects_url": door.system.kernel.settings.objects_root,
        "shard_threshold": "50",
        "sweep_seconds": "0.1",
    }
    return Process(name, ["serve", "ingest", "--dir", str(folder)], settings, folder / f"{name}.stderr")


def _list_for(point: str, number: int) -> bytes:
    if point in _OF_BAD:
        return b"1\n" * 60 + b"{\n"
    if point == "ingest.before_small_commit":
        return b"%d\n" % number * 3
    if point == "ingest.chunk_loaded":
        return b"".join(b'{"n": %d, "text": "%b"}\n' % (n, b"." * 190) for n in range(LINES))
    return b"%d\n" % number * 200


async def test_ingests_that_die_anywhere_make_each_line_one_task(door: Intake, tmp_path: Path) -> None:
    chance = random_for("ingests")
    points = sorted(_OF_LISTS) * ROUNDS
    chance.shuffle(points)
    runs: dict[str, bytes] = {}
    victim, other = _process(door, "victim", tmp_path), _process(door, "other", tmp_path)
    try:
        for number, point in enumerate(points):
            if point == "upload_sweep.before_forgotten":
                upload = await door.upload(b"1")
                await door.system.value(
                    "update interlock.uploads set sweep_at = 'epoch' where upload_id = $1::text::uuid", upload
                )
            else:
                content = _list_for(point, number)
                runs[(await door.submit(content))["run_id"]] = content
            await victim.start(f"{point}=kill")
            await victim.killed_itself()
            await door.visible()
        await victim.start()
        await other.start()
        await answered(lambda: _settled(door), 90)
        for run_id, content in runs.items():
            await _check(door, run_id, content)
        assert await victim.stop() == 0
        assert await other.stop() == 0
    finally:
        await victim.give_up()
        await other.give_up()


DAG = """
name: chain
jobs:
  - { name: feed, activation: source, source: { kind: manual }, operator: echo, outputs: [raw] }
  - { name: clean, operator: echo, inputs: [{ from: { job: feed, output: raw } }], outputs: [clean] }
"""
SCOPES = 100


async def test_ingests_that_die_anywhere_make_each_scope_of_a_backfill_one_task(door: Intake, tmp_path: Path) -> None:
    chance = random_for("backfills")
    points = sorted(_OF_BACKFILLS) * ROUNDS
    chance.shuffle(points)
    flow = DeployedDags(door.system)
    await flow.start(DAG)
    await flow.report("chain", "feed", *((10 * n, 10 * n + 9) for n in range(SCOPES)))
    runs: dict[str, int] = {}
    victim, other = _process(door, "victim", tmp_path), _process(door, "other", tmp_path)
    try:
        for point in points:
            count = 40 if point == "ingest.before_small_commit" else SCOPES
            body = {"start": 0, "end": 10 * count - 1}
            reply = await door.system.user("POST", "/v1/dags/chain/jobs/clean/backfills", json=body)
            runs[reply.json()["backfill"]["run_id"]] = count
            skipped = chance.randint(0, 1) if point == "ingest.chunk_loaded" else 0
            await victim.start(f"{point}=kill*{skipped}")
            await victim.killed_itself()
            await door.visible()
        await victim.start()
        await other.start()
        await answered(lambda: _settled(door), 90)
        await answered(lambda: _handed_out(door), 90)
        for run_id, count in runs.items():
            await _check_backfill(door, run_id, count)
        assert await victim.stop() == 0
        assert await other.stop() == 0
    finally:
        await victim.give_up()
        await other.give_up()


async def _handed_out(door: Intake) -> bool:
    return bool(await door.system.value("select count(*) = 0 from interlock.runs where held_from is not null"))


async def _check_backfill(door: Intake, run_id: str, count: int) -> None:
    run = await door.system.run(run_id)
    assert (run["state"], run["total"], run["counts"]["Queued"]) == ("Running", count, count)
    payloads = await door.payloads(run_id)
    assert [payloads[n]["start"] for n in range(len(payloads))] == [10 * n for n in range(count)]
    assert await door.indexes_of_messages(run_id) == list(range(count))


async def _settled(door: Intake) -> bool:
    await door.visible()
    return bool(await door.system.value("select count(*) = 0 from interlock.ingests where settled_at is null"))


async def _check(door: Intake, run_id: str, content: bytes) -> None:
    run = await door.system.run(run_id)
    if b"{\n" in content:
        assert run["state"] == "Failed"
        assert run["reason"].startswith("Line 61 cannot be stored: it is not JSON")
        return
    count = content.count(b"\n")
    assert (run["state"], run["total"], run["counts"]["Queued"]) == ("Running", count, count)
    assert sorted(await door.payloads(run_id)) == list(range(count))
    assert await door.indexes_of_messages(run_id) == list(range(count))
