"""`interlock ingest`: the process that makes tasks of staged lists and of backfills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from interlock.cli.conventions import FolderOption, Panel, command
from interlock.cli.processes import Handover, LogFile, Parent, configured, join, run_process, serve_metrics, take_over

if TYPE_CHECKING:
    from interlock.settings import Settings

app = typer.Typer()


@command(
    app,
    "ingest",
    panel=Panel.PROCESSES,
    example="INTERLOCK_STATE_URL=postgresql://… interlock ingest",
)
def ingest(
    folder: FolderOption = None,
    log_file: LogFile = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one ingest process, which makes the tasks of runs whose list is staged, and of backfills.

    It needs INTERLOCK_STATE_URL and the objects; any number may run.
    """
    join(parent)
    import interlock.bulk.ingest
    import interlock.wiring  # noqa: F401 - loaded while the supervisor starts the stores

    take_over(handover)
    run_process(_run(configured("ingest", log_file, dir=folder)))


async def _run(settings: Settings) -> None:
    """Until a signal. A list that is being read then is read on by the next process, from its last chunk."""
    import asyncio
    import signal

    import structlog

    from interlock.kernel.loop import forever
    from interlock.wiring import ingest

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with ingest(settings) as services:
        if settings.ingest_metrics is not None:
            serve_metrics(settings.ingest_metrics, setting="ingest_metrics")
        structlog.get_logger().info("ingest.started")
        loops = [asyncio.create_task(forever(service), name=service.name) for service in services]
        await stop.wait()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
