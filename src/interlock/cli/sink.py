"""`interlock sink`: the process that loads published batches of buffered datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from interlock.cli.conventions import FolderOption, Panel, command
from interlock.cli.processes import (
    Handover,
    LogFile,
    Parent,
    configured,
    join,
    run_loops,
    run_process,
    serve_metrics,
    take_over,
)

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
    """What is under way at a signal is done again by the next sink: it loses nothing."""
    from interlock.wiring import sink

    async with sink(settings) as services:
        if settings.sink_metrics is not None:
            serve_metrics(settings.sink_metrics, setting="sink_metrics")
        await run_loops("sink", services)
