"""Time partitions: hours, days and months of a time zone as ranges of integers.

A position is a number of seconds since 1970-01-01 UTC, and a partition is the inclusive range of the seconds of one
hour, day or month in the calendar of its zone. So partitions of every length and zone share one axis: they order, split
and merge like any range, and a day of 23 or 25 hours is just a shorter or longer range.

    hourly    begins where the clock of the zone shows a full hour. An hour that occurs twice is two partitions
    daily     begins with the first instant of a local date
    monthly   begins with the first instant of a local month

People read and write dates: `2026-11`, `2026-11-18`, `2026-11-18T06`. The end of a range of dates is included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

Range = tuple[int, int]
"""Start and end, both inclusive."""

FIRST_YEAR: Final = 1900
LAST_YEAR: Final = 2999
_HOUR: Final = 3600
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TEXT: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})(?:-([0-9]{2})(?:[T ]([0-9]{2})(?::00(?::00)?)?(Z|[+-][0-9]{2}:?[0-9]{2})?)?)?"
)
_DATE: Final = r"[0-9]{4}-[0-9]{2}(?:-[0-9]{2}(?:[T ][0-9]{2}(?::00){0,2}(?:Z|[+-][0-9]{2}:?[0-9]{2})?)?)?"
_TEXTS: Final = re.compile(rf"({_DATE})(?:(?:\.\.|-|/)({_DATE}))?")


class BadDate(ValueError):
    """Raised for a date that cannot be used, with a message that says what to write."""


class Misaligned(BadDate):
    """Raised for a range that does not begin and end with a partition."""


class Every(StrEnum):
    """The length of a partition."""

    HOURLY = "hourly"
    DAILY = "daily"
    MONTHLY = "monthly"


_NOUNS: Final = {Every.HOURLY: "hour", Every.DAILY: "day", Every.MONTHLY: "month"}
_EXAMPLES: Final = {Every.HOURLY: "2026-11-18T06", Every.DAILY: "2026-11-18", Every.MONTHLY: "2026-11"}


@dataclass(frozen=True, slots=True)
class Dates:
    """A range as dates: those of its first and of its last partition."""

    first: str
    last: str

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first}..{self.last}"


@dataclass(frozen=True)
class Interval:
    """A time that a task stands for: a partition, or several in a row."""

    start: datetime
    """The first instant, in the time zone of the partition."""
    end: datetime
    """The first instant after it."""
    dates: Dates

    @property
    def date(self) -> date:
        """The local date on which it begins."""
        return self.start.date()

    def __contains__(self, moment: datetime) -> bool:
        return self.start <= moment < self.end

    def __str__(self) -> str:
        return str(self.dates)


@dataclass(frozen=True)
class Calendar:
    """The partitions of one length in one time zone. Its text, such as `daily Europe/Berlin`, is its identity."""

    every: Every
    timezone: str = "UTC"

    def __str__(self) -> str:
        return f"{self.every} {self.timezone}"

    @property
    def noun(self) -> str:
        return _NOUNS[self.every]

    @property
    def example(self) -> str:
        return _EXAMPLES[self.every]

    @cached_property
    def zone(self) -> ZoneInfo:
        try:
            return ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise BadDate(
                f"this machine does not know the time zone {self.timezone!r}: install the package tzdata"
            ) from None

    # Partitions

    def partition(self, position: int) -> Range:
        """Returns the partition that contains a position."""
        _check_position(position)
        if self.every is Every.HOURLY:
            return self._hour(position)
        number = self._number(position)
        return self._begin(number), self._begin(number + 1) - 1

    def partitions(self, start: int, end: int) -> Iterator[Range]:
        """Yields the partitions that have a position in the range, in order."""
        while start <= end:
            found = self.partition(start)
            yield found
            start = found[1] + 1

    def aligned(self, start: int, end: int) -> bool:
        """Returns True if the range begins and ends with a partition."""
        try:
            return start <= end and self.partition(start)[0] == start and self.partition(end)[1] == end
        except BadDate:
            return False

    def check(self, start: int, end: int) -> None:
        """Raises Misaligned for a range that does not begin and end with a partition."""
        if self.aligned(start, end):
            return
        try:
            whole = self.partition(start)[0], self.partition(max(start, end))[1]
        except BadDate:
            instead = f"write dates, such as {self.example}"
        else:
            instead = f"write {self.dates(*whole)}, which is {whole[0]}-{whole[1]}"
        raise Misaligned(f"{start}-{end} does not begin and end with a {self.noun} of {self.timezone}: {instead}")

    def _number(self, position: int) -> int:
        """Returns the number of the day or month. A date that the zone skipped has no position, so the next one is
        returned."""
        local = self.local(position)
        near = _number_of(self.every, local.date())
        return next(number for number in (near + 1, near, near - 1, near - 2) if self._begin(number) <= position)

    def _begin(self, number: int) -> int:
        return self.position(_wall(self.every, number))

    def _hour(self, position: int) -> Range:
        """Returns an hour. The first one of a day may be shorter, where clocks were moved by minutes at midnight."""
        first, last = Calendar(Every.DAILY, self.timezone).partition(position)
        start = self._full_hour(position)
        return max(start, first), min(self._next_full_hour(start) - 1, last)

    def _full_hour(self, position: int) -> int:
        while True:
            offset = self._offset(position)
            start = position - (position + offset) % _HOUR
            if self._offset(start) == offset:
                return start
            # The clocks changed since: no full hour has begun after the change.
            position = self._change(start, position) - 1

    def _next_full_hour(self, start: int) -> int:
        ahead = start + _HOUR
        while (found := self._full_hour(ahead)) <= start:
            ahead += _HOUR // 4
        while (earlier := self._full_hour(found - 1)) > start:
            found = earlier
        return found

    # Instants

    def local(self, position: int) -> datetime:
        return (_EPOCH + timedelta(seconds=position)).astimezone(self.zone)

    def position(self, wall: datetime) -> int:
        """Returns the first instant of a wall-clock time; of a time that the clocks skip, the instant of the change."""
        later = _seconds(wall.replace(tzinfo=self.zone, fold=0))
        if self.local(later).replace(tzinfo=None, fold=0) == wall:
            return later
        return self._change(_seconds(wall.replace(tzinfo=self.zone, fold=1)), later)

    def _change(self, before: int, after: int) -> int:
        """Returns the instant between these two at which the clocks change to the offset of `after`."""
        offset = self._offset(after)
        while after - before > 1:
            middle = before + (after - before) // 2
            if self._offset(middle) == offset:
                after = middle
            else:
                before = middle
        return after

    def _offset(self, position: int) -> int:
        offset = self.local(position).utcoffset() or timedelta()
        return offset // timedelta(seconds=1)

    # Dates

    def dates(self, start: int, end: int) -> Dates:
        """Formats a range. A range that does not consist of whole partitions is shown as instants."""
        if not self.aligned(start, end):
            return Dates(self._instant(start), self._instant(end))
        return Dates(self._label(start), self._label(self.partition(end)[0]))

    def interval(self, start: int, end: int) -> Interval:
        return Interval(self.local(start), self.local(end + 1), self.dates(start, end))

    def file_suffix(self, start: int, end: int) -> str:
        """Formats a range for a file name: without a colon, which Hadoop reads as a URL scheme."""
        if self.aligned(start, end):
            names = [self._label(start), self._label(self.partition(end)[0])]
            if not any(":" in name for name in names):
                return "_".join(names)
        return "_".join(f"{_EPOCH + timedelta(seconds=at):%Y-%m-%dT%H%M%SZ}" for at in (start, end))

    def range_of(self, first: str, last: str | None = None) -> Range:
        """Parses a range of dates, the last one included. Raises BadDate or Misaligned."""
        start, end = self._span(first)[0], self._span(last or first)[1]
        if start > end:
            raise BadDate(f"{last} is before {first}: write the earlier date first")
        for text, aligned in (
            (first, self.partition(start)[0] == start),
            (last or first, self.partition(end)[1] == end),
        ):
            if not aligned:
                whole = self._label(self.partition(start if text is first else end)[0])
                raise Misaligned(
                    f"{text!r} is not a {self.noun} of {self.timezone}, and the partitions are {self.every}: "
                    f"write {whole}"
                )
        return start, end

    def _span(self, text: str) -> Range:
        """Returns the first and the last second of a month, day or hour."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise BadDate(f"{text[:60]!r} is not a date: write one such as {self.example}")
        year, month, day, hour = (None if part is None else int(part) for part in found.groups()[:4])
        try:
            wall = datetime(year or 0, month or 0, day or 1, hour or 0)  # noqa: DTZ001 - a wall-clock time
        except ValueError as error:
            raise BadDate(f"{text!r} is not a date that exists ({error}): write one such as {self.example}") from None
        if not FIRST_YEAR <= wall.year <= LAST_YEAR:
            raise BadDate(f"{text!r} is out of range: write a date from {FIRST_YEAR} to {LAST_YEAR}")
        if hour is not None:
            return self._hours(text, wall, found[5])
        every = Every.MONTHLY if day is None else Every.DAILY
        span = Calendar(every, self.timezone)
        start, end = self.position(wall), span._begin(_number_of(every, wall.date()) + 1) - 1
        if start > end:
            raise BadDate(f"{text!r} does not exist in {self.timezone}, whose clocks skip it: write the day after")
        return start, end

    def _hours(self, text: str, wall: datetime, offset: str | None) -> Range:
        """Without an offset, an hour that occurs twice means both."""
        hourly = Calendar(Every.HOURLY, self.timezone)
        if offset is not None:
            at = datetime.fromisoformat(f"{wall:%Y-%m-%dT%H:%M:%S}{offset.replace('Z', '+00:00')}")
            found = hourly.partition(_seconds(at))
            if found[0] != _seconds(at):
                raise Misaligned(f"{text!r} is not a full hour in {self.timezone}: write {hourly._label(found[0])}")
            return found
        first = self.position(wall)
        begun, ended = hourly.partition(first)
        if begun != first or self.local(first).hour != wall.hour:
            following = hourly._label(begun if begun == first else ended + 1)
            raise BadDate(f"{text!r} does not exist in {self.timezone}, whose clocks skip it: write {following}")
        return first, hourly.partition(_seconds(wall.replace(tzinfo=self.zone, fold=1)))[1]

    def _label(self, start: int) -> str:
        local = self.local(start)
        if self.every is not Every.HOURLY:
            begun = _wall(self.every, self._number(start))
            return f"{begun:%Y-%m}" if self.every is Every.MONTHLY else f"{begun:%Y-%m-%d}"
        text = f"{local:%Y-%m-%dT%H}"
        twice = local.replace(fold=0).utcoffset() != local.replace(fold=1).utcoffset()
        return text + local.isoformat()[19:] if twice else text

    def _instant(self, position: int) -> str:
        try:
            _check_position(position)
        except BadDate:
            return str(position)
        return self.local(position).isoformat()


def interval_payload(calendar: Calendar, partition: Range) -> dict[str, object]:
    """Returns the fields of a payload that define the partition of a task of a source."""
    interval = calendar.interval(*partition)
    return {
        "partition_key": f"{partition[0]}-{partition[1]}",
        "start": partition[0],
        "end": partition[1],
        "interval_start": interval.start.isoformat(),
        "interval_end": interval.end.isoformat(),
    }


@lru_cache(maxsize=1000)
def calendar_of(text: str) -> Calendar:
    """Parses the text of a calendar, such as `daily Europe/Berlin`."""
    every, _, timezone = text.partition(" ")
    return Calendar(Every(every), timezone or "UTC")


def known(text: str | None) -> Calendar | None:
    """Returns the calendar of a dataset or job, or None if its ranges are integers."""
    return None if text is None else calendar_of(text)


def is_date(text: str) -> bool:
    """Returns True if the text has the form of a date, which may still not exist in a calendar."""
    return _TEXT.fullmatch(text.strip()) is not None


def dates_of(text: str | None, start: int | None, end: int | None) -> tuple[str | None, str | None]:
    """Returns the dates of a range for display; None for integer ranges, and if there is no range."""
    if text is None or start is None or end is None:
        return None, None
    dates = calendar_of(text).dates(start, end)
    return dates.first, dates.last


def shown(text: str | None, start: int, end: int) -> str:
    """Returns a range for a message: as dates, or as integers."""
    return f"{start}-{end}" if text is None else str(calendar_of(text).dates(start, end))


def split_dates(text: str) -> tuple[str, str | None] | None:
    """Splits `2026-11-01..2026-11-18`, also with `-` or `/`, or returns one date. None: the text has no dates."""
    found = _TEXTS.fullmatch(text)
    return None if found is None else (found[1], found[2])


def _seconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(seconds=1)


def seconds_of(moment: datetime) -> int:
    """Returns the position of an instant."""
    return _seconds(moment)


def _number_of(every: Every, day: date) -> int:
    return day.toordinal() if every is Every.DAILY else day.year * 12 + day.month - 1


def _wall(every: Every, number: int) -> datetime:
    if every is Every.DAILY:
        return datetime.combine(date.fromordinal(number), datetime.min.time())
    return datetime(number // 12, number % 12 + 1, 1)  # noqa: DTZ001 - a wall-clock time


def _check_position(position: int) -> None:
    if not _LOWEST <= position <= _HIGHEST:
        raise BadDate(f"position {position} is not in the years {FIRST_YEAR} to {LAST_YEAR}: write dates")


_LOWEST: Final = _seconds(datetime(FIRST_YEAR - 1, 12, 1, tzinfo=UTC))
_HIGHEST: Final = _seconds(datetime(LAST_YEAR + 1, 2, 1, tzinfo=UTC))
