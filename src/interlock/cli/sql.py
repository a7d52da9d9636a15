"""`interlock sql`: runs queries, and shows the query history."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    Panel,
    ask,
    collect,
    command,
    usage,
)
from interlock.cli.output import present, sheet, table
from interlock.wire.queries import QueryFormat, QueryMode, QueryOutcome

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client, QueryClient, QueryOptions
    from interlock.wire.queries import QueryPage, QueryReply, QueryView, RelationPage

T = TypeVar("T")

app = typer.Typer()

_PATIENCE_SECONDS: Final = 2.0
_SHOWN: Final = 60
"""Characters of a statement in the history."""


@command(
    app,
    "sql",
    panel=Panel.WORK,
    example='interlock sql "select count(*) from transfers"\n'
    'interlock sql "select * from \\"chain:follow:logs\\"" --csv > logs.csv\n'
    'interlock sql "select * from transfers" --arrow transfers.arrow\n'
    'interlock sql "select * from transfers" --batch\n'
    "interlock sql --tables\n"
    'interlock sql "describe transfers"\n'
    "interlock sql --show 0197a0c4-…\n"
    "interlock sql --history",
)
def sql(
    statement: Annotated[
        str | None, typer.Argument(help="One SELECT over datasets; - reads it from stdin.", show_default=False)
    ] = None,
    datasets: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset", help="A dataset that the statement may use; repeatable. Default: those that it names."
        ),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV, without a limit of rows.")] = False,
    as_json: Annotated[bool, typer.Option("--json", hidden=True, help="Old spelling of --output json.")] = False,
    arrow: Annotated[
        Path | None, typer.Option("--arrow", help="Write an Arrow IPC stream to this file.", show_default=False)
    ] = None,
    export: Annotated[bool, typer.Option("--export", help="Write the result as Parquet; print its location.")] = False,
    batch: Annotated[bool, typer.Option("--batch", help="Run it as a Spark task; print its query id.")] = False,
    auto: Annotated[
        bool, typer.Option("--auto", help="Like --batch, but only if it exceeds the interactive limits.")
    ] = False,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Maximum number of rows.", show_default=False)
    ] = None,
    show: Annotated[
        str | None, typer.Option("--show", help="Show the query with this id and the location of its result.")
    ] = None,
    tables: Annotated[bool, typer.Option("--tables", help="Show the datasets that you can query.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Show the query history, newest first.")] = False,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Run one SELECT over published datasets on the query service, `show tables` or `describe NAME`.

    A dataset is referred to by its published name, or in double quotes as "dag:job:output" or by its UUID.
    """
    if as_json:
        print("--json is now --output json, as in all commands.", file=sys.stderr)
    shown = Output.JSON if as_json else output
    if tables:
        present(_relations(folder, cursor, limit), shown, _tables)
    elif history:
        present(_history(folder, cursor, limit), shown, _queries)
    elif show is not None:
        present(ask(folder, lambda client: client.queries.show(show)), shown, _query)
    else:
        options: QueryOptions = {"datasets": datasets, "export": export, "limit": rows, "mode": _mode(batch, auto)}
        _ask(folder, _statement(statement), _format(csv, arrow, options), arrow, options, shown)


def _mode(batch: bool, auto: bool) -> QueryMode:
    if batch and auto:
        raise usage("Give --batch or --auto, not both")
    return QueryMode.BATCH if batch else QueryMode.AUTO if auto else QueryMode.INTERACTIVE


def _format(csv: bool, arrow: Path | None, options: QueryOptions) -> QueryFormat:
    if csv and arrow is not None:
        raise usage("Give --csv or --arrow, not both")
    streamed = csv or arrow is not None
    if streamed and (options["export"] or options["mode"] is QueryMode.BATCH):
        raise usage("--csv and --arrow print rows; --export and --batch write them to the object store. Give only one")
    return QueryFormat.CSV if csv else QueryFormat.ARROW if arrow is not None else QueryFormat.JSON


def _statement(given: str | None) -> str:
    text = sys.stdin.read() if given == "-" else given
    if text is None or not text.strip():
        raise usage('No statement is given. For example: interlock sql "select 1"')
    return text


def _ask(
    folder: Path | None,
    statement: str,
    form: QueryFormat,
    file: Path | None,
    options: QueryOptions,
    output: Output,
) -> None:
    if form is QueryFormat.JSON:
        present(_asked(folder, lambda queries: queries.ask(statement, **options)), output, _reply)
    elif file is None:
        _asked(folder, lambda queries: queries.stream(statement, form, sys.stdout.buffer.write, **options))
        sys.stdout.flush()
    else:
        with file.open("wb") as opened:
            _asked(folder, lambda queries: queries.stream(statement, form, opened.write, **options))


def _asked(folder: Path | None, question: Callable[[QueryClient], Coroutine[Any, Any, T]]) -> T:
    async def open_and_ask() -> T:
        from interlock.client import QueryClient, query_access
        from interlock.settings import load

        settings = load(dir=folder)
        access = query_access(settings)
        async with QueryClient(
            access.url, access.secret, verify=access.verify, patience=_PATIENCE_SECONDS, org=settings.org
        ) as queries:
            return await question(queries)

    return asyncio.run(open_and_ask())


# Output


def _reply(reply: QueryReply) -> RenderableType:
    from rich.console import Group

    if reply.outcome is QueryOutcome.BATCHED:
        return sheet(
            [
                ("query", reply.query_id),
                ("task", reply.task_id),
                ("result", f"interlock sql --show {reply.query_id}"),
            ]
        )
    if reply.export is not None:
        return sheet(_export(reply))
    import msgspec

    rows = msgspec.json.decode(reply.rows, type=list[list[Any]])
    shown = table([column.name for column in reply.columns], rows, empty="No rows.")
    summary = f"{reply.row_count} row{'' if reply.row_count == 1 else 's'}, {reply.duration_ms:.0f} ms"
    more = ", truncated: use --csv, --arrow or --export for all rows" if reply.truncated else ""
    return Group(shown, f"[dim]{summary}{more}[/]")


def _export(view: QueryReply | QueryView) -> list[tuple[str, Any]]:
    if view.export is None:
        return [("query", view.query_id)]
    files = [file.url or file.uri for file in view.export.files]
    return [
        ("query", view.query_id),
        ("rows", view.export.row_count),
        ("files", "\n".join(files)),
        ("valid until", view.export.expires_at),
    ]


def _history(folder: Path | None, cursor: str | None, limit: int) -> QueryPage:
    from interlock.wire.queries import QueryPage

    async def read(client: Client) -> QueryPage:
        found, rest = await collect(client.queries.page, lambda page: page.queries, cursor, limit)
        return QueryPage(queries=found, next_cursor=rest)

    return ask(folder, read)


def _relations(folder: Path | None, cursor: str | None, limit: int) -> RelationPage:
    from interlock.wire.queries import RelationPage

    async def read(client: Client) -> RelationPage:
        found, rest = await collect(client.queries.relations, lambda page: page.relations, cursor, limit)
        return RelationPage(relations=found, next_cursor=rest)

    return ask(folder, read)


def _tables(page: RelationPage) -> RenderableType:
    found = sorted(page.relations, key=lambda each: (not each.published, each.name))
    rows = [(each.sql_name, each.dataset, [column.name for column in each.columns]) for each in found]
    return table(
        ("name", "dataset", "columns"),
        rows,
        empty="There are no datasets yet: deploy a DAG with `interlock dag deploy FILE`.",
    )


def _queries(page: QueryPage) -> RenderableType:
    rows = [
        (
            one.started_at,
            one.user or f"task {one.task_id}",
            one.outcome,
            one.code,
            one.row_count,
            None if one.duration_ms is None else f"{one.duration_ms:.0f}",
            one.query_id,
            None if one.sql is None else " ".join(one.sql.split())[:_SHOWN],
        )
        for one in page.queries
    ]
    columns = ("time", "by", "outcome", "code", "rows", "ms", "query", "statement")
    return table(columns, rows, empty="There are no queries.")


def _query(view: QueryView) -> RenderableType:
    return sheet(
        [
            *_export(view),
            ("statement", view.sql),
            ("outcome", view.outcome),
            ("code", view.code),
            ("task", view.batch_task_id),
            ("status", view.batch_status),
            ("error", view.batch_error),
            ("asked", view.started_at),
        ]
    )
