"""When a cron schedule starts, in a time zone that may put its clocks forward and back.

A schedule is meant in wall-clock time. A time that the clocks leap over starts once, right after the leap. A time that
comes twice starts once, the first time. So wall-clock times, in their order, are instants in their order, and the next
start after an instant is the first one of the next wall-clock times that lies behind it.
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

from interlock.dags.definition import CatchUp, Source, SourceKind
from interlock.dags.scalars import duration

_SECOND: Final = timedelta(seconds=1)


@dataclass(frozen=True)
class Schedule:
    expression: str
    timezone: str = "UTC"

    @cached_property
    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    def after(self, moment: datetime) -> datetime | None:
        """The first start behind this instant; None for a schedule that has come to its end."""
        wall = croniter(self.expression, self._wall(moment))
        try:
            while True:
                start = self._instant(wall.get_next(datetime))
                if start > moment:
                    return start
        except CroniterBadDateError:
            return None

    def back_from(self, moment: datetime) -> Iterator[datetime]:
        """Starts up to and with this instant, the newest first, each once."""
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
        """The latest wall-clock time that had come by then: in an hour that comes again, that is the hour's end."""
        local = moment.astimezone(self._zone)
        gone_back = _offset(local.replace(fold=0)) - _offset(local.replace(fold=1)) if local.fold else timedelta()
        return local.replace(tzinfo=None, fold=0) + gone_back

    def _instant(self, wall: datetime) -> datetime:
        earlier, later = (wall.replace(tzinfo=self._zone, fold=fold).astimezone(UTC) for fold in (1, 0))
        if self._wall(later) == wall:
            return later
        return self._leap(earlier, later)

    def _leap(self, before: datetime, after: datetime) -> datetime:
        """Between these two the clocks are put forward: when exactly."""
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
    """A cron source as it was deployed."""

    schedule: Schedule
    grace: timedelta
    """A start that is later than this was missed."""
    catch_up: CatchUp
    most: int
    """Starts that are made at once."""

    def due(self, since: datetime, now: datetime) -> list[datetime]:
        """The starts to make now, the oldest first: those behind `since` that are not missed, or made up for."""
        found: list[datetime] = []
        missed = 0
        for start in self.schedule.back_from(now):
            if start <= since or len(found) >= self.most:
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


def spoken(starts: Sequence[datetime]) -> list[str]:
    """As payloads and dedupe keys name them, whatever zone the schedule is in."""
    return [start.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for start in starts]


def source_of(document: dict[str, object]) -> Source:
    """The source of a job as the registry holds it: its canonical document."""
    written = dict(document)
    if isinstance(grace := written.get("misfire_grace"), str):
        written["misfire_grace"] = duration(grace)
    return msgspec.convert(written, Source)
