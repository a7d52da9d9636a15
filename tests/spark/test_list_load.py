"""Lists that are too long for one process: loaded by Spark, and the same tasks as the ingest itself would have made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pyspark.sql import SparkSession

from interlock.pipeline.attempt import run_operator
from interlock.pipeline.context import TaskContext
from interlock.pipeline.operators import resolve
from interlock.wire import DataReply, TaskData
from interlock.workers.context import TaskFailed
from interlock.workers.protocol import Assignment, Work
from tests.conftest import copied
from tests.ingests import Intake, intake
from tests.spark.attempts import Link
from tests.system import fence


@pytest.fixture(scope="module")
async def door(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    async with (
        copied(postgres_url, template) as url,
        intake(url, tmp_path_factory.mktemp("lists"), shard_threshold=1, spark_threshold_bytes=1) as made,
    ):
        yield made


async def worker_seen(door: Intake, *, seen: bool = True) -> None:
    await door.system.value("delete from interlock.workers")
    if seen:
        await door.system.value(
            "insert into interlock.workers (worker_id, queue, last_seen_at) values ('w', 'spark', interlock.clock())"
        )


async def handed_over(door: Intake, *parts: bytes, form: str = "jsonl") -> tuple[str, dict[str, Any]]:
    """A run, and a running attempt of the task that is to load it."""
    await worker_seen(door)
    accepted = await door.submit(*parts, form=form)
    await door.drain()
    task = await door.system.value(
        "select load_task from interlock.ingests where run_id = $1::text::uuid", accepted["run_id"]
    )
    assert task is not None
    return accepted["run_id"], await door.system.claim(str(task))


async def load(spark: SparkSession, door: Intake, claim: dict[str, Any], *, told: bool = True) -> None:
    reply = await door.system.worker("POST", "/internal/task-data", json={"items": [fence(claim)]})
    data: TaskData = msgspec.json.decode(reply.content, type=DataReply).items[0]
    url = door.system.kernel.settings.state_url.get_secret_value() if told else None  # type: ignore[union-attr]
    work = Work("list_load", ("", "load"), None, claim["attempt"], b"{}", [], [], None, None, None, url)
    context = TaskContext(work, Assignment(1, UUID(claim["task_id"]), None, b"{}"), Link(), spark, data)
    await asyncio.to_thread(lambda: run_operator(resolve("list_load"), spark, context, data)[0])


async def ended(door: Intake, run_id: str) -> dict[str, Any]:
    await door.pass_of("ingests_on_spark")
    await door.drain()
    return await door.system.run(run_id)


def parts_of(form: str) -> list[bytes]:
    """Several files, several splits each, every oddity that lines may have."""
    value = b'{"n": %d, "text": "' + b"." * 150 + b'"}' if form == "jsonl" else b'%d "quoted" \xc3\xa9' + b"." * 150
    whole = b"\xef\xbb\xbf" + b"".join(
        value % n + (b"\r\n" if n % 3 else b"\n") + b"\n" * (n % 7 == 0) for n in range(4000)
    )
    return [whole, b"", b"".join(value % n + b"\n" for n in range(10)) + value % 11, whole[3:]]


@pytest.mark.parametrize("form", ["jsonl", "lines"])
async def test_spark_makes_the_same_tasks_as_the_ingest_itself(spark: SparkSession, door: Intake, form: str) -> None:
    await worker_seen(door, seen=False)
    streamed = await door.ingested(*parts_of(form), form=form)
    size = spark.conf.get("spark.sql.files.maxPartitionBytes")
    spark.conf.set("spark.sql.files.maxPartitionBytes", 100_000)
    try:
        run_id, claim = await handed_over(door, *parts_of(form), form=form)
        await load(spark, door, claim)
        await load(spark, door, claim)  # as when an executor is lost after its commits
    finally:
        spark.conf.set("spark.sql.files.maxPartitionBytes", size or "134217728")
    assert (await door.system.complete(claim)).status_code == 200
    run = await ended(door, run_id)
    assert (run["state"], run["total"]) == ("Running", streamed["total"])
    assert await door.payloads(run_id) == await door.payloads(streamed["run_id"])
    assert (
        await door.system.value("select count(*) from interlock.ingest_chunks where run_id = $1::text::uuid", run_id)
        > 4
    )
    ranges = await door.indexes_of_messages(run_id)
    assert ranges == await door.indexes_of_messages(streamed["run_id"])


async def test_a_bad_line_fails_the_run_with_its_number(spark: SparkSession, door: Intake) -> None:
    run_id, claim = await handed_over(door, b"1\n2\n", b"3\n{\n5\n")
    with pytest.raises(TaskFailed, match="Line 4 cannot be stored: it is not JSON") as raised:
        await load(spark, door, claim)
    failed = await door.system.complete(
        claim, "Failed", error_class=raised.value.error_class, error_message=str(raised.value)
    )
    assert failed.status_code == 200, failed.text
    run = await ended(door, run_id)
    assert (run["state"], run["reason"]) == ("Failed", str(raised.value))


async def test_a_list_that_spark_cannot_load_is_read_by_the_ingest(spark: SparkSession, door: Intake) -> None:
    run_id, claim = await handed_over(door, b"1\n2\n3\n")
    await load(spark, door, claim)
    with pytest.raises(TaskFailed, match="INTERLOCK_STATE_URL"):
        await load(spark, door, claim, told=False)
    await door.system.complete(claim, "Failed", error_class="StateDatabaseRefused", error_message="no address")
    run = await ended(door, run_id)
    assert (run["state"], run["total"]) == ("Running", 3)
    assert await door.payloads(run_id) == {0: 1, 1: 2, 2: 3}
    with pytest.raises((TaskFailed, IndexError)):
        await load(spark, door, claim)  # one that went on regardless: the list is not its any more
    assert await door.payloads(run_id) == {0: 1, 1: 2, 2: 3}


async def test_what_cannot_be_split_is_not_handed_over(spark: SparkSession, door: Intake) -> None:
    import gzip

    await worker_seen(door)
    packed = await door.ingested(gzip.compress(b"1\n2\n"))
    table = await door.ingested(b"a\n1\n", form="csv")
    assert [packed["total"], table["total"]] == [2, 1]
