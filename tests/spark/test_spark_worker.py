"""A worker of the Spark runtime against a real dispatcher: one session, many tasks, and their failures."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from interlock.wire.base import Outcome, RunState, TaskStatus
from interlock.wire.jobs import Policy
from interlock.wire.tasks import Crash
from interlock.workers import Worker
from tests.spark.spark_workers import LITTLE_JAVA, Bench, drivers, opened, result, working
from tests.support.datasets import deploy
from tests.support.query_service import DAG, bring, querying, rows_of
from tests.support.system import System, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("spark-worker")]


@pytest.fixture(scope="module")
async def bench(shared: System, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with opened(shared, tmp_path_factory.mktemp("operators")) as bench:
        yield bench


@pytest.fixture(scope="module")
async def worker(bench: Bench) -> AsyncIterator[Worker]:
    """A worker for all tests of the module. Its driver starts with the first task, and again after a test ends it."""
    async with working(bench.worker(spark_conf=LITTLE_JAVA)) as worker:
        yield worker


async def test_concurrent_tasks_share_a_session_with_separate_views(bench: Bench, worker: Worker) -> None:
    assert drivers() == []  # no driver runs before the first task
    run_id = await bench.run("gate", None, None)
    visitors = [await bench.arrival(), await bench.arrival()]
    for visitor in visitors:
        visitor.let_go()
    tasks = await bench.ended(run_id)
    assert [result(task)["rows"] for task in tasks] == [10, 9]
    assert {result(task)["pid"] for task in tasks} == {drivers()[0].pid}
    assert {(task.status, task.attempt) for task in tasks} == {(TaskStatus.COMPLETED, 1)}


async def test_exception_fails_the_attempt_and_the_next_one_completes(bench: Bench, worker: Worker) -> None:
    task = await bench.only(await bench.run("raises"))
    assert (task.status, result(task)) == (TaskStatus.COMPLETED, 2)
    first = (await bench.attempts(task))[0]
    assert (first.error_class, first.error_message) == ("ValueError", "not this time")


async def test_canceling_a_task_stops_only_its_own_spark_jobs(bench: Bench, worker: Worker) -> None:
    neighbour = await bench.run("gate")
    visitor = await bench.arrival()
    victim = await bench.run("large", {"parts": 400, "seconds": 1})
    seen = await bench.progress(victim, "of 400 tasks")
    assert (seen.progress, (seen.progress_text or "").partition(";")[0]) == (0.25, "large")
    assert (await bench.canceled(victim)).status is TaskStatus.CANCELED
    visitor.let_go()
    task = await bench.only(neighbour)
    assert (task.status, task.attempt) == (TaskStatus.COMPLETED, 1)
    assert result(await bench.only(await bench.run("jobs"))) == 0


async def test_operator_that_hangs_in_python_is_stopped(bench: Bench, worker: Worker) -> None:
    before = drivers()
    run_id = await bench.run("spins")
    await bench.progress(run_id, "spinning")
    assert (await bench.canceled(run_id)).status is TaskStatus.CANCELED
    task = await bench.only(await bench.run("count", {"rows": 7}))
    assert (result(task)["rows"], drivers()) == (7, before)


async def test_lost_lease_and_hard_timeout_stop_one_attempt_without_a_report(bench: Bench, worker: Worker) -> None:
    before = drivers()
    fenced = await bench.run("gate")
    visitor = await bench.arrival()
    (task,) = await bench.tasks(fenced)
    await bench.system.value(
        "update interlock.tasks set lease_token = gen_random_uuid(), lease_expires_at = now() + interval '3 seconds' "
        "where task_id = $1",
        task.task_id,
    )
    overdue = await bench.run("spins", policy=Policy(max_attempts=1, timeout_seconds=1))
    await visitor.gone()
    again = await bench.arrival()
    assert again.attempt == 2
    again.let_go()
    outcomes = [one.outcome for one in await bench.attempts(await bench.only(fenced))]
    assert outcomes == [Outcome.LEASE_EXPIRED, Outcome.COMPLETED]
    assert [one.outcome for one in await bench.attempts(await bench.only(overdue))] == [Outcome.TIMED_OUT]
    assert result(await bench.only(await bench.run("count", {"rows": 3})))["rows"] == 3
    assert drivers() == before


async def test_operator_that_stops_the_session_fails_alone(bench: Bench, worker: Worker) -> None:
    neighbour = await bench.run("gate")
    visitor = await bench.arrival()
    task = await bench.only(await bench.run("stops", policy=Policy(max_attempts=1)))
    assert (task.error_class, "remove the call" in (task.error_message or "")) == ("SparkStopped", True)
    visitor.let_go()
    assert result(await bench.only(neighbour))["rows"] == 10


async def test_small_task_does_not_wait_for_a_large_one(bench: Bench, worker: Worker) -> None:
    large = await bench.run("large", {"parts": 400, "seconds": 0.5})
    await bench.progress(large, "of 400 tasks")
    small = await bench.only(await bench.run("large", {"parts": 4, "seconds": 0}))
    assert (small.status, result(small)) == (TaskStatus.COMPLETED, 4)
    assert (await bench.canceled(large)).status is TaskStatus.CANCELED


async def test_batch_query_result_is_downloadable_by_signed_urls(bench: Bench, worker: Worker) -> None:
    system = bench.system
    await deploy(system, DAG)
    await bring(system, 0, 9)
    await bring(system, 10, 19)
    async with querying(system, "") as site:
        sql = "select miner, sum(reward) as rewards from blocks where block_number > 4 group by miner order by miner"
        asked = await site.ask(sql, mode="batch")
        assert asked.status_code == 202, asked.text

        async def ended() -> dict[str, Any] | None:
            view = await site.record(asked.json()["query_id"])
            return view if view["batch_status"] in ("Completed", "Failed") else None

        view = await until(ended, seconds=200)
    assert (view["batch_status"], view["row_count"]) == ("Completed", 3)
    files = [(await system.http.get(file["url"])).content for file in view["export"]["files"]]
    found = [row for file in files for row in pq.read_table(io.BytesIO(file)).to_pylist()]
    rewards: Counter[str] = Counter()
    for row in rows_of(5, 19):
        rewards[row["miner"]] += row["reward"]
    assert [(row["miner"], int(row["rewards"])) for row in found] == sorted(rewards.items())


async def test_death_of_the_jvm_costs_an_attempt_and_the_next_one_completes(bench: Bench, worker: Worker) -> None:
    run_id = await bench.run("names_the_jvm")
    visitor = await bench.arrival()
    os.kill(visitor.worker, signal.SIGKILL)
    visitor.let_go()
    task = await bench.only(run_id)
    assert result(task) == {"rows": 5, "attempt": 2}
    killed, _ = await bench.attempts(task)
    assert (killed.error_class, killed.crash) == ("WorkerCrashed", Crash(signal="SIGKILL"))
    assert killed.error_message == "The Spark JVM that ran this task was killed by SIGKILL."


async def test_drain_lets_running_tasks_finish_and_leaves_no_process(bench: Bench, worker: Worker) -> None:
    run_id = await bench.run("gate")
    visitor = await bench.arrival()
    below = [process for driver in drivers() for process in (driver, *driver.children(recursive=True))]
    worker.request_drain()
    visitor.let_go()
    task = await bench.only(run_id)
    assert (task.status, task.attempt) == (TaskStatus.COMPLETED, 1)
    gone, alive = await asyncio.to_thread(psutil.wait_procs, below, 30)
    assert (alive, len(gone) >= 2) == ([], True)
    waiting = await bench.run("count", {"rows": 1})
    assert (await bench.client.run(waiting)).state is RunState.RUNNING
    await bench.client.cancel_run(waiting)
