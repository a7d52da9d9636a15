"""`interlock job`: watches runs, and shows their tasks, results and receipts."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from interlock.cli import job as jobs
from interlock.cli.connection import ask, collect
from interlock.cli.conventions import CursorOption, FolderOption, LimitOption, Output, OutputOption, command, usage
from interlock.cli.job import JobName
from interlock.cli.output import console, present, print_json, sheet
from interlock.cli.run import follow
from interlock.cli.task import StatusOption, task_table
from interlock.wire import TaskPage, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire import ReceiptReply, TaskView

app = jobs.app

RunOfJob = Annotated[
    UUID | None, typer.Option("--run", help="A run of the job. Default: the newest one", show_default=False)
]
FileOption = Annotated[
    Path | None, typer.Option("--file", help="Write to this file instead of the terminal.", show_default=False)
]


@command(app, "watch", example="interlock job watch nightly")
def watch(job: JobName, run: RunOfJob = None, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Watch a run until it has ended: done, failed, rate, time left.

    Exit code 1 means that some tasks did not complete.
    """

    async def work(client: Client) -> None:
        await follow(client, await run_of(client, job, run), output)

    ask(folder, work)


async def run_of(client: Client, job: str, run: UUID | None) -> UUID:
    """Returns the given run, or the job's newest one."""
    if run is not None:
        return run
    found = (await client.job(job)).run
    if found is None:
        raise usage(f"Job {job} has no run; `interlock job submit` creates one")
    return found.run_id


@command(
    app,
    "tasks",
    example="interlock job tasks nightly --status Failed\ninterlock job tasks nightly --index 4711 -o json",
)
def tasks(
    job: JobName,
    run: RunOfJob = None,
    status: StatusOption = None,
    index: Annotated[int | None, typer.Option(min=0, help="One task, by its index in the list.")] = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the tasks of a run, or one task by its index, with its result and a URL for it."""

    async def page(client: Client) -> TaskPage:
        which = await run_of(client, job, run)
        found, following = await collect(
            lambda at, size: client.task_page(at, size, run=which, status=status),
            lambda page: page.tasks,
            cursor,
            limit,
        )
        return TaskPage(tasks=found, next_cursor=following)

    if index is not None:
        present(ask(folder, lambda client: client.results.task(job, index, run=run)), output, _task)
    else:
        present(ask(folder, page), output, task_table)


def _task(task: TaskView) -> RenderableType:
    return sheet(
        [
            ("task", task.task_id),
            ("index", task.index),
            ("status", task.status),
            ("attempt", task.attempt),
            ("payload", task.payload),
            ("error", task.error_message),
            ("result", task.result),
            ("result URL", task.result_url),
        ]
    )


@command(
    app,
    "results",
    example="interlock job results nightly --file results.jsonl\ninterlock job results nightly | jq .result",
)
def results(
    job: JobName,
    run: RunOfJob = None,
    limit: LimitOption = 100_000,
    file: FileOption = None,
    folder: FolderOption = None,
) -> None:
    """Get the results of completed tasks as JSON, one line each."""

    async def work(client: Client) -> int:
        which = await run_of(client, job, run)
        with _written(file) as out:
            return await _results(client, which, limit, out)

    found = ask(folder, work)
    if file is not None:
        console().print(f"{found} results are in {file}.")


async def _results(client: Client, run_id: UUID, limit: int, out: IO[bytes]) -> int:
    import msgspec

    written = 0
    async for task in client.tasks(1000, run=run_id, status=TaskStatus.COMPLETED):
        packed = task.result_bytes is not None
        result = await client.results.result(run_id, task.index or 0) if packed else task.result
        out.write(msgspec.json.encode({"index": task.index, "task_id": task.task_id, "result": result}) + b"\n")
        written += 1
        if written == limit:
            break
    return written


@contextmanager
def _written(file: Path | None) -> Iterator[IO[bytes]]:
    if file is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with file.open("wb") as out:
        yield out


@command(
    app, "receipt", example="interlock job receipt nightly --file receipt.json\ninterlock receipt verify receipt.json"
)
def receipt(
    job: JobName,
    run: RunOfJob = None,
    file: FileOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Get the signed receipt of a run that has ended: the outcome of every task."""
    import msgspec

    found = ask(folder, lambda client: client.results.receipt(job, run=run))
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    if output is Output.JSON:
        print_json(found)
    else:
        console().print(_receipt(found))


def _receipt(reply: ReceiptReply) -> RenderableType:
    receipt = reply.receipt
    if receipt is None or reply.key is None:
        return "The receipt is being created."
    return sheet(
        [
            ("run", receipt.run_id),
            ("state", receipt.state),
            ("tasks", receipt.total),
            ("completed", receipt.completed),
            ("failed", receipt.failed or None),
            ("canceled", receipt.canceled or None),
            ("complete", receipt.complete),
            ("ids", receipt.ids),
            ("outcomes", receipt.outcomes),
            ("signed by", reply.key["kid"]),
        ]
    )
