"""`interlock job`: watches runs, shows and exports their tasks and results. `interlock receipt`: verifies receipts."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from interlock.cli import job as jobs
from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    ask,
    collect,
    command,
    group,
    usage,
)
from interlock.cli.job import JobName, RunOfJob
from interlock.cli.output import console, present, print_json, sheet
from interlock.cli.run import follow
from interlock.cli.task import StatusOption, task_table
from interlock.errors import Unavailable
from interlock.http import fetch
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import ExportFormat, ExportRequest, ExportState
from interlock.wire.tasks import TaskPage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.jobs import ExportPart, ExportView, ReceiptReply
    from interlock.wire.tasks import TaskView


app = jobs.app

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


async def run_of(client: Client, job: str, run: str | None) -> UUID:
    """Returns the id of the given run, or the job's newest one."""
    if run is not None:
        return (await client.run(run)).run_id
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


_AT_ONCE: Final = 4


@command(
    app,
    "export",
    example="interlock job export nightly --format jsonl --to nightly-results\n"
    "interlock receipt verify receipt.json --keys receipt-keys.json --export nightly-results",
)
def export(
    job: JobName,
    form: Annotated[ExportFormat, typer.Option("--format", help="Format of the files.")] = ExportFormat.PARQUET,
    to: Annotated[
        Path | None,
        typer.Option(help="Download to this folder. Default: only print the location", show_default=False),
    ] = None,
    run: RunOfJob = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Export all tasks of a run that has ended, with payloads, outcomes and results. Needs a Spark worker."""
    if to is not None and to.exists() and any(to.iterdir()):
        raise usage(f"{to} is not empty: choose an empty or a new folder")

    async def work(client: Client) -> ExportView:
        started = await client.results.start_export(job, ExportRequest(format=form, run=run))
        view = await client.results.wait_export(job, started.export_id, None if output is Output.JSON else _progress())
        if to is not None and view.state is ExportState.COMPLETED:
            await _download(client, job, view, to)
        return view

    view = ask(folder, work)
    present(view, output, _export)
    if view.state is not ExportState.COMPLETED:
        raise typer.Exit(1)


def _progress() -> Callable[[ExportView], None]:
    """Prints a line when the state changes."""
    shown = ""

    def show(view: ExportView) -> None:
        nonlocal shown
        if view.state != shown:
            shown = view.state
            console().print(f"export {str(view.export_id)[:8]}: {view.state}, {view.staged} of {view.of} rows staged")

    return show


async def _download(client: Client, job: str, view: ExportView, to: Path) -> None:
    await asyncio.to_thread(to.mkdir, parents=True, exist_ok=True)
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(part: ExportPart) -> None:
        async with places:
            await asyncio.to_thread(_fetch, part.url or "", to / part.name, part.sha256)

    parts = [part async for part in client.results.export_parts(job, view.export_id)]
    await asyncio.gather(*(one(part) for part in parts))
    # The manifest comes last: if it exists, all its files exist.
    await asyncio.to_thread(_fetch, view.manifest_url or "", to / "manifest.json", None)


def _fetch(url: str, path: Path, sha256: str | None) -> None:
    """Downloads from a signed URL of the gateway or of the object store."""
    if not url.startswith(("http://", "https://")):
        raise Unavailable(f"{path.name} has no download URL; request the export again.")
    if fetch.download(url, path) != sha256 and sha256 is not None:
        raise Unavailable(f"{path} does not match the manifest; download it again.")


def _export(view: ExportView) -> RenderableType:
    return sheet(
        [
            ("export", view.export_id),
            ("run", view.run_id),
            ("state", view.state),
            ("why", view.error),
            ("format", view.format),
            ("rows", view.rows),
            ("bytes", view.bytes),
            ("files", len(view.parts) if view.next_cursor is None else f"{len(view.parts)} and more"),
            ("manifest", view.manifest_url),
        ]
    )


receipts = group("Receipts: signed proof of the outcome of every task of a run.")


@command(receipts, "keys", example="interlock receipt keys > receipt-keys.json")
def keys(folder: FolderOption = None) -> None:
    """Print the public keys that currently sign receipts. Store them: receipts remain valid after key rotation."""
    print_json(ask(folder, lambda client: client.results.receipt_keys()))


@command(
    receipts,
    "verify",
    example="interlock receipt verify receipt.json --keys receipt-keys.json\n"
    "interlock receipt verify receipt.json --kid PkSx3… --export nightly-results",
)
def verify(
    file: Annotated[Path, typer.Argument(help="Receipt saved by `interlock job receipt --file`.", metavar="FILE")],
    keys_file: Annotated[
        Path | None,
        typer.Option("--keys", help="Trusted keys, from `interlock receipt keys`.", show_default=False),
    ] = None,
    kid: Annotated[str | None, typer.Option(help="Thumbprint of the only trusted key.", show_default=False)] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Folder with an export of the run, as JSON lines or Parquet, to verify as well.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Verify a receipt offline. Exit code 1 if it is not valid, with the reason."""
    from interlock.jobs.receipt_verification import tasks_of
    from interlock.jobs.receipt_verification import verify as check

    if keys_file is None and kid is None:
        raise usage("Give the keys that you trust: --keys FILE with public keys, or --kid THUMBPRINT")
    verdict = check(
        _read(file),
        keys=[] if keys_file is None else _keys(keys_file),
        kid=kid,
        tasks=None if export is None else tasks_of(export),
    )
    console().print(f"The receipt is signed by key {verdict.kid}:")
    for sentence in verdict.proven:
        console().print(f"- {sentence}")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise usage(f"{file} cannot be read: {error.strerror}") from None


def _keys(file: Path) -> list[dict[str, Any]]:
    import msgspec

    try:
        return msgspec.json.decode(_read(file), type=dict[str, list[dict[str, Any]]])["keys"]
    except (msgspec.MsgspecError, KeyError):
        raise usage(f"{file} is not a JWK set as printed by `interlock receipt keys`") from None
