"""Files that attempts read and write: the inputs they get, the conditions for a file to count, and the sweep."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec
import pytest

from interlock.clock import ManualClock
from interlock.schemas import MARKER, MAX_MARKER_BYTES, Column, DatasetSchema
from tests.support.dataset_files import PLAIN, marked, path_of
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System, fence, until

RANGES = """
name: chain
jobs:
  - { name: feed, activation: source, source: { kind: manual }, operator: echo, outputs: [logs] }
  - name: tens
    runtime: dispatcher
    operator: range_aggregator
    inputs: [{ from: { job: feed, output: logs }, where: "removed = false" }]
    outputs: [ranges]
    config: { size: 10 }
  - name: transfers
    operator: echo
    inputs: [{ from: { job: tens, output: ranges }, where: "topic0 = 'it''s'" }]
    outputs: [transfers]
  - name: merge
    operator: echo
    inputs: [{ from: { job: transfers, output: transfers } }]
    outputs: [merged]
    update_strategy: append
    unique_key: [id]
"""

WIDER = DatasetSchema([*PLAIN.columns, Column("note", "string")], "block_number")


async def data(system: System, *claims: dict[str, Any]) -> dict[str, Any]:
    reply = await system.worker("POST", "/internal/task-data", json={"items": [fence(claim) for claim in claims]})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


@pytest.fixture
async def flow(still: System) -> DeployedDags:
    flow = DeployedDags(still)
    await flow.start(RANGES)
    return flow


async def feed(flow: DeployedDags, *scopes: tuple[int, int]) -> None:
    """Commits one file per scope as the source."""
    for start, end in scopes:
        claim = await task_of(flow, "feed", {"start": start, "end": end})
        assert await commit(flow.system, claim, start, end) is None
        await flow.system.settle()


async def task_of(flow: DeployedDags, job: str, payload: Any) -> dict[str, Any]:
    task_id = uuid4()
    await flow.system.value(
        "insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)"
        " select $1, org_id, job_id, 3, 0, $3::json from interlock.jobs where job_id = $2",
        task_id,
        await flow.job_id("chain", job),
        msgspec.json.encode(payload).decode(),
    )
    return await flow.system.claim(str(task_id))


async def commit(system: System, claim: dict[str, Any], start: int, end: int, **said: Any) -> str | None:
    """Writes a file and completes with it. Returns the code of the refusal, if any."""
    grant = claim["task"]["outputs"][0]
    ref = {name: grant[name] for name in ("dataset_uuid", "dataset_version")} | {"start": start, "end": end}
    output = ref | marked(grant["write_prefix"], f"{start}_{end}.parquet", **said)
    item = fence(claim) | {"status": "Completed", "outputs": [output], "events": [ref]}
    reply = (await system.worker("POST", "/internal/task-complete", json={"items": [item]})).json()
    return reply["refused"][0]["code"] if "refused" in reply else None


async def waiting(flow: DeployedDags, job: str, tasks: int = 1) -> list[dict[str, Any]]:
    """Claims the job's tasks once there are this many: the dispatcher cuts ranges in the background."""

    async def look() -> list[str]:
        await flow.system.settle()
        found = await flow.waiting("chain", job)
        return found if len(found) == tasks else []

    return [await flow.system.claim(task_id) for task_id in await until(look)]


# Inputs


async def test_range_resolves_to_the_files_it_was_cut_from(flow: DeployedDags) -> None:
    await feed(flow, (0, 3), (14, 19), (4, 13), (20, 29))
    first, second, third = await waiting(flow, "transfers", 3)
    scopes = sorted((claim["task"]["payload"]["start"], claim["task"]["task_id"]) for claim in (first, second, third))
    assert [start for start, _ in scopes] == [0, 10, 20]
    answer = {item["task_id"]: item for item in (await data(flow.system, first, second, third))["items"]}
    found = answer[scopes[1][1]]["inputs"][0]
    assert (found["name"], found["storage"], found["start"], found["end"]) == ("logs", "parquet", 10, 19)
    assert [(file["start"], file["end"]) for file in found["files"]] == [(4, 13), (14, 19)]
    assert all(path_of(file["location"]).is_file() for file in found["files"])
    assert found["where"] == "(\"topic0\" = 'it''s') AND (\"removed\" = FALSE)"
    assert found["schema"] == msgspec.to_builtins(PLAIN)
    (output,) = answer[scopes[1][1]]["outputs"]
    assert (output["name"], output["storage"]) == ("transfers", "parquet")
    assert output["write_prefix"].endswith(f"/_attempts/{scopes[1][1]}/1/")


async def test_rewrite_is_visible_to_later_attempts_and_keeps_files_of_earlier_ones(flow: DeployedDags) -> None:
    await feed(flow, (0, 9))
    (claim,) = await waiting(flow, "transfers")
    (before,) = (await data(flow.system, claim))["items"][0]["inputs"][0]["files"]
    await feed(flow, (0, 9))
    (after,) = (await data(flow.system, claim))["items"][0]["inputs"][0]["files"]
    assert after["location"] != before["location"]
    assert after["commit"] > before["commit"]
    await flow.system.pass_of("sweep")
    assert path_of(before["location"]).is_file()


async def test_only_the_holder_of_a_task_gets_its_data(flow: DeployedDags, clock: ManualClock) -> None:
    claim = await task_of(flow, "feed", {"start": 0, "end": 9})
    other = claim | {"lease_token": str(uuid4())}
    answer = await data(flow.system, other)
    assert (answer["items"], [refusal["code"] for refusal in answer["refused"]]) == ([], ["fenced"])
    assert await flow.system.value("select count(*) from interlock.file_sweeps") == 0


# Conditions for a file to count


async def test_file_counts_only_under_its_attempt_and_with_its_marker(flow: DeployedDags) -> None:
    claim = await task_of(flow, "feed", {"start": 0, "end": 9})
    grant = claim["task"]["outputs"][0]
    prefix = grant["write_prefix"]
    ref = {name: grant[name] for name in ("dataset_uuid", "dataset_version")} | {"start": 0, "end": 9}
    other = prefix.replace("/1/", "/2/")
    said = marked(prefix) | ref
    marked(other)
    for wrong, status, code in (
        (said | {"location": f"{other}part"}, 403, "location_outside_prefix"),
        (said | {"location": f"{prefix}../1/part"}, 403, "location_outside_prefix"),
        (said | {"location": prefix}, 403, "location_outside_prefix"),
        (said | {"location": "s3://elsewhere/part"}, 403, "location_outside_prefix"),
        (said | {"location": f"{prefix}other"}, 400, "marker_differs"),
        (said | {"row_count": 1}, 400, "marker_differs"),
        (said | {"schema_hash": "another"}, 400, "marker_differs"),
    ):
        reply = await flow.system.complete(claim, outputs=[wrong])
        assert (reply.status_code, reply.json()["code"]) == (status, code), (wrong, reply.text)
    (path_of(prefix) / MARKER).write_text("{")
    assert (await flow.system.complete(claim, outputs=[said])).json()["code"] == "bad_marker"
    (path_of(prefix) / MARKER).write_text(" " * (MAX_MARKER_BYTES + 1))
    reply = await flow.system.complete(claim, outputs=[said])
    assert (reply.status_code, reply.json()["code"]) == (413, "object_too_large")
    (path_of(prefix) / MARKER).unlink()
    reply = await flow.system.complete(claim, outputs=[said])
    assert (reply.status_code, reply.json()["code"]) == (409, "marker_missing")
    assert await flow.partitions("chain", "feed") == []
    marked(prefix)
    assert (await flow.system.complete(claim, outputs=[said])).status_code == 200
    assert await flow.partitions("chain", "feed") == [(0, 9)]


async def test_nullable_columns_may_be_added_and_nothing_else_may_change(flow: DeployedDags) -> None:
    await feed(flow, (0, 9))
    wrong = {
        "another type": [Column("block_number", "int", nullable=False)],
        "may be null": [Column("block_number", "bigint")],
        "is gone": [],
        "new and not null": [*PLAIN.columns, Column("note", "string", nullable=False)],
    }
    for columns in wrong.values():
        claim = await task_of(flow, "feed", {"start": 10, "end": 19})
        schema = DatasetSchema(columns, "block_number")
        assert await commit(flow.system, claim, 10, 19, schema=schema) == "schema_mismatch", columns
    claim = await task_of(flow, "feed", {"start": 10, "end": 19})
    assert await commit(flow.system, claim, 10, 19, schema=WIDER) is None
    stored = "select schema::text from interlock.dataset_versions where dataset_version = $1"
    version = await flow.version("chain", "feed")
    assert msgspec.json.decode(await flow.system.value(stored, version), type=DatasetSchema) == WIDER
    await feed(flow, (20, 29))
    assert msgspec.json.decode(await flow.system.value(stored, version), type=DatasetSchema) == WIDER


async def test_schema_of_a_stale_attempt_changes_nothing(flow: DeployedDags, clock: ManualClock) -> None:
    await feed(flow, (0, 9))
    late = await task_of(flow, "feed", {"start": 10, "end": 19})
    newer = "update interlock.tasks set attempt = 2, lease_token = $1 where task_id = $2"
    await flow.system.value(newer, uuid4(), late["task_id"])
    assert await commit(flow.system, late, 10, 19, schema=WIDER) == "fenced"
    hashes = "select count(distinct schema_hash) from interlock.dataset_versions where schema_hash is not null"
    assert await flow.system.value(hashes) == 1
    assert await flow.partitions("chain", "feed") == [(0, 9)]


async def test_rows_are_added_only_to_the_current_partition(flow: DeployedDags) -> None:
    await feed(flow, (0, 9))
    (transfers,) = await waiting(flow, "transfers")
    assert await commit(flow.system, transfers, 0, 9) is None
    (one,) = await waiting(flow, "merge")
    other = await task_of(flow, "merge", {"start": 0, "end": 9})
    answer = await data(flow.system, one, other)
    assert [item["outputs"][0]["unique_key"] for item in answer["items"]] == [["id"], ["id"]]
    assert all("current" not in item["outputs"][0] for item in answer["items"])
    assert await commit(flow.system, one, 0, 9) is None
    assert await commit(flow.system, other, 0, 9) == "partition_changed"
    current = (await data(flow.system, other))["items"][0]["outputs"][0]["current"]
    assert await commit(flow.system, other, 0, 9, based_on=current["commit"]) is None


# Sweep


async def test_files_of_a_reaped_attempt_are_swept_and_its_late_commit_refused(
    flow: DeployedDags, clock: ManualClock
) -> None:
    claim = await task_of(flow, "feed", {"start": 0, "end": 9})
    await data(flow.system, claim)
    place = marked(claim["task"]["outputs"][0]["write_prefix"])["location"]
    clock.advance(700)
    await flow.system.settle()
    assert not path_of(place).exists()
    late = marked(claim["task"]["outputs"][0]["write_prefix"])["location"]
    assert await commit(flow.system, claim, 0, 9) == "fenced"
    clock.advance(3 * 3600)
    await flow.system.settle()
    assert not path_of(late).exists()
    assert await flow.system.value("select count(*) from interlock.file_sweeps") == 0
    assert await flow.partitions("chain", "feed") == []


async def test_files_of_running_and_committed_attempts_stay(flow: DeployedDags, clock: ManualClock) -> None:
    claim = await task_of(flow, "feed", {"start": 0, "end": 9})
    await data(flow.system, claim)
    place = marked(claim["task"]["outputs"][0]["write_prefix"])["location"]
    for _ in range(20):
        clock.advance(40)
        beat = await flow.system.worker("POST", "/internal/task-heartbeat", json={"items": [fence(claim)]})
        assert beat.json()["items"], beat.text
        await flow.system.pass_of("sweep")
    assert path_of(place).exists()
    assert await commit(flow.system, claim, 0, 9) is None
    clock.advance(7200)
    await flow.system.settle()
    assert await flow.system.value("select count(*) from interlock.file_sweeps") == 0
    (kept,) = path_of(claim["task"]["outputs"][0]["write_prefix"]).glob("*.parquet")
    assert kept.name == "0_9.parquet"


@pytest.mark.parametrize("marker", ["as it was", "{", " " * (MAX_MARKER_BYTES + 1)], ids=["own", "garbage", "huge"])
async def test_replaced_file_is_swept_once_no_attempt_can_read_it(
    flow: DeployedDags, clock: ManualClock, marker: str
) -> None:
    await feed(flow, (0, 9))
    version = await flow.version("chain", "feed")
    location = "select location from interlock.partitions where dataset_version = $1"
    before = await flow.system.value(location, version)
    if marker != "as it was":
        (path_of(before).parent / MARKER).write_text(marker)
    await feed(flow, (0, 9))
    clock.advance(5 * 3600)
    await flow.system.settle()
    assert path_of(before).exists()
    clock.advance(2 * 3600)
    await flow.system.settle()
    assert not path_of(before).parent.exists()
    assert path_of(await flow.system.value(location, version)).exists()


async def test_files_that_a_sweep_failed_to_delete_are_deleted_later(flow: DeployedDags, clock: ManualClock) -> None:
    claim = await task_of(flow, "feed", {"start": 0, "end": 9})
    await data(flow.system, claim)
    place = path_of(marked(claim["task"]["outputs"][0]["write_prefix"])["location"])
    await flow.system.complete(claim, "Failed")
    await flow.system.value("update interlock.file_sweeps set place = replace(place, 'file:', 'elsewhere:')")
    clock.advance(700)
    with pytest.raises(ValueError, match="is not under"):
        await flow.system.pass_of("sweep")
    await flow.system.value("update interlock.file_sweeps set place = replace(place, 'elsewhere:', 'file:')")
    clock.advance(700)
    await flow.system.pass_of("sweep")
    assert not place.exists()
