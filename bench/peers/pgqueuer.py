"""pgqueuer at its fastest: uvloop, asyncpg, jobs in thousands.

Tables are durable, which is its default. Jobs are enqueued as lists. `batch_size` is 1,000 for fetching and for
reporting. A pool keeps fetching and reporting from waiting for each other. No concurrency limit is set, which saves the
counting query. Two worker processes on two cores: one leaves a core half idle, and a third was no faster.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from pgqueuer import AsyncpgPoolDriver, Job, PgQueuer, Queries

from bench.peers.process import Peer
from bench.peers.program import Handled, Queue

_BATCH_SIZE = 1000
_CONNECTIONS = 4
_PLAIN = b'{"n": 1}'
_TIMED = b'{"timed": 1}'


async def peer() -> Peer:
    return Peer(
        name=f"pgqueuer {importlib.metadata.version('pgqueuer')}",
        command=[sys.executable, "-m", "bench.peers.program", "pgqueuer"],
        directory=Path(__file__).parents[2],
        workers=2,
        idle="select not exists (select 1 from pgqueuer)",
        completed="select count(*) from pgqueuer_log where status = 'successful'",
    )


@dataclass
class _Queue:
    pool: asyncpg.Pool[Any]
    queries: Queries

    async def install(self) -> None:
        await self.queries.install()

    async def create(self, count: int) -> None:
        await self.queries.enqueue(["noop"] * count, [_PLAIN] * count, [0] * count)

    async def create_timed(self) -> None:
        await self.queries.enqueue("noop", _TIMED)

    async def work(self, handled: Handled, stop: asyncio.Event) -> None:
        manager = PgQueuer.from_asyncpg_pool(self.pool)

        @manager.entrypoint("noop")
        async def noop(job: Job) -> None:
            handled.one(job.created.timestamp() if job.payload == _TIMED else None)

        manager.qm.shutdown = stop
        await manager.qm.run(batch_size=_BATCH_SIZE)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Queue]:
    async with asyncpg.create_pool(url, min_size=_CONNECTIONS, max_size=_CONNECTIONS) as pool:
        yield _Queue(pool, Queries(AsyncpgPoolDriver(pool)))
