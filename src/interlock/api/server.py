"""Serves one application on one listener until told to stop."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable

import structlog
from litestar import Litestar

from interlock.connections.server import Server, config_of
from interlock.settings import Settings

log = structlog.get_logger()
_GRACE_SECONDS = 10


async def serve(
    app: Litestar,
    listener: socket.socket,
    settings: Settings,
    *,
    stop: asyncio.Event,
    on_stop: Callable[[], None],
) -> None:
    """`on_stop` runs when draining begins, before open requests are waited for."""
    config = config_of(
        app,
        grace_seconds=_GRACE_SECONDS,
        lifespan="on",
        ssl_certfile=str(settings.tls_cert) if settings.tls_cert else None,
        ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
    )
    server = Server(config, settings.connection_limits)
    # What is loaded by now stays: a collector that walks all of it holds every request up for a tenth of a second.
    gc.freeze()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    on_stop()
    server.should_exit = True
    await serving
    gc.unfreeze()  # extensions count what is left of theirs when the process ends, and complain


def stop_on_signals() -> asyncio.Event:
    """SIGTERM and SIGINT ask for a drain; the second one is left to the default and ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("draining", signal=number.name)
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
