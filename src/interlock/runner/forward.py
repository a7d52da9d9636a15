"""Connections from inside to the platform, and to nowhere else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

import structlog

log = structlog.get_logger()

MOST_CONNECTIONS: Final = 64
"""Of one invocation at once; further ones wait to be accepted."""
_CHUNK: Final = 1 << 16
_CONNECT_SECONDS: Final = 10.0
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """Where a connection from inside goes to."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Self:
        parts = urlsplit(url)
        return cls(parts.hostname or "", parts.port or _PORTS[parts.scheme])


class Forwarder:
    """For one invocation: sockets that listen inside, in the order of their targets."""

    def __init__(self, listeners: Sequence[socket.socket], targets: Sequence[Target]) -> None:
        self._listeners = listeners
        self._targets = targets
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        for listener, target in zip(self._listeners, self._targets, strict=True):
            listener.setblocking(False)
            self._begin(self._accept(listener, target))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, target: Target) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            inner, _ = await loop.sock_accept(listener)
            self._begin(self._pass(inner, target))

    async def _pass(self, inner: socket.socket, target: Target) -> None:
        try:
            here = await asyncio.open_connection(sock=inner)
            try:
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_CONNECT_SECONDS):
                        there = await asyncio.open_connection(target.host, target.port)
                    await _both_ways(here, there)
            finally:
                here[1].close()
        finally:
            self._room.release()


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _both_ways(one: _Stream, other: _Stream) -> None:
    try:
        await asyncio.gather(_one_way(one[0], other[1]), _one_way(other[0], one[1]))
    finally:
        other[1].close()


async def _one_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
