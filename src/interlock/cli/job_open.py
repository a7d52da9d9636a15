"""`interlock job`, for open runs: adds tasks and closes the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli import job_export
from interlock.cli.connection import ask
from interlock.cli.conventions import FolderOption, Output, OutputOption, command
from interlock.cli.job import JobName, payloads_of
from interlock.cli.output import present, sheet
from interlock.cli.run import run_sheet

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire import TasksAdded

app = job_export.app


@command(app, "add", example="interlock job add found --task '{\"n\": 3}'\nseq 100 | interlock job add found --tasks -")
def add(
    job: JobName,
    task: Annotated[list[str] | None, typer.Option("--task", help="A payload, as JSON; repeatable.")] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="File with one JSON payload per line; - for stdin.", metavar="FILE")
    ] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="Adding again with the same key has no effect.")] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Add tasks to a run that was submitted with --open, all or none."""
    payloads = payloads_of(task or [], tasks)

    async def work(client: Client) -> TasksAdded:
        return await client.lists.add(job, payloads, idempotency_key=idempotency_key)

    present(ask(folder, work), output, _added)


def _added(added: TasksAdded) -> RenderableType:
    last = added.first_index + added.added - 1
    return sheet([("run", added.run_id), ("added", added.added), ("indexes", f"{added.first_index} to {last}")])


@command(app, "close", example="interlock job close found")
def close(job: JobName, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Close a run: it gets no more tasks and ends with its last one."""
    present(ask(folder, lambda client: client.lists.close(job)), output, run_sheet)
