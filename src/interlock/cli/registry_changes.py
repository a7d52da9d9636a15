"""`interlock key`: what services sign commands with. `interlock change`: the changelog of the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.asking import confirm
from interlock.cli.connection import ask, collect
from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    YesOption,
    command,
    group,
)
from interlock.cli.output import present, sheet, table
from interlock.cli.registry import DryRunOption, ServiceArgument, changed

# Typer reads it from the annotations when the commands are built.
from interlock.wire import RegistryKind

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire import ChangePage, ServiceKeyPage, ServiceKeyView, TenantConfig

keys = group("Keys that services sign commands with; `keys` are those behind capability tokens.")
changes = group("The changelog of services, routes, ACLs, limits and keys, and the way back.")

ChangeArgument = Annotated[
    int, typer.Argument(metavar="CHANGE", min=1, help="Its number, as `change list` shows it.", show_default=False)
]


@command(keys, "list", example="interlock key list --service billing")
def list_keys(
    service: Annotated[str | None, typer.Option(help="Only of this service.", show_default=False)] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the versions of services' keys, without their secrets."""
    from interlock.wire import ServiceKeyPage

    async def read(client: Client) -> ServiceKeyPage:
        found, following = await collect(
            lambda at, most: client.registry.keys(service, at, most), lambda page: page.keys, cursor, limit
        )
        return ServiceKeyPage(keys=found, next_cursor=following)

    present(ask(folder, read), output, _keys)


@command(keys, "rotate", example="interlock key rotate billing --overlap-hours 24")
def rotate(
    service: ServiceArgument,
    overlap_hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=720,
            help="How long the version before stays good. Default: bus_key_overlap_days.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Make the next version of a service's key. The service finds the secret in its configuration."""
    seconds = None if overlap_hours is None else overlap_hours * 3600
    present(ask(folder, lambda client: client.registry.rotate_key(service, overlap_seconds=seconds)), output, _key)


@command(keys, "revoke", example="interlock key revoke billing hmac-v3 --yes")
def revoke(
    service: ServiceArgument,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="As hmac-v3.", show_default=False)],
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """End a version at once, as when it leaked. Where it was the current one, the next takes its place."""
    confirm(f"End {version} of {service}? What is signed with it is refused from now on.", yes=yes)
    present(ask(folder, lambda client: client.registry.revoke_key(service, version)), output, _key)


@command(keys, "config", example="INTERLOCK_API_KEY=ilk_… interlock key config")
def config(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show what a producer signs with, secrets included: for the service whose API key asks."""
    present(ask(folder, lambda client: client.registry.tenant_config()), output, _config)


@command(changes, "list", example="interlock change list --kind acls")
def list_changes(
    kind: Annotated[RegistryKind | None, typer.Option(help="Only of these.", show_default=False)] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show who changed what, newest first."""
    from interlock.wire import ChangePage

    async def read(client: Client) -> ChangePage:
        found, following = await collect(
            lambda at, most: client.registry.changes(kind, at, most), lambda page: page.changes, cursor, limit
        )
        return ChangePage(changes=found, next_cursor=following)

    present(ask(folder, read), output, _changes)


@command(changes, "show", example="interlock change show 42")
def show(change: ChangeArgument, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a change: before and after."""
    present(ask(folder, lambda client: client.registry.change(change)), output, changed)


@command(changes, "revert", example="interlock change revert 42 --dry-run\ninterlock change revert 42")
def revert(
    change: ChangeArgument,
    dry_run: DryRunOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Take a change back, if nothing changed its subject since. That is a change, too."""
    present(ask(folder, lambda client: client.registry.revert(change, dry_run=dry_run)), output, changed)


def _keys(page: ServiceKeyPage) -> RenderableType:
    rows = [
        (each.service, each.version_id, each.state, each.created_at, each.rotates_at, each.expires_at)
        for each in page.keys
    ]
    columns = ("service", "version", "state", "made", "rotates", "good until")
    return table(columns, rows, empty="There are no keys; a service gets its first with interlock service add NAME")


def _key(view: ServiceKeyView) -> RenderableType:
    return sheet(
        [
            ("service", view.service),
            ("version", view.version_id),
            ("state", view.state),
            ("rotates", view.rotates_at),
            ("good until", view.expires_at),
            ("by", view.created_by),
        ]
    )


def _config(config: TenantConfig) -> RenderableType:
    previous = config.previous
    return sheet(
        [
            ("source", config.source),
            ("version", config.active.version_id),
            ("secret", config.active.secret),
            ("rotates", config.rotates_at),
            ("previous", None if previous is None else previous.version_id),
            ("previous secret", None if previous is None else previous.secret),
            ("good until", None if previous is None else previous.expires_at),
            ("ask again in", f"{config.poll_seconds:.0f} s"),
            ("clock within", f"{config.replay_window_seconds:g} s"),
        ]
    )


def _changes(page: ChangePage) -> RenderableType:
    rows = [
        (each.change_id, each.changed_at, each.changed_by, each.kind, each.action, each.subject, each.reverts)
        for each in page.changes
    ]
    columns = ("change", "when", "by", "kind", "action", "subject", "takes back")
    return table(columns, rows, empty="Nothing was changed yet.")
