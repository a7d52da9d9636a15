"""DAGs: deploy, versions, plans."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import Meta, Raw

from interlock.wire.base import Reply, Request


class DagState(StrEnum):
    """Of a DAG version. `Building`: made beside the current one, which it will replace when it is complete."""

    BUILDING = "Building"
    CURRENT = "Current"
    RETIRED = "Retired"
    ABANDONED = "Abandoned"
    PURGED = "Purged"


class JobChange(StrEnum):
    """What a new version of a DAG means for one of its jobs."""

    ADDED = "added"
    CHANGED = "changed"
    """It makes something else than before, or of something else."""
    DOWNSTREAM = "downstream"
    """As before itself, behind a job that is not."""
    TUNED = "tuned"
    """Run in another way, and makes the same: changed in place."""
    REMOVED = "removed"
    KEPT = "kept"


class DagRequest(Request, frozen=True, kw_only=True):
    """A DAG file, where a body of JSON is handier than one of YAML."""

    yaml: Annotated[str, Meta(max_length=1_000_000)]


class PlannedInput(Reply, frozen=True, kw_only=True):
    """What there is to read now, so that a reader can tell how much will be built."""

    input: str
    """`job.output`, or a published name."""
    partitions: int
    more: bool
    """There are more than were counted."""
    cursor: int | None
    """How far it is, where it is a stream."""


class PlannedJob(Reply, frozen=True, kw_only=True):
    name: str
    change: JobChange
    new_versions: list[str]
    """Outputs that get a new dataset version."""
    inputs: list[PlannedInput]
    """Of a job that is built."""


class DagDeployed(Reply, frozen=True, kw_only=True):
    dag: str
    dag_version: UUID | None
    """Null when it was only asked what would happen."""
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
    """When it last became current."""
    retired_at: datetime | None


class DagVersionPage(Reply, frozen=True, kw_only=True):
    versions: list[DagVersionView]
    next_cursor: str | None


class BuildProgress(Reply, frozen=True, kw_only=True):
    """What a job of a version that is being built has yet to do. Counts end at 10,000."""

    job_id: UUID
    name: str
    complete: bool
    undone: int
    """Scopes that it was given and has not done."""
    dead: int
    """Of these, scopes whose task has failed for good: the version waits for somebody to retry it."""
    behind: int
    """Changes of its inputs that it was not given yet."""
    unread: int
    """Positions of its streams that it has not read."""
    catching_up: bool
    """A source that has not come as far as the one it replaces."""


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
    """Its kind, where it is a source."""
    paused: bool
    outputs: list[DagOutput]


class DagSummary(Reply, frozen=True, kw_only=True):
    name: str
    created_at: datetime
    current: DagVersionView | None
    building: DagVersionView | None


class DagPage(Reply, frozen=True, kw_only=True):
    dags: list[DagSummary]
    next_cursor: str | None


class DagView(Reply, frozen=True, kw_only=True):
    name: str
    created_at: datetime
    current: DagVersionView | None
    building: DagVersionView | None
    jobs: list[DagJobView]
    """Of the current version."""
    publish: list[str]
    progress: list[BuildProgress]
    """Of the jobs that are being built."""


class DagDocument(Reply, frozen=True, kw_only=True):
    """A deployed version in canonical form: a file with this content deploys the same."""

    dag_version: UUID
    content_hash: str
    document: Raw


class RollbackRequest(Request, frozen=True, kw_only=True):
    """Without `to`, the version that was current before."""

    to: Annotated[str, Meta(min_length=4, max_length=64, pattern=r"^[0-9a-f]+$(?!\n)")] | None = None


class PurgeRequest(Request, frozen=True, kw_only=True):
    """By the beginning of its content hash."""

    version: Annotated[str, Meta(min_length=4, max_length=64, pattern=r"^[0-9a-f]+$(?!\n)")]
