"""`interlock service-key`: keys that sign commands of services. `interlock change`: the changelog of the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from interlock.cli.bus_registry import DryRunOption, ServiceArgument, changed
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
from interlock.cli.output import confirm, present, sheet, table

# Typer needs it at runtime, to read the annotations.
from interlock.wire.bus_registry import RegistryKind

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.bus_registry import ChangePage, ServiceKeyPage, ServiceKeyView, TenantConfig

keys = group("Keys with which services sign commands; `signing-key` has the keys of capability tokens.")
changes = group("The changelog of services, routes, ACLs, limits and keys, and reverts.")

ChangeArgument = Annotated[
    int, typer.Argument(metavar="CHANGE", min=1, help="Number of the change, from `change list`.", show_default=False)
]


@command(keys, "list", example="interlock service-key list --service billing")
def list_keys(
    service: Annotated[str | None, typer.Option(help="Only keys of this service.", show_default=False)] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the versions of services' keys, without their secrets."""
    from interlock.wire.bus_registry import ServiceKeyPage

    async def read(client: Client) -> ServiceKeyPage:
        found, following = await collect(
            lambda at, size: client.registry.keys(service, at, size), lambda page: page.keys, cursor, limit
        )
        return ServiceKeyPage(keys=found, next_cursor=following)

    present(ask(folder, read), output, _keys)


@command(keys, "rotate", example="interlock service-key rotate billing --overlap-hours 24")
def rotate(
    service: ServiceArgument,
    overlap_hours: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=720,
            help="How long the previous version remains valid. Default: bus_key_overlap_days.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create the next version of a service's key. The service reads the secret from its tenant config."""
    seconds = None if overlap_hours is None else overlap_hours * 3600
    present(ask(folder, lambda client: client.registry.rotate_key(service, overlap_seconds=seconds)), output, _key)


@command(keys, "revoke", example="interlock service-key revoke billing hmac-v3 --yes")
def revoke(
    service: ServiceArgument,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Version, such as hmac-v3.", show_default=False)],
    yes: YesOption = False,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Revoke a version immediately, for example after a leak. If it was the current one, the next replaces it."""
    confirm(f"Revoke {version} of {service}? Commands signed with it are refused from now on.", yes=yes)
    present(ask(folder, lambda client: client.registry.revoke_key(service, version)), output, _key)


@command(keys, "config", example="INTERLOCK_API_KEY=ilk_… interlock service-key config")
def config(output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show the signing keys of the service whose API key is used, secrets included."""
    present(ask(folder, lambda client: client.registry.tenant_config()), output, _config)


@command(changes, "list", example="interlock change list --kind acls")
def list_changes(
    kind: Annotated[RegistryKind | None, typer.Option(help="Only changes of this kind.", show_default=False)] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show changes and who made them, newest first."""
    from interlock.wire.bus_registry import ChangePage

    async def read(client: Client) -> ChangePage:
        found, following = await collect(
            lambda at, size: client.registry.changes(kind, at, size), lambda page: page.changes, cursor, limit
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
    """Revert a change if its subject has not changed since. A revert is a change, too."""
    present(ask(folder, lambda client: client.registry.revert(change, dry_run=dry_run)), output, changed)


def _keys(page: ServiceKeyPage) -> RenderableType:
    rows = [
        (each.service, each.version_id, each.state, each.created_at, each.rotates_at, each.expires_at)
        for each in page.keys
    ]
    columns = ("service", "version", "state", "created", "rotates", "valid until")
    return table(columns, rows, empty="There are no keys; a service gets its first with interlock service add NAME")


def _key(view: ServiceKeyView) -> RenderableType:
    return sheet(
        [
            ("service", view.service),
            ("version", view.version_id),
            ("state", view.state),
            ("rotates", view.rotates_at),
            ("valid until", view.expires_at),
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
            ("valid until", None if previous is None else previous.expires_at),
            ("refresh after", f"{config.poll_seconds:.0f} s"),
            ("clock tolerance", f"{config.replay_window_seconds:g} s"),
        ]
    )


def _changes(page: ChangePage) -> RenderableType:
    rows = [
        (each.change_id, each.changed_at, each.changed_by, each.kind, each.action, each.subject, each.reverts)
        for each in page.changes
    ]
    columns = ("change", "when", "by", "kind", "action", "subject", "reverts")
    return table(columns, rows, empty="There are no changes.")
