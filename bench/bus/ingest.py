"""Commands over HTTP until they are durable in the target's queue, compared with bare inserts of the same bodies."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Final

import asyncpg

from bench.bus.registry import PRODUCER, message
from bench.bus.sender import Sender
from interlock.bus.path.delivery import body
from interlock.wire.commands import read

BATCH: Final = 100
_FEW: Final = 8
_DELIVERED: Final = b'"outcome":"delivered"'
_INSERT: Final = (
    "insert into interlock.queue_messages (queue, body) select 'bare', m::json from unnest($1::text[]) as m"
)


async def batches(sender: Sender, count: int, lanes: int) -> float:
    """Returns commands per second, sent in batches with `lanes` concurrent requests."""
    contents = [b'{"commands":[' + b",".join(message() for _ in range(BATCH)) + b"]}" for _ in range(count // BATCH)]
    waiting = iter(contents)

    async def lane() -> None:
        for content in waiting:
            answer = await sender.send(content)
            assert answer.count(_DELIVERED) == BATCH, answer

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(lanes)))
    return len(contents) * BATCH / (time.perf_counter() - began)


async def bare(url: str, count: int) -> float:
    """Returns rows per second on one connection: the bodies that targets would get, one batch per statement."""
    source = f"bench/{PRODUCER}"
    bodies = [[body(read(message()), source) for _ in range(BATCH)] for _ in range(count // BATCH)]
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_INSERT, bodies[0])
        began = time.perf_counter()
        for rows in bodies:
            await connection.execute(_INSERT, rows)
        return len(bodies) * BATCH / (time.perf_counter() - began)
    finally:
        await connection.close()


async def saturation(sender: Sender, count: int, lanes: int) -> float:
    """Returns single commands per second, with `lanes` senders that each send as soon as they have an answer."""
    waiting = iter([message() for _ in range(count)])

    async def lane() -> None:
        for content in waiting:
            await sender.send(content)

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(lanes)))
    return count / (time.perf_counter() - began)


async def bare_latencies(url: str, rate: float, seconds: float) -> list[float]:
    """Returns latencies of single-row inserts on a few connections: the disk's share at this rate."""
    source = f"bench/{PRODUCER}"
    async with asyncpg.create_pool(url, min_size=_FEW, max_size=_FEW) as pool:

        async def insert(content: bytes) -> object:
            return await pool.execute(_INSERT, [body(read(content), source)])

        return await latencies(insert, rate, seconds)


async def latencies(send: Callable[[bytes], Awaitable[object]], rate: float, seconds: float) -> list[float]:
    """Returns milliseconds from each command's due time: a delayed command counts as late and is not omitted."""
    count = int(rate * seconds)
    contents = [message() for _ in range(count)]
    gc.collect()
    gc.freeze()  # garbage collection in this process must not count as latency
    loop, found = asyncio.get_running_loop(), []
    began = loop.time()

    async def one(place: int) -> None:
        await send(contents[place])
        found.append(1000 * (loop.time() - began - place / rate))

    async with asyncio.TaskGroup() as sending:
        for place in range(count):
            await asyncio.sleep(max(0.0, began + place / rate - loop.time()))
            sending.create_task(one(place))
    gc.unfreeze()
    return found
