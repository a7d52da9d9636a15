"""`interlock run`: the runs of jobs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    YesOption,
    ask,
    collect,
    command,
    group,
    some_id,
)
from interlock.cli.output import confirm, console, present, sheet, table
from interlock.cli.progress import watch_run
from interlock.wire.base import RunState, TaskStatus
from interlock.wire.jobs import RunPage

if TYPE_CHECKING:
    from uuid import UUID

    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.jobs import RunView
    from interlock.wire.tasks import JobRef

app = group("Runs: the tasks of one submission, with one outcome.")

_SAMPLE: Final = 100
_SMALL_RESULT: Final = 1_000

RunId = Annotated[str, typer.Argument(parser=some_id, help="A run's id, or a unique prefix of it.", metavar="RUN")]
StateOption = Annotated[RunState | None, typer.Option("--state", help="Runs in this state.", show_default=False)]


@command(app, "list", example="interlock run list\ninterlock run list --job nightly --state Failed")
def list_runs(
    job: Annotated[
        str | None, typer.Option("--job", help="Runs of this job, by id or name.", show_default=False)
    ] = None,
    state: StateOption = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show runs, newest first."""

    async def work(client: Client) -> RunPage:
        runs, following = await collect(
            lambda at, size: client.run_list(at, size, job=job, state=state), lambda page: page.runs, cursor, limit
        )
        return RunPage(runs=runs, next_cursor=following)

    present(ask(folder, work), output, run_table)


def run_table(page: RunPage) -> RenderableType:
    rows = [
        (
            run.run_id,
            job_label(run.job) or run.job_id,
            run.state,
            run.total,
            run.counts.Completed,
            run.counts.dead,
            run.errors[0].error_class if run.errors else None,
            run.created_at,
        )
        for run in page.runs
    ]
    columns = ("run", "job", "state", "tasks", "done", "dead", "error", "created")
    return table(columns, rows, empty="No runs match; `interlock job submit` creates one.")


def job_label(job: JobRef | None) -> str | None:
    """Returns the name by which commands find the job, or None if it has none."""
    if job is None or job.name is None:
        return None
    return f"{job.dag_name}/{job.name}" if job.dag_name else job.name


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
        ("by error", ", ".join(f"{one.tasks} {one.error_class}" for one in run.errors) or None),
        ("rerun of", run.rerun_of),
        ("canceling", True if run.cancel_requested and run.ended_at is None else None),
        ("started", run.created_at),
        ("ended", run.ended_at),
    ]


@command(app, "watch", example="interlock run watch 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b")
def watch(run_id: RunId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Watch a run until it has ended. Exit code 1 means that some of its tasks did not complete."""
    ask(folder, lambda client: follow(client, run_id, output))


async def follow(client: Client, run_id: UUID | str, output: Output) -> None:
    run = await watch_run(client, run_id, quiet=output is Output.JSON)
    present(run, output, run_sheet)
    if output is Output.TABLE:
        await _show_end(client, run)
    if run.state is not RunState.COMPLETED:
        raise typer.Exit(1)


async def _show_end(client: Client, run: RunView) -> None:
    """Prints the result of a single task, or the errors by class, and the next command."""
    if run.counts.Failed:
        page = await client.task_page(None, _SAMPLE, run=run.run_id, status=TaskStatus.FAILED)
        classes = Counter(task.error_class or "unknown" for task in page.tasks)
        counted = ", ".join(f"{number} {name}" for name, number in classes.most_common())
        first = page.tasks[0]
        console().print(f"errors{' (of the first 100)' if page.next_cursor else ''}: {counted}", markup=False)
        console().print(f"{first.error_class}: {first.error_message}", style="red", markup=False)
        console().print(f"More: interlock task logs {first.task_id}", markup=False, soft_wrap=True)
        return
    tasks = (await client.task_page(None, 2, run=run.run_id)).tasks
    if len(tasks) != 1 or run.state is not RunState.COMPLETED:
        console().print(f"More: interlock task list --run {run.run_id}", markup=False, soft_wrap=True)
        return
    result = bytes(tasks[0].result).decode()
    if tasks[0].result_bytes is None and len(result) <= _SMALL_RESULT:
        console().print(f"result: {result}", markup=False, soft_wrap=True)
    else:
        console().print(f"result: interlock task show {tasks[0].task_id}", markup=False, soft_wrap=True)


@command(app, "cancel", example="interlock run cancel 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b --yes")
def cancel(
    run_id: RunId, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Cancel every task of a run that has not ended; running ones are asked to stop."""
    confirm(f"Cancel all tasks of run {run_id} that have not ended?", yes=yes)
    changed = ask(folder, lambda client: client.cancel_run(run_id))
    more = " The rest is canceled in the background."
    present(changed, output, lambda done: f"{done.matched} tasks canceled.{more if done.remaining else ''}")
