"""`interlock sink`: the process that loads published batches of buffered datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from interlock.cli.conventions import FolderOption, Panel, command
from interlock.cli.processes import Handover, LogFile, Parent, configured, join, run_process, take_over

if TYPE_CHECKING:
    from interlock.settings import Settings

app = typer.Typer()


@command(
    app,
    "sink",
    panel=Panel.PROCESSES,
    example="INTERLOCK_STATE_URL=postgresql://… INTERLOCK_DATA_URL=postgresql://… interlock sink",
)
def sink(
    folder: FolderOption = None,
    log_file: LogFile = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one sink, which loads published batches into the tables of buffered datasets.

    It needs INTERLOCK_STATE_URL and INTERLOCK_DATA_URL, and the objects; any number may run.
    """
    join(parent)
    import interlock.buffers.sink
    import interlock.wiring  # noqa: F401 - loaded while the supervisor starts the stores

    take_over(handover)
    run_process(_run(configured("sink", log_file, dir=folder)))


async def _run(settings: Settings) -> None:
    """Until a signal. What is under way then is done again by the next sink: it loses nothing."""
    import asyncio
    import signal

    import structlog

    from interlock.kernel.loop import forever
    from interlock.wiring import sink

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with sink(settings) as services:
        if settings.sink_metrics is not None:
            _serve_metrics(settings.sink_metrics)
        structlog.get_logger().info("sink.started")
        loops = [asyncio.create_task(forever(service), name=service.name) for service in services]
        await stop.wait()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


def _serve_metrics(address: str) -> None:
    """In a thread that ends with the process: whoever asks does not wait for a batch."""
    from prometheus_client import start_http_server

    from interlock.api.listener import require_loopback
    from interlock.telemetry import REGISTRY

    require_loopback(address, setting="sink_metrics")
    host, _, port = address.rpartition(":")
    start_http_server(int(port), host.strip("[]"), REGISTRY)
