"""A proxy between a process and PostgreSQL that can go silent: both ends stay open, but no data passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

LISTENER = b"interlock-listen"
"""The application name of a LISTEN connection."""


@dataclass
class Line:
    """One connection through the proxy."""

    sent: bytearray = field(default_factory=bytearray)
    """All data from the process that this end received."""
    received: bytearray = field(default_factory=bytearray)
    silent: bool = False
    abandoned: bool = False
    """The process has closed its end."""

    @property
    def listens(self) -> bool:
        return LISTENER in self.sent


class Wire:
    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._dies: Callable[[Line], bool] = lambda _line: False
        self.lines: list[Line] = []

    @property
    def url(self) -> str:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        login = self._target.netloc.rpartition("@")[0]
        return urlunsplit(self._target._replace(netloc=f"{login}@127.0.0.1:{port}"))

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Wire]:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield self
        finally:
            self._server.close()
            for line in self._carrying:
                line.cancel()
            await asyncio.gather(*self._carrying, return_exceptions=True)

    def kill(self, dies: Callable[[Line], bool]) -> None:
        """Silences all matching connections from now on. Connections that are already silent stay silent."""
        self._dies = dies
        for line in self.lines:
            line.silent = line.silent or dies(line)

    def mend(self) -> None:
        self._dies = lambda _line: False

    async def first(self, found: Callable[[Line], bool], seconds: float) -> Line:
        """Waits for the first connection that matches."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: any(map(found, self.lines)))
            return next(filter(found, self.lines))

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carrying = asyncio.create_task(self._carry(reader, writer))
        self._carrying.add(carrying)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line()
        self.lines.append(line)
        far_reader, far_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        there = asyncio.create_task(self._pump(line, line.sent, reader, far_writer))
        back = asyncio.create_task(self._pump(line, line.received, far_reader, writer))
        try:
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            if line.silent:
                await there  # the far end may be gone: a silent connection does not show it
            async with self._changed:
                line.abandoned = there.done()
                self._changed.notify_all()
        finally:
            for pump, end in ((there, far_writer), (back, writer)):
                pump.cancel()
                end.transport.abort()

    async def _pump(
        self, line: Line, seen: bytearray, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                async with self._changed:
                    seen += data
                    line.silent = line.silent or self._dies(line)
                    self._changed.notify_all()
                if not line.silent:
                    writer.write(data)
                    await writer.drain()
