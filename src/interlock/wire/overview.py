"""Bodies of the dashboard: health, throughput, failures, timelines and durations of runs, search."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from interlock.wire.base import Outcome, Reply, RunState
from interlock.wire.bulk_operations import BulkView
from interlock.wire.jobs import Counts
from interlock.wire.tasks import JobRef, QueueView


class ProcessHealth(Reply, frozen=True, kw_only=True):
    """A kind of process, with its connections to the state database. One that is down has none and is not listed."""

    name: str
    connections: int


class MinuteCounts(Reply, frozen=True, kw_only=True):
    """Tasks of runs that ended within a minute. `failed` counts attempts, whether they are retried or not."""

    minute: datetime
    completed: int
    failed: int
    canceled: int


class FailureView(Reply, frozen=True, kw_only=True):
    """A failed attempt."""

    task_id: UUID
    run_id: UUID | None
    job_id: UUID
    job: JobRef
    index: int | None
    attempt: int
    outcome: Outcome
    error_class: str | None
    error_message: str | None
    worker_id: str | None
    ended_at: datetime


class FailureList(Reply, frozen=True, kw_only=True):
    failures: list[FailureView]


class LiveRun(Reply, frozen=True, kw_only=True):
    run_id: UUID
    job_id: UUID
    job: JobRef
    state: RunState
    total: int | None
    counts: Counts
    created_at: datetime


class Overview(Reply, frozen=True, kw_only=True):
    at: datetime
    processes: list[ProcessHealth]
    minutes: list[MinuteCounts]
    queues: list[QueueView]
    runs: list[LiveRun]
    """Live runs, newest first."""
    failures: list[FailureView]
    """The newest failed attempts of the last day."""


class HitKind(StrEnum):
    TASK = "task"
    RUN = "run"
    BACKFILL = "backfill"
    JOB = "job"
    DAG = "dag"
    DATASET = "dataset"
    QUERY = "query"
    OPERATION = "operation"
    WORKER = "worker"


class SearchHit(Reply, frozen=True, kw_only=True):
    kind: HitKind
    id: str
    name: str | None
    detail: str | None
    """A status, or what else tells hits apart."""


class SearchHits(Reply, frozen=True, kw_only=True):
    hits: list[SearchHit]


class LiveUpdate(Reply, frozen=True, kw_only=True):
    """The data of an `overview` event of the live stream. `overview.minutes` has only the last ones."""

    overview: Overview
    operations: list[BulkView]
    """Bulk operations that are running."""


class FailureGroup(Reply, frozen=True, kw_only=True):
    """Failed tasks whose last errors have the same class, and messages of the same shape."""

    error_class: str | None
    shape: str
    """The message with numbers, ids and quoted text replaced."""
    tasks: int
    dead: int
    sample_task_id: UUID
    sample_message: str | None
    first_index: int


class RunFailures(Reply, frozen=True, kw_only=True):
    """`sampled`: the run has more failed tasks than were looked at; the numbers are those of the sample."""

    run_id: UUID
    groups: list[FailureGroup]
    sampled: bool
    looked_at: int
    failed: int


class TimelineAttempt(Reply, frozen=True, kw_only=True):
    task_id: UUID
    index: int
    attempt: int
    worker_id: str | None
    started_at: datetime
    ended_at: datetime | None
    outcome: Outcome | None


class RunTimeline(Reply, frozen=True, kw_only=True):
    """Attempts of a run's tasks, in the order of their start. `sampled`: of evenly spaced tasks of a larger run."""

    run_id: UUID
    sampled: bool
    looked_at: int
    of: int
    attempts: list[TimelineAttempt]


class DurationBucket(Reply, frozen=True, kw_only=True):
    from_seconds: float
    to_seconds: float
    tasks: int


class LongTask(Reply, frozen=True, kw_only=True):
    task_id: UUID
    index: int
    seconds: float


class RunDurations(Reply, frozen=True, kw_only=True):
    """How long the last attempts of completed tasks took. `sampled`: of evenly spaced tasks of a larger run."""

    run_id: UUID
    sampled: bool
    looked_at: int
    of: int
    buckets: list[DurationBucket]
    p50: float | None
    p90: float | None
    p99: float | None
    longest: list[LongTask]
