"""Invalidation recomputes exactly the scopes that a range touches and everything downstream, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from interlock import failpoints
from interlock.dags import invalidation
from interlock.wire.access import Role
from tests.support.datasets import (
    CHAIN,
    READER,
    bring,
    built,
    claim_of,
    deploy,
    finish,
    got,
    job_id,
    key_of,
    scope,
    waiting,
    work,
)
from tests.support.system import System, until

STREAM = """
name: river
jobs:
  - name: flow
    activation: source
    source: { kind: manual }
    operator: echo
    outputs: [water]
  - name: bottle
    operator: echo
    inputs: [{ from: { job: flow, output: water } }]
    outputs: [bottles]
"""


async def invalidate(system: System, name: str, start: int, end: int, **more: Any) -> Any:
    key = more.pop("key", None)
    body = {"start": start, "end": end, "reason": "wrong decimals"} | more
    return await system.user("POST", f"/v1/datasets/{name}/invalidate", key=key, json=body)


async def invalidated(system: System, name: str, start: int, end: int, **more: Any) -> int:
    reply = await invalidate(system, name, start, end, **more)
    assert reply.status_code == 200, reply.text
    await system.settle()
    scopes: int = reply.json()["scopes"]
    return scopes


async def idle(system: System) -> bool:
    return not any([await waiting(system, "chain", job) for job in ("double", "total")])


async def test_scopes_of_a_reactive_job_and_downstream_are_recomputed(still: System) -> None:
    await built(still, (0, 9), (10, 19), (20, 29), (30, 39))
    await deploy(still, READER)
    while await still.pass_of("scopes"):
        continue
    await work(still, "reader", "report")
    before = await got(still, "/v1/datasets/doubled/partitions")
    assert await invalidated(still, "doubled", 15, 25) == 2
    assert await waiting(still, "chain", "total") == []
    assert await work(still, "chain", "double") == ["10-19", "20-29"]
    assert await work(still, "chain", "total") == ["10-19", "20-29"]
    assert await work(still, "reader", "report") == ["10-19", "20-29"]
    after = await got(still, "/v1/datasets/doubled/partitions")
    changed = [
        new["partition_key"]
        for old, new in zip(before["partitions"], after["partitions"], strict=True)
        if old["commit"] != new["commit"]
    ]
    assert changed == ["10-19", "20-29"]
    while await still.pass_of("scopes"):
        continue
    assert await idle(still)


async def test_partitions_of_a_source_count_as_changed_without_a_new_task(still: System) -> None:
    await built(still, (0, 9), (10, 19), (20, 29))
    assert await invalidated(still, "chain:feed:blocks", 0, 10) == 2
    assert await waiting(still, "chain", "feed") == []
    assert await work(still, "chain", "double") == ["0-9", "10-19"]
    assert await work(still, "chain", "total") == ["0-9", "10-19"]
    assert await idle(still)


async def test_range_of_a_stream_counts_as_rewritten(still: System) -> None:
    await deploy(still, STREAM)
    for cursor in (9, 19, 29):
        await bring(still, {"cursor": cursor}, dag="river", job="flow")
        await work(still, "river", "bottle")
    assert await invalidated(still, "river:flow:water", 12, 1000) == 2
    (first, second) = await waiting(still, "river", "bottle")
    payloads = [(await still.task(task_id))["payload"] for task_id in (first, second)]
    parts = sorted((p["start"], p["end"], p["changed_start"], p["changed_end"]) for p in payloads)
    assert parts == [(10, 19, 12, 19), (20, 29, 20, 29)]
    await work(still, "river", "bottle")
    assert await invalidated(still, "river:flow:water", 30, 40) == 0
    assert await still.value("select committed from interlock.job_cursors") == 29


async def test_dry_run_counts_and_changes_nothing(still: System) -> None:
    await built(still, (0, 9), (10, 19))
    for name, expected in (("doubled", 2), ("chain:feed:blocks", 2)):
        reply = await invalidate(still, name, 5, 12, dry_run=True)
        assert reply.json() == {"scopes": expected, "dry_run": True, "invalidation_id": None}
    await still.settle()
    assert await idle(still)
    assert await still.value("select count(*) from interlock.invalidations") == 0


async def test_invalidation_records_user_time_and_reason(still: System) -> None:
    await built(still, (0, 9))
    writer = await key_of(still, Role.WRITER)
    reply = await invalidate(still, "doubled", 3, 4, key=writer)
    async with still.kernel.stores.database.connection() as connection:
        (row,) = await connection.fetch("select * from interlock.invalidations")
    assert str(row["invalidation_id"]) == reply.json()["invalidation_id"]
    assert (row["asked_by"], row["reason"], row["scopes"]) == ("some-writer", "wrong decimals", 1)
    assert (row["range_start"], row["range_end"], row["org_id"]) == (3, 4, still.org_id)
    assert row["created_at"] == still.kernel.stores.clock.now()


async def test_empty_range_changes_nothing(still: System) -> None:
    await built(still, (0, 9))
    for name in ("doubled", "chain:feed:blocks"):
        assert (await invalidate(still, name, 10, 500)).json()["scopes"] == 0
    assert await still.value("select count(*) from interlock.invalidations") == 0
    await deploy(still, STREAM)
    assert (await invalidate(still, "river:flow:water", 0, 9)).json()["scopes"] == 0


async def test_scope_with_a_queued_task_gets_no_second_one(still: System) -> None:
    await built(still, (0, 9))
    assert await invalidated(still, "doubled", 0, 9) == 1
    tasks = await waiting(still, "chain", "double")
    assert await invalidated(still, "doubled", 0, 0) == 1
    assert await waiting(still, "chain", "double") == tasks
    assert await work(still, "chain", "double") == ["0-9"]
    assert await work(still, "chain", "total") == ["0-9"]
    assert await idle(still)


async def test_scope_of_a_running_task_is_recomputed_if_it_read_too_early(still: System) -> None:
    await built(still, (0, 9))
    await invalidated(still, "doubled", 0, 9)
    (task_id,) = await waiting(still, "chain", "double")
    early = await still.claim(task_id)
    assert await invalidated(still, "doubled", 0, 9) == 1
    late = [await still.claim(task) for task in await waiting(still, "chain", "double")]
    assert len(late) == 1
    await finish(still, late[0], scope(0, 9))
    newest = (await got(still, "/v1/datasets/doubled/partitions"))["partitions"][0]
    await finish(still, early, scope(0, 9))
    kept = (await got(still, "/v1/datasets/doubled/partitions"))["partitions"][0]
    assert kept["task_id"] == newest["task_id"] == late[0]["task_id"]
    undone = "select count(*) from interlock.materialisations where done_commit is distinct from input_commit"
    await still.settle()
    assert await work(still, "chain", "total") == ["0-9"]
    assert await still.value(undone) == 0


async def test_invalidation_recomputes_a_dead_scope(still: System) -> None:
    await deploy(still, CHAIN)
    await bring(still, scope(0, 9))
    (task_id,) = await waiting(still, "chain", "double")
    await still.user("POST", f"/v1/tasks/{task_id}/cancel")
    assert await invalidated(still, "doubled", 0, 9) == 1
    assert await work(still, "chain", "double") == ["0-9"]


async def test_uncommitted_input_change_does_not_count_as_read(still: System) -> None:
    """The change has a number but is not committed: the invalidation waits for it, and so gets a newer number."""
    await built(still, (0, 9))
    claim = await claim_of(still, "chain", "feed")
    reached, go = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        failpoints.disarm("complete.before_commit")
        reached.set()
        await go.wait()

    failpoints.arm("complete.before_commit", hold)
    try:
        changing = asyncio.create_task(finish(still, claim, scope(0, 9)))
        await reached.wait()
        asking = asyncio.create_task(invalidate(still, "doubled", 0, 9))
        await _blocked(still)
    finally:
        go.set()
        failpoints.disarm("complete.before_commit")
    await changing
    assert (await asking).json()["scopes"] == 1
    commit = await still.value(
        "select commit_id from interlock.dataset_versions v join interlock.jobs j on j.job_id = v.job_id"
        " where j.name = 'feed'"
    )
    asked = await still.value("select commit_id from interlock.invalidations")
    assert asked > commit
    await still.settle()
    assert await work(still, "chain", "double") == ["0-9"]
    assert await work(still, "chain", "total") == ["0-9"]
    assert await idle(still)


async def _blocked(system: System) -> None:
    await until(lambda: system.value("select exists (select 1 from pg_locks where not granted)"))


async def test_invalidation_of_a_paused_job_is_refused(still: System) -> None:
    await built(still, (0, 9))
    double = await job_id(still, "chain", "double")
    await still.value(
        "insert into interlock.pauses (job_id, cause_id, bulk, path, reason)"
        " values ($1, $2, false, array[$2, $1]::uuid[], 'total has 5 tasks waiting') returning 1",
        double,
        await job_id(still, "chain", "total"),
    )
    reply = await invalidate(still, "doubled", 0, 9)
    assert (reply.status_code, reply.json()["code"]) == (409, "job_paused")
    assert "total has 5 tasks waiting" in reply.json()["detail"]
    assert (await invalidate(still, "chain:feed:blocks", 0, 9)).status_code == 200
    while await still.pass_of("router"):
        continue
    assert await idle(still)
    await still.value("delete from interlock.pauses returning 1")
    while await still.pass_of("scopes"):
        continue
    assert await work(still, "chain", "double") == ["0-9"]


async def test_too_many_scopes_in_one_call_are_refused(still: System, monkeypatch: pytest.MonkeyPatch) -> None:
    await built(still, (0, 9), (10, 19), (20, 29))
    monkeypatch.setattr(invalidation, "MAX_SCOPES", 2)
    for name in ("doubled", "chain:feed:blocks"):
        reply = await invalidate(still, name, 0, 29)
        assert (reply.status_code, reply.json()["code"]) == (413, "too_many_scopes")
        assert (await invalidate(still, name, 0, 19, dry_run=True)).json()["scopes"] == 2


async def test_reader_may_not_invalidate(still: System) -> None:
    await built(still, (0, 9))
    reply = await invalidate(still, "doubled", 0, 9, key=await key_of(still, Role.READER))
    assert reply.status_code == 403
    assert (await invalidate(still, "doubled", 0, 9, key=await key_of(still, Role.WRITER))).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"start": 0, "end": 9},
        {"start": 9, "end": 0, "reason": "x"},
        {"start": 0, "end": 9, "reason": ""},
        {"start": 0, "end": 2**63, "reason": "x"},
        {"start": "0", "end": 9, "reason": "x"},
        {"start": 0, "end": 9, "reason": "x", "force": True},
    ],
)
async def test_malformed_invalidation_is_refused(shared: System, body: dict[str, Any]) -> None:
    reply = await shared.user("POST", "/v1/datasets/doubled/invalidate", json=body)
    assert reply.status_code == 400


async def test_invalidation_that_fails_before_its_commit_leaves_nothing(still: System) -> None:
    await built(still, (0, 9))

    async def broken() -> None:
        raise RuntimeError("power cut")

    failpoints.arm("invalidate.before_commit", broken)
    try:
        assert (await invalidate(still, "doubled", 0, 9)).status_code == 500
    finally:
        failpoints.disarm("invalidate.before_commit")
    assert await idle(still)
    assert await still.value("select count(*) from interlock.invalidations") == 0
