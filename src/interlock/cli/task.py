"""`interlock task`: shows, explains, cancels, retries and redrives tasks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

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
    usage,
)
from interlock.cli.output import confirm, console, first_line, must_ask, percent, present, sheet, shown_range, table
from interlock.cli.progress import watch_task
from interlock.cli.run import job_label
from interlock.wire.base import TaskStatus
from interlock.wire.tasks import RedriveRequest, TaskPage

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.tasks import AttemptPage, Changed, Explanation, TaskView

app = group("Tasks: their state, their attempts, and why they wait or failed.")

_SHOWN: Final = 500
"""Characters of a result that `task show` prints."""

TaskId = Annotated[str, typer.Argument(parser=some_id, help="A task's id, or a unique prefix of it.", metavar="TASK")]
JobOption = Annotated[str | None, typer.Option("--job", help="Tasks of this job, by id or name.", show_default=False)]
RunOption = Annotated[
    str | None,
    typer.Option("--run", parser=some_id, help="Tasks of this run.", show_default=False),
]
StatusOption = Annotated[TaskStatus | None, typer.Option("--status", help="Tasks in this status.", show_default=False)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count.")]

_EXAMPLE_ID = "0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b"


@command(app, "list", example="interlock task list --job nightly --status Failed")
def list_tasks(
    job: JobOption = None,
    run: RunOption = None,
    status: StatusOption = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the tasks of a job or a run."""

    async def work(client: Client) -> TaskPage:
        tasks, following = await collect(
            lambda at, size: client.task_page(at, size, job=job, run=run, status=status),
            lambda page: page.tasks,
            cursor,
            limit,
        )
        return TaskPage(tasks=tasks, next_cursor=following)

    present(ask(folder, work), output, task_table)


def task_table(page: TaskPage) -> RenderableType:
    rows = [
        (
            task.task_id,
            task.index if task.origin_index is None else f"{task.index} ({task.origin_index})",
            job_label(task.job),
            _status(task),
            task.attempt,
            task.error_class,
            first_line(task.error_message),
        )
        for task in page.tasks
    ]
    columns = ("task", "index", "job", "status", "try", "error", "message")
    return table(columns, rows, empty="No tasks match.", cut="message")


def _status(task: TaskView) -> str:
    if task.status is TaskStatus.FAILED:
        return "Failed, dead" if task.dead else "Failed, retries"
    if task.status is TaskStatus.RUNNING and task.progress is not None:
        return f"Running {percent(task.progress)}"
    return str(task.status)


@command(app, "show", example=f"interlock task show {_EXAMPLE_ID}")
def show(task_id: TaskId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a task with its payload, progress and result."""
    present(ask(folder, lambda client: client.task(task_id)), output, _task)


def _task(task: TaskView) -> RenderableType:
    return sheet(
        [
            ("task", task.task_id),
            ("job", job_label(task.job) or task.job_id),
            ("run", task.run_id),
            ("index", task.index),
            ("original index", task.origin_index),
            ("status", _status(task)),
            ("attempt", task.attempt),
            ("canceling", True if task.cancel_requested and task.status is TaskStatus.RUNNING else None),
            ("dates", shown_range(0, 0, task.start_date, task.end_date) if task.start_date else None),
            ("payload", task.payload),
            ("created", task.created_at),
            ("started", task.started_at),
            ("ended", task.ended_at),
            ("retry at", task.retry_at),
            ("worker", task.worker_id),
            ("lease until", task.lease_expires_at),
            ("progress", percent(1.0 if task.status is TaskStatus.COMPLETED else task.progress)),
            ("", task.progress_text),
            ("error", task.error_class),
            ("message", task.error_message),
            ("result", _shown_result(task)),
        ]
    )


def _shown_result(task: TaskView) -> str | None:
    """Returns the result, or the beginning of a long one with the command that prints all of it."""
    text = bytes(task.result).decode()
    if len(text) <= _SHOWN:
        return None if text == "null" else text
    return f"{text[:_SHOWN]} … {len(bytes(task.result))} bytes: interlock task result {task.task_id}"


@command(app, "result", example=f"interlock task result {_EXAMPLE_ID} > result.json")
def result(task_id: TaskId, folder: FolderOption = None) -> None:
    """Print the whole result of a task, as JSON."""
    task = ask(folder, lambda client: client.task(task_id))
    sys.stdout.buffer.write(bytes(task.result) + b"\n")
    sys.stdout.flush()


@command(app, "attempts", example=f"interlock task attempts {_EXAMPLE_ID}")
def attempts(task_id: TaskId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show every attempt of a task: where it ran and how it ended."""
    present(ask(folder, lambda client: client.attempts(task_id)), output, attempt_table)


def attempt_table(page: AttemptPage) -> RenderableType:
    rows = []
    for one in page.attempts:
        crash = None
        if one.crash is not None:
            cause = one.crash.signal or f"exit code {one.crash.exit_code}"
            crash = f"{cause}, out of memory" if one.crash.oom else cause
        error = one.error_message or one.error_class
        rows.append((one.attempt, one.outcome or "Running", one.started_at, one.ended_at, one.worker_id, error, crash))
    columns = ("attempt", "outcome", "started", "ended", "worker", "error", "crash")
    return table(columns, rows, empty="The task has no attempts yet.")


@command(
    app, "logs", example=f"interlock task logs {_EXAMPLE_ID}\ninterlock task logs {_EXAMPLE_ID} --attempt 1 --follow"
)
def logs(
    task_id: TaskId,
    attempt: Annotated[int | None, typer.Option(min=1, help="Default: the latest.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print lines until the attempt has ended.")] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show what an attempt printed: stdout, stderr, logging and the traceback. With -o json, one line of JSON each."""
    from interlock.cli.logs import print_task_log

    count = ask(folder, lambda client: print_task_log(client, task_id, attempt=attempt, follow=follow, output=output))
    if not count and output is Output.TABLE:
        console().print("The attempt has printed nothing.")


@command(app, "explain", example=f"interlock task explain {_EXAMPLE_ID}")
def explain(task_id: TaskId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Explain why a task is not running, or why it ended as it did."""
    present(ask(folder, lambda client: client.explain(task_id)), output, _explanation)


def _explanation(answer: Explanation) -> RenderableType:
    """Returns the answer without its facts, most of which the sentence contains. --output json has all of them."""
    return sheet(
        [("task", answer.task_id), ("status", answer.status), ("reason", answer.reason), ("why", answer.detail)]
    )


@command(app, "watch", example=f"interlock task watch {_EXAMPLE_ID}")
def watch(task_id: TaskId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Watch a task until it has ended. Exit code 1 means that it did not complete."""
    task = ask(folder, lambda client: watch_task(client, task_id, quiet=output is Output.JSON))
    present(task, output, _task)
    if task.status is not TaskStatus.COMPLETED:
        raise typer.Exit(1)


@command(
    app,
    "cancel",
    example=f"interlock task cancel {_EXAMPLE_ID}\ninterlock task cancel --job nightly --status Queued --dry-run",
)
def cancel(
    task_id: Annotated[
        str | None, typer.Argument(parser=some_id, help="One task; otherwise give a filter.", metavar="TASK")
    ] = None,
    job: JobOption = None,
    run: RunOption = None,
    status: StatusOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Cancel a task in any state, or all that match a filter. Running tasks are asked to stop."""
    by_filter = job is not None or run is not None
    if (task_id is None) != by_filter or (task_id is not None and (status is not None or dry_run)):
        raise usage("Give one task, or give --job or --run, with or without --status")
    if task_id is not None:
        present(ask(folder, lambda client: client.cancel_task(task_id)), output, _canceled)
        return

    async def work(client: Client) -> Changed:
        if not dry_run and must_ask(yes=yes):
            counted = await client.cancel_tasks(job=job, run=run, status=status, dry_run=True)
            confirm(f"Cancel {counted.matched} tasks?", yes=yes)
        return await client.cancel_tasks(job=job, run=run, status=status, dry_run=dry_run)

    present(ask(folder, work), output, lambda done: _changed(done, "canceled"))


def _canceled(task: TaskView) -> str:
    if task.status is TaskStatus.RUNNING:
        return f"Task {task.task_id} is asked to stop; its worker learns of it with the next heartbeat."
    return f"Task {task.task_id} is {task.status}."


def _changed(done: Changed, verb: str) -> str:
    if done.dry_run:
        return f"{done.matched} tasks would be {verb}."
    return f"{done.matched} tasks {verb}.{' There are more: run the command again.' if done.remaining else ''}"


@command(app, "retry", example=f"interlock task retry {_EXAMPLE_ID}")
def retry(task_id: TaskId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Run a failed task again now. A dead letter gets a new set of attempts."""
    task = ask(folder, lambda client: client.retry_task(task_id))
    present(task, output, lambda found: f"Task {found.task_id} is {found.status}, for attempt {found.attempt}.")


@command(app, "redrive", example="interlock task redrive --job nightly --error-class ConnectTimeout --dry-run")
def redrive(
    job: JobOption = None,
    run: RunOption = None,
    error_class: Annotated[str | None, typer.Option(help="Only tasks that ended with this error class.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of tasks to redrive.")] = 10_000,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Give dead letters of a job or a run a new set of attempts."""
    import msgspec

    if job is None and run is None:
        raise usage("Give --job or --run")
    request = RedriveRequest(job=job, run=run, error_class=error_class, limit=limit, dry_run=dry_run)

    async def work(client: Client) -> Changed:
        if not dry_run and must_ask(yes=yes):
            counted = await client.redrive_tasks(msgspec.structs.replace(request, dry_run=True))
            confirm(f"Redrive {counted.matched} dead letters?", yes=yes)
        return await client.redrive_tasks(request)

    present(ask(folder, work), output, lambda done: _changed(done, "redriven"))
