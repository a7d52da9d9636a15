"""Throughput, live runs and failures of an org; failures, timeline and durations of a run: the dashboard's reads.

Nothing here depends on how much is stored. A large run is represented by a sample, and the reply says so.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from interlock.errors import NotFound
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.queue import Queue
from interlock.tasks.reads import run_by_id
from interlock.wire.base import Outcome, RunState, TaskStatus
from interlock.wire.jobs import Counts
from interlock.wire.overview import (
    DurationBucket,
    FailureGroup,
    FailureView,
    LiveRun,
    LongTask,
    MinuteCounts,
    Overview,
    ProcessHealth,
    RunDurations,
    RunFailures,
    RunTimeline,
    TimelineAttempt,
)
from interlock.wire.tasks import JobRef, QueueView

_sql = queries(__name__, "overview")

MINUTES: Final = 60
NEWEST_FAILURES: Final = 20
LIVE_RUNS: Final = 50
TIMELINE_TASKS: Final = 200
DURATION_TASKS: Final = 1_000
FAILED_TASKS: Final = 1_000
_LOOKED_AT_RUNS: Final = 500
_LOOKED_AT_ATTEMPTS: Final = 300
_LONGEST: Final = 10
_BUCKETS: Final = 24
_SHAPE_LENGTH: Final = 300


class Overviews:
    def __init__(self, database: Database, queue: Queue, queue_names: Sequence[str]) -> None:
        self._database = database
        self._queue = queue
        self._queue_names = queue_names

    async def overview(self, org_id: UUID, *, minutes: int = MINUTES, failures: int = NEWEST_FAILURES) -> Overview:
        async with self._database.connection() as connection:
            processes = await _sql.processes(connection)
            counts = await _sql.minute_counts(connection, org_id=org_id, minutes=minutes)
            runs = await _sql.live_runs(connection, org_id=org_id, looked_at=_LOOKED_AT_RUNS, limit=LIVE_RUNS)
            failed = await self._failures(connection, org_id, failures)
        return Overview(
            at=self._database.clock.now(),
            processes=[ProcessHealth(name=row["name"], connections=row["connections"]) for row in processes],
            minutes=[_minute(row) for row in counts],
            queues=[await queue_view(self._queue, name) for name in self._queue_names],
            runs=[_live(row) for row in runs],
            failures=failed,
        )

    async def failures(self, org_id: UUID, limit: int) -> list[FailureView]:
        async with self._database.connection() as connection:
            return await self._failures(connection, org_id, limit)

    async def _failures(self, connection: Connection, org_id: UUID, limit: int) -> list[FailureView]:
        """Returns the org's failures among the newest of all orgs within a day."""
        since = self._database.clock.now() - timedelta(days=1)
        rows = await _sql.recent_failed_attempts(connection, since=since, limit=_LOOKED_AT_ATTEMPTS)
        by_shard: defaultdict[int, list[UUID]] = defaultdict(list)
        for row in rows:
            by_shard[row["shard"]].append(row["task_id"])
        tasks: dict[UUID, Row] = {}
        for shard, ids in by_shard.items():
            found = await _sql.tasks_of_org(connection, shard=shard, task_ids=ids, org_id=org_id)
            tasks |= {task["task_id"]: task for task in found}
        mine = [row for row in rows if row["task_id"] in tasks][:limit]
        return [_failure(row, tasks[row["task_id"]]) for row in mine]

    async def run_failures(self, run_id: UUID, org_id: UUID) -> RunFailures:
        """Groups failed tasks by error class and message shape: of a large number, the first by index."""
        async with self._database.connection() as connection:
            run = await _run(connection, run_id, org_id)
            which = {"shard": run["shard"], "run_id": run_id, "org_id": org_id}
            rows = await _sql.failed_sample(connection, first=0, limit=FAILED_TASKS, **which)
        more = len(rows) == FAILED_TASKS
        groups: dict[tuple[str | None, str], list[Row]] = {}
        for row in rows:
            groups.setdefault((row["error_class"], shape(row["error_message"])), []).append(row)
        ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
        return RunFailures(
            run_id=run_id,
            groups=[_group(error_class, text, found) for (error_class, text), found in ordered],
            sampled=more,
            looked_at=len(rows),
            failed=max(run["failed"], len(rows)),
        )

    async def timeline(self, run_id: UUID, org_id: UUID) -> RunTimeline:
        async with self._database.connection() as connection:
            run = await _run(connection, run_id, org_id)
            tasks = await _sample(connection, run, org_id, TIMELINE_TASKS)
            started = [row["task_id"] for row in tasks if row["attempt"] > 1 or row["status"] in ("Failed", "Canceled")]
            earlier = await _sql.attempts_of_tasks(connection, task_ids=started)
        indexes = {row["task_id"]: row["task_index"] for row in tasks}
        attempts = [_attempt(row, indexes[row["task_id"]], row["outcome"]) for row in earlier]
        attempts += [
            _attempt(row, row["task_index"], row["status"] if row["status"] == TaskStatus.COMPLETED else None)
            for row in tasks
            if row["status"] in (TaskStatus.RUNNING, TaskStatus.COMPLETED) and row["started_at"] is not None
        ]
        return RunTimeline(
            run_id=run_id,
            sampled=run["last_index"] >= TIMELINE_TASKS,
            looked_at=len(tasks),
            of=run["last_index"] + 1,
            attempts=sorted(attempts, key=lambda attempt: attempt.started_at),
        )

    async def durations(self, run_id: UUID, org_id: UUID) -> RunDurations:
        async with self._database.connection() as connection:
            run = await _run(connection, run_id, org_id)
            rows = await _sample(connection, run, org_id, DURATION_TASKS)
        ended = [row for row in rows if row["status"] == TaskStatus.COMPLETED and row["started_at"] and row["ended_at"]]
        pairs = [((row["ended_at"] - row["started_at"]).total_seconds(), row) for row in ended]
        timed = sorted(pairs, key=lambda pair: pair[0])
        seconds = [max(0.0, each) for each, _ in timed]
        return RunDurations(
            run_id=run_id,
            sampled=run["last_index"] >= DURATION_TASKS,
            looked_at=len(rows),
            of=run["last_index"] + 1,
            buckets=buckets(seconds),
            p50=_percentile(seconds, 0.5),
            p90=_percentile(seconds, 0.9),
            p99=_percentile(seconds, 0.99),
            longest=[
                LongTask(task_id=row["task_id"], index=row["task_index"], seconds=each)
                for each, row in reversed(timed[-_LONGEST:])
            ],
        )


async def queue_view(queue: Queue, name: str) -> QueueView:
    return QueueView(
        queue=name,
        depth=await queue.depth(name),
        in_flight=await queue.in_flight(name),
        oldest_age_seconds=await queue.oldest_age(name),
        dead_letters=await queue.dead_letter_count(name),
    )


async def add_minute_counts(connection: Connection, rows: Sequence[Row]) -> None:
    """Adds what the fold of run counters has found to the current minute of each org."""
    totals: defaultdict[UUID, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        for place, name in enumerate(("newly_completed", "newly_failed", "newly_canceled")):
            totals[row["org_id"]][place] += row[name]
    found = sorted((org_id, *counts) for org_id, counts in totals.items() if any(counts))
    if found:
        org_ids, completed, failed, canceled = (list(column) for column in zip(*found, strict=True))
        await _sql.add_minute_counts(connection, org_ids=org_ids, completed=completed, failed=failed, canceled=canceled)


async def delete_old_minutes(connection: Connection, limit: int) -> int:
    return len(await _sql.delete_old_minutes(connection, limit=limit))


async def _run(connection: Connection, run_id: UUID, org_id: UUID) -> Row:
    run = await run_by_id(connection, run_id, org_id)
    if run is None:
        raise NotFound(f"There is no run {run_id} in this org.")
    return run


async def _sample(connection: Connection, run: Row, org_id: UUID, size: int) -> list[Row]:
    """Returns up to `size` tasks, evenly spaced over the indexes of the run."""
    total = run["last_index"] + 1
    indexes = range(total) if total <= size else [position * total // size for position in range(size)]
    rows: list[Row] = await _sql.sampled_tasks(
        connection, indexes=list(indexes), shard=run["shard"], run_id=run["run_id"], org_id=org_id
    )
    return rows


_VARIABLE: Final = re.compile(
    r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}|'[^']*'|\"[^\"]*\"|\b[0-9a-fA-F]{12,}\b|\d[\d.,:_-]*"
)


def shape(message: str | None) -> str:
    """Returns a message without what differs from task to task: numbers, ids and quoted text."""
    return _VARIABLE.sub("…", (message or "")[: 4 * _SHAPE_LENGTH])[:_SHAPE_LENGTH]


def buckets(seconds: Sequence[float]) -> list[DurationBucket]:
    """Returns a histogram with buckets of equal ratio between the shortest and the longest duration."""
    if not seconds:
        return []
    low, high = max(0.001, seconds[0]), max(0.001, seconds[-1])
    if high / low < 1.05:
        return [DurationBucket(from_seconds=low, to_seconds=high, tasks=len(seconds))]
    count = min(_BUCKETS, max(4, math.ceil(math.sqrt(len(seconds)))))
    ratio = (high / low) ** (1 / count)
    tasks = [0] * count
    for each in seconds:
        tasks[min(count - 1, max(0, int(math.log(max(each, low) / low, ratio))))] += 1
    edges = [low * ratio**step for step in range(count)] + [high]
    return [
        DurationBucket(from_seconds=edges[step], to_seconds=edges[step + 1], tasks=tasks[step]) for step in range(count)
    ]


def _percentile(seconds: Sequence[float], share: float) -> float | None:
    return seconds[min(len(seconds) - 1, int(share * len(seconds)))] if seconds else None


def _group(error_class: str | None, text: str, rows: Sequence[Row]) -> FailureGroup:
    return FailureGroup(
        error_class=error_class,
        shape=text,
        tasks=len(rows),
        dead=sum(row["dead"] for row in rows),
        sample_task_id=rows[0]["task_id"],
        sample_message=rows[0]["error_message"],
        first_index=rows[0]["task_index"],
    )


def _minute(row: Row) -> MinuteCounts:
    return MinuteCounts(
        minute=row["minute"], completed=row["completed"], failed=row["failed"], canceled=row["canceled"]
    )


def _live(row: Row) -> LiveRun:
    return LiveRun(
        run_id=row["run_id"],
        job_id=row["job_id"],
        job=JobRef(dag_name=row["dag_name"], name=row["name"]),
        state=RunState(row["state"]),
        total=row["total"],
        counts=Counts(
            Queued=row["queued"],
            Running=row["running"],
            Completed=row["completed"],
            Failed=row["failed"],
            Canceled=row["canceled"],
            dead=row["dead"],
        ),
        created_at=row["created_at"],
    )


def _failure(row: Row, task: Row) -> FailureView:
    return FailureView(
        task_id=row["task_id"],
        run_id=task["run_id"],
        job_id=task["job_id"],
        job=JobRef(dag_name=task["dag_name"], name=task["name"]),
        index=task["task_index"],
        attempt=row["attempt"],
        outcome=Outcome(row["outcome"]),
        error_class=row["error_class"],
        error_message=row["error_message"],
        worker_id=row["worker_id"],
        ended_at=row["ended_at"],
    )


def _attempt(row: Row, index: int, outcome: str | None) -> TimelineAttempt:
    ended: datetime | None = row["ended_at"]
    return TimelineAttempt(
        task_id=row["task_id"],
        index=index,
        attempt=row["attempt"],
        worker_id=row["worker_id"],
        started_at=row["started_at"],
        ended_at=ended,
        outcome=None if outcome is None else Outcome(outcome),
    )
