"""A peer's process: `python -m bench.peers.program PEER URL`, controlled by lines on standard input.

install         create the tables
create N        create N tasks, 1,000 at a time, with four calls in flight
trickle N RATE  create N timed tasks one by one, RATE per second
work            work off all tasks, and report the number that the handler has seen
end of input    finish current tasks, report the latencies of the timed tasks, and exit
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvloop

BATCH = 1000
IN_FLIGHT = 4
_REPORT_SECONDS = 0.01


def say(**words: Any) -> None:
    sys.stdout.write(f"{json.dumps(words)}\n")
    sys.stdout.flush()


@dataclass
class Handled:
    """Tasks that a handler has seen. Reported in steps: a line per task would itself dominate the measurement."""

    count: int = 0
    latencies: list[float] = field(default_factory=list)
    _reported: int = 0

    def one(self, created_at: float | None = None) -> None:
        """Counts a task. A timed task has its creation time, in seconds since the epoch."""
        if created_at is not None:
            self.latencies.append((time.time() - created_at) * 1000)
        self.count += 1
        if self.count == 1:
            self.report()

    def report(self) -> None:
        if self._reported != self.count:
            self._reported = self.count
            say(handled=self.count)

    async def keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            self.report()


class Queue(Protocol):
    async def install(self) -> None: ...

    async def create(self, count: int) -> None:
        """Creates tasks in one call."""

    async def create_timed(self) -> None: ...

    async def work(self, handled: Handled, stop: asyncio.Event) -> None:
        """Works until `stop` is set, and then finishes the current tasks."""


Opened = Callable[[str], AbstractAsyncContextManager[Queue]]


async def _create(queue: Queue, count: int) -> None:
    sizes = iter([min(BATCH, count - at) for at in range(0, count, BATCH)])

    async def some() -> None:
        for size in sizes:
            await queue.create(size)

    await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))


async def _trickle(queue: Queue, count: int, rate: int) -> None:
    begun = time.perf_counter()
    for n in range(count):
        await asyncio.sleep(max(0.0, begun + n / rate - time.perf_counter()))
        await queue.create_timed()


async def serve(queue: Queue) -> None:
    handled, stop = Handled(), asyncio.Event()
    verbs: dict[str, Callable[..., Awaitable[None]]] = {
        "install": queue.install,
        "create": lambda count: _create(queue, count),
        "trickle": lambda count, rate: _trickle(queue, count, rate),
    }
    working: asyncio.Task[None] | None = None
    lines = await _standard_input()
    reporting = asyncio.create_task(handled.keep_reporting())
    say(ready=True)
    async for line in lines:
        verb, *numbers = line.decode().split()
        if verb == "work":
            working = asyncio.create_task(queue.work(handled, stop))
        else:
            await verbs[verb](*map(int, numbers))
        say(done=verb)
    stop.set()
    if working:
        await working
    reporting.cancel()
    handled.report()
    say(latencies=handled.latencies)


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def main(peer: str, url: str) -> None:
    opened: Opened = importlib.import_module(f"bench.peers.{peer}").opened
    async with opened(url) as queue:
        await serve(queue)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
