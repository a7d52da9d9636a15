"""`interlock replay`: sends previously accepted commands again."""

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
    ask,
    collect,
    command,
    group,
    usage,
)
from interlock.cli.output import present, sheet, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.bus_messages import ReplayFilters, ReplayPage, ReplayView

app = group("Replays: previously accepted commands, re-signed and sent again.")

_LOOK_SECONDS: Final = 0.5

ReplayArgument = Annotated[UUID, typer.Argument(metavar="REPLAY", help="Id of the replay.", show_default=False)]


@command(
    app,
    "start",
    example='interlock replay start --reason "mailer was down" --target mailer --since 2026-01-31T12:00:00Z --dry-run\n'
    'interlock replay start --reason "bug fixed" --dead-letters mail --rate 10 --wait',
)
def start(
    reason: Annotated[str, typer.Option(help="Reason, recorded and sent with each command.", show_default=False)],
    dead_letters: Annotated[
        str | None,
        typer.Option(help="Replay the dead letters of this queue. Default: the archive.", show_default=False),
    ] = None,
    source: Annotated[str | None, typer.Option(help="Only commands from this service.", show_default=False)] = None,
    target: Annotated[str | None, typer.Option(help="Only commands to this service.", show_default=False)] = None,
    name: Annotated[str | None, typer.Option(help="Only commands with this name.", show_default=False)] = None,
    since: Annotated[
        str | None, typer.Option(help="Only commands from this time on, with a time zone.", show_default=False)
    ] = None,
    until: Annotated[str | None, typer.Option(help="Only commands before this time.", show_default=False)] = None,
    command_id: Annotated[
        list[UUID] | None, typer.Option(help="Only the command with this id; may be repeated.", show_default=False)
    ] = None,
    rate: Annotated[float, typer.Option(help="Maximum number of commands per second.")] = 50.0,
    limit: Annotated[
        int, typer.Option("--limit", help="Maximum number of commands in total; the oldest first.")
    ] = 100_000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the commands, without sending them.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the replay has ended.")] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Send commands again. The user, the reason and the outcome are recorded.

    A Spark worker reads the archive; one must be running.
    """
    from interlock.wire.bus_messages import ReplayFilters, ReplayOrigin, ReplayRequest

    filters = ReplayFilters(
        source=source,
        target=target,
        name=name,
        since=_moment("--since", since),
        until=_moment("--until", until),
        command_ids=command_id,
        queue=dead_letters,
    )
    origin = ReplayOrigin.ARCHIVE if dead_letters is None else ReplayOrigin.DEAD_LETTERS
    request = ReplayRequest(origin=origin, reason=reason, filters=filters, dry_run=dry_run, rate=rate, limit=limit)

    async def run(client: Client) -> ReplayView:
        replay = await client.replays.start(request)
        while wait and replay.ended_at is None:
            await asyncio.sleep(_LOOK_SECONDS)
            replay = await client.replays.replay(replay.replay_id)
        return replay

    present(ask(folder, run), output, _sheet)


@command(app, "list", example="interlock replay list")
def list_replays(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show replays and who started them, newest first."""
    from interlock.wire.bus_messages import ReplayPage

    async def read(client: Client) -> ReplayPage:
        found, following = await collect(client.replays.page, lambda page: page.replays, cursor, limit)
        return ReplayPage(replays=found, next_cursor=following)

    present(ask(folder, read), output, _table)


@command(app, "show", example="interlock replay show 0192f0c1-7a1b-7c3d-8e4f-5a6b7c8d9e0f")
def show(replay: ReplayArgument, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a replay and its progress."""
    present(ask(folder, lambda client: client.replays.replay(replay)), output, _sheet)


@command(app, "cancel", example="interlock replay cancel 0192f0c1-7a1b-7c3d-8e4f-5a6b7c8d9e0f")
def cancel(replay: ReplayArgument, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Stop a replay. Commands that were sent remain sent."""
    present(ask(folder, lambda client: client.replays.cancel(replay)), output, _sheet)


def _moment(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise usage(f"{option} {text} is not a time; write it like 2026-01-31T12:00:00Z.") from None
    if moment.tzinfo is None:
        raise usage(f"{option} {text} has no time zone; write it like 2026-01-31T12:00:00Z.")
    return moment


def _sheet(replay: ReplayView) -> RenderableType:
    return sheet(
        (
            ("replay", replay.replay_id),
            ("state", replay.state.value),
            ("of", replay.origin.value),
            ("filters", _only(replay.filters)),
            ("reason", replay.reason),
            ("started by", replay.operator),
            ("dry run", "yes" if replay.dry_run else None),
            ("limits", f"{replay.rate:g} per second, {replay.limit} in total"),
            ("selected", replay.selected),
            ("sent", replay.sent),
            ("failed", replay.failed),
            ("task", replay.task_id),
            ("detail", replay.detail),
            ("asked", replay.created_at),
            ("ended", replay.ended_at),
        )
    )


def _only(filters: ReplayFilters) -> str | None:
    """Formats the filters that were given."""
    named = [(name, getattr(filters, name)) for name in ("queue", "source", "target", "name", "since", "until")]
    given = [f"{name} {value}" for name, value in named if value is not None]
    given += [f"command {each}" for each in filters.command_ids or ()]
    return ", ".join(given) or None


def _table(page: ReplayPage) -> RenderableType:
    rows = [
        (r.replay_id, r.state.value, r.origin.value, r.selected, r.sent, r.failed, r.operator, r.reason, r.created_at)
        for r in page.replays
    ]
    columns = ("replay", "state", "of", "selected", "sent", "failed", "started by", "reason", "started")
    return table(columns, rows, empty="There are no replays.")
