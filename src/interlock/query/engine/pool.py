"""The engine's side of the warm process: forks and kills processes, and receives their exit statuses."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from interlock.errors import Unavailable
from interlock.processes.child import Child, scrubbed
from interlock.query.statement.protocol import EXIT, FORK, KILL, ORDER

log = structlog.get_logger()

START_SECONDS: Final = 60.0
_PASSED_ON: Final = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
"""Variables with which Python finds its modules."""
_ENVIRONMENT: Final = {
    # RLIMIT_DATA counts mapped memory, used or not. Arrow's allocator maps 1 GiB at a time, and DuckDB's (jemalloc)
    # keeps freed memory mapped: a sort within 512 MiB had 955 MiB mapped, and 720 MiB with these settings.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "DUCKDB_JE_MALLOC_CONF": "retain:false",
    "LC_ALL": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TZ": "UTC",
}
KILLED: Final = -9


class Warm:
    """A warm process. After it has ended, the engine starts another one."""

    def __init__(
        self,
        process: Child,
        sock: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._socket, self._reader = process, sock, reader
        # Keep a reference, because the connection is closed on garbage collection.
        self._writer = writer
        self._number = 0
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls) -> Warm:
        """Starts the process. Raises Unavailable if it does not start."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await Child.start(
                [sys.executable, "-P", "-m", "interlock.query.statement.zygote", str(theirs.fileno())],
                environment=scrubbed(os.environ, _PASSED_ON) | _ENVIRONMENT,
                descriptors=[theirs.fileno()],
                cwd="/",
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours.dup())
        warm = cls(process, ours, reader, writer)
        try:
            async with asyncio.timeout(START_SECONDS):
                await reader.readexactly(EXIT.size)
        except (TimeoutError, asyncio.IncompleteReadError):
            await warm.stop()
            raise Unavailable("The process that runs queries does not start; see its log output.") from None
        warm._listening = asyncio.create_task(warm._listen())
        return warm

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> int:
        """Number of forks that are not dead yet."""
        return len(self._ends)

    @property
    def alive(self) -> bool:
        return self._process.alive and self._listening is not None and not self._listening.done()

    async def _listen(self) -> None:
        try:
            while True:
                number, status = EXIT.unpack(await self._reader.readexactly(EXIT.size))
                if ended := self._ends.pop(number, None):
                    ended.set_result(status)
        except (asyncio.IncompleteReadError, ConnectionError):
            log.warning("query.warm_process_ended")
        finally:
            # Its forks are killed with it.
            for ended in self._ends.values():
                if not ended.done():
                    ended.set_result(KILLED)
            self._ends.clear()

    def fork(self, descriptors: Sequence[int]) -> Fork:
        """Forks a process that owns copies of these descriptors."""
        self._number += 1
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._socket, [ORDER.pack(FORK, self._number)], list(descriptors))
        except OSError as error:
            raise Unavailable("The process that runs queries is restarting; retry later.") from error
        self._ends[self._number] = ended
        return Fork(self, self._number, ended)

    def kill(self, number: int) -> None:
        with suppress(OSError):
            self._socket.send(ORDER.pack(KILL, number))

    async def stop(self) -> None:
        """Stops the process and all its forks."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._process.kill()
        await self._process.wait()
        self._writer.close()
        self._socket.close()


class Fork:
    """The process of one statement."""

    def __init__(self, warm: Warm, number: int, ended: asyncio.Future[int]) -> None:
        self._warm, self._number, self._ended = warm, number, ended

    @property
    def gone(self) -> bool:
        return self._ended.done()

    def when_dead(self, call: Callable[[], None]) -> None:
        self._ended.add_done_callback(lambda _: call())

    def kill(self) -> None:
        if not self._ended.done():
            self._warm.kill(self._number)

    async def end(self) -> int:
        """Waits for the end of the process and returns its exit status."""
        return await asyncio.shield(self._ended)
