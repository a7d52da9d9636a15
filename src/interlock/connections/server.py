"""uvicorn behind a guard, for every listener of the platform."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog
import uvicorn

from interlock.connections.guard import KEEP_ALIVE_SECONDS, Guard
from interlock.connections.limits import ConnectionLimits
from interlock.connections.protocol import Protocol

log = structlog.get_logger()

_OTHER_FILES: Final = 512
"""Descriptors left for everything that is not a connection of a client: stores, files, children."""


def config_of(app: Any, *, grace_seconds: int, **more: Any) -> uvicorn.Config:
    """`app` is an ASGI application, for which there is no type that all of ours have."""
    return uvicorn.Config(
        app,
        loop="none",
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # anyone could claim to be a proxy
        timeout_graceful_shutdown=grace_seconds,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        **more,
    )


class Server(uvicorn.Server):
    """Signals belong to the process, not to the server: a process drains more than its connections."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self._guard: Guard | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As the base class does, but with the guard, and a deadline for TLS handshakes."""
        await super().startup(sockets=[])
        loop = asyncio.get_running_loop()
        self._guard = Guard(_fitted(self._limits), loop.time())
        make = partial(Protocol, self.config, self.server_state, self.lifespan.state, guard=self._guard)
        deadline = self._limits.head_seconds if self.config.ssl else None
        for listener in sockets or []:
            server = await loop.create_server(
                make,
                sock=listener,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=deadline,
            )
            self.servers.append(server)

    async def on_tick(self, counter: int) -> bool:
        if self._guard is not None:
            self._guard.tick(asyncio.get_running_loop().time())
        return await super().on_tick(counter)


def _fitted(limits: ConnectionLimits) -> ConnectionLimits:
    """Raises the process's limit on open files to what the connections need, or lowers their number to what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.most + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        most = max(_OTHER_FILES // 4, hard - _OTHER_FILES)
        log.warning("listener.few_files", open_files=hard, max_connections=most, wanted=limits.most)
        limits, wanted = replace(limits, most=most), hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limits
