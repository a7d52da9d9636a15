"""`interlock run`: the runs of jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from interlock.cli.conventions import FolderOption, Output, OutputOption, YesOption, ask, command, group
from interlock.cli.output import confirm, present, sheet
from interlock.cli.progress import watch_run
from interlock.wire.base import RunState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.jobs import RunView

app = group("Runs: the tasks of one submission, with one outcome.")

RunId = Annotated[UUID, typer.Argument(help="A run's id.", metavar="RUN")]


@command(app, "show", example="interlock run show 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b")
def show(run_id: RunId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a run and its tasks, counted by status."""
    present(ask(folder, lambda client: client.run(run_id)), output, run_sheet)


def run_sheet(run: RunView) -> RenderableType:
    return sheet(run_rows(run))


def run_rows(run: RunView) -> list[tuple[str, Any]]:
    counts = run.counts
    by_status = [(name, getattr(counts, name)) for name in ("Queued", "Running", "Completed", "Failed", "Canceled")]
    counted = ", ".join(f"{number} {name}" for name, number in by_status if number)
    return [
        ("run", run.run_id),
        ("state", run.state),
        ("reason", run.reason),
        ("tasks", run.total),
        ("by status", counted or None),
        ("dead letters", counts.dead or None),
        ("canceling", True if run.cancel_requested else None),
        ("started", run.created_at),
        ("ended", run.ended_at),
    ]


@command(app, "watch", example="interlock run watch 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b")
def watch(run_id: RunId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Watch a run until it has ended. Exit code 1 means that some of its tasks did not complete."""
    ask(folder, lambda client: follow(client, run_id, output))


async def follow(client: Client, run_id: UUID, output: Output) -> None:
    run = await watch_run(client, run_id, quiet=output is Output.JSON)
    present(run, output, run_sheet)
    if run.state is not RunState.COMPLETED:
        raise typer.Exit(1)


@command(app, "cancel", example="interlock run cancel 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b --yes")
def cancel(
    run_id: RunId, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Cancel every task of a run that has not ended; running ones are asked to stop."""
    confirm(f"Cancel all tasks of run {run_id} that have not ended?", yes=yes)
    changed = ask(folder, lambda client: client.cancel_run(run_id))
    more = " The rest is canceled in the background."
    present(changed, output, lambda done: f"{done.matched} tasks canceled.{more if done.remaining else ''}")
