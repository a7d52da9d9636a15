"""A gate where operators of a test stop, identify themselves, and wait until they are released."""

from __future__ import annotations

import asyncio
from pathlib import Path


class Visitor:
    """An operator that waits at the gate."""

    def __init__(self, greeting: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.index, self.attempt, self.worker = (int(word) for word in greeting.split())
        self._reader, self._writer = reader, writer

    def let_go(self) -> None:
        self._writer.write(b".")

    async def gone(self) -> None:
        """Waits until the operator has left, for whatever reason."""
        async with asyncio.timeout(30):
            await self._reader.read()

    def leave(self) -> None:
        self._writer.transport.abort()


class Gate:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._arrivals: asyncio.Queue[Visitor] = asyncio.Queue()
        self._visitors: list[Visitor] = []

    async def opened(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = (await reader.readline()).decode()
        self._visitors.append(Visitor(greeting, reader, writer))
        await self._arrivals.put(self._visitors[-1])

    async def arrival(self, seconds: float = 30) -> Visitor:
        async with asyncio.timeout(seconds):
            return await self._arrivals.get()

    def close(self) -> None:
        for visitor in self._visitors:
            visitor.leave()
