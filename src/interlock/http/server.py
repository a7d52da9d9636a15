"""uvicorn with a connection guard, for all listeners of the platform."""

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

from interlock.http.connection import KEEP_ALIVE_SECONDS, ConnectionLimits, Guard, Protocol

log = structlog.get_logger()

_OTHER_FILES: Final = 512
"""File descriptors reserved for everything except client connections: stores, files, child processes."""


def config_of(app: Any, *, grace_seconds: int, **more: Any) -> uvicorn.Config:
    """Returns the uvicorn configuration. `app` is an ASGI application; our applications share no static type."""
    return uvicorn.Config(
        app,
        loop="none",
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # any client could send these headers
        timeout_graceful_shutdown=grace_seconds,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        **more,
    )


class Server(uvicorn.Server):
    """A server without signal handlers: the process handles signals, because it drains more than its connections."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self._guard: Guard | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts like the base class, but with the guard and a timeout for TLS handshakes."""
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
    """Raises the limit on open files to the need of the connections, or lowers the number of connections to fit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        limit = max(_OTHER_FILES // 4, hard - _OTHER_FILES)
        log.warning("listener.few_files", open_files=hard, max_connections=limit, wanted=limits.connections)
        limits, wanted = replace(limits, connections=limit), hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limits
