"""Datasets: registry, lineage, invalidation, published batches."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import Meta, Raw, field

from interlock.wire.access import Role
from interlock.wire.base import Bound, Reply, Request


class PublishStatus(StrEnum):
    """State of a published batch."""

    PENDING = "Pending"
    LOADING = "Loading"
    LOADED = "Loaded"
    REFUSED = "Refused"
    FAILED = "Failed"


class BadRow(Reply, frozen=True, kw_only=True):
    line: int
    """Line number in JSON lines, or row number in Parquet, from 1."""
    reason: str


class BatchRefusal(Reply, frozen=True, kw_only=True):
    """The reason why a batch was not loaded."""

    code: str
    detail: str
    bad_rows: int = 0
    """Number of bad rows. Counting stops at 10,000."""
    rows: list[BadRow] = field(default_factory=list)
    """The first 100 bad rows."""


class BufferView(Reply, frozen=True, kw_only=True):
    """A published batch."""

    publish_id: UUID
    dataset: str | None = None
    """Published name or `dag:job:output`, as in queries. Null if no DAG declares the dataset."""
    dataset_uuid: UUID
    dataset_version: UUID
    task_id: UUID
    attempt: int
    batch_uri: str
    record_count: int
    status: PublishStatus
    published_at: datetime
    settled_at: datetime | None = None
    """Time when the batch was loaded, refused or abandoned."""
    batch: int | None = None
    """Sequence number in the dataset version. It is the cursor of the event that readers received."""
    rows: int | None = None
    bytes: int | None = None
    redrives: int = 0
    load_task: UUID | None = None
    """The Spark task that loads the batch."""
    swept_at: datetime | None = None
    """Time when the file was deleted."""
    refusal: BatchRefusal | None = None


class BufferPage(Reply, frozen=True, kw_only=True):
    buffers: list[BufferView]
    next_cursor: str | None = None


class VersionState(StrEnum):
    """State of a dataset version. A `Building` version belongs to a DAG version that is not current yet."""

    CURRENT = "Current"
    BUILDING = "Building"
    RETIRED = "Retired"
    PURGED = "Purged"


class DatasetSummary(Reply, frozen=True, kw_only=True):
    """Outputs of jobs outside DAGs have no name, only a UUID."""

    dataset_uuid: UUID
    names: list[str]
    """Published names."""
    dag: str | None
    job: str | None
    output: str | None
    storage: str
    current_version: UUID
    partition: str | None = None
    """Length and time zone of its time partitions, such as `daily Europe/Berlin`; null for integer ranges."""
    progress: Literal["cursor", "partition"] | None
    """A stream or partitions; null until the first change."""
    cursor: int | None
    """For a stream: the position up to which it is complete."""


class DatasetPage(Reply, frozen=True, kw_only=True):
    datasets: list[DatasetSummary]
    next_cursor: str | None


class DatasetVersionView(Reply, frozen=True, kw_only=True):
    dataset_version: UUID
    state: VersionState
    job_id: UUID | None
    storage: str
    unique_key: list[str]
    schema_hash: str | None
    columns: Raw
    """The schema as its writer defined it; JSON null until there is one."""
    progress: Literal["cursor", "partition"] | None
    cursor: int | None
    start: int | None
    """Start of the first partition."""
    end: int | None
    """End of the last partition."""
    partition: str | None = None
    """Length and time zone of its time partitions; null for integer ranges."""
    start_date: str | None = None
    """Date of the first time partition."""
    end_date: str | None = None
    """Date of the last time partition."""
    partitions: int
    more_partitions: bool
    """True if there are more than were counted."""
    created_at: datetime


class DatasetView(Reply, frozen=True, kw_only=True):
    dataset_uuid: UUID
    names: list[str]
    dag: str | None
    job: str | None
    output: str | None
    current_version: UUID
    read_roles: list[Role]
    """Roles whose keys may read the dataset."""
    versions: list[DatasetVersionView]
    """The newest versions, and the current one."""


class PartitionView(Reply, frozen=True, kw_only=True):
    partition_key: str
    start: int
    end: int
    start_date: str | None = None
    """For a time partition: its date."""
    end_date: str | None = None
    """Its last date, which differs if it consists of several days, hours or months."""
    commit: int
    task_id: UUID
    attempt: int
    location: str | None
    row_count: int | None
    bytes: int | None
    schema_hash: str | None
    committed_at: datetime


class PartitionPage(Reply, frozen=True, kw_only=True):
    dataset_version: UUID
    partitions: list[PartitionView]
    next_cursor: str | None


class DatasetEventView(Reply, frozen=True, kw_only=True):
    event_id: int
    dataset_version: UUID
    cursor: int | None
    partition_key: str | None
    start: int | None
    end: int | None
    start_date: str | None = None
    end_date: str | None = None
    commit: int
    task_id: UUID
    attempt: int
    accepted_at: datetime


class DatasetEventPage(Reply, frozen=True, kw_only=True):
    events: list[DatasetEventView]
    next_cursor: str | None


class Direction(StrEnum):
    UP = "up"
    DOWN = "down"
    BOTH = "both"


class LineageJob(Reply, frozen=True, kw_only=True):
    job_id: UUID
    dag: str | None
    job: str | None
    depth: int
    """Number of jobs from the dataset to this job, itself included; negative upstream."""


class LineageDataset(Reply, frozen=True, kw_only=True):
    dataset_uuid: UUID
    names: list[str]
    dag: str | None
    job: str | None
    output: str | None
    depth: int


class LineageEdge(Reply, frozen=True, kw_only=True):
    job_id: UUID
    dataset_uuid: UUID
    kind: Literal["reads", "writes"]
    where: str | None = None


class Lineage(Reply, frozen=True, kw_only=True):
    """Jobs and datasets upstream and downstream of a dataset: current versions, across DAGs."""

    dataset_uuid: UUID
    jobs: list[LineageJob]
    datasets: list[LineageDataset]
    edges: list[LineageEdge]
    truncated: bool
    """True if the graph is deeper or wider than shown."""


class InvalidateRequest(Request, frozen=True, kw_only=True):
    """Recomputes an inclusive range: of integers, or of dates for time partitions. `dry_run` only counts."""

    start: Bound
    end: Bound | None = None
    """Defaults to `start` if that is a date."""
    reason: Annotated[str, Meta(min_length=1, max_length=2_000)]
    dry_run: bool = False


class Invalidated(Reply, frozen=True, kw_only=True):
    scopes: int
    """Scopes that are, or would be, recomputed. Scopes that follow from them downstream are not counted."""
    dry_run: bool
    invalidation_id: UUID | None
    """Null if nothing was written."""


class ScopeExplanation(Reply, frozen=True, kw_only=True):
    """Why a job has or has not processed a scope: a stable `reason`, a sentence, and supporting facts."""

    job_id: UUID
    start: int
    end: int
    start_date: str | None = None
    end_date: str | None = None
    reason: str
    detail: str
    task_id: UUID | None
    facts: dict[str, Any]
