"""Schedules of cron sources: start times in time zones with daylight saving time, and the partitions they stand for.

A schedule is in wall-clock time. A time that is skipped when clocks go forward starts once, right after the change. A
time that occurs twice starts once, at its first occurrence. So wall-clock times in order are instants in order, and the
next start after an instant is the first of the following wall-clock times that is later than it.

A start of a job with time partitions stands for the partitions that have ended since the start before it: one task for
each. `covered_to` records how far they have had their tasks, so that neither a crash nor a changed schedule leaves one
out or repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from croniter import CroniterBadDateError, croniter

from interlock.calendars import Calendar, Range, known, seconds_of
from interlock.dags.definition import CatchUp, Source, SourceKind
from interlock.dags.fields import duration

_MAX_INTERVALS: Final = 1000
"""Partitions per pass, beyond those of one start. A backlog is processed in several passes."""
_SECOND: Final = timedelta(seconds=1)


@dataclass(frozen=True)
class Schedule:
    expression: str
    timezone: str = "UTC"

    @cached_property
    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    def after(self, moment: datetime) -> datetime | None:
        """Returns the first start after this instant; None if the schedule has no more starts."""
        wall = croniter(self.expression, self._wall(moment))
        try:
            while True:
                start = self._instant(wall.get_next(datetime))
                if start > moment:
                    return start
        except CroniterBadDateError:
            return None

    def back_from(self, moment: datetime) -> Iterator[datetime]:
        """Yields starts up to and including this instant, the latest first, each once."""
        wall = croniter(self.expression, self._latest_wall(moment) + _SECOND)
        last: datetime | None = None
        while True:
            try:
                start = self._instant(wall.get_prev(datetime))
            except CroniterBadDateError:
                return
            if start <= moment and start != last:
                last = start
                yield start

    def _wall(self, moment: datetime) -> datetime:
        return moment.astimezone(self._zone).replace(tzinfo=None, fold=0)

    def _latest_wall(self, moment: datetime) -> datetime:
        """Returns the latest wall-clock time reached so far: in a repeated hour, the end of that hour."""
        local = moment.astimezone(self._zone)
        gone_back = _offset(local.replace(fold=0)) - _offset(local.replace(fold=1)) if local.fold else timedelta()
        return local.replace(tzinfo=None, fold=0) + gone_back

    def _instant(self, wall: datetime) -> datetime:
        earlier, later = (wall.replace(tzinfo=self._zone, fold=fold).astimezone(UTC) for fold in (1, 0))
        if self._wall(later) == wall:
            return later
        return self._leap(earlier, later)

    def _leap(self, before: datetime, after: datetime) -> datetime:
        """Finds the instant between these two at which clocks go forward."""
        offset = _offset(after.astimezone(self._zone))
        while after - before > _SECOND:
            middle = before + timedelta(seconds=(after - before) // _SECOND // 2)
            if _offset(middle.astimezone(self._zone)) == offset:
                after = middle
            else:
                before = middle
        return after


def _offset(local: datetime) -> timedelta:
    return local.utcoffset() or timedelta()


@dataclass(frozen=True)
class Cron:
    """A cron source as deployed."""

    schedule: Schedule
    grace: timedelta
    """A start later than this counts as missed."""
    catch_up: CatchUp
    max_starts: int
    """Maximum number of starts per pass."""

    def next_starts(self, since: datetime, now: datetime) -> list[datetime]:
        """Returns the earliest starts that were not made, oldest first. None of them is ever skipped."""
        found: list[datetime] = []
        start = self.schedule.after(since)
        while start is not None and start <= now and len(found) < self.max_starts:
            found.append(start)
            start = self.schedule.after(start)
        return found

    def due(self, since: datetime, now: datetime) -> list[datetime]:
        """Returns the starts to make now, oldest first: those after `since` that are on time or to be caught up."""
        found: list[datetime] = []
        missed = 0
        for start in self.schedule.back_from(now):
            if start <= since or len(found) >= self.max_starts:
                break
            if now - start > self.grace:
                missed += 1
                if self.catch_up is CatchUp.NONE or (self.catch_up is CatchUp.LATEST and missed > 1):
                    break
            found.append(start)
        return found[::-1]


def cron_of(source: Source) -> Cron:
    if source.kind is not SourceKind.CRON or source.schedule is None:
        raise ValueError("the source has no schedule")
    grace = timedelta(seconds=source.misfire_grace)
    return Cron(Schedule(source.schedule, source.timezone), grace, source.catch_up, source.max_catch_up)


def utc_texts(starts: Sequence[datetime]) -> list[str]:
    """Formats starts in UTC for payloads and dedupe keys, whatever the schedule's time zone."""
    return [start.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for start in starts]


def source_of(document: dict[str, object]) -> Source:
    """Decodes the source of a job from its canonical document in the registry."""
    written = dict(document)
    if isinstance(grace := written.get("misfire_grace"), str):
        written["misfire_grace"] = duration(grace)
    return msgspec.convert(written, Source)


@dataclass(frozen=True)
class Covered:
    """The partitions that starts of a job stand for."""

    cron: Cron
    calendar: Calendar
    covered_to: int
    """Partitions that begin before this position have had their start."""

    @classmethod
    def of(cls, cron: Cron, calendar: Calendar, last_at: datetime, covered_to: datetime | None) -> Covered:
        """Returns the partitions of a job. One that was never followed begins after its last start before `last_at`."""
        since = covered_to or next(cron.schedule.back_from(last_at), last_at)
        return cls(cron, calendar, calendar.partition(seconds_of(since))[0])

    def until(self, start: datetime) -> list[Range]:
        """Returns the partitions that a start stands for: those that have ended by then and had none."""
        reached = self._reached(start)
        return list(self.calendar.partitions(self.covered_to, reached - 1)) if reached > self.covered_to else []

    def _reached(self, moment: datetime) -> int:
        """Returns the start of the partition in progress at this time."""
        return self.calendar.partition(seconds_of(moment))[0]

    def after(self, start: datetime) -> Covered:
        return Covered(self.cron, self.calendar, max(self.covered_to, self._reached(start)))

    def due(self, since: datetime, now: datetime) -> tuple[list[_Due], Covered, bool]:
        """Returns the starts to make with their partitions, the state after them, and whether more are due now."""
        every = self.cron.catch_up is CatchUp.ALL
        starts = self.cron.next_starts(since, now) if every else self.cron.due(since, now)
        covered = self if every else self._without_missed(since, starts[0] - _SECOND if starts else now)
        made: list[_Due] = []
        for start in starts:
            made.append(_Due(start, covered.until(start)))
            covered = covered.after(start)
            if sum(len(one.partitions) for one in made) >= _MAX_INTERVALS:
                break
        reached = made[-1].start if made else since
        following = self.cron.schedule.after(reached)
        more = every and following is not None and following <= now
        return made, covered, more

    def _without_missed(self, since: datetime, until: datetime) -> Covered:
        """Leaves out the partitions of starts that were missed until then and are not made up for."""
        previous = next(self.cron.schedule.back_from(until), since)
        return self.after(previous) if previous > since else self


@dataclass(frozen=True)
class _Due:
    """A start to make, and the partitions that it stands for."""

    start: datetime
    partitions: Sequence[Range]


def next_interval(
    source: dict[str, object], partition: str | None, covered_to: datetime | None, next_at: datetime | None
) -> Range | None:
    """Returns the range of the partitions that the next start of a schedule stands for."""
    calendar = known(partition)
    if calendar is None or covered_to is None or next_at is None:
        return None
    found = Covered(cron_of(source_of(source)), calendar, seconds_of(covered_to)).until(next_at)
    return (found[0][0], found[-1][1]) if found else None
