"""`interlock service`, `route`, `acl`, `limit`: the registry of the command bus."""

from __future__ import annotations

from datetime import datetime
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
    usage,
)
from interlock.cli.output import confirm, present, sheet, table

# Typer needs them at runtime, to read the annotations.
from interlock.wire.bus_registry import DedupeMode, DispatchMode, Enforcement, Sensitivity

if TYPE_CHECKING:
    from msgspec import Raw
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.bus_registry import (
        AclPage,
        LimitPage,
        RegistryChange,
        RoutePage,
        RouteTrial,
        RouteView,
        ServicePage,
        ServiceView,
    )

services = group("Services that send or receive commands.")
routes = group("Routes: the destinations of commands.")
acls = group("ACLs: which service may send which command to which target.")
limits = group("Limits: rate limits of commands.")

_TIMES: Final = ["%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z"]

ServiceArgument = Annotated[str, typer.Argument(metavar="SERVICE", show_default=False)]
SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="The sending service.", show_default=False)]
TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help="The receiving service.", show_default=False)]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the command.", show_default=False)]
AnyTargetArgument = Annotated[
    str | None, typer.Argument(metavar="[TARGET]", help="The receiving service.", show_default=False)
]
AnyNameArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Name of the command.", show_default=False)
]
TargetOption = Annotated[str | None, typer.Option("--target", help="Only entries of this target.", show_default=False)]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would change, without changing it.")]
ExpiresOption = Annotated[
    datetime | None,
    typer.Option("--expires-at", formats=_TIMES, help="Expiry time, such as 2026-12-31T00:00:00Z.", show_default=False),
]


# Services


@command(services, "add", example="interlock service add billing --description 'Invoices and refunds'")
def add_service(
    service: ServiceArgument,
    description: Annotated[str, typer.Option(help="Description of the service.", show_default=False)] = "",
    dispatch_mode: Annotated[
        DispatchMode | None,
        typer.Option(help="cold-only: all its commands take the slow path.", show_default=False),
    ] = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Register a service with its first key, or change one."""
    from interlock.wire.bus_registry import ServiceRequest

    request = ServiceRequest(name=service, description=description, dispatch_mode=dispatch_mode)
    present(ask(folder, lambda client: client.registry.put_service(request, dry_run=dry_run)), output, changed)


@command(services, "list", example="interlock service list")
def list_services(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show all services."""
    from interlock.wire.bus_registry import ServicePage

    async def read(client: Client) -> ServicePage:
        found, following = await collect(client.registry.services, lambda page: page.services, cursor, limit)
        return ServicePage(services=found, next_cursor=following)

    present(ask(folder, read), output, _services)


@command(services, "show", example="interlock service show billing")
def show_service(service: ServiceArgument, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a service."""
    present(ask(folder, lambda client: client.registry.service(service)), output, _service)


@command(services, "remove", example="interlock service remove billing --yes")
def remove_service(
    service: ServiceArgument,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Remove a service that no entry refers to, with its keys. The keys cannot be restored."""
    confirm(f"Remove the service {service}, with all its keys?", yes=yes or dry_run)
    present(ask(folder, lambda client: client.registry.drop_service(service, dry_run=dry_run)), output, changed)


# Routes


@command(
    routes,
    "add",
    example="interlock route add discord-bot post-message --queue discord-posts --dlq discord-posts-dlq\n"
    "interlock route add ledger rebuild --dag books --job rebuild --dedupe strict",
)
def add_route(
    target: TargetArgument,
    name: NameArgument,
    queue: Annotated[str | None, typer.Option(help="Destination queue.", show_default=False)] = None,
    dlq: Annotated[str | None, typer.Option(help="Dead letter queue. Default: QUEUE-dlq", show_default=False)] = None,
    dag: Annotated[str | None, typer.Option(help="The DAG of --job.", show_default=False)] = None,
    job: Annotated[
        str | None, typer.Option(help="Destination job: the command becomes a task of it.", show_default=False)
    ] = None,
    dedupe: Annotated[
        DedupeMode, typer.Option("--dedupe", help="strict: one delivery per command id.")
    ] = DedupeMode.NONE,
    dedupe_seconds: Annotated[float, typer.Option(help="How long command ids are remembered.")] = 300.0,
    drain_seconds: Annotated[
        float, typer.Option("--expected-drain-seconds", help="Typical time to consume one command.")
    ] = 300.0,
    dominant_share: Annotated[
        float, typer.Option(help="A source with more than this share dominates; 1 disables the check.")
    ] = 0.8,
    competing_share: Annotated[
        float, typer.Option(help="Minimum share of other sources for the check to apply.")
    ] = 0.1,
    expires_at: ExpiresOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create or change the route of a command."""
    from interlock.wire.bus_registry import Fairness, RouteRequest

    request = RouteRequest(
        target=target,
        name=name,
        queue=queue,
        dlq=dlq or (None if queue is None else f"{queue}-dlq"),
        dag=dag,
        job=job,
        dedupe_mode=dedupe,
        dedupe_seconds=dedupe_seconds,
        expected_drain_seconds=drain_seconds,
        fairness=Fairness(dominant_share=dominant_share, competing_share=competing_share),
        expires_at=expires_at,
    )
    present(ask(folder, lambda client: client.registry.put_route(request, dry_run=dry_run)), output, changed)


@command(routes, "list", example="interlock route list --target discord-bot")
def list_routes(
    target: TargetOption = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show all routes."""
    from interlock.wire.bus_registry import RoutePage

    async def read(client: Client) -> RoutePage:
        found, following = await collect(
            lambda at, size: client.registry.routes(target, at, size), lambda page: page.routes, cursor, limit
        )
        return RoutePage(routes=found, next_cursor=following)

    present(ask(folder, read), output, _routes)


@command(routes, "show", example="interlock route show discord-bot post-message")
def show_route(
    target: TargetArgument, name: NameArgument, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Show a route with all its settings."""
    present(ask(folder, lambda client: client.registry.route(target, name)), output, _route)


@command(routes, "remove", example="interlock route remove discord-bot post-message --dry-run")
def remove_route(
    target: TargetArgument,
    name: NameArgument,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Remove a route. Messages in its queue remain."""
    confirm(f"Remove the route of {name} to {target}?", yes=yes or dry_run)
    present(ask(folder, lambda client: client.registry.drop_route(target, name, dry_run=dry_run)), output, changed)


@command(routes, "test", example="interlock route test billing discord-bot post-message")
def try_route(
    source: SourceArgument,
    target: TargetArgument,
    name: NameArgument,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show what would happen to a command, without sending it. Exit code 1 unless it would be delivered."""
    trial = ask(folder, lambda client: client.registry.test_route(source, target, name))
    present(trial, output, _trial)
    if not trial.deliverable:
        raise typer.Exit(1)


# ACLs


@command(acls, "allow", example="interlock acl allow billing discord-bot post-message --sensitivity critical")
def allow(
    source: SourceArgument,
    target: TargetArgument,
    name: NameArgument,
    sensitivity: Annotated[
        Sensitivity, typer.Option(help="How soon a revocation must take effect everywhere: 4, 20 or 90 seconds.")
    ] = Sensitivity.MODERATE,
    expires_at: ExpiresOption = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Allow a service to send a command to a target, or change the permission."""
    from interlock.wire.bus_registry import AclRequest

    request = AclRequest(source=source, target=target, name=name, sensitivity=sensitivity, expires_at=expires_at)
    present(ask(folder, lambda client: client.registry.put_acl(request, dry_run=dry_run)), output, changed)


@command(acls, "list", example="interlock acl list --target discord-bot")
def list_acls(
    target: TargetOption = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show which services may send which commands."""
    from interlock.wire.bus_registry import AclPage

    async def read(client: Client) -> AclPage:
        found, following = await collect(
            lambda at, size: client.registry.acls(target, at, size), lambda page: page.acls, cursor, limit
        )
        return AclPage(acls=found, next_cursor=following)

    present(ask(folder, read), output, _acls)


@command(acls, "revoke", example="interlock acl revoke billing discord-bot post-message --yes")
def revoke(
    source: SourceArgument,
    target: TargetArgument,
    name: NameArgument,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Revoke a service's permission to send a command."""
    confirm(f"Revoke the permission of {source} to send {name} to {target}?", yes=yes or dry_run)
    service = source.rpartition("/")[2]
    present(
        ask(folder, lambda client: client.registry.drop_acl(service, target, name, dry_run=dry_run)), output, changed
    )


# Limits


@command(
    limits,
    "set",
    example="interlock limit set discord-bot post-message --rate 50\n"
    "interlock limit set discord-bot post-message --rate 10 --source billing --enforcement shadow\n"
    "interlock limit set --source billing --rate 200",
)
def set_limit(
    *,
    target: AnyTargetArgument = None,
    name: AnyNameArgument = None,
    rate: Annotated[int, typer.Option(min=1, help="Commands per window.", show_default=False)],
    window_seconds: Annotated[float, typer.Option(help="Length of the window.")] = 1.0,
    burst: Annotated[int, typer.Option(min=0, help="Commands that unused windows may accumulate.")] = 0,
    cooldown_seconds: Annotated[
        float, typer.Option(help="How long commands are refused after the limit was reached.")
    ] = 0.0,
    enforcement: Annotated[
        Enforcement,
        typer.Option(help="strict: never exceeded; relaxed: checked afterwards; shadow: only reported."),
    ] = Enforcement.STRICT,
    source: Annotated[
        str | None,
        typer.Option(
            help="Quota of this source; without TARGET and NAME, limit of all its commands. "
            "Default: all sources together.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create or change a rate limit."""
    from interlock.wire.bus_registry import LimitRequest

    request = LimitRequest(
        target=target,
        name=name,
        source=source,
        rate=rate,
        window_seconds=window_seconds,
        burst=burst,
        cooldown_seconds=cooldown_seconds,
        enforcement=enforcement,
    )
    present(ask(folder, lambda client: client.registry.put_limit(request, dry_run=dry_run)), output, changed)


@command(limits, "list", example="interlock limit list")
def list_limits(
    target: TargetOption = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show limits and quotas; those of a source alone come first."""
    from interlock.wire.bus_registry import LimitPage

    async def read(client: Client) -> LimitPage:
        found, following = await collect(
            lambda at, size: client.registry.limits(target, at, size), lambda page: page.limits, cursor, limit
        )
        return LimitPage(limits=found, next_cursor=following)

    present(ask(folder, read), output, _limits)


@command(
    limits,
    "remove",
    example="interlock limit remove discord-bot post-message --yes\ninterlock limit remove --source billing --yes",
)
def remove_limit(
    target: AnyTargetArgument = None,
    name: AnyNameArgument = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="Quota of this source; without TARGET and NAME, limit of all its commands.",
            show_default=False,
        ),
    ] = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Remove a limit, the quota of a source, or the limit of a source alone."""
    if (target is None) != (name is None) or (target is None and source is None):
        raise usage("Write TARGET and NAME, or --source alone.")
    what = f"all commands of {source}" if target is None else f"{name} to {target}"
    confirm(f"Remove the limit of {what}?", yes=yes or dry_run)
    present(
        ask(folder, lambda client: client.registry.drop_limit(target, name, source, dry_run=dry_run)), output, changed
    )


# Output


def changed(change: RegistryChange) -> RenderableType:
    did = {"create": "created", "update": "changed", "delete": "removed", "none": "unchanged"}[change.action]
    return sheet(
        [
            ("change", change.change_id),
            (str(change.kind), change.subject),
            ("result", f"would be {did}" if change.dry_run else did),
            ("before", _shown(change.before)),
            ("after", _shown(change.after)),
            ("reverts", change.reverts),
        ]
    )


def _shown(entry: Raw) -> str | None:
    text = bytes(entry).decode()
    return None if text == "null" else text


def _services(page: ServicePage) -> RenderableType:
    rows = [(each.name, each.source, each.dispatch_mode, each.description) for each in page.services]
    columns = ("service", "source", "dispatch mode", "description")
    return table(columns, rows, empty="There are no services; register one: interlock service add NAME")


def _service(view: ServiceView) -> RenderableType:
    return sheet(
        [
            ("service", view.name),
            ("source", view.source),
            ("description", view.description),
            ("dispatch mode", view.dispatch_mode),
            ("changed", view.changed_at),
            ("by", view.changed_by),
        ]
    )


def _place(view: RouteView) -> str:
    if view.queue is not None:
        return f"queue {view.queue}"
    return f"job {view.job}" if view.dag is None else f"job {view.dag}/{view.job}"


def _routes(page: RoutePage) -> RenderableType:
    rows = [(each.target, each.name, _place(each), each.dedupe_mode, each.expires_at) for each in page.routes]
    columns = ("target", "name", "destination", "dedupe", "expires")
    return table(columns, rows, empty="There are no routes; create one: interlock route add TARGET NAME --queue QUEUE")


def _route(view: RouteView) -> RenderableType:
    return sheet(
        [
            ("target", view.target),
            ("name", view.name),
            ("destination", _place(view)),
            ("dead letters", view.dlq),
            ("dedupe", view.dedupe_mode),
            ("dedupe seconds", view.dedupe_seconds),
            ("expected drain", f"{view.expected_drain_seconds:g} s"),
            ("dominant share", view.fairness.dominant_share),
            ("competing share", view.fairness.competing_share),
            ("expires", view.expires_at),
            ("changed", view.changed_at),
            ("by", view.changed_by),
        ]
    )


def _trial(trial: RouteTrial) -> RenderableType:
    rows = [(check.check, "ok" if check.ok else "fail", check.detail) for check in trial.checks]
    return table(("check", "", ""), rows, empty="")


def _acls(page: AclPage) -> RenderableType:
    rows = [(each.source, each.target, each.name, each.sensitivity, each.expires_at) for each in page.acls]
    columns = ("source", "target", "name", "sensitivity", "expires")
    return table(
        columns, rows, empty="There are no ACLs, so no service may send; interlock acl allow SOURCE TARGET NAME"
    )


def _limits(page: LimitPage) -> RenderableType:
    rows = [
        (
            each.target or "any",
            each.name or "any",
            each.source or "all",
            f"{each.rate} / {each.window_seconds:g} s",
            each.burst or None,
            each.cooldown_seconds or None,
            each.enforcement,
        )
        for each in page.limits
    ]
    columns = ("target", "name", "source", "rate", "burst", "cooldown", "enforcement")
    return table(columns, rows, empty="There are no limits; interlock limit set TARGET NAME --rate 100")
