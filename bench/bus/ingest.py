"""Commands over HTTP until they are durable in the target's queue, beside bare inserts of the same bodies."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any, Final

import aiohttp
import asyncpg

from bench.bus.registered import PRODUCER, Registered, message
from interlock.bus.delivered import body
from interlock.bus.envelope import read

BATCH: Final = 100
_INSERT: Final = (
    "insert into interlock.queue_messages (queue, body) select 'bare', m::json from unnest($1::text[]) as m"
)


class Sender:
    def __init__(self, url: str, registered: Registered, session: aiohttp.ClientSession) -> None:
        self._url = f"{url}/v1/commands"
        self._headers = {"Authorization": f"Bearer {registered.key}", "Content-Type": "application/json"}
        self._session = session

    async def send(self, content: bytes) -> Any:
        async with self._session.post(self._url, data=content, headers=self._headers) as reply:
            answer = await reply.json()
            assert reply.status == 202, answer
            return answer


async def batches(sender: Sender, count: int, lanes: int) -> float:
    """Commands per second, in batches, so many requests at once."""
    contents = [b'{"commands":[' + b",".join(message() for _ in range(BATCH)) + b"]}" for _ in range(count // BATCH)]
    waiting = iter(contents)

    async def lane() -> None:
        for content in waiting:
            answer = await sender.send(content)
            assert all(result["outcome"] == "delivered" for result in answer["results"]), answer["results"][0]

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


async def latencies(sender: Sender, rate: float, seconds: float) -> list[float]:
    """Milliseconds from when each was due: one that waits for those before it is late, not left out."""
    count = int(rate * seconds)
    contents = [message() for _ in range(count)]
    gc.collect()
    gc.freeze()  # the pauses of this process' own collector are nobody's latency
    loop, found = asyncio.get_running_loop(), []
    began = loop.time()

    async def one(place: int) -> None:
        await sender.send(contents[place])
        found.append(1000 * (loop.time() - began - place / rate))

    async with asyncio.TaskGroup() as sending:
        for place in range(count):
            await asyncio.sleep(max(0.0, began + place / rate - loop.time()))
            sending.create_task(one(place))
    gc.unfreeze()
    return found
