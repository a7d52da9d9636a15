"""`interlock query`: the process that answers queries."""

from __future__ import annotations

from typing import Annotated

import typer

from interlock.cli.conventions import FolderOption, Panel, command
from interlock.cli.processes import Descriptor, Handover, LogFile, Parent, configured, join, run_process, take_over

app = typer.Typer()


@command(app, "query", panel=Panel.PROCESSES, example="INTERLOCK_STATE_URL=postgresql://… interlock query")
def query(
    address: Annotated[str | None, typer.Option("--query", help="host:port. Default: 127.0.0.1:7072")] = None,
    folder: FolderOption = None,
    log_file: LogFile = None,
    descriptor: Descriptor = None,
    parent: Parent = None,
    handover: Handover = None,
) -> None:
    """Run one query service. It needs INTERLOCK_STATE_URL, and INTERLOCK_QUERY_DATA_URL for datasets that are tables.

    Any number may run. To ask a query, see `interlock sql`.
    """
    join(parent)
    from interlock.api.run_query import run_query

    inherited = take_over(handover)
    settings = configured("query", log_file, dir=folder, query=address)
    run_process(run_query(settings, descriptor=inherited or descriptor))
