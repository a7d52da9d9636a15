"""Jobs and runs, as users submit and see them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from msgspec import Meta, Raw, field

from interlock.wire.base import JsonPointer, Name, OperatorName, Priority, Reply, Request, RunState, Seconds
from interlock.wire.bulk import ListSource


class Policy(Request, frozen=True, kw_only=True):
    """Retries and time limits. Unset values come from the runtime's defaults."""

    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 3
    backoff_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 1.0
    backoff_factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    backoff_cap_seconds: Annotated[float, Meta(ge=0, le=7 * 86_400)] = 300.0
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.2
    non_retryable: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=100)] = field(
        default_factory=list
    )
    lease_seconds: Seconds | None = None
    timeout_seconds: Seconds | None = None


class Scaling(Request, frozen=True, kw_only=True):
    """Concurrency caps, enforced at claim. `key` points into the payload: `/host` caps per host."""

    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    key: JsonPointer | None = None
    max_concurrency_per_key: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class RateLimit(Request, frozen=True, kw_only=True):
    """How often tasks of one key begin."""

    key: Annotated[str, Meta(pattern=r"^(host|(/[^/]*)+)$(?!\n)", max_length=500)]
    """A JSON pointer into the payload; or `host`, of the URL that is the payload or its `url`."""
    per_second: Annotated[float, Meta(ge=0.001, le=1_000_000)]


class RunLimits(Request, frozen=True, kw_only=True):
    """Of one run: how many of its tasks run at once, and when it is given up as a whole. What has not ended is then
    canceled, and the run is `Failed`."""

    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Of its tasks that run at once; `scaling` has the limits of all runs of the job together."""
    rate: RateLimit | None = None
    tolerated_failure_share: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Of its tasks that may fail for good."""
    deadline_seconds: Annotated[float, Meta(gt=0, le=366 * 86_400)] | None = None
    """From now on."""


class DatasetRef(Request, frozen=True, kw_only=True):
    dataset_uuid: UUID
    dataset_version: UUID


class JobRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/jobs`: a list of tasks for an operator. A named job may be posted to again.

    The list is closed, here or in an upload; `open` takes more of them later.
    """

    tasks: list[Raw] | None = None
    source: ListSource | None = None
    open: bool = False
    in_background: bool = field(default=False, name="async")
    name: Name | None = None
    operator: OperatorName | None = None
    runtime: Name = "platform"
    config: dict[str, Any] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    scaling: Scaling = field(default_factory=Scaling)
    limits: RunLimits = field(default_factory=RunLimits)
    """Of the run that this request makes."""
    retention_days: Annotated[float, Meta(gt=0, le=3660)] | None = None
    """How long that run is kept when it has ended, with its tasks and results: up to ten years. None: the setting of
    that name, 14 days unless it was changed."""
    priority: Priority = Priority.NORMAL
    outputs: Annotated[list[DatasetRef], Meta(max_length=100)] = field(default_factory=list)
    dedupe_by: JsonPointer | None = None
    update: bool = False

    @property
    def listed(self) -> list[Raw]:
        return self.tasks or []


class JobAccepted(Reply, frozen=True, kw_only=True):
    """201: its tasks are there. 202: they will be, and `total` with them; see `status_url`."""

    job_id: UUID
    run_id: UUID
    state: RunState
    total: int | None
    deduplicated: int
    tasks_url: str
    status_url: str | None = None


class Counts(Reply, frozen=True, kw_only=True):
    """Tasks per status. `dead` is the part of Failed that no retry will touch."""

    Queued: int = 0
    Running: int = 0
    Completed: int = 0
    Failed: int = 0
    Canceled: int = 0
    dead: int = 0


class RunView(Reply, frozen=True, kw_only=True):
    run_id: UUID
    job_id: UUID
    state: RunState
    total: int | None
    counts: Counts
    cancel_requested: bool
    reason: str | None = None
    """Why it failed as a whole: its deadline, too many failures, or a list that could not be read."""
    rate: float | None = None
    """Tasks per second that end; of a run that goes on, as far as it is known."""
    eta_seconds: float | None = None
    """Until the last of them has, at that rate."""
    retention_days: float | None = None
    """How long it is kept when it has ended, with its tasks and results."""
    created_at: datetime
    ended_at: datetime | None


class JobView(Reply, frozen=True, kw_only=True):
    job_id: UUID
    dag_name: str | None
    name: str | None
    operator: str
    runtime: str
    priority: Priority
    config: Raw
    policy: Policy
    scaling: Scaling
    created_at: datetime
    state: RunState | None
    """The newest run's state, so that one read tells how the job stands."""
    run: RunView | None


class JobPage(Reply, frozen=True, kw_only=True):
    jobs: list[JobView]
    next_cursor: str | None


class RunPage(Reply, frozen=True, kw_only=True):
    runs: list[RunView]
    next_cursor: str | None
