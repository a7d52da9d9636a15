"""Prefixes of ids: wherever a request names an id, its first characters are enough if they are unique."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from interlock.errors import BadRequest, NotFound

MAX_CANDIDATES: Final = 10
MIN_DIGITS: Final = 4
_DIGITS: Final = re.compile(rf"[0-9a-f]{{{MIN_DIGITS},32}}")


def span_of(text: str) -> dict[str, UUID] | None:
    """Returns the ids `low` to `high` that start with `text`, or None if it cannot be a prefix. Dashes are ignored."""
    digits = text.replace("-", "").lower()
    if not _DIGITS.fullmatch(digits):
        return None
    return {"low": UUID(digits.ljust(32, "0")), "high": UUID(digits.ljust(32, "f"))}


def required_span(text: str, kind: str) -> dict[str, UUID]:
    span = span_of(text)
    if span is None:
        raise BadRequest(
            f"{text[:60]!r} is not the id of a {kind}: an id has 32 hexadecimal digits, and at least its first "
            f"{MIN_DIGITS} are needed.",
            code="invalid_request",
        )
    return span


def only(text: str, kind: str, found: Sequence[UUID]) -> UUID:
    """Returns the only id that was found for a prefix."""
    if not found:
        raise NotFound(f"There is no {kind} {text[:60]!r} in this org.")
    if len(found) > 1:
        listed = ", ".join(map(str, found[:MAX_CANDIDATES]))
        more = ", and more" if len(found) > MAX_CANDIDATES else ""
        raise BadRequest(
            f"{text!r} is the start of several ids of a {kind}: {listed}{more}. Write more characters.",
            code="ambiguous_id",
            candidates=[str(one) for one in found[:MAX_CANDIDATES]],
        )
    return found[0]
