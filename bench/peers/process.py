"""The benchmark's end of a peer's process: writes verbs to its standard input, and reads lines of JSON."""

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
    """A peer could not be measured. The message is shown in the table."""


@dataclass(frozen=True)
class Peer:
    """The command of one queue, and the SQL that shows when its work is done."""

    name: str
    command: Sequence[str]
    """Accepts the verbs of `bench.peers.program`; the database URL is appended as the last argument."""
    directory: Path
    workers: int
    idle: str
    """SQL: true if no task is waiting or running."""
    completed: str | None = None
    """SQL: number of successful tasks. None for a queue that deletes them: then the handlers' count is used."""
    max_tasks: int | None = None
    """Number of tasks that is enough to measure its rate, if all of them would take too long."""


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
                self._received(json.loads(line))
        finally:
            self._answers.put_nowait(None)

    def _received(self, line: dict[str, Any]) -> None:
        if "handled" in line:
            self.first_handled_at = self.first_handled_at or time.perf_counter()
            self.handled = line["handled"]
        elif "latencies" in line:
            self.latencies = line["latencies"]
        else:
            self._answers.put_nowait(line)

    async def answer(self) -> None:
        if await self._answers.get() is None:
            raise PeerFailed(f"its process ended with {await self.process.wait()}; see its output above.")

    async def ask(self, verb: str, *numbers: int) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{' '.join(map(str, (verb, *numbers)))}\n".encode())
        await self.answer()


@contextlib.asynccontextmanager
async def started(peer: Peer, url: str, count: int = 1) -> AsyncIterator[list[PeerProcess]]:
    """Starts processes, loaded and connected. On exit, they finish their current work in order."""
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
        raise PeerFailed(f"its process did not end within {_ENDING_SECONDS} s after the end of its input.") from error
    if code:
        raise PeerFailed(f"its process ended with {code}; see its output above.")
