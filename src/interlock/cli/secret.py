"""`interlock secret`: values that configs refer to and that are never read back."""

from __future__ import annotations

import sys
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
    usage,
)
from interlock.cli.output import confirm, present, sheet, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.access import OrgSecretPage, OrgSecretView

app = group("Secrets of your org: credentials that jobs send to other servers, used in configs as ${secret:NAME}.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the secret.", show_default=False)]


@command(
    app,
    "set",
    example="interlock secret set RPC_KEY --host rpc.example.com\n"
    "interlock secret set RPC_KEY --host rpc.example.com < key.txt",
)
def set_(
    name: NameArgument,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="Send it only to this host, such as rpc.example.com or rpc.example.com:8545; may be repeated.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Create a secret, or set a new value. The value is read from a prompt or from stdin.

    Tasks that are claimed from now on get the new value. Hosts that are not given again are no longer allowed.
    """
    value = _value(name)
    present(ask(folder, lambda client: client.secrets.set(name, value, hosts=host or ())), output, _sheet)


@command(app, "list", example="interlock secret list")
def list_(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show the secrets of the org, without their values."""
    from interlock.wire.access import OrgSecretPage

    async def read(client: Client) -> OrgSecretPage:
        found, following = await collect(client.secrets.page, lambda page: page.secrets, cursor, limit)
        return OrgSecretPage(secrets=found, next_cursor=following)

    present(ask(folder, read), output, _table)


@command(app, "remove", example="interlock secret remove RPC_KEY --yes")
def remove(
    name: NameArgument, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Remove a secret. Tasks whose config refers to it fail from then on."""
    confirm(f"Remove the secret {name}? Tasks that refer to it will fail.", yes=yes)
    present(ask(folder, lambda client: client.secrets.remove(name)), output, _sheet)


def _value(name: str) -> str:
    """Reads the value. It is not an argument, because those are visible in the shell history and the process list."""
    if sys.stdin.isatty():
        asked: str = typer.prompt(f"Value of {name}", hide_input=True, confirmation_prompt=True)
        return asked
    value = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    if not value:
        raise usage("Stdin has no value; pipe it in, or run the command in a terminal to be prompted.")
    return value


def _table(page: OrgSecretPage) -> RenderableType:
    rows = [(each.name, each.hosts or "all", each.version, each.set_by, each.set_at) for each in page.secrets]
    columns = ("name", "hosts", "version", "set by", "set at")
    return table(columns, rows, empty="There are no secrets; set one: interlock secret set NAME")


def _sheet(view: OrgSecretView) -> RenderableType:
    return sheet(
        [
            ("name", view.name),
            ("hosts", view.hosts or "all"),
            ("version", view.version),
            ("set by", view.set_by),
            ("set at", view.set_at),
        ]
    )
