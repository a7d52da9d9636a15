"""spark_map in a real Spark worker: a claim is one DataFrame, and each row ends its own task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from interlock.wire.base import TaskStatus
from interlock.wire.jobs import Policy
from tests.spark.spark_workers import LITTLE_JAVA, QUICK, Bench, opened, result, working
from tests.support.system import System, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("spark-worker")]

OPERATORS = """
import os, socket
from pyspark.sql import functions as F
from interlock.spark import operator
from spark_test_operators import at_gate

TASKS = "index bigint, payload string"

@operator(inputs={"tasks": TASKS})
def doubled(tasks, ctx):
    together = tasks.count()
    n = F.get_json_object("payload", "$.n").cast("bigint")
    error = F.when(n % 10 == 3, F.concat(F.lit("no threes: "), n))
    rows = tasks.select("index", F.struct((n * 2).alias("double"), F.lit(together).alias("together")).alias("result"),
                        error.alias("error"), n.alias("n"))
    twice = rows.where("n % 10 = 5")
    return rows.where("n % 10 <> 4").union(twice)

@operator(inputs={"tasks": TASKS})
def waits(tasks, ctx):
    class Visit:
        payload, index, attempt = ctx.config, ctx.index, ctx.attempt
    at_gate(Visit)
    return tasks.select("index", F.col("payload").alias("result"))

@operator(inputs={"tasks": TASKS})
def no_frame(tasks, ctx):
    return tasks.count()
"""


@pytest.fixture(scope="module")
async def bench(shared: System, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("mapped")
    (folder / "mapped_operators.py").write_text(OPERATORS)
    async with opened(shared, folder) as made, working(made.worker(spark_conf=LITTLE_JAVA)):
        yield made


async def submitted(bench: Bench, function: str, tasks: list[Any], **config: Any) -> UUID:
    config |= {"operator": f"mapped_operators:{function}"}
    policy = Policy(max_attempts=1, lease_seconds=QUICK.lease_seconds)
    accepted = await bench.client.submit(tasks, operator="spark_map", runtime="spark", config=config, policy=policy)
    return accepted.run_id


async def test_tasks_of_a_claim_are_one_frame_and_end_separately(bench: Bench) -> None:
    tasks = await bench.ended(await submitted(bench, "doubled", [{"n": n} for n in range(300)]))
    for n, task in enumerate(tasks):
        if n % 10 == 3:
            assert (task.status, task.error_class, task.error_message) == ("Failed", "MapFailed", f"no threes: {n}")
        elif n % 10 == 4:
            assert (task.status, task.error_class) == ("Failed", "NoResult")
        elif n % 10 == 5:
            assert (task.status, task.error_class) == ("Failed", "TwoResults")
        else:
            assert (task.status, result(task)["double"]) == ("Completed", 2 * n)
    assert max(result(task)["together"] for task in tasks if task.status is TaskStatus.COMPLETED) == 100


async def test_canceling_one_task_of_a_batch_leaves_the_others_running(bench: Bench) -> None:
    run_id = await submitted(bench, "waits", [{"n": n} for n in range(5)], gate=bench.gate.path)
    visitor = await bench.arrival()
    tasks = await bench.tasks(run_id)
    await bench.client.cancel_task(tasks[2].task_id)

    async def canceled() -> bool:
        return (await bench.client.task(tasks[2].task_id)).status is TaskStatus.CANCELED

    await until(canceled, seconds=60)
    visitor.let_go()
    ended = await bench.ended(run_id)
    assert [task.status for task in ended] == ["Completed", "Completed", "Canceled", "Completed", "Completed"]


async def test_canceling_the_run_stops_all_tasks_of_a_batch(bench: Bench) -> None:
    run_id = await submitted(bench, "waits", [{"n": n} for n in range(5)], gate=bench.gate.path)
    await bench.arrival()
    await bench.client.cancel_run(run_id)
    async with asyncio.timeout(60):
        assert {task.status for task in await bench.ended(run_id)} == {TaskStatus.CANCELED}


async def test_operator_error_fails_each_task_of_a_batch(bench: Bench) -> None:
    expected = {
        "no_frame": ("WrongOutputs", "columns `index` and `result`"),
        "unknown": ("OperatorNotFound", "no operator 'mapped_operators:unknown'"),
    }
    await bench.system.declare("mapped_operators:unknown", queue="spark")
    for function, (error_class, sentence) in expected.items():
        tasks = await bench.ended(await submitted(bench, function, [1, 2]))
        assert {task.error_class for task in tasks} == {error_class}
        assert all(sentence in (task.error_message or "") for task in tasks)
