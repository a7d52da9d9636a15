"""Large runs in progress: next to small ones, under pauses and deletions, and with workers that report oddly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from interlock.stores.embedded import EmbeddedValkey
from tests.support.staged_lists import Intake, intake
from tests.support.system import System

LINES = [b'{"n":%d}' % n for n in range(2000)]


@pytest.fixture
async def site(state_url: str, tmp_path: Path, valkey: EmbeddedValkey) -> AsyncIterator[Intake]:
    # Two of ten messages are bulk: a share that does not depend on chance.
    settings: dict[str, Any] = {"shard_threshold": 1000, "bulk_share": 0.2, "valkey_url": await valkey.start()}
    async with intake(state_url, tmp_path, **settings) as opened:
        yield opened


async def large(site: Intake, **job: Any) -> dict[str, Any]:
    run = await site.ingested(b"\n".join(LINES), **job)
    assert await site.shard(run["run_id"]) > 0
    return run


async def group_of(system: System, run: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    reply = await system.claim_many(
        ranges=[{"run_id": run["run_id"], "start": start, "end": end}], tokens=False, grouped=True
    )
    (group,) = reply["groups"]
    return {"run_id": run["run_id"], "attempt": group["attempt"], "lease_token": group["lease_token"]}


async def report(system: System, group: dict[str, Any], indexes: list[int]) -> dict[str, Any]:
    body = {"groups": [group | {"indexes": indexes, "results": [{"i": index} for index in indexes]}]}
    reply = await system.worker("POST", "/internal/task-complete", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


async def test_small_run_does_not_wait_behind_a_large_one(site: Intake) -> None:
    run = await large(site)
    small = await site.system.submit([{"n": n} for n in range(10)])
    received = await site.system.receive(max_messages=10)
    runs = [message["body"]["run_id"] for message in received]
    assert small["run_id"] in runs
    assert runs.count(run["run_id"]) >= 2


async def test_range_reported_twice_out_of_order_and_beyond_the_claim_counts_once(site: Intake) -> None:
    system = site.system
    run = await large(site)
    group = await group_of(system, run, 0, 99)
    assert (await report(system, group, list(range(99, 49, -1))))["accepted"] == 50
    assert (await report(system, group, list(range(40, 100))))["accepted"] == 60
    beyond = await report(system, group, [0, 150, 1999, 5000])
    assert beyond["accepted"] == 1
    assert {refusal["stale"] for refusal in beyond["refused"]} <= {"lease_token", "task", "attempt"}
    assert len(beyond["refused"]) == 3
    await system.pass_of("run-counters")
    counts = (await system.run(run["run_id"]))["counts"]
    assert (counts["Completed"], counts["Running"], counts["Queued"]) == (61, 39, 1900)


async def test_large_run_is_paused_resumed_and_ends(site: Intake) -> None:
    system = site.system
    run = await large(site)
    await system.user("POST", f"/v1/jobs/{run['job_id']}/pause")
    while messages := await system.receive(max_messages=100):
        for message in messages:
            body = {name: message["body"][name] for name in ("run_id", "start", "end")}
            receipt = {"queue": "platform"} | {name: message[name] for name in ("message_id", "receipt")}
            assert not (await system.claim_many(**body, message=receipt)).get("claims")
    assert await site.indexes_of_messages(run["run_id"]) == []
    await system.user("POST", f"/v1/jobs/{run['job_id']}/resume")
    await system.pass_of("run-wakes")
    assert await site.indexes_of_messages(run["run_id"]) == list(range(2000))
    for start in range(0, 2000, 500):
        group = await group_of(system, run, start, start + 499)
        assert (await report(system, group, list(range(start, start + 500))))["accepted"] == 500
    await system.settle()
    assert (await system.run(run["run_id"]))["state"] == "Completed"


async def test_job_is_deleted_during_its_ingest(site: Intake) -> None:
    accepted = await site.submit(b"\n".join(LINES))
    assert (await site.system.user("DELETE", f"/v1/jobs/{accepted['job_id']}")).status_code == 200
    await site.drain()
    while await site.system.pass_of("run-deletions"):
        continue
    await site.drain()
    for table in ("runs", "jobs", "tasks"):
        assert await site.system.value(f"select count(*) from interlock.{table}") == 0, table


async def test_large_job_is_deleted_with_its_table_while_it_runs(site: Intake) -> None:
    system = site.system
    run = await large(site, limits={"max_concurrency": 50})
    shard = await site.shard(run["run_id"])
    group = await group_of(system, run, 0, 99)
    assert (await system.user("DELETE", f"/v1/jobs/{run['job_id']}")).status_code == 200
    while await system.pass_of("run-deletions"):
        continue
    assert await system.value("select to_regclass('interlock.tasks_' || $1::int)", shard) is None
    late = await report(system, group, list(range(50)))
    assert late.get("accepted", 0) == 0
    assert len(late["refused"]) == 50
