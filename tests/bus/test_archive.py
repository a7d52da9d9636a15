"""The archive: accepted commands as a dataset of each tenant."""

from __future__ import annotations

import json

import pytest

from interlock.bus.replay import archive
from interlock.bus.replay.archive import Archive, ArchiveRetention
from interlock.clock import ManualClock
from interlock.datasets.files import Sweeper
from interlock.failpoints import arm, disarm
from tests.support.accepted_commands import archived_payloads, archived_rows, owe_commands
from tests.support.datasets import deploy
from tests.support.system import System


def _archive(system: System) -> Archive:
    return Archive(system.kernel.stores.database, system.kernel.settings, system.kernel.access.objects)


async def test_commands_become_consecutive_partitions(still: System, clock: ManualClock) -> None:
    await owe_commands(still, ["a", "b"])
    await owe_commands(still, ["c"])
    assert await _archive(still).run_once() == 0
    clock.advance(300)
    assert await _archive(still).run_once() == 3
    await owe_commands(still, ["d"])
    clock.advance(300)
    assert await _archive(still).run_once() == 1
    rows = await archived_rows(still)
    assert [(row["position"], row["payload"]) for row in rows] == [(0, '"a"'), (1, '"b"'), (2, '"c"'), (3, '"d"')]
    assert {row["source"] for row in rows} == {"default/billing"}
    page = (await still.user("GET", "/v1/datasets/bus_commands/partitions")).json()
    assert [each["partition_key"] for each in page["partitions"]] == ["0-2", "3-3"]
    dataset = (await still.user("GET", "/v1/datasets/bus_commands")).json()
    assert [column["name"] for column in dataset["versions"][0]["columns"]["columns"]][:2] == ["position", "command_id"]


@pytest.mark.parametrize(
    ("full", "most_bytes", "parts"),
    [
        pytest.param({"rows": 2, "commands": 100}, 10**6, ["0-2", "3-5"], id="rows"),
        pytest.param({"rows": 100, "commands": 4}, 10**6, ["0-4", "5-5"], id="commands"),
        pytest.param({"rows": 100, "commands": 100}, 1, ["0-1", "2-2", "3-4", "5-5"], id="bytes"),
    ],
)
async def test_full_file_is_written_immediately(
    still: System, monkeypatch: pytest.MonkeyPatch, full: dict[str, int], most_bytes: int, parts: list[str]
) -> None:
    monkeypatch.setattr(archive, "_FULL", full)
    monkeypatch.setattr(archive, "_MAX_BYTES", most_bytes)
    for payloads in (["a", "b"], ["c"], ["d", "e"], ["f"]):
        await owe_commands(still, payloads)
    writing = _archive(still)
    while await writing.flush(still.org_id):
        continue
    page = (await still.user("GET", "/v1/datasets/bus_commands/partitions")).json()
    assert [each["partition_key"] for each in page["partitions"]] == parts
    assert await archived_payloads(still) == [*"abcdef"]


async def test_tenant_with_a_full_file_does_not_wait(still: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_FULL", {"rows": 3, "commands": 4})
    await owe_commands(still, ["a", "b", "c"])
    assert await _archive(still).run_once() == 0
    await owe_commands(still, ["d"])
    assert await _archive(still).run_once() == 4


async def test_dag_gets_a_task_for_each_part_of_the_archive(still: System, clock: ManualClock) -> None:
    await owe_commands(still, ["a"])
    clock.advance(300)
    await _archive(still).run_once()
    await still.declare("audits:count")
    await deploy(
        still,
        """
name: audit
jobs:
  - name: count
    operator: "audits:count"
    inputs: [{ from: { dataset: bus_commands } }]
    outputs: [counts]
""",
    )
    await still.settle()
    await owe_commands(still, ["b", "c"])
    clock.advance(300)
    await _archive(still).run_once()
    await still.settle()
    async with still.kernel.stores.database.connection() as connection:
        rows = await connection.fetch("select payload from interlock.tasks")
    scopes = [json.loads(row["payload"]) for row in rows]
    assert sorted((scope["start"], scope["end"]) for scope in scopes) == [(0, 0), (1, 2)]


async def test_late_attempt_commits_nothing(still: System, clock: ManualClock) -> None:
    await owe_commands(still, ["a"])
    clock.advance(300)

    async def overtaken() -> None:
        disarm("archive.written")
        clock.advance(121)
        assert await _archive(still).run_once() == 1

    arm("archive.written", overtaken)
    assert await _archive(still).run_once() == 0
    assert await archived_payloads(still) == ["a"]
    clock.advance(86_400)
    swept = Sweeper(still.kernel.stores.database, still.kernel.settings, still.kernel.access.objects)
    await swept.run_once()
    assert await archived_payloads(still) == ["a"]
    assert await still.value("select count(*) from interlock.file_sweeps") == 0


async def test_old_parts_are_dropped_with_their_files(still: System, clock: ManualClock) -> None:
    await owe_commands(still, ["a"])
    clock.advance(300)
    await _archive(still).run_once()
    clock.advance(30 * 86_400)
    await owe_commands(still, ["b"])
    clock.advance(300)
    await _archive(still).run_once()
    retention = ArchiveRetention(still.kernel.stores.database, still.kernel.settings)
    assert await retention.run_once() == 1
    assert await retention.run_once() == 0
    assert await archived_payloads(still) == ["b"]
