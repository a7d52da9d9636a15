"""`interlock alert`: alerts of the command bus, their channels, and critical alerts for the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from interlock.cli.bus_registry import routes
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
from interlock.cli.output import present, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.bus_events import AlertPage, AlertSettingsList, AlertSettingsView, AlertView, RouteHealthPage

app = group("Alerts of the command bus, and the channels that receive them.")


@command(app, "list", example="interlock alert list --limit 20")
def list_alerts(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the alerts of the org, newest first."""
    from interlock.wire.bus_events import AlertPage

    async def read(client: Client) -> AlertPage:
        found, following = await collect(client.bus.alerts, lambda page: page.alerts, cursor, limit)
        return AlertPage(alerts=found, next_cursor=following)

    present(ask(folder, read), output, _alerts)


@command(app, "channels", example="interlock alert channels")
def channels(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show which events raise alerts, and the channels of each."""
    present(ask(folder, lambda client: client.bus.alert_channels()), output, _channels)


@command(
    app,
    "set",
    example="interlock alert set snavio.command.invalid --email ops@example.org --webhook oncall\n"
    "interlock alert set snavio.route.unhealthy --nowhere",
)
def set_channels(
    event: Annotated[str, typer.Argument(metavar="EVENT", help="Name of the event.", show_default=False)],
    email: Annotated[
        list[str] | None, typer.Option(help="An e-mail address; may be repeated.", show_default=False)
    ] = None,
    webhook: Annotated[
        list[str] | None, typer.Option(help="The name of a webhook; may be repeated.", show_default=False)
    ] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Show it in the org's feed.")] = False,
    nowhere: Annotated[
        bool, typer.Option("--nowhere", help="Send it to no channel; not allowed for critical events.")
    ] = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Replace the channels of an event."""
    from interlock.wire.bus_events import AlertSettingsList, Channel, ChannelKind

    wanted = [Channel(kind=ChannelKind.DASHBOARD)] if dashboard else []
    wanted += [Channel(kind=ChannelKind.EMAIL, to=address) for address in email or ()]
    wanted += [Channel(kind=ChannelKind.WEBHOOK, to=name) for name in webhook or ()]
    if bool(wanted) == nowhere:
        raise usage("Give a channel with --email, --webhook or --dashboard, or pass --nowhere.")
    settings: AlertSettingsView = ask(folder, lambda client: client.bus.set_alert_channels(event, wanted))
    present(settings, output, lambda one: _channels(AlertSettingsList(events=[one])))


@command(app, "unrouted", example="interlock alert unrouted")
def unrouted(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show critical alerts of all orgs that reached no e-mail address and no webhook. Needs the platform scope."""
    from interlock.wire.bus_events import AlertPage

    async def read(client: Client) -> AlertPage:
        found, following = await collect(client.bus.unrouted_alerts, lambda page: page.alerts, cursor, limit)
        return AlertPage(alerts=found, next_cursor=following)

    present(ask(folder, read), output, _alerts)


@command(app, "resolve", example="interlock alert resolve 0192f0c1-7a1b-7c3d-8e4f-5a6b7c8d9e0f")
def resolve(
    alert_id: Annotated[UUID, typer.Argument(metavar="ALERT", help="Id of the alert.", show_default=False)],
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Mark an alert as resolved. Needs the platform scope."""
    present(ask(folder, lambda client: client.bus.resolve_alert(alert_id)), output, _resolved)


@command(routes, "health", example="interlock route health --bad")
def route_health(
    bad: Annotated[bool, typer.Option("--bad", help="Only routes that are not healthy.")] = False,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show how fast the queues of the org's routes are drained, and commands for which no route exists."""
    from interlock.wire.bus_events import RouteHealthPage

    async def read(client: Client) -> RouteHealthPage:
        found, following = await collect(
            lambda at, size: client.bus.route_health(at, size, only_bad=bad), lambda page: page.routes, cursor, limit
        )
        return RouteHealthPage(routes=found, next_cursor=following)

    present(ask(folder, read), output, _health)


def _alerts(page: AlertPage) -> RenderableType:
    rows = [(a.alert_id, a.org, a.event, a.told, a.opened_at, a.last_at) for a in page.alerts]
    return table(("alert", "org", "event", "notified", "opened", "last"), rows, empty="There are no alerts.")


def _resolved(alert: AlertView) -> str:
    return f"{alert.event} of {alert.org}: resolved by {alert.resolved_by}."


def _channels(settings: AlertSettingsList) -> RenderableType:
    rows = [
        (one.event, "yes" if one.critical else "no", ", ".join(f"{c.kind} {c.to}".strip() for c in one.channels) or "-")
        for one in settings.events
    ]
    return table(("event", "critical", "channels"), rows, empty="No event raises alerts.")


def _health(page: RouteHealthPage) -> RenderableType:
    rows = [
        (
            r.target,
            r.name,
            r.status.value,
            r.since,
            r.depth,
            r.in_flight,
            r.dead_letters,
            r.oldest_age_seconds,
            r.misroutes,
        )
        for r in page.routes
    ]
    columns = ("target", "name", "status", "since", "depth", "in flight", "dead", "oldest (s)", "misroutes")
    return table(columns, rows, empty="No route has been checked yet.")
