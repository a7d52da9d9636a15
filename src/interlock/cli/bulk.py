"""`interlock bulk`: act on all tasks or runs that match a filter."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Final
from uuid import UUID

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
)
from interlock.cli.output import confirm, must_ask, percent, present, sheet, table
from interlock.wire.base import Priority, TaskStatus
from interlock.wire.bulk_operations import BulkFilter, BulkKind, BulkPage, BulkRequest, BulkState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.bulk_operations import BulkPreview, BulkView

app = group("Actions on all tasks or runs that match a filter, carried out by the server.")

OperationId = Annotated[UUID, typer.Argument(help="A bulk operation's id.", metavar="OPERATION")]
_EXAMPLE_ID: Final = "0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b"
_POLL_SECONDS: Final = 0.3


@command(
    app,
    "start",
    example="interlock bulk start retry --job nightly --error-class ConnectTimeout --dry-run\n"
    "interlock bulk start cancel --dag tokens --status Queued --reason 'wrong input'\n"
    "interlock bulk start reprioritise --run 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b --priority normal",
)
def start(
    kind: Annotated[BulkKind, typer.Argument(help="The action; pause, resume and reprioritise act on runs.")],
    job: Annotated[str | None, typer.Option("--job", help="A job, by id or name.", show_default=False)] = None,
    dag: Annotated[str | None, typer.Option("--dag", help="All jobs of this DAG.", show_default=False)] = None,
    run: Annotated[UUID | None, typer.Option("--run", help="One run.", show_default=False)] = None,
    operator: Annotated[str | None, typer.Option("--operator", help="All jobs with this operator.")] = None,
    status: Annotated[TaskStatus | None, typer.Option("--status", help="Only tasks in this status.")] = None,
    error_class: Annotated[str | None, typer.Option(help="Only tasks whose last attempt had this error class.")] = None,
    worker: Annotated[str | None, typer.Option("--worker", help="Only tasks that this worker ran last.")] = None,
    created_after: Annotated[datetime | None, typer.Option(help="Only what was created then or later, in UTC.")] = None,
    created_before: Annotated[datetime | None, typer.Option(help="Only what was created earlier, in UTC.")] = None,
    priority: Annotated[Priority | None, typer.Option("--priority", help="The new priority, to reprioritise.")] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Stored with the operation.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count, and show samples.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the operation has ended.")] = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Retry, redrive, cancel, pause, resume or reprioritise all that match a filter."""
    chosen = BulkFilter(
        job=job,
        dag=dag,
        run=run,
        operator=operator,
        status=status,
        error_class=error_class,
        worker=worker,
        created_after=_utc(created_after),
        created_before=_utc(created_before),
    )
    request = BulkRequest(kind=kind, filter=chosen, priority=priority, reason=reason, dry_run=dry_run)
    if dry_run:
        present(ask(folder, lambda client: client.bulk.preview(request)), output, _preview)
        return

    async def work(client: Client) -> BulkView:
        if must_ask(yes=yes):
            found = await client.bulk.preview(request)
            confirm(f"{kind.value.capitalize()} {_count(found)}?", yes=yes)
        begun = await client.bulk.start(request)
        return await _ended(client, begun) if wait else begun

    present(ask(folder, work), output, _operation)


def _utc(moment: datetime | None) -> datetime | None:
    from datetime import UTC

    return moment if moment is None or moment.tzinfo is not None else moment.replace(tzinfo=UTC)


async def _ended(client: Client, operation: BulkView) -> BulkView:
    while operation.state is BulkState.RUNNING:
        await asyncio.sleep(_POLL_SECONDS)
        operation = await client.bulk.operation(operation.operation_id)
    return operation


def _count(found: BulkPreview) -> str:
    return f"{found.matched:,}{'+' if found.more else ''} {found.unit}"


def _preview(found: BulkPreview) -> RenderableType:
    rows = [(one.task_id or one.run_id, one.job.name, one.status, one.error_class) for one in found.samples]
    title = f"{_count(found)} match; the first of them"
    return table((title, "job", "status", "error"), rows, empty=f"No {found.unit} match.")


@command(app, "list", example="interlock bulk list")
def list_operations(
    limit: LimitOption = 20,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show bulk operations, newest first: who did what, and why."""

    async def work(client: Client) -> BulkPage:
        found, following = await collect(client.bulk.page, lambda page: page.operations, cursor, limit)
        return BulkPage(operations=found, next_cursor=following)

    present(ask(folder, work), output, _operations)


def _operations(page: BulkPage) -> RenderableType:
    rows = [
        (one.operation_id, one.kind, one.state, f"{one.changed} of {one.matched}", one.requested_by, one.created_at)
        for one in page.operations
    ]
    columns = ("operation", "action", "state", "changed", "by", "created")
    return table(columns, rows, empty="There are no bulk operations.")


@command(app, "show", example=f"interlock bulk show {_EXAMPLE_ID}")
def show(operation_id: OperationId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a bulk operation and its progress."""
    present(ask(folder, lambda client: client.bulk.operation(operation_id)), output, _operation)


@command(app, "cancel", example=f"interlock bulk cancel {_EXAMPLE_ID}")
def cancel(operation_id: OperationId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Stop a bulk operation after its current batch. What it has done stays done."""
    present(ask(folder, lambda client: client.bulk.cancel(operation_id)), output, _operation)


def _operation(one: BulkView) -> RenderableType:
    import msgspec

    chosen = {name: value for name, value in msgspec.to_builtins(one.filter).items() if value is not None}
    return sheet(
        [
            ("operation", one.operation_id),
            ("action", one.kind),
            ("state", "stopping" if one.cancel_requested and one.ended_at is None else one.state),
            *((f"with {name}", value) for name, value in chosen.items()),
            ("priority", one.priority),
            ("matched", f"{one.matched} {one.unit}"),
            ("changed", one.changed),
            ("skipped", one.skipped or None),
            ("progress", percent(one.progress)),
            ("by", one.requested_by),
            ("reason", one.reason),
            ("created", one.created_at),
            ("ended", one.ended_at),
        ]
    )
