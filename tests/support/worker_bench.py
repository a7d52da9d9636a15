"""Workers in the test process against a real dispatcher, with operators that a test writes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.client import Client
from interlock.processes.loop import forever
from interlock.settings import Settings
from interlock.wire.base import Outcome
from interlock.wire.jobs import Policy
from interlock.wire.tasks import TaskView
from interlock.workers import Worker
from tests.support.operator_gate import Gate, Visitor
from tests.support.system import System

PROCESS = """
import asyncio, sys
from interlock.settings import Settings
from interlock.workers import main
settings = Settings(internal_url=sys.argv[1], worker_token=sys.argv[2])
asyncio.run(main(settings, concurrency=1, operators=[sys.argv[3]]))
"""


class Bench:
    """A system with running loops, a client, a gate, and workers on demand."""

    def __init__(self, system: System, client: Client, gate: Gate, folder: Path, stack: AsyncExitStack) -> None:
        self.system, self.client, self.gate, self.folder = system, client, gate, str(folder)
        self._stack = stack

    def settings(self, **overrides: Any) -> Settings:
        given = {"internal_url": self.system.internal_url, "worker_token": self.system.worker_token}
        return Settings(**given | {"operators": [self.folder]} | overrides)

    async def worker(self, concurrency: int = 1, cancel_grace: float = 5.0, **overrides: Any) -> Worker:
        """Starts a worker that runs until the end of the test."""
        worker = Worker(self.settings(**overrides), concurrency=concurrency, cancel_grace=cancel_grace)
        await self._stack.enter_async_context(_at_work(worker))
        return worker

    async def process(self) -> asyncio.subprocess.Process:
        """Starts a worker in a separate process, with one child."""
        addresses = (self.system.internal_url, self.system.worker_token, self.folder)
        return await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESS, *addresses)

    async def run(self, operator: str, payloads: list[Any], **options: Any) -> UUID:
        policy = options.pop("policy", Policy(backoff_seconds=0, jitter=0))
        name = operator if operator in ("echo", "sleep", "fail", "python") else f"own_operators:{operator}"
        return (await self.client.submit(payloads, operator=name, policy=policy, **options)).run_id

    async def ended(self, run_id: UUID) -> list[TaskView]:
        """Waits until the run has ended and returns its tasks in order."""
        async with asyncio.timeout(60):
            await self.client.wait(run_id, poll_seconds=0.02)
        return await self.tasks(run_id)

    async def tasks(self, run_id: UUID) -> list[TaskView]:
        tasks = [task async for task in self.client.tasks(run=run_id, page_size=1000)]
        return sorted(tasks, key=lambda task: task.index or 0)

    async def at_the_gate(self, **options: Any) -> tuple[TaskView, Visitor]:
        """Starts a task and returns it once its operator is running, with the operator's visitor at the gate."""
        run_id = await self.run("gate", [{"gate": self.gate.path}], **options)
        visitor = await self.gate.arrival()
        (task,) = await self.tasks(run_id)
        return task, visitor

    async def outcomes(self, task_id: UUID) -> list[Outcome | None]:
        return [attempt.outcome for attempt in (await self.client.attempts(task_id)).attempts]


@asynccontextmanager
async def _at_work(worker: Worker) -> AsyncIterator[None]:
    running = asyncio.create_task(worker.run())
    yield
    worker.request_drain()
    worker.request_drain()
    await running


@asynccontextmanager
async def benched(system: System, tmp_path: Path, operators: str) -> AsyncIterator[Bench]:
    """Runs the loops of a dispatcher. `operators` becomes the module `own_operators`."""
    folder = tmp_path / "operators"
    folder.mkdir()
    (folder / "own_operators.py").write_text(operators)
    await system.declare_all(folder)
    gate = Gate(tmp_path / "gate")
    loops = [asyncio.create_task(forever(service)) for service in dispatcher_services(system.kernel)]
    doors = await asyncio.start_unix_server(gate.opened, gate.path)
    async with Client(system.gateway_url, system.admin_key) as client, AsyncExitStack() as stack:
        yield Bench(system, client, gate, folder, stack)
    doors.close()
    gate.close()
    await doors.wait_closed()
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
