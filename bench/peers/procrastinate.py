"""procrastinate at its fastest: uvloop, psycopg in C, several concurrent fetches.

It fetches and reports one job at a time, and a worker fetches its next job only after it has received the previous one.
So throughput depends on how many of these share a WAL flush: six workers in each of two processes, four jobs each.
Twice as many workers, or twice the processes, were no faster on two cores; nor was deleting completed jobs. Jobs are
deferred in batches. We open the pool ourselves, as its documentation allows: without a liveness query before each use,
and without a transaction around a single statement.

Its rate is clear long before it has worked off as many tasks as the other queues, so it gets fewer.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import procrastinate
import psycopg
from procrastinate.types import JSONDict
from psycopg_pool import AsyncConnectionPool

from bench.peers.process import Peer
from bench.peers.program import Handled, Queue

_FETCHERS = 6
_CONCURRENCY = 4
_CONNECTIONS = 12


async def peer() -> Peer:
    return Peer(
        name=f"procrastinate {importlib.metadata.version('procrastinate')}",
        command=[sys.executable, "-m", "bench.peers.program", "procrastinate"],
        directory=Path(__file__).parents[2],
        workers=2,
        idle="select not exists (select 1 from procrastinate_jobs where status in ('todo', 'doing'))",
        completed="select count(*) from procrastinate_jobs where status = 'succeeded'",
        max_tasks=10_000,
    )


@dataclass
class _Queue:
    app: procrastinate.App
    handled: Handled = field(default_factory=Handled)

    def __post_init__(self) -> None:
        self.noop = self.app.task(name="noop")(self._handle)

    async def _handle(self, **payload: float) -> None:
        self.handled.one(payload.get("at"))

    async def install(self) -> None:
        await self.app.schema_manager.apply_schema_async()

    async def create(self, count: int) -> None:
        payload: JSONDict = {"n": 1}
        await self.noop.batch_defer_async(*[payload] * count)

    async def create_timed(self) -> None:
        # A job does not know its creation time, so the payload carries it.
        await self.noop.defer_async(n=1, at=time.time())

    async def work(self, handled: Handled, stop: asyncio.Event) -> None:
        self.handled = handled
        async with asyncio.TaskGroup() as group:
            fetchers = [group.create_task(self._fetch()) for _ in range(_FETCHERS)]
            await stop.wait()
            for fetcher in fetchers:
                fetcher.cancel()

    async def _fetch(self) -> None:
        await self.app.run_worker_async(concurrency=_CONCURRENCY, install_signal_handlers=False)


async def _autocommit(connection: psycopg.AsyncConnection[Any]) -> None:
    await connection.set_autocommit(True)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Queue]:
    logging.getLogger("procrastinate").setLevel(logging.WARNING)
    app = procrastinate.App(connector=procrastinate.PsycopgConnector())
    pool = AsyncConnectionPool(url, min_size=4, max_size=_CONNECTIONS, configure=_autocommit, open=False)
    async with pool, app.open_async(pool):
        yield _Queue(app)
