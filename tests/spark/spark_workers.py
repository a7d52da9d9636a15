"""A system with only workers of the Spark runtime, and operators that report their start and progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import psutil

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.client import Client
from interlock.processes.loop import forever
from interlock.settings import Settings
from interlock.wire.base import RunState
from interlock.wire.jobs import Policy
from interlock.wire.tasks import AttemptView, TaskView
from interlock.workers import Worker
from tests.support.operator_gate import Gate, Visitor
from tests.support.system import System, until

OPERATORS = """
import os, socket, time
from interlock.spark import operator

def at_gate(ctx, number=None):
    # In small steps: what waits in C code cannot be interrupted.
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(ctx.payload["gate"])
        door.sendall(f"{ctx.index or 0} {ctx.attempt} {number or os.getpid()}\\n".encode())
        door.settimeout(0.02)
        while True:
            try:
                door.recv(1)
                return
            except TimeoutError:
                continue

def slowly(seconds):
    def through(batches):
        for batch in batches:
            time.sleep(seconds)
            yield batch
    return through

@operator(inputs={})
def count(ctx):
    ctx.spark.range(ctx.payload["rows"]).createOrReplaceTempView("numbers")
    return {"rows": ctx.spark.sql("select count(*) from numbers").first()[0], "pid": os.getpid()}

@operator(inputs={})
def gate(ctx):
    ctx.spark.range(ctx.index or 0, 10).createOrReplaceTempView("numbers")
    print("at the gate")
    at_gate(ctx)
    return {"rows": ctx.spark.sql("select count(*) from numbers").first()[0], "pid": os.getpid()}

@operator(inputs={})
def jobs(ctx):
    return len(ctx.spark.sparkContext.statusTracker().getActiveJobsIds())

@operator(inputs={})
def large(ctx):
    numbers = ctx.spark.range(0, ctx.payload["parts"], numPartitions=ctx.payload["parts"])
    ctx.progress(0.25, "large")
    return numbers.mapInArrow(slowly(ctx.payload["seconds"]), "id bigint").count()

@operator(inputs={})
def raises(ctx):
    if ctx.attempt == 1:
        raise ValueError("not this time")
    return ctx.attempt

@operator(inputs={})
def stops(ctx):
    ctx.spark.stop()

@operator(inputs={})
def spins(ctx):
    ctx.progress(0.5, "spinning")
    while True:
        time.sleep(0.01)

@operator(inputs={})
def sleeps(ctx):
    ctx.progress(0.5, "asleep")
    time.sleep(3600)

@operator(inputs={})
def exits(ctx):
    if ctx.attempt == 1:
        os._exit(9)
    return {"rows": ctx.spark.range(5).count(), "attempt": ctx.attempt}

@operator(inputs={})
def names_the_jvm(ctx):
    if ctx.attempt == 1:
        at_gate(ctx, ctx.spark.sparkContext._gateway.proc.pid)
    return {"rows": ctx.spark.range(5).count(), "attempt": ctx.attempt}
"""

QUICK = Policy(lease_seconds=4, backoff_seconds=0, jitter=0)
"""Short, because a cancel arrives with a heartbeat, after a third of the lease."""

LITTLE_JAVA = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
}


@dataclass
class Bench:
    system: System
    client: Client
    gate: Gate
    folder: Path

    def settings(self, **overrides: Any) -> Settings:
        given = {"internal_url": self.system.internal_url, "worker_token": self.system.worker_token}
        own = {"operators": [str(self.folder)], "spark_master": "local[2]", "spark_memory": "1g"}
        return Settings(**given | own | overrides)

    def worker(self, **overrides: Any) -> Worker:
        return Worker(self.settings(**overrides), "spark", concurrency=4, cancel_grace=1.0)

    async def run(self, operator: str, *payloads: Any, policy: Policy = QUICK) -> UUID:
        tasks = [{"gate": self.gate.path} if payload is None else payload for payload in payloads or (None,)]
        name = f"spark_test_operators:{operator}"
        return (await self.client.submit(tasks, operator=name, runtime="spark", policy=policy)).run_id

    async def tasks(self, run_id: UUID) -> list[TaskView]:
        tasks = [task async for task in self.client.tasks(run=run_id, page_size=1000)]
        return sorted(tasks, key=lambda task: task.index or 0)

    async def ended(self, run_id: UUID) -> list[TaskView]:
        async with asyncio.timeout(200):
            await self.client.wait(run_id, poll_seconds=0.05)
        return await self.tasks(run_id)

    async def only(self, run_id: UUID) -> TaskView:
        (task,) = await self.ended(run_id)
        return task

    async def first_of(self, run_ids: list[UUID]) -> tuple[TaskView, UUID]:
        """Returns the task of the run that ends first, and the other run."""

        async def some() -> UUID | None:
            states = {run_id: (await self.client.run(run_id)).state for run_id in run_ids}
            return next((run_id for run_id, state in states.items() if state is RunState.COMPLETED), None)

        first = await until(some, seconds=100)
        return await self.only(first), next(run_id for run_id in run_ids if run_id != first)

    async def attempts(self, task: TaskView) -> list[AttemptView]:
        return (await self.client.attempts(task.task_id)).attempts

    async def arrival(self) -> Visitor:
        """Waits for a task to arrive. The first one waits for the start of the session."""
        return await self.gate.arrival(seconds=200)

    async def progress(self, run_id: UUID, text: str) -> TaskView:
        async def shown() -> TaskView | None:
            (task,) = await self.tasks(run_id)
            return task if text in (task.progress_text or "") else None

        found: TaskView = await until(shown, seconds=200)
        return found

    async def canceled(self, run_id: UUID) -> TaskView:
        (task,) = await self.tasks(run_id)
        await self.client.cancel_task(task.task_id)
        return await self.only(run_id)


@asynccontextmanager
async def opened(system: System, folder: Path) -> AsyncIterator[Bench]:
    (folder / "spark_test_operators.py").write_text(OPERATORS)
    await system.declare_all(folder, spark=True)
    gate = Gate(folder / "gate")
    loops = [asyncio.create_task(forever(service)) for service in dispatcher_services(system.kernel)]
    doors = await asyncio.start_unix_server(gate.opened, gate.path)
    async with Client(system.gateway_url, system.admin_key) as client:
        yield Bench(system, client, gate, folder)
    doors.close()
    gate.close()
    await doors.wait_closed()
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[Worker]:
    running = asyncio.create_task(worker.run())
    yield worker
    worker.request_drain()
    worker.request_drain()
    await running


def drivers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "interlock.spark.driver" in one.cmdline()]


def result(task: TaskView) -> Any:
    return msgspec.json.decode(task.result)
