"""Runs: folds deltas into counters, ends and cancels runs, records their events, and serves their rate and status."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec
import structlog

from interlock.clock import Clock
from interlock.errors import InterlockError
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.low_water import Look, LowWater
from interlock.stores.postgres import Connection, Database, Row, queries, try_lock
from interlock.stores.valkey import Coordination
from interlock.tasks.actions import Actions
from interlock.tasks.overview import add_minute_counts
from interlock.tasks.reads import Reads, run_view
from interlock.wire.jobs import JobView, RunView
from interlock.wire.webhooks import WebhookEvent, WebhookEventType, WebhookJob

_sql = queries(__name__, "runs")
_BATCH = 5000
_RUNS = 20
_SLACK_PAGES = 64
"""Concurrent writers fill different pages, some of them before the last one that was folded."""

Ctid = tuple[int, int]
"""Page and line of a row in its table (its ctid)."""


async def end_runs(connection: Connection, run_ids: Sequence[UUID]) -> list[UUID]:
    """Ends those of the runs whose tasks have all ended, and returns them."""
    return [row["run_id"] for row in await _sql.end_runs(connection, run_ids=run_ids)]


async def delete_nameless_job(connection: Connection, job_id: UUID) -> None:
    """Deletes the job if it has neither a name nor runs."""
    await _sql.delete_nameless_job(connection, job_id=job_id)


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
        look.skipped = not await try_lock(connection, self.name)
        if look.skipped:
            return []
        rows: list[Row] = await _sql.fold_deltas(connection, limit=_BATCH, since=look.since)
        look.reached = rows[0]["reached"] if rows else None
        await add_minute_counts(connection, rows)
        over = [row["run_id"] for row in rows if row["over"]]
        intolerable = [row["run_id"] for row in rows if row["intolerable"]]
        if intolerable:
            await _sql.stop_intolerable(connection, run_ids=intolerable)
        ended = await end_runs(connection, over) if over else []
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


_webhooks_sql = queries(__name__, "webhooks")


@dataclass(frozen=True, slots=True)
class Delivery:
    """A call of a webhook that is still to be made."""

    delivery_id: UUID
    org_id: UUID
    webhook_id: UUID
    event: str
    body: str
    run_id: UUID | None = None


async def record_run_events(
    connection: Connection, run_ids: Sequence[UUID], *, ended: Sequence[UUID], now: datetime, retention_days: float
) -> int:
    """Writes events of runs whose counters changed: the end of those in `ended`, and the shares that any have passed.

    `retention_days` applies to runs without their own retention.
    """
    rows: list[Row] = await _webhooks_sql.news_of_runs(connection, run_ids=run_ids, ended=ended)
    if rows:
        deliveries = [
            Delivery(
                row["delivery_id"],
                row["org_id"],
                row["webhook_id"],
                row["event"],
                _run_event(row, now, retention_days),
                row["run_id"],
            )
            for row in rows
        ]
        await insert_deliveries(connection, deliveries)
    return len(rows)


async def insert_deliveries(connection: Connection, deliveries: Sequence[Delivery]) -> None:
    """Queues calls of webhooks. The loop that delivers them signs, guards and retries them."""
    await _webhooks_sql.insert_deliveries(
        connection,
        ids=[each.delivery_id for each in deliveries],
        org_ids=[each.org_id for each in deliveries],
        webhook_ids=[each.webhook_id for each in deliveries],
        events=[each.event for each in deliveries],
        run_ids=[each.run_id for each in deliveries],
        bodies=[each.body for each in deliveries],
    )


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


_FRESH_MS: Final = 250
_KEPT_MS: Final = 1_000
"""A stale status is still served while one caller refreshes it: clients that keep polling never wait for Postgres."""
_LARGE: Final = 10_000
"""Number of tasks from which a status is cached. For a smaller run the read is as cheap as the cache."""
_REMEMBERED_MS: Final = 600_000
_SMOOTHED_SECONDS: Final = 10.0
"""Time constant of the moving average: older samples have little weight."""

# One sample per run: tasks ended, time and rate so far. Samples less than half a second apart are ignored.
_NOTE: Final = """
local now, smoothed, kept = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
for n, key in ipairs(KEYS) do
  local done = tonumber(ARGV[3 + n])
  local seen = redis.call('HMGET', key, 'at', 'done', 'rate')
  local at, before, rate = tonumber(seen[1]), tonumber(seen[2]), tonumber(seen[3])
  if at == nil or done < before or now < at then
    redis.call('HSET', key, 'at', now, 'done', done)
  elseif now - at >= 0.5 then
    local latest = (done - before) / (now - at)
    local weight = 1 - math.exp(-(now - at) / smoothed)
    rate = rate and rate + weight * (latest - rate) or latest
    redis.call('HSET', key, 'at', now, 'done', done, 'rate', tostring(rate))
  end
  redis.call('PEXPIRE', key, kept)
end
"""

# Returns the cached status, and 1 if this caller must refresh it: only one of the concurrent callers.
_STATUS: Final = """
local kept = redis.call('GET', KEYS[1])
if not kept then return {} end
local stale = redis.call('PTTL', KEYS[1]) <= tonumber(ARGV[1])
return {kept, stale and redis.call('SET', KEYS[2], 1, 'NX', 'PX', ARGV[2]) and 1 or 0}
"""

_view = msgspec.json.Decoder(JobView)
log = structlog.get_logger()


@dataclass(frozen=True)
class Ended:
    """The number of tasks of a run that have ended so far."""

    run_id: UUID
    tasks: int


class Pace:
    def __init__(self, coordination: Coordination | None, clock: Clock) -> None:
        self._coordination = coordination
        self._clock = clock

    async def note(self, ended: Sequence[Ended]) -> None:
        if self._coordination is None or not ended:
            return
        await self._coordination.script(
            _NOTE,
            keys=[_pace_key(one.run_id) for one in ended],
            args=[self._clock.now().timestamp(), _SMOOTHED_SECONDS, _REMEMBERED_MS, *(one.tasks for one in ended)],
        )

    async def of(self, run: RunView) -> float | None:
        """Returns tasks per second, or None before the first has ended.

        Without a recent sample this is the average since the run started.
        """
        counts = run.counts
        done = counts.Completed + counts.dead + counts.Canceled
        if not done or run.ended_at is not None:
            return None
        noted = await self._coordination.field(_pace_key(run.run_id), "rate") if self._coordination else None
        if noted is not None:
            return float(noted)
        return done / max(0.001, _seconds(run.created_at, self._clock.now()))


class HotStatus:
    def __init__(self, reads: Reads, pace: Pace, coordination: Coordination | None) -> None:
        self._reads = reads
        self._pace = pace
        self._coordination = coordination
        self._renewals: set[asyncio.Task[None]] = set()

    async def job(self, job: str, org_id: UUID) -> JobView:
        found = await self._kept(_status_key(job, org_id))
        if found is None:
            return await self._read(job, org_id)
        kept, stale = found
        if stale:
            renewal = asyncio.create_task(self._renew(job, org_id))
            self._renewals.add(renewal)
            renewal.add_done_callback(self._renewals.discard)
        return _view.decode(kept)

    async def _kept(self, key: str) -> tuple[bytes, bool] | None:
        if self._coordination is None:
            return None
        left = [_KEPT_MS - _FRESH_MS, _FRESH_MS]
        found = await self._coordination.script(_STATUS, keys=[key, f"{key}:renewed"], args=left)
        return (found[0], bool(found[1])) if found else None

    async def _renew(self, job: str, org_id: UUID) -> None:
        try:
            view = await self._read(job, org_id)
            if view.run is None or view.run.ended_at is not None:
                await self.forget([job], org_id)
        except InterlockError as error:
            # No caller waits for this. Once the cached status expires, the next caller gets the same error.
            log.warning("status.not_renewed", code=error.code, reason=error.detail)

    async def _read(self, job: str, org_id: UUID) -> JobView:
        view = await self._reads.job(job, org_id)
        if view.run is None or view.run.ended_at is not None:
            return view
        run = await self._paced(view.run)
        view = msgspec.structs.replace(view, run=run)
        if self._coordination and (run.total or 0) >= _LARGE:
            await self._coordination.put(_status_key(job, org_id), msgspec.json.encode(view), milliseconds=_KEPT_MS)
        return view

    async def run(self, run_id: UUID, org_id: UUID) -> RunView:
        view = await self._reads.run(run_id, org_id)
        return view if view.ended_at is not None else await self._paced(view)

    async def _paced(self, run: RunView) -> RunView:
        rate = await self._pace.of(run)
        counts = run.counts
        left = counts.Queued + counts.Running + counts.Failed - counts.dead
        known = run.total is not None and rate is not None and rate > 0
        return msgspec.structs.replace(run, rate=rate, eta_seconds=left / rate if known and rate else None)

    async def forget(self, jobs: Sequence[str | None], org_id: UUID) -> None:
        """Invalidates the status of jobs, so that a caller sees its own change."""
        if self._coordination:
            await self._coordination.drop([_status_key(job, org_id) for job in jobs if job])


def _pace_key(run_id: UUID) -> str:
    return f"interlock:pace:{run_id}"


def _status_key(job: str, org_id: UUID) -> str:
    return f"interlock:status:{org_id}:{hashlib.sha256(job.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _seconds(since: datetime, now: datetime) -> float:
    return (now - since).total_seconds()
