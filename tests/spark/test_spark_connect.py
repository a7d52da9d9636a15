"""A worker on Spark Connect, and the exits of its driver process, which is cheap to restart here."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pyspark
import pytest

from interlock.spark import java
from interlock.wire.base import Outcome, TaskStatus
from interlock.wire.jobs import Policy
from interlock.wire.tasks import Crash
from interlock.workers import Worker, driver_pool
from tests.spark.spark_workers import LITTLE_JAVA, Bench, opened, result, working
from tests.support.system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("spark-worker")]


@pytest.fixture(scope="module")
async def bench(shared: System, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with opened(shared, tmp_path_factory.mktemp("operators")) as bench:
        yield bench


@pytest.fixture(scope="module")
async def worker(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    async with (
        connect_server(tmp_path_factory.mktemp("connect")) as url,
        working(bench.worker(spark_remote=url)) as worker,
    ):
        yield worker


@asynccontextmanager
async def connect_server(folder: Path) -> AsyncIterator[str]:
    """Starts Spark Connect on a free port, without any of our code."""
    port = free_port()
    conf = {
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        **LITTLE_JAVA,
    }
    flags = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    command = ["--master", "local[2]", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    environment = java.find().environment(os.environ) | {"PYSPARK_PYTHON": sys.executable}
    server = await asyncio.create_subprocess_exec(
        str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        *(*command, *flags, "spark-internal"),
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    listening = asyncio.Event()
    reading = asyncio.create_task(heed(server, listening))
    try:
        await asyncio.wait_for(listening.wait(), 200)
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.kill()
        await server.wait()
        await reading


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


async def heed(server: asyncio.subprocess.Process, listening: asyncio.Event) -> None:
    assert server.stderr is not None
    async for line in server.stderr:
        if b"Spark Connect server started" in line:
            listening.set()


async def test_session_that_does_not_start_fails_the_attempt(bench: Bench) -> None:
    policy = Policy(max_attempts=2, backoff_seconds=0)
    async with working(bench.worker(spark_remote="sc://127.0.0.1:1")):
        task = await bench.only(await bench.run("count", {"rows": 1}, policy=policy))
    assert [attempt.outcome for attempt in await bench.attempts(task)] == [Outcome.FAILED, Outcome.FAILED]
    assert (task.error_class, "No Spark Connect server answers at 127.0.0.1:1" in (task.error_message or "")) == (
        "SparkUnavailable",
        True,
    )


async def test_tasks_run_and_are_canceled_separately(bench: Bench, worker: Worker) -> None:
    tasks = await bench.ended(await bench.run("count", {"rows": 3}, {"rows": 4}))
    assert [result(task)["rows"] for task in tasks] == [3, 4]
    victim = await bench.run("large", {"parts": 400, "seconds": 1})
    await bench.progress(victim, "large")
    other = await bench.run("large", {"parts": 4, "seconds": 0.1})
    assert (await bench.canceled(victim)).status is TaskStatus.CANCELED
    assert result(await bench.only(other)) == 4
    stopped = await bench.only(await bench.run("stops", policy=Policy(max_attempts=1)))
    assert stopped.error_class == "SparkStopped"


async def test_thread_that_does_not_stop_is_abandoned_with_its_driver(
    bench: Bench, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process(result(await bench.only(await bench.run("count", {"rows": 1})))["pid"])
    neighbours = [await bench.run("gate"), await bench.run("gate")]
    visitors = [await bench.arrival(), await bench.arrival()]
    run_id = await bench.run("sleeps")
    await bench.progress(run_id, "asleep")
    assert (await bench.canceled(run_id)).status is TaskStatus.CANCELED
    assert before.is_running()  # for the neighbours
    visitors[0].let_go()
    done, slow = await bench.first_of(neighbours)
    assert (done.attempt, result(done)["pid"]) == (1, before.pid)
    monkeypatch.setattr(driver_pool, "SPENT_SECONDS", 0.0)  # no wait lasts forever
    await asyncio.to_thread(before.wait, 30)
    (await bench.arrival()).let_go()
    task = await bench.only(slow)
    assert [one.outcome for one in await bench.attempts(task)] == [Outcome.RELEASED, Outcome.COMPLETED]
    assert result(task)["pid"] != before.pid


async def test_operator_that_exits_its_process_costs_an_attempt(bench: Bench, worker: Worker) -> None:
    task = await bench.only(await bench.run("exits"))
    assert result(task) == {"rows": 5, "attempt": 2}
    exited, _ = await bench.attempts(task)
    assert (exited.error_class, exited.crash) == ("WorkerCrashed", Crash(exit_code=9))
