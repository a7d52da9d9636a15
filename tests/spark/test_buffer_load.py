"""Batches that are too large for the sink: staged by Spark, and committed by the sink like any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from interlock.spark.attempt import run_operator
from interlock.spark.context import TaskContext
from interlock.spark.operators import resolve
from interlock.wire.attempts import DataReply, TaskData
from interlock.workers.failures import BadConfig
from interlock.workers.protocol import Assignment, Work
from tests.conftest import copied
from tests.datasets.test_sink import STORED, WHOLE, parquet
from tests.spark.local_attempts import Link, task
from tests.support.buffered_datasets import Depot, depot, row
from tests.support.system import fence


@pytest.fixture(scope="module")
async def site(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Depot]:
    async with (
        copied(postgres_url, template) as url,
        depot(postgres_url, url, tmp_path_factory.mktemp("sink"), sink_spark_bytes=1) as made,
    ):
        yield made


async def worker_seen(site: Depot) -> None:
    await site.system.value(
        "insert into interlock.workers (worker_id, queue, last_seen_at) values ('w', 'spark', interlock.clock())"
        " on conflict (worker_id, queue) do update set last_seen_at = excluded.last_seen_at"
    )


async def handed_over(site: Depot, publish_id: str) -> dict[str, Any]:
    """Returns a running attempt of the task that the sink has created."""
    await worker_seen(site)
    await site.drain()
    view = await site.buffer(publish_id)
    assert view["status"] == "Loading"
    return await site.system.claim(view["load_task"])


async def data_of(site: Depot, claim: dict[str, Any]) -> TaskData:
    reply = await site.system.worker("POST", "/internal/task-data", json={"items": [fence(claim)]})
    return msgspec.json.decode(reply.content, type=DataReply).items[0]


def run(spark: SparkSession, site: Depot, claim: dict[str, Any], data: TaskData) -> dict[str, Any]:
    work = Work("buffer_load", ("", "load"), None, claim["attempt"], b"{}", [], [], site.data_url)
    context = TaskContext(work, Assignment(1, data.task_id, None, b"{}"), Link(), spark, data)
    result: dict[str, Any] = run_operator(resolve("buffer_load"), spark, context, data)[0]
    return result


async def loaded(spark: SparkSession, site: Depot, claim: dict[str, Any]) -> dict[str, Any]:
    """Runs the attempt to its end."""
    result = await asyncio.to_thread(run, spark, site, claim, await data_of(site, claim))
    assert (await site.system.complete(claim, result=result)).status_code == 200
    return result


@pytest.mark.parametrize("on_conflict", ["nothing", "update"])
async def test_spark_stages_batches_of_every_format_and_the_sink_commits_them(
    spark: SparkSession, site: Depot, on_conflict: str
) -> None:
    dataset = await site.deploy(f"spark_{on_conflict}", on_conflict=on_conflict)
    ids = [
        await dataset.publish([WHOLE, row(2, name="first")]),
        await dataset.publish(parquet([STORED | {"id": 3}]), "b.parquet", 1),
        await dataset.publish(b'{"id": 9, "must": 9}\n{"id": 10}\n', "bad.jsonl"),
        await dataset.publish([row(2, name="second"), row(4)]),
    ]
    claim = await handed_over(site, ids[0])
    assert await loaded(spark, site, claim) == {"batches": 4, "refused": 1, "rows": 5}
    assert await site.pass_of("buffer_loads") == 1
    views = [await site.buffer(one) for one in ids]
    assert [view["status"] for view in views] == ["Loaded", "Loaded", "Refused", "Loaded"]
    assert views[2]["refusal"]["rows"] == [
        {"line": 2, "reason": "column 'must' is null or missing, but declared as not null"}
    ]
    stored = {one["id"]: one for one in await dataset.rows()}
    assert sorted(stored) == [1, 2, 3, 4]
    for number in (1, 3):
        assert {name: stored[number][name] for name in STORED} == STORED | {"id": number}
    assert stored[2]["name"] == ("second" if on_conflict == "update" else "first")
    assert sorted(await dataset.events()) == [1, 2, 3]
    assert await site.pass_of("buffer_loads") == 0
    staging = "select count(*) from pg_tables where schemaname = 'datasets' and tablename like 'staging%'"
    assert await site.data.fetchval(staging) == 0


async def test_retried_load_stages_again_and_rows_exist_once(spark: SparkSession, site: Depot) -> None:
    dataset = await site.deploy("again", on_conflict="update")
    publish_id = await dataset.publish([row(1, name="a"), row(1, name="b")])
    first = await handed_over(site, publish_id)
    await asyncio.to_thread(run, spark, site, first, await data_of(site, first))
    failed = {"status": "Failed", "error_class": "Lost", "error_message": "the executor died"}
    assert (await site.system.complete(first, **failed)).status_code == 200
    await site.system.value("update interlock.tasks set retry_at = interlock.clock() where retry_at is not null")
    await site.system.settle()
    await loaded(spark, site, await site.system.claim(first["task_id"]))
    await site.pass_of("buffer_loads")
    assert [(one["id"], one["name"]) for one in await dataset.rows()] == [(1, "b")]
    assert (await site.buffer(publish_id))["status"] == "Loaded"


async def test_batches_of_a_failed_load_are_given_up_until_redriven(site: Depot) -> None:
    dataset = await site.deploy("gone")
    publish_id = await dataset.publish([row(1)])
    claim = await handed_over(site, publish_id)
    assert (await site.system.user("POST", f"/v1/tasks/{claim['task_id']}/cancel")).status_code == 200
    await site.system.complete(claim, "Canceled")
    await site.pass_of("buffer_loads")
    view = await site.buffer(publish_id)
    assert (view["status"], view["refusal"]["code"]) == ("Failed", "load_failed")
    await site.system.value("delete from interlock.workers")
    await site.system.user("POST", f"/v1/buffers/{publish_id}/redrive")
    await site.drain()
    assert (await site.buffer(publish_id))["status"] == "Loaded", "without Spark the sink does it itself"


async def test_forged_buffer_load_task_is_refused(spark: SparkSession, site: Depot, tmp_path: Path) -> None:
    made_up = await site.system.made_up("buffer_load")
    data = await data_of(site, await site.system.claim(made_up))
    assert data.load is None
    with pytest.raises(BadConfig, match="buffer_load runs only in tasks that the sink creates"):
        run(spark, site, {"attempt": 1}, task([], []))
