"""Runs a process until a signal: its listener and its background loops."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Sequence

import structlog
from litestar import Litestar

from interlock.http.connection import ConnectionLimits
from interlock.http.listener import bind, require_public_urls, require_safe
from interlock.http.server import Server, config_of
from interlock.processes.loop import Service, forever
from interlock.settings import Settings

log = structlog.get_logger()


def stop_on_signals() -> asyncio.Event:
    """Returns an event that SIGTERM and SIGINT set. A second signal has the default action and ends the process.

    A process calls this before it opens its stores, so that a signal during a slow start also ends it cleanly.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("draining", signal=number.name)
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def run_loops(services: Sequence[Service], stop: asyncio.Event) -> None:
    """Runs until `stop` is set. Work that a pass has not committed by then is repeated by the next process."""
    log.info("started", loops=[service.name for service in services])
    gc.freeze()  # the collector need not walk the modules that are loaded by now
    loops = [asyncio.create_task(forever(service), name=service.name) for service in services]
    await stop.wait()
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    gc.unfreeze()


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
    server = Server(config, connection_limits(settings))
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


def listener_of(settings: Settings, address: str, name: str, descriptor: int | None) -> socket.socket:
    """Takes over the supervisor's socket, so that a restart keeps the port and drops no connection, or binds one."""
    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    require_safe(address, settings)
    require_public_urls(settings)
    return bind(address, setting=name)


def connection_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        head_seconds=settings.request_head_seconds,
        body_bytes_per_second=settings.request_body_bytes_per_second,
        body_window_seconds=settings.request_body_window_seconds,
        reply_stall_seconds=settings.reply_stall_seconds,
        connections=settings.max_connections,
        per_peer=settings.max_connections_per_peer,
    )
