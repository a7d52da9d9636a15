"""`interlock backfill`: recomputes a job's scopes in a range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
    range_of,
    some_id,
)
from interlock.cli.output import confirm, present, sheet, shown_range, table
from interlock.cli.progress import watch_backfill
from interlock.wire.base import Priority, RunState
from interlock.wire.dags import BackfillPage, BackfillRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.dags import BackfillAnswer, BackfillScope, BackfillView

app = group("Backfills: recompute a job's scopes in a range.")

RunId = Annotated[
    str, typer.Argument(parser=some_id, help="The backfill's run, or a unique prefix of it.", metavar="RUN")
]


@command(
    app,
    "start",
    example="interlock backfill start sales enrich 2026-11-01 2026-11-18\n"
    "interlock backfill start chain transfers 0 999999 --dry-run",
)
def start(
    dag: Annotated[str, typer.Argument(help="Name of the DAG.", metavar="DAG")],
    job: Annotated[str, typer.Argument(help="Name of the job.", metavar="JOB")],
    first: Annotated[str, typer.Argument(help="First date or position of the range.", metavar="START")],
    last: Annotated[
        str | None,
        typer.Argument(help="Last date or position, included. Default: START.", metavar="END", show_default=False),
    ] = None,
    priority: Annotated[Priority, typer.Option(help="bulk yields to all other work.")] = Priority.BULK,
    reason: Annotated[str | None, typer.Option(help="Reason, recorded with the backfill.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the scopes and show the first ones.")] = False,
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Recompute every scope of a job that overlaps the range, whether or not it is done.

    A job with time partitions takes dates, and the last one is included. Downstream jobs are recomputed
    automatically, as after any change.
    """
    start, end = range_of(first, last)
    if not dry_run:
        confirm(f"Recompute {dag}/{job} from {start} to {end}?", yes=yes)
    request = BackfillRequest(start=start, end=end, priority=priority, reason=reason, dry_run=dry_run)
    answer = ask(folder, lambda client: client.backfills.start(dag, job, request))
    present(answer, output, _answer)


def _answer(answer: BackfillAnswer) -> RenderableType:
    scopes = f"more than {answer.scopes:,}" if answer.more else f"{answer.scopes:,}"
    first = ", ".join(_range(scope) for scope in answer.first)
    shown = f"{first}, …" if answer.more or answer.scopes > len(answer.first) else first
    pairs: list[tuple[str, object]] = [("scopes", scopes), ("first", shown or None)]
    if answer.upstream:
        commands = [f"interlock backfill start {name.replace('/', ' ')} …" for name in answer.upstream]
        pairs.append(("", f"Its inputs have no data in this range. To create it: {' or '.join(commands)}"))
    if answer.backfill is not None:
        pairs.insert(0, ("run", answer.backfill.run_id))
    return sheet(pairs)


@command(app, "list", example="interlock backfill list")
def list_backfills(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show backfills, newest first."""

    async def read(client: Client) -> BackfillPage:
        found, following = await collect(client.backfills.page, lambda page: page.backfills, cursor, limit)
        return BackfillPage(backfills=found, next_cursor=following)

    present(ask(folder, read), output, _list)


def _list(page: BackfillPage) -> RenderableType:
    columns = ("run", "job", "range", "priority", "state", "made", "of", "done", "failed")
    rows = [
        (
            b.run_id,
            _job(b),
            _range(b),
            b.priority,
            b.state,
            b.made,
            b.total,
            b.counts.Completed,
            b.counts.dead,
        )
        for b in page.backfills
    ]
    return table(columns, rows, empty="There are no backfills; start one with `interlock backfill start`.")


def _range(of: BackfillScope | BackfillView) -> str:
    return shown_range(of.start, of.end, of.start_date, of.end_date)


def _job(backfill: BackfillView) -> str:
    return f"{backfill.job.dag_name}/{backfill.job.name}"


@command(app, "show", example="interlock backfill show 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b --watch")
def show(
    run_id: RunId,
    watch: Annotated[bool, typer.Option("--watch", help="Wait until its last task has ended.")] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show a backfill. With --watch, exit code 1 means that some of its tasks did not complete."""

    async def read(client: Client) -> BackfillView:
        if watch:
            return await watch_backfill(client, run_id, quiet=output is Output.JSON)
        return await client.backfills.show(run_id)

    found = ask(folder, read)
    present(found, output, _sheet)
    if watch and found.run_state is not RunState.COMPLETED:
        raise typer.Exit(1)


def _sheet(found: BackfillView) -> RenderableType:
    counts = found.counts
    by_status = [(name, getattr(counts, name)) for name in ("Queued", "Running", "Completed", "Failed", "Canceled")]
    made = f"{found.made:,}" if found.total is None else f"{found.made:,} of {found.total:,}"
    return sheet(
        [
            ("run", found.run_id),
            ("job", _job(found)),
            ("range", _range(found)),
            ("priority", found.priority),
            ("reason", found.reason),
            ("requested by", found.requested_by),
            ("state", found.state),
            ("created", made),
            ("tasks", ", ".join(f"{number} {name}" for name, number in by_status if number) or None),
            ("run state", found.run_state),
            ("reason for failure", found.run_reason),
            ("started", found.created_at),
            ("ended", found.ended_at),
        ]
    )


@command(app, "pause", example="interlock backfill pause 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b")
def pause(run_id: RunId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Create no more of its tasks for now. Existing tasks continue."""
    present(ask(folder, lambda client: client.backfills.pause(run_id)), output, _sheet)


@command(app, "resume", example="interlock backfill resume 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b")
def resume(run_id: RunId, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Continue creating its tasks."""
    present(ask(folder, lambda client: client.backfills.resume(run_id)), output, _sheet)


@command(app, "cancel", example="interlock backfill cancel 0198c6f2-7d1e-7c3a-9f10-2b4d5e6f7a8b --yes")
def cancel(
    run_id: RunId, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Create no more of its tasks, and cancel those that have not ended."""
    confirm(f"Cancel backfill {run_id}?", yes=yes)
    present(ask(folder, lambda client: client.backfills.cancel(run_id)), output, _sheet)
