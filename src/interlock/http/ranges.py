"""Ranges in requests: integers, or dates if the dataset or job has time partitions."""

from __future__ import annotations

import re
from typing import Final

from interlock.calendars import BadDate, Misaligned, Range, calendar_of, is_date
from interlock.errors import BadRequest

MAX_POSITION: Final = 2**62
_INTEGER: Final = re.compile(r"-?[0-9]{1,20}")

Bound = int | str
"""A position, or a date."""


def range_of(
    partition: str | None, start: Bound, end: Bound | None, *, aligned: bool = False, code: str = "bad_partition"
) -> Range:
    """Returns a range as positions, both inclusive. A date without an end is a range by itself.

    A range of dates consists of whole partitions. With `aligned`, a range of integers must too.
    """
    check_form(start, end, code=code)
    last = start if end is None else end
    if partition is None:
        found = _integer(start), _integer(last)
    else:
        found = _in_calendar(partition, start, last, aligned=aligned)
    if found[0] > found[1]:
        raise BadRequest(f"`start` must be at most `end`, got {found[0]}-{found[1]}.", code=code)
    return found


def check_form(start: Bound, end: Bound | None, *, code: str = "bad_partition") -> None:
    """Refuses a range that is malformed with any kind of partition, so that no look-up is needed to say so."""
    if end is None and isinstance(start, int):
        raise BadRequest(f"A range of integers needs an `end`; `start` is {start}.", code=code)
    if isinstance(start, int) and isinstance(end, int) and start > end:
        raise BadRequest(f"`start` must be at most `end`, got {start}-{end}.", code=code)
    for bound in (start, end):
        if isinstance(bound, str) and not is_date(bound):
            raise BadRequest(
                f"{bound[:60]!r} is neither an integer nor a date: write 0, or a date such as 2026-11-01.",
                code="bad_date",
            )


def bound_of(text: str) -> Bound:
    """Parses a bound in a query string."""
    if _INTEGER.fullmatch(text) is None:
        return text
    position = int(text)
    if abs(position) > MAX_POSITION:
        raise BadRequest(f"A position must be from -2^62 to 2^62, got {text}.", code="bad_request")
    return position


def _integer(bound: Bound) -> int:
    if isinstance(bound, str):
        raise BadRequest(
            f"{bound[:60]!r} is a date, but the partitions are ranges of integers: write integers, such as 0 and 999, "
            "or declare `partition: daily` in the DAG.",
            code="not_time_partitioned",
        )
    return bound


def _in_calendar(partition: str, start: Bound, end: Bound, *, aligned: bool) -> Range:
    calendar = calendar_of(partition)
    try:
        first = calendar.range_of(start)[0] if isinstance(start, str) else start
        last = calendar.range_of(end)[1] if isinstance(end, str) else end
        if isinstance(start, str) and isinstance(end, str) and first > last:
            raise BadDate(f"{end} is before {start}: write the earlier date first")
        if aligned and first <= last:
            calendar.check(first, last)
    except Misaligned as error:
        raise BadRequest(f"{_sentence(error)}.", code="misaligned_partition") from None
    except BadDate as error:
        raise BadRequest(f"{_sentence(error)}.", code="bad_date") from None
    return first, last


def _sentence(error: BadDate) -> str:
    text = str(error)
    return text[0].upper() + text[1:]
