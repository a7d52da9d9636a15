"""Commands over HTTP until they are durable in the target's queue, beside bare inserts of the same bodies."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Final

import asyncpg

from bench.bus.registered import PRODUCER, message
from bench.bus.sender import Sender
from interlock.bus.delivered import body
from interlock.bus.envelope import read

BATCH: Final = 100
_FEW: Final = 8
_DELIVERED: Final = b'"outcome":"delivered"'
_INSERT: Final = (
    "insert into interlock.queue_messages (queue, body) select 'bare', m::json from unnest($1::text[]) as m"
)


async def batches(sender: Sender, count: int, lanes: int) -> float:
    """Commands per second, in batches, so many requests at once."""
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
    """Rows per second, by one connection: the bodies that targets would get, as many a statement as a batch has."""
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
    """Single commands per second with so many senders that wait for nothing but their answers."""
    waiting = iter([message() for _ in range(count)])

    async def lane() -> None:
        for content in waiting:
            await sender.send(content)

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(lanes)))
    return count / (time.perf_counter() - began)


async def bare_latencies(url: str, rate: float, seconds: float) -> list[float]:
    """Of inserts of one body each, by a few connections: what the disk alone makes of such a rate."""
    source = f"bench/{PRODUCER}"
    async with asyncpg.create_pool(url, min_size=_FEW, max_size=_FEW) as pool:

        async def insert(content: bytes) -> object:
            return await pool.execute(_INSERT, [body(read(content), source)])

        return await latencies(insert, rate, seconds)


async def latencies(send: Callable[[bytes], Awaitable[object]], rate: float, seconds: float) -> list[float]:
    """Milliseconds from when each was due: one that waits for those before it is late, not left out."""
    count = int(rate * seconds)
    contents = [message() for _ in range(count)]
    gc.collect()
    gc.freeze()  # the pauses of this process' own collector are nobody's latency
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
