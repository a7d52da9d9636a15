"""The bench's end of a peer's process: verbs in by standard input, lines of JSON back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LONGEST_LINE = 2**24
_ENDING_SECONDS = 60


class PeerFailed(Exception):
    """A peer could not be measured; the message is for the table."""


@dataclass(frozen=True)
class Peer:
    """How to run one queue, and how its tables tell that the work is done."""

    name: str
    command: Sequence[str]
    """Takes the verbs of `bench.peers.program`; the database's URL is added at the end."""
    directory: Path
    workers: int
    idle: str
    """SQL: true when no task waits or runs."""
    completed: str | None = None
    """SQL: how many tasks ended well. None for a queue that forgets them: there the handlers' count has to do."""
    most: int | None = None
    """Tasks enough to know its rate, where all of them would take too long."""


@dataclass
class PeerProcess:
    process: asyncio.subprocess.Process
    handled: int = 0
    first_handled_at: float | None = None
    latencies: list[float] = field(default_factory=list)
    _answers: asyncio.Queue[dict[str, Any] | None] = field(default_factory=asyncio.Queue)

    async def listen(self) -> None:
        assert self.process.stdout
        try:
            async for line in self.process.stdout:
                self._hear(json.loads(line))
        finally:
            self._answers.put_nowait(None)

    def _hear(self, said: dict[str, Any]) -> None:
        if "handled" in said:
            self.first_handled_at = self.first_handled_at or time.perf_counter()
            self.handled = said["handled"]
        elif "latencies" in said:
            self.latencies = said["latencies"]
        else:
            self._answers.put_nowait(said)

    async def answer(self) -> None:
        if await self._answers.get() is None:
            raise PeerFailed(f"its process ended with {await self.process.wait()}; see above what it said.")

    async def ask(self, verb: str, *numbers: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{' '.join(map(str, (verb, *numbers)))}\n".encode())
        await self.answer()


@contextlib.asynccontextmanager
async def started(peer: Peer, url: str, count: int = 1) -> AsyncIterator[list[PeerProcess]]:
    """Processes that are loaded and connected; they end what they began, in order, when this is left."""
    async with contextlib.AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(_started(peer, url)) for _ in range(count)]
        for process in processes:
            await process.answer()
        yield processes


@contextlib.asynccontextmanager
async def _started(peer: Peer, url: str) -> AsyncIterator[PeerProcess]:
    process = await asyncio.create_subprocess_exec(
        *peer.command,
        url,
        cwd=peer.directory,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
    )
    running = PeerProcess(process)
    listening = asyncio.create_task(running.listen())
    try:
        yield running
        await _ended(process, listening)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await listening


async def _ended(process: asyncio.subprocess.Process, listening: asyncio.Task[None]) -> None:
    assert process.stdin
    process.stdin.close()
    try:
        async with asyncio.timeout(_ENDING_SECONDS):
            await listening
            code = await process.wait()
    except TimeoutError as error:
        raise PeerFailed(f"its process did not end within {_ENDING_SECONDS} s of being told to.") from error
    if code:
        raise PeerFailed(f"its process ended with {code}; see above what it said.")
