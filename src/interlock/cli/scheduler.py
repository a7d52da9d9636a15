"""`interlock scheduler`: the process that follows cron schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from interlock.cli.conventions import FolderOption, Panel, command
from interlock.cli.processes import Handover, LogFile, Parent, configured, join, run_process, take_over

if TYPE_CHECKING:
    from interlock.settings import Settings

app = typer.Typer()


@command(app, "scheduler", panel=Panel.PROCESSES, example="INTERLOCK_STATE_URL=postgresql://… interlock scheduler")
def scheduler(
    folder: FolderOption = None,
    log_file: LogFile = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one scheduler, which starts cron sources. It needs INTERLOCK_STATE_URL; any number may run."""
    join(parent)
    import interlock.wiring  # noqa: F401 - loaded while the supervisor starts the stores

    take_over(handover)
    run_process(_run(configured("scheduler", log_file, dir=folder)))


async def _run(settings: Settings) -> None:
    """Until a signal: every pass is one transaction, so that ending one loses nothing."""
    import asyncio
    import signal

    import structlog

    from interlock.kernel.loop import forever
    from interlock.wiring import scheduler

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with scheduler(settings) as service:
        structlog.get_logger().info("scheduler.started")
        following = asyncio.create_task(forever(service), name=service.name)
        await stop.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
