"""Conventions of all commands: common options, and the example in the help."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

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
    return typer.Typer(help=summary, no_args_is_help=True)


def command(app: typer.Typer, name: str, *, example: str, panel: Panel | None = None) -> Callable[[F], F]:
    """Registers a command whose help ends with an example."""
    return app.command(name, epilog=epilog(example), rich_help_panel=panel)


def epilog(example: str) -> str:
    # Single line breaks would be folded, so they are doubled. A bracket would be Rich markup.
    shown = example.replace("[", r"\[").replace("\n", "\n\n")
    return f"Example:\n\n{shown}"


def usage(sentence: str) -> typer.BadParameter:
    """Returns a usage error: exit code 2."""
    return typer.BadParameter(sentence)
