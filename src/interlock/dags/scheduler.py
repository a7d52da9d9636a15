"""The loop that starts cron sources."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID
from zoneinfo import ZoneInfoNotFoundError

import msgspec
import structlog
from croniter import CroniterError

from interlock.calendars import Calendar, Range, interval_payload, known
from interlock.dags import sources
from interlock.dags.schedules import Covered, cron_of, source_of, utc_texts
from interlock.dags.sources import Trigger
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries, try_lock

log = structlog.get_logger()

_sql = queries(__name__, "sources")

_SCHEDULES: Final = 100
_UNUSABLE_SECONDS: Final = 3600.0
"""Delay before retrying a schedule that this machine cannot evaluate, for example because its time zone is missing."""


@dataclass(frozen=True)
class _Step:
    job_id: UUID
    triggers: list[Trigger]
    last_at: datetime
    next_at: datetime | None
    covered_to: datetime | None = None


class Scheduler(Periodic):
    name = "scheduler"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.schedule_seconds
        self._database = database

    async def run_once(self) -> int:
        steps = await self._database.run(self._pass)
        for step in steps:
            if step.triggers:
                log.info("cron.started", job_id=str(step.job_id), starts=len(step.triggers))
        return len(steps)

    async def _pass(self, connection: Connection) -> list[_Step]:
        if not await try_lock(connection, self.name):
            return []
        await _sql.follow_schedules(connection)
        steps = [_step(row) for row in await _sql.due_schedules(connection, limit=_SCHEDULES)]
        for step in steps:
            if step.triggers:
                await sources.accept(connection, [step.job_id], step.triggers)
        if steps:
            await _sql.set_schedules(
                connection,
                job_ids=[step.job_id for step in steps],
                last_ats=[step.last_at for step in steps],
                next_ats=[step.next_at for step in steps],
                covered_tos=[step.covered_to for step in steps],
            )
        await failpoint("schedule.before_commit")
        return steps


def _step(row: Row) -> _Step:
    now = max(row["now"], row["last_at"])
    try:
        cron = cron_of(source_of(msgspec.json.decode(row["source"])))
        if (calendar := known(row["partition"])) is not None:
            return _intervals(row, Covered.of(cron, calendar, row["last_at"], row["covered_to"]), now)
        starts, following = cron.due(row["last_at"], row["now"]), cron.schedule.after(now)
    except (ZoneInfoNotFoundError, CroniterError, ValueError, OverflowError) as error:
        log.warning("cron.unusable", job_id=str(row["job_id"]), reason=str(error), effect="retried in an hour")
        return _Step(row["job_id"], [], row["last_at"], now + timedelta(seconds=_UNUSABLE_SECONDS), row["covered_to"])
    return _Step(row["job_id"], [_trigger(start) for start in utc_texts(starts)], now, following)


def _trigger(start: str) -> Trigger:
    return Trigger(f"cron:{start}", msgspec.json.encode({"scheduled_at": start}))


def _intervals(row: Row, covered: Covered, now: datetime) -> _Step:
    calendar = covered.calendar
    made, after, more = covered.due(row["last_at"], row["now"])
    found = [_interval_trigger(calendar, one.start, partition) for one in made for partition in one.partitions]
    last_at, next_at = (made[-1].start, now) if more else (now, covered.cron.schedule.after(now))
    return _Step(row["job_id"], found, last_at, next_at, calendar.local(after.covered_to))


def _interval_trigger(calendar: Calendar, start: datetime, partition: Range) -> Trigger:
    """The key is the partition itself: whatever becomes of the schedule, it gets one task."""
    (scheduled_at,) = utc_texts([start])
    first, last = partition
    payload = {"scheduled_at": scheduled_at, **interval_payload(calendar, partition)}
    return Trigger(f"interval:{first}-{last}", msgspec.json.encode(payload))
