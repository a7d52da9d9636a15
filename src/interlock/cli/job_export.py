"""`interlock job export`: exports a run as files on Spark, downloads them and verifies them."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.request import urlopen

import typer

from interlock.cli import job_results
from interlock.cli.connection import ask
from interlock.cli.conventions import FolderOption, Output, OutputOption, command, usage
from interlock.cli.job import JobName
from interlock.cli.job_results import RunOfJob
from interlock.cli.output import console, present, sheet
from interlock.errors import Unavailable
from interlock.wire import ExportFormat, ExportRequest, ExportState

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire import ExportPart, ExportView

app = job_results.app

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
    with urlopen(url, timeout=60) as reply, path.open("wb") as file:  # noqa: S310 - one of the two schemes above
        shutil.copyfileobj(reply, file)
    if sha256 is not None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
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
