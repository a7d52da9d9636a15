"""Runs the background loops of a process until a signal, and serves its metrics."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Sequence

import structlog
from prometheus_client import start_http_server

from interlock.http.listener import require_loopback
from interlock.processes.loop import Service, forever
from interlock.telemetry import REGISTRY

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


def serve_metrics(address: str | None, *, setting: str) -> None:
    """Serves metrics in a daemon thread, so that a scrape waits for no loop. None serves nothing."""
    if address is None:
        return
    require_loopback(address, setting=setting)
    host, _, port = address.rpartition(":")
    start_http_server(int(port), host.strip("[]"), REGISTRY)
