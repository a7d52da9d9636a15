"""Output of commands: tables for people, JSON for programs; and confirmation before large actions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

import msgspec
import typer

from interlock.cli.conventions import Output

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text


def must_ask(*, yes: bool) -> bool:
    """False with --yes, and if there is no terminal to answer."""
    return not yes and sys.stdin.isatty() and sys.stdout.isatty()


def confirm(question: str, *, yes: bool) -> None:
    if must_ask(yes=yes):
        typer.confirm(question, abort=True)


def shown_range(start: int, end: int, start_date: str | None, end_date: str | None) -> str:
    """Shows a range as dates, if its dataset has time partitions."""
    if start_date is None:
        return f"{start}-{end}"
    return start_date if start_date == end_date else f"{start_date}..{end_date}"


T = TypeVar("T")

_PIPED_WIDTH: Final = 1_000
"""Without a terminal, nothing is truncated or folded."""

ID_PREFIX: Final = 18
"""Characters of an id in a table on a terminal. They hold the time to a quarter of a microsecond."""

_STYLES: Final = {
    "Queued": "cyan",
    "Running": "blue",
    "Paused": "yellow",
    "Completed": "green",
    "CompletedWithFailures": "yellow",
    "Failed": "red",
    "Canceled": "magenta",
    "TimedOut": "red",
    "LeaseExpired": "red",
    "Released": "cyan",
    "Building": "blue",
    "Current": "green",
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
}


@functools.cache
def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)


def present(value: T, output: Output, show: Callable[[T], RenderableType]) -> None:
    """Prints `value` as the API's JSON, or in a readable form."""
    if output is Output.JSON:
        print_json(value)
    else:
        console().print(show(value))


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]], *, empty: str, cut: str = "") -> RenderableType:
    """Returns a plain table, or the sentence `empty` if there are no rows.

    On a terminal, ids are cut to a prefix that commands accept, and the column `cut` to the width that is left.
    """
    from rich.table import Table

    given = [list(row) for row in rows]
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        ids = any(isinstance(row[number], UUID) for row in given)
        is_cut = column == cut and console().is_terminal
        shown.add_column(
            column,
            overflow="ellipsis" if is_cut else "fold",
            no_wrap=ids or is_cut,
            min_width=min(ID_PREFIX, console().width) if ids else None,
        )
    for row in given:
        shown.add_row(*(cell(_short(value)) for value in row))
    return shown if given else empty


def _short(value: Any) -> Any:
    """Shortens values for a table on a terminal. Elsewhere nothing is shortened."""
    if console().is_terminal and isinstance(value, UUID):
        return str(value)[:ID_PREFIX]
    if console().is_terminal and isinstance(value, datetime):
        return value.astimezone().strftime("%m-%d %H:%M:%S")
    return value


def first_line(text: str | None) -> str | None:
    return text.strip().partition("\n")[0] if text else None


def sheet(pairs: Iterable[tuple[str, Any]]) -> RenderableType:
    """Returns one line per property, without unset ones."""
    from rich.table import Table

    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None:
            shown.add_row(name, cell(value))
    return shown


def cell(value: Any) -> Text:
    from rich.text import Text

    text = _text(value)
    return Text(text, style=_STYLES.get(text, ""))


def _text(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        case msgspec.Raw():
            return bytes(value).decode()
        case list():
            return ", ".join(map(_text, value)) or "-"
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def seconds_since(moment: datetime) -> str:
    return f"{max(0.0, (datetime.now(UTC) - moment).total_seconds()):.0f} s ago"


def percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{fraction:.0%}"
