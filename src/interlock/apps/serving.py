"""Serves one application on one listener until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable

from litestar import Litestar

from interlock.http.server import Server, config_of
from interlock.settings import Settings

_GRACE_SECONDS = 10


async def serve(
    app: Litestar,
    listener: socket.socket,
    settings: Settings,
    *,
    stop: asyncio.Event,
    on_stop: Callable[[], None],
) -> None:
    """Serves until `stop` is set. Calls `on_stop` when the drain begins, before it waits for open requests."""
    config = config_of(
        app,
        grace_seconds=_GRACE_SECONDS,
        lifespan="on",
        ssl_certfile=str(settings.tls_cert) if settings.tls_cert else None,
        ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
    )
    server = Server(config, settings.connection_limits)
    # Loaded modules stay. A garbage collection that scans them would delay all requests by 0.1 s.
    gc.freeze()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    on_stop()
    server.should_exit = True
    await serving
    gc.unfreeze()  # otherwise some extensions report leaks at exit
