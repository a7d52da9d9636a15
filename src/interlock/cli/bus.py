"""`interlock bus`: the process behind the command bus, which does what no command waits for."""

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


@command(app, "bus", panel=Panel.PROCESSES, example="INTERLOCK_STATE_URL=postgresql://… interlock bus")
def bus(
    folder: FolderOption = None,
    log_file: LogFile = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one process of the command bus, which does what no command waits for.

    It decides about commands that the gateway has handed on, hands telemetry to tenants, writes the archive, looks at
    routes, sends alerts by e-mail, rotates keys and carries out replays. It needs INTERLOCK_STATE_URL, the objects and
    the keys of the gateway; any number may run.
    """
    join(parent)
    import interlock.bus.process
    import interlock.wiring  # noqa: F401 - loaded while the supervisor starts the stores

    take_over(handover)
    run_process(_run(configured("bus", log_file, dir=folder)))


async def _run(settings: Settings) -> None:
    from interlock.wiring import bus

    async with bus(settings) as services:
        if settings.bus_metrics is not None:
            serve_metrics(settings.bus_metrics, setting="bus_metrics")
        await run_loops("bus", services)
