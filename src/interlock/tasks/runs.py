"""Folds deltas into the counters of runs, ends finished runs, cancels whole runs, and records their events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.low_water import Look, LowWater
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.actions import Actions
from interlock.tasks.reads import run_view
from interlock.tasks.run_progress import Ended, Pace
from interlock.wire import WebhookEvent, WebhookEventType, WebhookJob

_sql = queries("tasks", "runs")
_BATCH = 5000
_RUNS = 20
_SLACK_PAGES = 64
"""Concurrent writers fill different pages, some of them before the last one that was folded."""

Ctid = tuple[int, int]
"""Page and line of a row in its table (its ctid)."""


class RunCounters(Periodic):
    name = "run-counters"

    def __init__(self, database: Database, settings: Settings, pace: Pace) -> None:
        self.seconds = settings.fold_seconds
        self._database = database
        self._pace = pace
        self._retention_days = settings.retention_days
        self._water: LowWater[Ctid] = LowWater((0, 0), lambda place: (max(0, place[0] - _SLACK_PAGES), 0))

    async def run_once(self) -> int:
        with self._water.look() as look:
            rows = await self._database.run(lambda connection: self._fold(connection, look))
        await self._pace.note([Ended(row["run_id"], row["done"]) for row in rows])
        return len(rows)

    async def _fold(self, connection: Connection, look: Look[Ctid]) -> list[Row]:
        # Two folding dispatchers would only wait for each other's run rows.
        look.skipped = not await _sql.only_one(connection, name=self.name)
        if look.skipped:
            return []
        rows: list[Row] = await _sql.fold_deltas(connection, limit=_BATCH, since=look.since)
        look.reached = rows[0]["reached"] if rows else None
        over = [row["run_id"] for row in rows if row["over"]]
        intolerable = [row["run_id"] for row in rows if row["intolerable"]]
        if intolerable:
            await _sql.stop_intolerable(connection, run_ids=intolerable)
        ended = [row["run_id"] for row in await _sql.end_runs(connection, run_ids=over)] if over else []
        watched = [row["run_id"] for row in rows if row["watched"]]
        if watched:
            now = self._database.clock.now()
            await record_run_events(connection, watched, ended=ended, now=now, retention_days=self._retention_days)
        await failpoint("fold.before_commit")
        return rows


class RunCancels(Periodic):
    name = "run-cancels"

    def __init__(self, database: Database, settings: Settings, actions: Actions) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._actions = actions

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            runs = await _sql.canceling_runs(connection, limit=_RUNS)
        done = 0
        for row in runs:
            await self._actions.cancel_some_of_run(row)
            done += 1
        return done


_webhooks_sql = queries("webhooks", "webhooks")


async def record_run_events(
    connection: Connection, run_ids: Sequence[UUID], *, ended: Sequence[UUID], now: datetime, retention_days: float
) -> int:
    """Writes events of runs whose counters changed: the end of those in `ended`, and the shares that any have passed.

    `retention_days` applies to runs without their own retention.
    """
    rows: list[Row] = await _webhooks_sql.news_of_runs(connection, run_ids=run_ids, ended=ended)
    if rows:
        await _webhooks_sql.insert_deliveries(
            connection,
            ids=[row["delivery_id"] for row in rows],
            org_ids=[row["org_id"] for row in rows],
            webhook_ids=[row["webhook_id"] for row in rows],
            events=[row["event"] for row in rows],
            run_ids=[row["run_id"] for row in rows],
            bodies=[_run_event(row, now, retention_days) for row in rows],
        )
    return len(rows)


def _run_event(row: Row, now: datetime, retention_days: float) -> str:
    return _text(
        WebhookEvent(
            id=row["delivery_id"],
            type=WebhookEventType(row["event"]),
            created_at=now,
            org=row["org"],
            webhook=row["webhook"],
            job=WebhookJob(job_id=row["job_id"], dag_name=row["dag_name"], name=row["job_name"]),
            run=run_view(row, retention_days),
        )
    )


def trial_event(delivery_id: UUID, org: str, webhook: str, now: datetime) -> str:
    """Returns the body of a test event."""
    event = WebhookEvent(id=delivery_id, type=WebhookEventType.TEST, created_at=now, org=org, webhook=webhook)
    return _text(event)


def _text(event: WebhookEvent) -> str:
    return msgspec.json.encode(event).decode()
