"""Asking before something is done to many."""

from __future__ import annotations

import sys

import typer


def must_ask(*, yes: bool) -> bool:
    """Not when told to go on, and not where nobody would answer."""
    return not yes and sys.stdin.isatty() and sys.stdout.isatty()


def confirm(question: str, *, yes: bool) -> None:
    if must_ask(yes=yes):
        typer.confirm(question, abort=True)
