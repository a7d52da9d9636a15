"""Texts with a form of their own: names, durations, schedules, time zones. Each check raises Malformed."""

from __future__ import annotations

import functools
import re
import zoneinfo
from typing import Final

from croniter import croniter

from interlock.dags.definition import PATH_NAME, DurationSeconds
from interlock.schemas import TABLE_TYPES, table_type
from interlock.wire import OperatorName


class Malformed(Exception):
    """A value of the wrong form: what is wrong with it, and what to write instead."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.what = what
        self.instead = instead


_DURATION: Final = re.compile(r"(?=.)(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")
_UNITS: Final = (86_400, 3_600, 60, 1)
_LONGEST_SECONDS: Final = 366 * 86_400
_LONGEST_COLUMN: Final = 63
_NAME: Final = re.compile(PATH_NAME)
_OPERATOR: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_.]*)?")
_CRON: Final = re.compile(r"[0-9A-Za-z*/,#?-]+(?: +[0-9A-Za-z*/,#?-]+){4}")
_BY_CHANCE: Final = re.compile(r"\b[hr]\b", re.IGNORECASE)
_SCHEDULES: Final = frozenset({"@hourly", "@daily", "@weekly", "@monthly", "@yearly"})


def path_name(text: str) -> str:
    if len(text) > 100:
        raise Malformed(f"is a name of {len(text)} characters", "write at most 100")
    if not _NAME.fullmatch(text):
        raise Malformed(
            "is a name that no path can carry",
            "write letters, digits, - _ and single dots, with a letter or digit first",
        )
    return text


def operator(text: str) -> OperatorName:
    if len(text) > 200 or not _OPERATOR.fullmatch(text):
        raise Malformed("names no operator", "write the name of a built-in one, or module:function")
    return text


def column_name(text: str) -> str:
    """Of a table: PostgreSQL would cut a longer one, and the platform's own begin with an underscore."""
    if not 0 < len(text.encode()) <= _LONGEST_COLUMN or not text.isprintable():
        raise Malformed("has a name that no table can carry", f"write 1 to {_LONGEST_COLUMN} bytes that can be printed")
    if text.startswith("_") or text.lower() == "org_id":
        raise Malformed("is the platform's own", "write another name, which does not begin with _")
    return text


def column_type(text: str) -> str:
    """In one spelling: a type, and `not null` where it is so."""
    words = " ".join(text.lower().replace(", ", ",").split())
    kind = words.removesuffix(" not null")
    if table_type(kind) is None:
        known = ", ".join(TABLE_TYPES)
        raise Malformed("has no type that a table can have", f"write one of {known} or decimal(p,s), and not null")
    return words


def duration(text: str) -> DurationSeconds:
    found = _DURATION.fullmatch(text)
    if not found:
        raise Malformed("is no duration", "write a number with its unit: 90s, 10m, 2h, 1d or 1h30m")
    seconds = sum(int(count or 0) * unit for count, unit in zip(found.groups(), _UNITS, strict=True))
    if not 1 <= seconds <= _LONGEST_SECONDS:
        raise Malformed("is out of range", "write a duration from 1s to 366d")
    return seconds


def schedule(text: str) -> str:
    """Five fields, minutes first: a scheduler of seconds is no scheduler of data work."""
    if text in _SCHEDULES:
        return text
    if len(text) > 200 or not _CRON.fullmatch(text):
        raise Malformed("is no cron schedule", "write five fields, such as 0 6 * * 1-5, or @daily")
    if _BY_CHANCE.search(text):
        raise Malformed("is a schedule by chance", "write the minute and hour themselves instead of H or R")
    if not croniter.is_valid(text):
        raise Malformed("has a field out of range", "write minute 0-59, hour 0-23, day 1-31, month 1-12, weekday 0-7")
    if not croniter.is_valid(text, strict=True):
        raise Malformed("names a day that no month has", "write a date that exists")
    return re.sub(" +", " ", text)


@functools.cache
def time_zones() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones())
