"""Cron sources: start times in time zones with daylight saving time, and the loop that starts them.

A schedule is in wall-clock time. A time that is skipped when clocks go forward starts once, right after the change. A
time that occurs twice starts once, at its first occurrence. So wall-clock times in order are instants in order, and the
next start after an instant is the first of the following wall-clock times that is later than it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Final
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import structlog
from croniter import CroniterBadDateError, CroniterError, croniter

from interlock.dags import sources
from interlock.dags.definition import CatchUp, Source, SourceKind
from interlock.dags.fields import duration
from interlock.dags.sources import Trigger
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries, try_lock

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


log = structlog.get_logger()

_sql = queries(__name__, "sources")

_SCHEDULES: Final = 100
_UNUSABLE_SECONDS: Final = 3600.0
"""Delay before retrying a schedule that this machine cannot evaluate, for example because its time zone is missing."""


@dataclass(frozen=True)
class _Step:
    job_id: UUID
    starts: list[datetime]
    last_at: datetime
    next_at: datetime | None


class Scheduler(Periodic):
    name = "scheduler"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.schedule_seconds
        self._database = database

    async def run_once(self) -> int:
        steps = await self._database.run(self._pass)
        for step in steps:
            if step.starts:
                log.info("cron.started", job_id=str(step.job_id), starts=len(step.starts))
        return len(steps)

    async def _pass(self, connection: Connection) -> list[_Step]:
        if not await try_lock(connection, self.name):
            return []
        await _sql.follow_schedules(connection)
        steps = [_step(row) for row in await _sql.due_schedules(connection, limit=_SCHEDULES)]
        for step in steps:
            if step.starts:
                await sources.accept(connection, [step.job_id], [_trigger(start) for start in utc_texts(step.starts)])
        if steps:
            await _sql.set_schedules(
                connection,
                job_ids=[step.job_id for step in steps],
                last_ats=[step.last_at for step in steps],
                next_ats=[step.next_at for step in steps],
            )
        await failpoint("schedule.before_commit")
        return steps


def _step(row: Row) -> _Step:
    now = max(row["now"], row["last_at"])
    try:
        cron = cron_of(source_of(msgspec.json.decode(row["source"])))
        starts, following = cron.due(row["last_at"], row["now"]), cron.schedule.after(now)
    except (ZoneInfoNotFoundError, CroniterError, ValueError, OverflowError) as error:
        log.warning("cron.unusable", job_id=str(row["job_id"]), reason=str(error), effect="retried in an hour")
        return _Step(row["job_id"], [], row["last_at"], now + timedelta(seconds=_UNUSABLE_SECONDS))
    return _Step(row["job_id"], starts, now, following)


def _trigger(start: str) -> Trigger:
    return Trigger(f"cron:{start}", msgspec.json.encode({"scheduled_at": start}))
