"""Follows the schedules of cron sources, in a process of its own. Any number may run: one at a time makes a pass.

How far a schedule was followed is in the database, and each start is a trigger whose key is its time. So a scheduler
that dies goes on where it was, and neither a restart nor a clock that goes back makes a start twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID
from zoneinfo import ZoneInfoNotFoundError

import msgspec
import structlog
from croniter import CroniterError

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.dags import triggers
from interlock.dags.schedule import cron_of, source_of, spoken
from interlock.dags.triggers import Trigger
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.settings import Settings

log = structlog.get_logger()

_sql = queries("sources")
_runs_sql = queries("runs")

_SCHEDULES: Final = 100
_UNUSABLE_SECONDS: Final = 3600.0
"""Until a schedule that this machine cannot read, for want of its time zone, is tried again."""


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
        if not await _runs_sql.only_one(connection, name=self.name):
            return []
        await _sql.follow_schedules(connection)
        steps = [_step(row) for row in await _sql.due_schedules(connection, most=_SCHEDULES)]
        for step in steps:
            if step.starts:
                await triggers.accept(connection, [step.job_id], [_trigger(start) for start in spoken(step.starts)])
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
        log.warning("cron.unusable", job_id=str(row["job_id"]), reason=str(error), effect="tried again in an hour")
        return _Step(row["job_id"], [], row["last_at"], now + timedelta(seconds=_UNUSABLE_SECONDS))
    return _Step(row["job_id"], starts, now, following)


def _trigger(start: str) -> Trigger:
    return Trigger(f"cron:{start}", msgspec.json.encode({"scheduled_at": start}))
