"""Conventions of all commands: common options, the example in the help, and the connection to the gateway."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from interlock.client import Client

F = TypeVar("F", bound=Callable[..., Any])


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


class Panel(StrEnum):
    """The headings of `interlock --help`."""

    START = "Start here"
    WORK = "Work"
    OPERATION = "Operation"
    PROCESSES = "Single processes"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="table for people, json for programs.")]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="Folder of `interlock up`; its address and key are used if the environment sets none. Default: .interlock",
        show_default=False,
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="Maximum number of items to show.")]
CursorOption = Annotated[
    str | None, typer.Option("--cursor", help="next_cursor of the previous page.", show_default=False)
]


def group(summary: str) -> typer.Typer:
    return typer.Typer(help=summary, cls=_Group, no_args_is_help=True)


def command(app: typer.Typer, name: str, *, example: str, panel: Panel | None = None) -> Callable[[F], F]:
    """Registers a command whose help ends with an example."""
    return app.command(name, cls=_Command, epilog=epilog(example), rich_help_panel=panel)


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _plain(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _plain(super().get_params(ctx))


def _plain(parameters: Any) -> Any:
    """Shows no type for flags: `<bool>` suggests that they take a value."""
    for one in parameters:
        if getattr(one, "is_flag", False):
            one.metavar = ""
    return parameters


def epilog(example: str) -> str:
    # Single line breaks would be folded, so they are doubled. A bracket would be Rich markup.
    shown = example.replace("[", r"\[").replace("\n", "\n\n")
    return f"Example:\n\n{shown}"


def usage(sentence: str) -> typer.BadParameter:
    """Returns a usage error: exit code 2."""
    return typer.BadParameter(sentence)


def some_id(text: str) -> str:
    """Checks an id or the start of one, so that a wrong argument fails before a server is asked."""
    from interlock.http.prefixes import MIN_DIGITS, span_of

    if span_of(text) is None:
        raise usage(f"{text!r} is not an id: give its hexadecimal digits, at least the first {MIN_DIGITS}")
    return text


T = TypeVar("T")
Item = TypeVar("Item")

_PATIENCE_SECONDS: Final = 2.0
"""Long enough for a gateway that restarts. A user should not wait longer to learn that it is not running."""
_MAX_PER_PAGE: Final = 1_000


class Page(Protocol):
    @property
    def next_cursor(self) -> str | None: ...


P = TypeVar("P", bound=Page)


def ask(folder: Path | None, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    """Runs `question` with a client and closes the client."""
    return asyncio.run(_ask(folder, question))


def bound(text: str) -> int | str:
    """Parses one bound of a range: a position, or a date, which the gateway checks."""
    from interlock.calendars import split_dates

    if re.fullmatch(r"-?[0-9]{1,19}", text):
        return int(text)
    if (found := split_dates(text)) is None or found[1] is not None:
        raise usage(f"{text!r} is neither a position nor a date; write an integer, or a date such as 2026-11-18")
    return text


def span(text: str) -> tuple[int | str, int | str]:
    """Parses a range in one word: `100-199`, `2026-11-01..2026-11-18` or a single date."""
    from interlock.calendars import split_dates

    dates = split_dates(text)
    if dates is None and (found := re.fullmatch(r"(-?[0-9]{1,19})(?:-|\.\.)(-?[0-9]{1,19})", text)):
        return int(found[1]), int(found[2])
    if dates is None:
        raise usage(
            f"{text!r} is not a range; write START-END such as 100-199, or dates such as 2026-11-01..2026-11-18"
        )
    return dates[0], dates[1] or dates[0]


def range_of(start: str, end: str | None) -> tuple[int | str, int | str]:
    """Parses a range in one word or in two."""
    return span(start) if end is None else (bound(start), bound(end))


async def _ask(folder: Path | None, question: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    from interlock.client import Client, gateway_access
    from interlock.settings import load

    settings = load(dir=folder)
    access, patience = gateway_access(settings), _PATIENCE_SECONDS
    async with Client(access.url, access.secret, verify=access.verify, patience=patience, org=settings.org) as client:
        return await question(client)


async def collect(
    read: Callable[[str | None, int], Awaitable[P]],
    items: Callable[[P], list[Item]],
    cursor: str | None,
    limit: int,
) -> tuple[list[Item], str | None]:
    """Follows pages until there are `limit` items. Returns them with the cursor of the next page."""
    found: list[Item] = []
    while True:
        page = await read(cursor, min(limit - len(found), _MAX_PER_PAGE))
        found += items(page)
        cursor = page.next_cursor
        if cursor is None or len(found) >= limit:
            return found, cursor
