"""Queries: what a task or a user asks of the query service, and the record that is kept of it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import Meta, Raw, Struct, field

from interlock.wire.base import Attempt, Internal, Reply, Request, TaskStatus

Sql = Annotated[str, Meta(min_length=1, max_length=100_000)]
RowLimit = Annotated[int, Meta(ge=1, le=2**53)]
DatasetName = Annotated[str, Meta(min_length=1, max_length=700)]


class QueryFormat(StrEnum):
    JSON = "json"
    """One document, up to the limits of rows and bytes."""
    CSV = "csv"
    """A stream, with a header line."""
    ARROW = "arrow"
    """A stream of Arrow IPC."""


class QueryMode(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"
    """A task on Spark, whose result is exported."""
    AUTO = "auto"
    """Interactive; a batch task when that goes past its limits."""


class QueryOutcome(StrEnum):
    RUNNING = "Running"
    COMPLETED = "Completed"
    BATCHED = "Batched"
    """Handed on to a task on Spark."""
    REFUSED = "Refused"
    """By the gate, by DuckDB, or for what it may not read."""
    FAILED = "Failed"
    """The process of the statement died of it."""
    OVER_LIMIT = "OverLimit"
    """Past its time, its memory or its room on disk."""
    CANCELED = "Canceled"
    """The caller went away."""
    BUSY = "Busy"
    """There was no place for it."""
    LOST = "Lost"
    """The service was killed, or a store was away."""


class TaskQuery(Internal, frozen=True, kw_only=True):
    """`POST /v1/task/query`: over the inputs of the attempt's task, by their names."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID | None = None
    sql: Sql
    format: QueryFormat = QueryFormat.JSON
    mode: QueryMode = QueryMode.INTERACTIVE
    export: bool = False
    limit: RowLimit | None = None


class UserQuery(Request, frozen=True, kw_only=True):
    """`POST /v1/query`: over datasets of the org."""

    sql: Sql
    datasets: Annotated[list[DatasetName], Meta(min_length=1, max_length=100)] | None = None
    """Which ones there are for the statement; without it, those that the statement names."""
    format: QueryFormat = QueryFormat.JSON
    mode: QueryMode = QueryMode.INTERACTIVE
    export: bool = False
    """Write the result as Parquet under the caller's prefix, and answer with where it is."""
    limit: RowLimit | None = None
    """Most rows."""


class QueryColumn(Struct, frozen=True):
    name: str
    type: str
    """As DuckDB names it; of a batch query, as Spark does."""


class ExportedFile(Struct, frozen=True, kw_only=True):
    uri: str
    url: str | None
    """Signed: whoever has it may read the file until `expires_at`."""
    bytes: int


class QueryExport(Struct, frozen=True, kw_only=True):
    """A result as Parquet."""

    prefix: str
    files: list[ExportedFile]
    row_count: int
    expires_at: datetime | None
    """Of the signed addresses; the next reading of the query gives fresh ones."""


class QueryReply(Reply, frozen=True, kw_only=True):
    query_id: UUID
    outcome: QueryOutcome
    """`Completed`, or `Batched` with the task that has it now."""
    columns: list[QueryColumn] = field(default_factory=list)
    rows: Raw = field(default_factory=lambda: Raw(b"[]"))
    """Lists of values in the order of the columns."""
    row_count: int = 0
    truncated: bool = False
    """There are more rows than the limits let through."""
    duration_ms: float = 0.0
    export: QueryExport | None = None
    task_id: UUID | None = None
    """Of a batch query."""


class QueryView(Reply, frozen=True, kw_only=True):
    """What is kept of a query. The statement itself is not: its hash tells whether two were the same."""

    query_id: UUID
    outcome: QueryOutcome
    mode: QueryMode
    code: str | None
    """Of the error, when there was one."""
    user: str | None
    task_id: UUID | None
    """Of the attempt that asked; null for a user."""
    attempt: int | None
    dataset_versions: list[UUID]
    sql_sha256: str
    row_count: int | None
    bytes: int | None
    truncated: bool
    duration_ms: float | None
    started_at: datetime
    batch_task_id: UUID | None
    batch_status: TaskStatus | None
    """Of that task, when the query is read by itself."""
    batch_error: str | None
    export: QueryExport | None
    """With signed addresses, when the query is read by itself."""


class QueryPage(Reply, frozen=True, kw_only=True):
    queries: list[QueryView]
    next_cursor: str | None
