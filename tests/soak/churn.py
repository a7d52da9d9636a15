"""Does the work of workers and a dispatcher directly through the kernel, and counts the pages each step touches."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sized
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar
from uuid import UUID

import msgspec

from interlock.access.principals import WorkerIdentity
from interlock.apps.app import App
from interlock.apps.dispatcher import services as dispatcher_services
from interlock.clock import ManualClock
from interlock.tasks.idempotency import Repeat
from interlock.tasks.queue import Handle, Received
from interlock.wire.attempts import ClaimRequest, Completion, Heartbeat
from interlock.wire.jobs import JobRequest

T = TypeVar("T", bound=Sized | int)
QUEUE = "platform"
LOOPS = ("relay", "reaper", "retries", "run-counters", "run-cancels", "reconciler", "retention")
_WORKER = WorkerIdentity(token_id="soak", name="soak", runtimes=None)


@dataclass
class Steps:
    """Measurements of one round by kind of step: pages per task or message, and milliseconds in total."""

    pages: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    milliseconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def typical(self) -> dict[str, float]:
        return {step: median(pages) for step, pages in self.pages.items()}

    def latency(self) -> dict[str, float]:
        return {step: median(times) for step, times in self.milliseconds.items()}


class _Body(msgspec.Struct):
    task_id: UUID | None = None
    run_id: UUID | None = None
    start: int | None = None
    end: int | None = None


class _Fence(msgspec.Struct):
    task_id: UUID
    attempt: int
    lease_token: UUID


@dataclass
class Churn:
    """Submits, works off and cleans up in rounds, one statement at a time, so that pages have a single cause."""

    kernel: App
    clock: ManualClock
    org_id: UUID
    steps: Steps = field(default_factory=Steps)
    served: int = 0
    """Number of attempts that ended."""

    def __post_init__(self) -> None:
        self._loops = {service.name: service for service in dispatcher_services(self.kernel)}

    async def round(self, runs: int) -> Steps:
        """Runs `runs` runs of 100 tasks, and for each a single task and a task of a job with a concurrency limit."""
        self.steps = Steps()
        await self.plan_anew()
        for _ in range(runs):
            await self._submit(100, name="plain")
            await self._submit(1)
            await self._submit(1, name="capped", scaling={"max_concurrency": 1000})
        await self._work_off()
        self.clock.advance(90)  # past every lease, so that abandoned tasks are reaped
        for name in LOOPS:
            await self.exhaust(name)
        await self._work_off()
        await self.exhaust("run-counters")
        return self.steps

    async def exhaust(self, loop: str) -> None:
        """Runs a loop until a pass finds nothing to do."""
        while await self._step(loop, self._loops[loop].run_once):
            continue

    async def _submit(self, tasks: int, **job: object) -> None:
        policy = {"max_attempts": 5, "backoff_seconds": 0, "jitter": 0}
        body = msgspec.json.encode({"operator": "echo", "tasks": [{"rows": 1000}] * tasks, "policy": policy} | job)
        request = msgspec.json.decode(body, type=JobRequest)
        await self.kernel.jobs.submissions.submit(request, self.org_id, Repeat(body=body))

    async def _work_off(self) -> None:
        while messages := await self._step("receive", self._receive):
            bodies = [msgspec.json.decode(message.body, type=_Body) for message in messages]
            for body in bodies:
                if body.task_id is None:
                    await self._work("range", run_id=body.run_id, start=body.start, end=body.end)
            if alone := [body.task_id for body in bodies if body.task_id is not None]:
                await self._work("list", task_ids=alone)
            handles = [Handle(message.message_id, message.receipt) for message in messages]
            await self._step("ack", lambda: self.kernel.tasks.queue.ack(QUEUE, handles))  # noqa: B023 - awaited immediately

    async def _receive(self) -> list[Received]:
        return await self.kernel.tasks.queue.receive(QUEUE, wait_seconds=0, limit=20, visibility_seconds=60)

    async def _work(self, kind: str, **what: object) -> None:
        request = msgspec.convert({"worker_id": "soak", "tokens": False} | what, ClaimRequest)

        async def claim() -> list[_Fence]:
            reply = await self.kernel.tasks.claims.claim(request, _WORKER)
            claimed = [claim for claim in reply.claims if claim.status == "Claimed"]
            return [msgspec.convert(claim, _Fence, from_attributes=True) for claim in claimed]

        held = await self._step(f"claim {kind}", claim)
        # Abandons one task in a hundred, like a worker that died.
        report = [fence for n, fence in enumerate(held) if fence.attempt > 1 or n % 100 != 13]
        if report:
            await self._report(kind, report)

    async def _report(self, kind: str, held: list[_Fence]) -> None:
        beats = [msgspec.convert(fence, Heartbeat, from_attributes=True) for fence in held]
        ends = [
            # Three in ten fail at first, and are retried.
            Completion(
                task_id=fence.task_id,
                attempt=fence.attempt,
                lease_token=fence.lease_token,
                status="Failed" if fence.attempt == 1 and n % 10 < 3 else "Completed",
            )
            for n, fence in enumerate(held)
        ]

        async def heartbeat() -> int:
            return len((await self.kernel.tasks.attempts.heartbeat(beats)).items)

        async def complete() -> int:
            return (await self.kernel.tasks.attempts.complete(ends)).accepted

        await self._step(f"heartbeat {kind}", heartbeat)
        self.served += await self._step(f"complete {kind}", complete)

    async def _step(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        before, started = await self.pages(), time.perf_counter()
        result = await work()
        took, touched = time.perf_counter() - started, await self.pages() - before
        if items := result if isinstance(result, int) else len(result):
            self.steps.milliseconds[name].append(1000 * took)
            self.steps.pages[name].append(touched / items)
        return result

    async def plan_anew(self) -> None:
        """Makes plans follow the growth of tables now, and not again before the next call.

        Otherwise a check of all tables and new plans, which touch a hundred pages, would happen during an arbitrary
        step whenever a second has passed: on a slow machine, during every step.
        """
        database = self.kernel.stores.database
        database._check_growth_at = 0.0
        async with database.connection():
            database._check_growth_at = math.inf

    async def overhead(self) -> dict[str, int]:
        """Returns the pages that a receive and the loops touch when there is nothing to do: the minimum of three.

        The server counts pages for the whole database, including those of an autovacuum of its catalogs.
        """
        looks: dict[str, Callable[[], Awaitable[Sized | int]]] = {"receive": self._receive}
        looks |= {name: self._loops[name].run_once for name in LOOPS}
        found = {}
        for name, look in looks.items():
            await look()  # may have to plan
            found[name] = min([await self._idle_pages(look) for _ in range(3)])
        return found

    async def _idle_pages(self, look: Callable[[], Awaitable[Sized | int]]) -> int:
        before = await self.pages()
        assert not await look()
        return await self.pages() - before

    async def pages(self) -> int:
        """Returns all pages touched in this database so far. The query itself touches none."""
        async with self.kernel.stores.database.connection() as connection:
            await connection.fetchval("select pg_stat_force_next_flush()")
            count: int = await connection.fetchval(
                "select pg_stat_get_db_blocks_fetched(oid) from pg_database where datname = current_database()"
            )
        return count
