"""Cursors of pages: the key of the last row as text, which the client sends back for the next page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import UUID

from interlock.errors import BadRequest

if TYPE_CHECKING:
    from interlock.stores.postgres import Row

FIRST: Final = UUID(int=0)
LAST: Final = UUID(int=2**128 - 1)
LOWEST: Final = -(2**63)
HIGHEST: Final = 2**63 - 1

S = TypeVar("S")


def next_cursor(rows: Sequence[Row], limit: int, *columns: str) -> str | None:
    """Returns the key of the last row, or None if the page is not full: no row follows."""
    if len(rows) < limit:
        return None
    values = [rows[-1][column] for column in columns]
    return "/".join("" if value is None else str(value) for value in values)


def uuid_cursor(cursor: str | None, start: S) -> UUID | S:
    try:
        return start if cursor is None else UUID(cursor)
    except ValueError:
        raise bad_cursor() from None


def number_cursor(cursor: str | None, start: int, *, lowest: int = 0) -> int:
    if cursor is None:
        return start
    digits = cursor.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20 and int(cursor) >= lowest):
        raise bad_cursor()
    return min(int(cursor), HIGHEST)


def bad_cursor() -> BadRequest:
    return BadRequest("`cursor` is not one this server gave out; start again without it.", code="bad_cursor")
