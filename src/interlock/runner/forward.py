"""Connections from inside to the platform, and to nowhere else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote_to_bytes, urlsplit

from interlock.runner.contract import Endpoints
from interlock.runner.proxy import Stream, exchange_all

MOST_CONNECTIONS: Final = 64
"""Of one invocation at once; further ones wait to be accepted."""
_CHUNK: Final = 1 << 16
_CONNECT_SECONDS: Final = 10.0
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """An address of the platform, and the paths there that code may ask for."""

    host: str
    port: int
    paths: frozenset[str] | None
    """Beginnings of paths; None where the connection is passed on as it is: an encrypted one, or one to a bucket,
    which has nothing but objects, each with a credential of its own."""

    def allows(self, path: bytes) -> bool:
        """Nothing that a server could read in two ways: no dots, no empty part, encoded or not."""
        plain = unquote_to_bytes(path.partition(b"?")[0])
        odd = {b"", b".", b".."} & set(plain.split(b"/")[1:]) or b"\\" in plain or b"#" in path
        beginnings = [each.encode() for each in self.paths or ()]
        return not odd and any(path.startswith(each) and path[len(each) :][:1] in b"/?" for each in beginnings)


def targets_of(endpoints: Endpoints) -> list[Target]:
    """Each address once, with the paths of all URLs that lead to it."""
    allowed: dict[tuple[str, int], frozenset[str] | None] = {}
    for url, beginning in (
        (endpoints.dispatcher_url, "/v1/task"),
        (endpoints.query_url, "/v1/task"),
        (endpoints.objects_url, None if endpoints.objects_in_bucket else "/v1/objects"),
    ):
        if url is None:
            continue
        parts = urlsplit(url)
        address = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        known = allowed.get(address, frozenset())
        opaque = beginning is None or parts.scheme == "https" or known is None
        allowed[address] = None if opaque else (known or frozenset()) | {f"{parts.path.rstrip('/')}{beginning}"}
    return [Target(*address, paths) for address, paths in allowed.items()]


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
                    try:
                        if target.paths is None:
                            await _both_ways(here, there)
                        else:
                            await exchange_all(here, there, target.allows)
                    finally:
                        there[1].close()
            finally:
                here[1].close()
        finally:
            self._room.release()


async def _both_ways(one: Stream, other: Stream) -> None:
    await asyncio.gather(_one_way(one[0], other[1]), _one_way(other[0], one[1]))


async def _one_way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
