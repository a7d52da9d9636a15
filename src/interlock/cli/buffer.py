"""`interlock buffer`: published batches of buffered datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from interlock.cli.conventions import FolderOption, Output, OutputOption, ask, command, group
from interlock.cli.output import present, sheet, table

# Typer needs it at runtime, to read the annotations.
from interlock.wire.datasets import PublishStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.wire.datasets import BufferPage, BufferView

app = group("Published batches of buffered datasets.")

PublishId = Annotated[UUID, typer.Argument(help="Id of the published batch.", metavar="PUBLISH_ID")]


@command(app, "list", example="interlock buffer list --status Refused")
def list_buffers(
    status: Annotated[
        PublishStatus | None, typer.Option(help="Only batches with this status.", show_default=False)
    ] = None,
    cursor: Annotated[str | None, typer.Option(help="next_cursor of the previous page.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of batches to show.")] = 100,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show published batches, newest first."""
    present(ask(folder, lambda client: client.buffers.page(status, cursor, limit)), output, _page)


def _page(page: BufferPage) -> RenderableType:
    rows = [
        (one.publish_id, one.status, _name(one), one.record_count, one.batch, one.published_at, _why(one))
        for one in page.buffers
    ]
    columns = ("publish", "status", "dataset", "records", "batch", "published", "reason")
    return table(columns, rows, empty="No batch has been published.")


def _name(view: BufferView) -> str:
    return view.dataset or str(view.dataset_uuid)


def _why(view: BufferView) -> str | None:
    return None if view.refusal is None else f"{view.refusal.code}: {view.refusal.detail}"


@command(app, "show", example="interlock buffer show 0192f0c1-…")
def show(publish_id: PublishId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a batch: its status, and its bad rows."""
    present(ask(folder, lambda client: client.buffers.show(publish_id)), output, _view)


def _view(view: BufferView) -> RenderableType:
    from rich.console import Group

    facts = sheet(
        [
            ("publish", view.publish_id),
            ("status", view.status),
            ("dataset", f"{_name(view)}, version {view.dataset_version}"),
            ("producer", f"task {view.task_id}, attempt {view.attempt}"),
            ("file", view.batch_uri),
            ("records", view.record_count),
            ("published", view.published_at),
            ("settled", view.settled_at),
            ("batch", view.batch),
            ("redrives", view.redrives or None),
            ("load task", view.load_task),
            ("file deleted", view.swept_at),
            ("reason", _why(view)),
        ]
    )
    if view.refusal is None or not view.refusal.rows:
        return facts
    rows = [(row.line, row.reason) for row in view.refusal.rows]
    return Group(facts, table(("line", "reason"), rows, empty=""))


@command(app, "redrive", example="interlock buffer redrive 0192f0c1-…")
def redrive(publish_id: PublishId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Load a batch again that was refused or abandoned."""
    present(ask(folder, lambda client: client.buffers.redrive(publish_id)), output, _view)
