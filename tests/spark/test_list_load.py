"""Lists that are too long for one process: Spark creates the same tasks as the ingest would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pyspark.sql import SparkSession

from interlock.spark.attempt import run_operator
from interlock.spark.context import TaskContext
from interlock.spark.operators import resolve
from interlock.wire.attempts import DataReply, TaskData
from interlock.workers.context import TaskFailed
from interlock.workers.protocol import Assignment, Work
from tests.conftest import copied
from tests.spark.local_attempts import Link
from tests.support.staged_lists import Intake, intake
from tests.support.system import fence


@pytest.fixture(scope="module")
async def site(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    async with (
        copied(postgres_url, template) as url,
        intake(url, tmp_path_factory.mktemp("lists"), shard_threshold=1, spark_threshold_bytes=1) as made,
    ):
        yield made


async def worker_seen(site: Intake, *, seen: bool = True) -> None:
    await site.system.value("delete from interlock.workers")
    if seen:
        await site.system.value(
            "insert into interlock.workers (worker_id, queue, last_seen_at) values ('w', 'spark', interlock.clock())"
        )


async def handed_over(site: Intake, *parts: bytes, form: str = "jsonl") -> tuple[str, dict[str, Any]]:
    """Returns a run, and a running attempt of the task that loads it."""
    await worker_seen(site)
    accepted = await site.submit(*parts, form=form)
    await site.drain()
    task = await site.system.value(
        "select load_task from interlock.ingests where run_id = $1::text::uuid", accepted["run_id"]
    )
    assert task is not None
    return accepted["run_id"], await site.system.claim(str(task))


async def load(spark: SparkSession, site: Intake, claim: dict[str, Any], *, with_state_url: bool = True) -> None:
    reply = await site.system.worker("POST", "/internal/task-data", json={"items": [fence(claim)]})
    data: TaskData = msgspec.json.decode(reply.content, type=DataReply).items[0]
    url = site.system.kernel.settings.state_url.get_secret_value() if with_state_url else None  # type: ignore[union-attr]
    work = Work("list_load", ("", "load"), None, claim["attempt"], b"{}", [], [], None, None, None, url)
    context = TaskContext(work, Assignment(1, UUID(claim["task_id"]), None, b"{}"), Link(), spark, data)
    await asyncio.to_thread(lambda: run_operator(resolve("list_load"), spark, context, data)[0])


async def ended(site: Intake, run_id: str) -> dict[str, Any]:
    await site.pass_of("ingests_on_spark")
    await site.drain()
    return await site.system.run(run_id)


def parts_of(form: str) -> list[bytes]:
    """Writes several files with several splits each, and with every edge case of lines."""
    value = b'{"n": %d, "text": "' + b"." * 150 + b'"}' if form == "jsonl" else b'%d "quoted" \xc3\xa9' + b"." * 150
    whole = b"\xef\xbb\xbf" + b"".join(
        value % n + (b"\r\n" if n % 3 else b"\n") + b"\n" * (n % 7 == 0) for n in range(4000)
    )
    return [whole, b"", b"".join(value % n + b"\n" for n in range(10)) + value % 11, whole[3:]]


@pytest.mark.parametrize("form", ["jsonl", "lines"])
async def test_spark_creates_the_same_tasks_as_the_ingest(spark: SparkSession, site: Intake, form: str) -> None:
    await worker_seen(site, seen=False)
    streamed = await site.ingested(*parts_of(form), form=form)
    size = spark.conf.get("spark.sql.files.maxPartitionBytes")
    spark.conf.set("spark.sql.files.maxPartitionBytes", 100_000)
    try:
        run_id, claim = await handed_over(site, *parts_of(form), form=form)
        await load(spark, site, claim)
        await load(spark, site, claim)  # like an executor that is lost after its commits
    finally:
        spark.conf.set("spark.sql.files.maxPartitionBytes", size or "134217728")
    assert (await site.system.complete(claim)).status_code == 200
    run = await ended(site, run_id)
    assert (run["state"], run["total"]) == ("Running", streamed["total"])
    assert await site.payloads(run_id) == await site.payloads(streamed["run_id"])
    assert (
        await site.system.value("select count(*) from interlock.ingest_chunks where run_id = $1::text::uuid", run_id)
        > 4
    )
    ranges = await site.indexes_of_messages(run_id)
    assert ranges == await site.indexes_of_messages(streamed["run_id"])


async def test_invalid_line_fails_the_run_with_its_number(spark: SparkSession, site: Intake) -> None:
    run_id, claim = await handed_over(site, b"1\n2\n", b"3\n{\n5\n")
    with pytest.raises(TaskFailed, match="Line 4 cannot be stored: it is not JSON") as raised:
        await load(spark, site, claim)
    failed = await site.system.complete(
        claim, "Failed", error_class=raised.value.error_class, error_message=str(raised.value)
    )
    assert failed.status_code == 200, failed.text
    run = await ended(site, run_id)
    assert (run["state"], run["reason"]) == ("Failed", str(raised.value))


async def test_list_that_spark_cannot_load_is_loaded_by_the_ingest(spark: SparkSession, site: Intake) -> None:
    run_id, claim = await handed_over(site, b"1\n2\n3\n")
    await load(spark, site, claim)
    with pytest.raises(TaskFailed, match="INTERLOCK_STATE_URL"):
        await load(spark, site, claim, with_state_url=False)
    await site.system.complete(claim, "Failed", error_class="StateDatabaseRefused", error_message="no address")
    run = await ended(site, run_id)
    assert (run["state"], run["total"]) == ("Running", 3)
    assert await site.payloads(run_id) == {0: 1, 1: 2, 2: 3}
    with pytest.raises((TaskFailed, IndexError)):
        await load(
            spark, site, claim
        )  # an attempt that ignored the loss of its lease: the list no longer belongs to it
    assert await site.payloads(run_id) == {0: 1, 1: 2, 2: 3}


async def test_list_that_cannot_be_split_is_not_loaded_by_spark(spark: SparkSession, site: Intake) -> None:
    import gzip

    await worker_seen(site)
    packed = await site.ingested(gzip.compress(b"1\n2\n"))
    table = await site.ingested(b"a\n1\n", form="csv")
    assert [packed["total"], table["total"]] == [2, 1]
