"""A Spark worker with a remote Spark: a standalone cluster of real processes, and a Spark Connect server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.client import Client
from interlock.failpoints import arm, disarm
from interlock.processes.loop import forever
from interlock.settings import Settings
from interlock.wire.base import TaskStatus
from interlock.wire.dags import SourceEvent
from interlock.wire.datasets import PartitionView
from interlock.wire.jobs import Policy
from interlock.wire.tasks import TaskView
from interlock.workers import Worker
from tests.spark.spark_servers import SMALL_JAVA, connect_server, lose_machine, standalone
from tests.support.dataset_files import path_of
from tests.support.operator_gate import Gate, Visitor
from tests.support.system import System

T = TypeVar("T")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("spark-worker")]

OPERATORS = """
import os, socket
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext as SparkTask
from pyspark.sql.functions import arrow_udf
from pyspark.sql.types import LongType, StringType
from interlock.spark import operator

ROWS = "block_number bigint not null, block_timestamp timestamp not null, amount bigint not null"

def rows_of(numbers):
    return numbers.selectExpr("id as block_number", "timestamp_seconds(id * 60) as block_timestamp", "id % 7 as amount")

def at_gate(path):
    def through(batches):
        task = SparkTask.get()
        if task.partitionId() == 0:
            with socket.socket(socket.AF_UNIX) as door:
                door.connect(path)
                door.sendall(f"0 {task.attemptNumber() + 1} {os.getpid()}\\n".encode())
                door.recv(1)
        yield from batches
    return through

@operator(inputs={}, output=ROWS)
def feed(ctx):
    return rows_of(ctx.spark.range(ctx.scope.start, ctx.scope.end + 1))

@operator(inputs={}, output=ROWS)
def held(ctx):
    numbers = ctx.spark.range(ctx.scope.start, ctx.scope.end + 1, numPartitions=2)
    return rows_of(numbers.mapInArrow(at_gate(ctx.config["gate"]), "id bigint").repartition(1))

@arrow_udf(LongType())
def squared(amount: pa.Array) -> pa.Array:
    return pc.multiply(amount, amount)

@arrow_udf(StringType())
def executor(amount: pa.Array) -> pa.Array:
    # Each executor of a cluster has a folder of its own to work in.
    return pa.array([os.getcwd()] * len(amount))

@operator(inputs={"rows": ROWS}, output=ROWS + ", square bigint, executor string")
def priced(rows, ctx):
    spread = rows.repartition(8)
    return spread.withColumns({"square": squared("amount"), "executor": executor("amount")}).repartition(1)
"""

NOT_ON_THE_CLUSTER = """
from interlock.spark import operator

def doubled(batches):
    yield from batches

@operator(inputs={})
def here_only(ctx):
    return ctx.spark.range(3).mapInArrow(doubled, "id bigint").count()
"""

DAG = """
name: {name}
defaults: {{ runtime: spark, max_attempts: 2, backoff_seconds: 0, jitter: 0, heartbeat_timeout_seconds: 6 }}
jobs:
  - name: feed
    activation: source
    source: {{ kind: manual }}
    operator: cluster_operators:feed
    outputs: [rows]
  - name: held
    activation: source
    source: {{ kind: manual }}
    operator: cluster_operators:held
    outputs: [rows]
    config: {{ gate: "{gate}" }}
  - name: priced
    operator: cluster_operators:priced
    inputs: [{{ from: {{ job: feed, output: rows }}, where: "amount <> 3" }}]
    outputs: [priced]
  - name: hourly
    operator: rollup
    inputs: [{{ from: {{ job: priced, output: priced }} }}]
    outputs: [hours]
    config: {{ bucket: hour, measures: {{ rows: count, squares: sum(square) }} }}
"""


@dataclass
class Pipeline:
    """A deployed DAG and its outcome."""

    system: System
    client: Client
    gate: Gate
    operators: Path
    changed: asyncio.Event
    """Set each time an attempt ends."""
    name: str = "remote"

    def settings(self, **overrides: Any) -> Settings:
        given = {"internal_url": self.system.internal_url, "worker_token": self.system.worker_token}
        own = {"spark_memory": "1g", "operators": [str(self.operators)]}
        return Settings(**given | own | overrides)

    async def trigger(self, job: str, *scopes: tuple[int, int]) -> None:
        payloads = [msgspec.Raw(msgspec.json.encode({"start": start, "end": end})) for start, end in scopes]
        events = [SourceEvent(payload=payload) for payload in payloads]
        await self.client.sources.send(self.name, job, events)

    async def eventually(self, check: Callable[[], Awaitable[T | None]]) -> T:
        """Repeats the check after each end of an attempt until it returns a value."""
        async with asyncio.timeout(120):
            while True:
                self.changed.clear()
                if (found := await check()) is not None:
                    return found
                await self.changed.wait()

    async def partitions(self, job: str, output: str, count: int) -> list[PartitionView]:
        """Waits for this number of partitions. Fails with the first error of a task."""

        async def all_there() -> list[PartitionView] | None:
            failed = [task async for task in self.client.tasks(status=TaskStatus.FAILED) if task.job.dag_name]
            assert not failed, failed[0].error_message
            page = await self.client.datasets.partition_page(f"{self.name}:{job}:{output}")
            return page.partitions if len(page.partitions) == count else None

        return await self.eventually(all_there)

    async def ended(self, task_id: UUID) -> TaskView:
        async def over() -> TaskView | None:
            task = await self.client.task(task_id)
            return task if task.ended_at is not None else None

        return await self.eventually(over)

    async def rows(self, job: str, output: str, count: int) -> pa.Table:
        found = await self.partitions(job, output, count)
        return pa.concat_tables([pq.read_table(path_of(one.location or "")) for one in found])

    async def only_task(self, job: str) -> TaskView:
        (task,) = [task async for task in self.client.tasks() if task.job.name == job]
        return task

    async def arrival(self) -> Visitor:
        return await self.gate.arrival(seconds=120)


@pytest.fixture
async def pipeline(system: System, tmp_path: Path) -> AsyncIterator[Pipeline]:
    operators = tmp_path / "operators"
    operators.mkdir()
    (operators / "cluster_operators.py").write_text(OPERATORS)
    await system.declare_all(operators, spark=True)
    gate = Gate(tmp_path / "gate")
    changed = asyncio.Event()

    async def ended() -> None:
        changed.set()

    arm("complete.committed", ended)
    loops = [asyncio.create_task(forever(service)) for service in dispatcher_services(system.kernel)]
    doors = await asyncio.start_unix_server(gate.opened, gate.path)
    async with Client(system.gateway_url, system.admin_key) as client:
        yield Pipeline(system, client, gate, operators, changed)
    disarm("complete.committed")
    doors.close()
    gate.close()
    await doors.wait_closed()
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


@asynccontextmanager
async def working(settings: Settings) -> AsyncIterator[None]:
    worker = Worker(settings, "spark", concurrency=4, cancel_grace=5.0)
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.request_drain()
        worker.request_drain()
        await running


def python_path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


async def check_pipeline(pipeline: Pipeline, ranges: list[tuple[int, int]]) -> set[str]:
    """Runs the DAG from its source to its end. Returns the executors that ran tasks."""
    await pipeline.client.dags.deploy(DAG.format(name=pipeline.name, gate=pipeline.gate.path))
    await pipeline.trigger("feed", *ranges)
    hours = await pipeline.rows("hourly", "hours", len(ranges))
    kept = [number for start, end in ranges for number in range(start, end + 1) if number % 7 != 3]
    squares: Counter[int] = Counter()
    for number in kept:
        squares[number // 60] += (number % 7) ** 2
    assert {row["bucket"].timestamp() // 3600: row["squares"] for row in hours.to_pylist()} == squares
    priced = await pipeline.rows("priced", "priced", len(ranges))
    assert sorted(priced["block_number"].to_pylist()) == kept
    return set(priced["executor"].to_pylist())


async def test_pipeline_on_a_cluster_survives_the_loss_of_a_machine(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "not_on_the_cluster.py").write_text(NOT_ON_THE_CLUSTER)
    await pipeline.system.declare_all(apart, spark=True)
    on_the_cluster = python_path(pipeline.operators)
    monkeypatch.setenv("PYTHONPATH", python_path(pipeline.operators, apart))
    async with standalone(tmp_path, {"PYTHONPATH": on_the_cluster}) as master:
        conf = {
            "spark.pyspark.python": sys.executable,
            "spark.cores.max": 2,
            "spark.executor.memory": "600m",
            "spark.executor.extraJavaOptions": SMALL_JAVA,
            "spark.driver.extraJavaOptions": SMALL_JAVA,
            "spark.driver.host": "127.0.0.1",
            "spark.sql.shuffle.partitions": 2,
            # Wait for both executors, so that both get work.
            "spark.scheduler.minRegisteredResourcesRatio": 1.0,
        }
        given = [str(pipeline.operators), str(apart)]
        async with working(pipeline.settings(spark_master=master, spark_conf=conf, operators=given)):
            assert len(await check_pipeline(pipeline, [(0, 119), (120, 239), (240, 359)])) == 2
            await check_missing_package(pipeline)
            await check_lost_machine(pipeline)


async def check_missing_package(pipeline: Pipeline) -> None:
    job = await pipeline.client.submit(
        [{}], operator="not_on_the_cluster:here_only", runtime="spark", policy=Policy(max_attempts=1)
    )
    await pipeline.client.wait(job.run_id, poll_seconds=0.05)
    (task,) = [task async for task in pipeline.client.tasks(run=job.run_id)]
    assert task.error_class == "PackageMissing"
    assert "'not_on_the_cluster'" in (task.error_message or "")
    assert "spark.pyspark.python" in (task.error_message or "")


async def check_lost_machine(pipeline: Pipeline) -> None:
    await pipeline.trigger("held", (0, 99))
    visitor = await pipeline.arrival()
    lose_machine(visitor.worker)
    again = await pipeline.arrival()
    assert again.attempt > 1  # Spark's, in another executor
    again.let_go()
    rows = await pipeline.rows("held", "rows", 1)
    assert sorted(rows["block_number"].to_pylist()) == list(range(100))
    assert (await pipeline.only_task("held")).attempt == 1


async def test_pipeline_runs_over_spark_connect_and_a_cancel_stops_one_task(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = python_path(pipeline.operators)
    monkeypatch.setenv("PYTHONPATH", path)
    async with (
        connect_server(tmp_path, {"PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable}) as remote,
        working(pipeline.settings(spark_remote=remote)),
    ):
        await check_pipeline(pipeline, [(0, 119)])
        await pipeline.trigger("held", (0, 99))
        visitor = await pipeline.arrival()
        task = await pipeline.only_task("held")
        await pipeline.client.cancel_task(task.task_id)
        await visitor.gone()
        assert (await pipeline.ended(task.task_id)).status is TaskStatus.CANCELED
