"""The dataset registry, lineage and invalidation."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import Meta, Raw

from interlock.wire.base import Position, Reply, Request
from interlock.wire.principals import Role


class VersionState(StrEnum):
    """`Building`: made beside the current one, by a DAG version that has not taken over yet."""

    CURRENT = "Current"
    BUILDING = "Building"
    RETIRED = "Retired"
    PURGED = "Purged"


class DatasetSummary(Reply, frozen=True, kw_only=True):
    """Outputs of jobs outside DAGs have no name but their uuid."""

    dataset_uuid: UUID
    names: list[str]
    """Published ones."""
    dag: str | None
    job: str | None
    output: str | None
    storage: str
    current_version: UUID
    progress: Literal["cursor", "partition"] | None
    """A stream, or partitions; null until the first change says which."""
    cursor: int | None
    """How far a stream is complete."""


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
    """The schema as its writer gave it; JSON null until there is one."""
    progress: Literal["cursor", "partition"] | None
    cursor: int | None
    start: int | None
    """Of the first partition."""
    end: int | None
    """Of the last partition."""
    partitions: int
    more_partitions: bool
    """There are more than were counted."""
    created_at: datetime


class DatasetView(Reply, frozen=True, kw_only=True):
    dataset_uuid: UUID
    names: list[str]
    dag: str | None
    job: str | None
    output: str | None
    current_version: UUID
    read_roles: list[Role]
    """Whose keys may read it."""
    versions: list[DatasetVersionView]
    """The newest ones, and the current one."""


class PartitionView(Reply, frozen=True, kw_only=True):
    partition_key: str
    start: int
    end: int
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
    """Jobs between it and the dataset in question, itself included; negative upstream."""


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
    """Who makes a dataset of what, and who makes what of it: generations that are current, across DAGs."""

    dataset_uuid: UUID
    jobs: list[LineageJob]
    datasets: list[LineageDataset]
    edges: list[LineageEdge]
    truncated: bool
    """There is more than is shown, deeper or beside."""


class InvalidateRequest(Request, frozen=True, kw_only=True):
    """Have an inclusive range made again. `dry_run` only counts."""

    start: Position
    end: Position
    reason: Annotated[str, Meta(min_length=1, max_length=2_000)]
    dry_run: bool = False


class Invalidated(Reply, frozen=True, kw_only=True):
    scopes: int
    """Scopes that are made again, or would be; those that follow from them downstream are not counted."""
    dry_run: bool
    invalidation_id: UUID | None
    """Null when nothing was written."""


class ScopeExplanation(Reply, frozen=True, kw_only=True):
    """Why a job has, or has not, done a scope: a stable `reason`, a sentence, and the facts behind it."""

    job_id: UUID
    start: int
    end: int
    reason: str
    detail: str
    task_id: UUID | None
    facts: dict[str, Any]
