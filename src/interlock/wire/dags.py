"""DAGs: deployment, versions, plans, sources, backpressure, backfills."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import UNSET, Meta, Raw, UnsetType, field

from interlock.wire.base import Bound, Name, Position, Priority, Reply, Request, RunState
from interlock.wire.jobs import Counts
from interlock.wire.tasks import JobRef


class PauseLevel(StrEnum):
    BULK = "bulk"
    """Only bulk work is paused."""
    ALL = "all"


class PauseView(Reply, frozen=True, kw_only=True):
    """A job that gets no new tasks because a queue downstream of it exceeds its limit."""

    job_id: UUID
    job: JobRef
    cause_id: UUID
    cause: JobRef
    """The job whose queue exceeds its limit."""
    level: PauseLevel
    path: list[str]
    """Jobs from the paused one down to the cause, in the direction of the data."""
    reason: str
    since: datetime


class PausePage(Reply, frozen=True, kw_only=True):
    pauses: list[PauseView]
    next_cursor: str | None


class BackfillState(StrEnum):
    """State of creating the tasks; `run_state` is the state of the tasks themselves."""

    RUNNING = "Running"
    PAUSED = "Paused"
    DONE = "Done"
    CANCELED = "Canceled"
    FAILED = "Failed"
    """The tasks could not be created; see `run_reason`."""


class BackfillRequest(Request, frozen=True, kw_only=True):
    """Recomputes the scopes of a job that overlap `start` to `end`: integers, or dates for time partitions."""

    start: Bound
    end: Bound | None = None
    """Included. Defaults to `start` if that is a date."""
    priority: Priority = Priority.BULK
    reason: Annotated[str, Meta(max_length=1_000)] | None = None
    dry_run: bool = False


class BackfillScope(Reply, frozen=True, kw_only=True):
    input_index: int
    start: int
    end: int
    start_date: str | None = None
    """For time partitions: the date of the first one."""
    end_date: str | None = None
    """The date of the last one, included."""


class BackfillView(Reply, frozen=True, kw_only=True):
    run_id: UUID
    job_id: UUID
    job: JobRef
    start: int
    end: int
    partition: str | None = None
    """For time partitions: their length and time zone, such as `daily Europe/Berlin`."""
    start_date: str | None = None
    end_date: str | None = None
    priority: Priority
    reason: str | None
    requested_by: str
    state: BackfillState
    made: int
    """Tasks created so far."""
    total: int | None
    """Total tasks. Until all are created it is an estimate from the start; null if there were too many to count."""
    counts: Counts
    run_state: RunState
    run_reason: str | None = None
    """Reason why the run failed as a whole."""
    created_at: datetime
    ended_at: datetime | None


class BackfillAnswer(Reply, frozen=True, kw_only=True):
    """The number of scopes to compute and, unless it was a dry run, the backfill."""

    scopes: int
    more: bool
    """True if there are more than were counted."""
    first: list[BackfillScope]
    upstream: list[str] = field(default_factory=list)
    """If there are no scopes: sources with time partitions upstream, as `dag/job`, whose backfill creates the data."""
    dry_run: bool
    backfill: BackfillView | None = None


class BackfillPage(Reply, frozen=True, kw_only=True):
    backfills: list[BackfillView]
    next_cursor: str | None


class DagState(StrEnum):
    """State of a DAG version.

    A `Building` version is computed next to the current one and replaces it when complete.
    """

    BUILDING = "Building"
    CURRENT = "Current"
    RETIRED = "Retired"
    ABANDONED = "Abandoned"
    PURGED = "Purged"


class JobChange(StrEnum):
    """The effect of a new DAG version on one of its jobs."""

    ADDED = "added"
    CHANGED = "changed"
    """Its output or its inputs change."""
    DOWNSTREAM = "downstream"
    """The job itself is unchanged, but a job upstream of it has changed."""
    TUNED = "tuned"
    """Only how it runs has changed, not what it computes: updated in place."""
    REMOVED = "removed"
    KEPT = "kept"


class DagRequest(Request, frozen=True, kw_only=True):
    """A DAG file inside a JSON body, as an alternative to a YAML body."""

    yaml: Annotated[str, Meta(max_length=1_000_000)]


class PlannedInput(Reply, frozen=True, kw_only=True):
    """The data that an input has now, so that a reader can estimate how much will be built."""

    input: str
    """`job.output`, or a published name."""
    partitions: int
    more: bool
    """True if there are more than were counted."""
    cursor: int | None
    """For a stream: the position up to which it is complete."""
    start_date: str | None = None
    """For time partitions: the date of the first one."""
    end_date: str | None = None
    """The date of the last one."""


class PlannedJob(Reply, frozen=True, kw_only=True):
    name: str
    change: JobChange
    partition: str | None = None
    """Length and time zone of its time partitions, such as `daily Europe/Berlin`; null for integer ranges."""
    new_versions: list[str]
    """Outputs that get a new dataset version."""
    inputs: list[PlannedInput]
    """Only for a job that is built."""


class DagDeployed(Reply, frozen=True, kw_only=True):
    dag: str
    dag_version: UUID | None
    """Null for a dry run."""
    content_hash: str
    state: DagState | None
    dry_run: bool
    plan: list[PlannedJob]


class DagVersionView(Reply, frozen=True, kw_only=True):
    dag_version: UUID
    content_hash: str
    state: DagState
    deployed_by: str
    deployed_at: datetime
    current_at: datetime | None
    """Time when it last became current."""
    retired_at: datetime | None


class DagVersionPage(Reply, frozen=True, kw_only=True):
    versions: list[DagVersionView]
    next_cursor: str | None


class BuildProgress(Reply, frozen=True, kw_only=True):
    """Remaining work of a job in a version that is being built. Counts stop at 10,000."""

    job_id: UUID
    name: str
    complete: bool
    undone: int
    """Scopes that were assigned to it and are not done."""
    dead: int
    """Undone scopes whose task is dead. The version waits until an operator retries the task."""
    behind: int
    """Input changes that were not assigned to it yet."""
    unread: int
    """Positions of its streams that it has not read."""
    catching_up: bool
    """True for a source that has not yet reached the position of the source it replaces."""


class DagOutput(Reply, frozen=True, kw_only=True):
    name: str
    dataset_uuid: UUID
    dataset_version: UUID


class DagJobView(Reply, frozen=True, kw_only=True):
    job_id: UUID
    name: str
    operator: str
    runtime: str
    source: str | None
    """Kind of source; null for other jobs."""
    partition: str | None = None
    """Length and time zone of its time partitions; null for integer ranges."""
    paused: bool
    outputs: list[DagOutput]


class DagPause(Reply, frozen=True, kw_only=True):
    """A paused DAG hands out no tasks. What happens meanwhile is recorded and is processed after the resume."""

    since: datetime
    by: str
    reason: str | None


class DagSummary(Reply, frozen=True, kw_only=True):
    name: str
    created_at: datetime
    paused: DagPause | None = None
    current: DagVersionView | None
    building: DagVersionView | None


class DagPage(Reply, frozen=True, kw_only=True):
    dags: list[DagSummary]
    next_cursor: str | None


class DagView(Reply, frozen=True, kw_only=True):
    name: str
    created_at: datetime
    paused: DagPause | None = None
    current: DagVersionView | None
    building: DagVersionView | None
    jobs: list[DagJobView]
    """Jobs of the current version."""
    publish: list[str]
    progress: list[BuildProgress]
    """Progress of the jobs that are being built."""


class FailingJob(Reply, frozen=True, kw_only=True):
    """A job of a DAG with tasks that are failed now. The error is that of the newest of them."""

    dag: str
    job: str
    job_id: UUID
    runtime: str
    failing: int
    """Failed tasks, dead or waiting for a retry, among the newest 100 failed ones."""
    more: bool
    """True if there may be more."""
    dead: int
    """Failed tasks without attempts left."""
    task_id: UUID
    attempt: int
    error_class: str | None
    error_message: str | None
    """The first line."""
    failed_at: datetime | None


class FailingJobs(Reply, frozen=True, kw_only=True):
    failures: list[FailingJob]


class DagPauseRequest(Request, frozen=True, kw_only=True):
    reason: Annotated[str, Meta(max_length=1_000)] | None = None


class DeletedOutput(Reply, frozen=True, kw_only=True):
    """The data of an output of a deleted DAG."""

    job: str
    output: str
    partitions: int
    more: bool
    """True if there are more than were counted."""
    cursor: int | None
    """For a stream: the position up to which it is complete."""


class DagDeleted(Reply, frozen=True, kw_only=True):
    """What a deletion affects. Tasks of the jobs are canceled in the background; running ones are asked to stop."""

    dag: str
    dry_run: bool
    purge: bool
    """True if the data is deleted too. Otherwise it stays readable, and a deploy of the DAG restores it."""
    jobs: list[str]
    outputs: list[DeletedOutput]
    readers: list[str]
    """Other DAGs that read data of this DAG. They get no more changes."""


class DagDocument(Reply, frozen=True, kw_only=True):
    """A deployed version in canonical form. A file with this content deploys the same version."""

    dag_version: UUID
    content_hash: str
    document: Raw


class RollbackRequest(Request, frozen=True, kw_only=True):
    """`to` defaults to the version that was current before."""

    to: Annotated[str, Meta(min_length=4, max_length=64, pattern=r"^[0-9a-f]+$(?!\n)")] | None = None


class PurgeRequest(Request, frozen=True, kw_only=True):
    """`version` is a prefix of a content hash."""

    version: Annotated[str, Meta(min_length=4, max_length=64, pattern=r"^[0-9a-f]+$(?!\n)")]


class SourceState(StrEnum):
    """For an `always_on` source, the state of its task. Other sources are `ready` unless paused."""

    STARTING = "starting"
    QUEUED = "queued"
    RUNNING = "running"
    RESTARTING = "restarting"
    PAUSED = "paused"
    READY = "ready"


class SourceOutput(Reply, frozen=True, kw_only=True):
    output: str | None
    dataset_uuid: UUID
    dataset_version: UUID
    cursor: int | None
    """For a stream: the position up to which it is complete."""
    last_scope: str | None
    """Scope of its newest event: a cursor or a partition."""
    last_dates: str | None = None
    """The same partition as dates."""
    last_at: datetime | None


class SourceView(Reply, frozen=True, kw_only=True):
    job: str
    job_id: UUID
    current: bool
    """False for a source of a version that is being built."""
    kind: str
    state: SourceState
    since: datetime | None
    paused: str | None
    """Reason why it is paused."""
    task_id: UUID | None
    """Only for an `always_on` source. The same task id across restarts."""
    attempt: int | None
    restarts: int
    """Consecutive restarts, each shortly after the last."""
    worker_id: str | None
    last_error: str | None
    last_error_at: datetime | None
    next_at: datetime | None
    """Next start of a schedule."""
    partition: str | None = None
    """Length and time zone of its time partitions."""
    next_start_date: str | None = None
    """First of the partitions that the next start of a schedule stands for. Null if none will have ended by then."""
    next_end_date: str | None = None
    catch_up: str | None = None
    """Which missed starts of a schedule are made up for."""
    waiting: int
    """Triggers that are not tasks yet. Counting stops at 1,000."""
    hook: str | None
    """Path of the webhook, once it has a secret."""
    outputs: list[SourceOutput]


class SourceList(Reply, frozen=True, kw_only=True):
    sources: list[SourceView]


class SourceEvent(Request, frozen=True, kw_only=True):
    """A changed scope of an output, or a payload for a task."""

    output: Name | None = None
    """Optional for a job with one output."""
    cursor: Position | None = None
    start: Bound | None = None
    end: Bound | None = None
    """Defaults to `start`, if that is a date."""
    payload: Raw | UnsetType = UNSET


class SourceEvents(Request, frozen=True, kw_only=True):
    events: Annotated[list[SourceEvent], Meta(min_length=1, max_length=1_000)]


class SourceEventsAccepted(Reply, frozen=True, kw_only=True):
    events: int
    """Number of recorded scopes."""
    triggers: int
    """Number of payloads that become tasks."""


class SecretRequest(Request, frozen=True, kw_only=True):
    rotate: bool = False
    """Replace the existing secret, which remains valid for another hour."""


class HookSecret(Reply, frozen=True, kw_only=True):
    hook_id: str
    path: str
    auth: str
    """`hmac` or `token`: how a call is authenticated."""
    secret: str
    """Shown only once."""
    previous_until: datetime | None
    """Time until which the previous secret is valid."""


class HookAccepted(Reply, frozen=True, kw_only=True):
    accepted: bool = True
    duplicate: bool = False
    """True if the same call was accepted before; it has no further effect."""
