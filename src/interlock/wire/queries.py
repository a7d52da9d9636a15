"""Requests of tasks and users to the query service, and the record that is kept of each query."""

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
    """One document, limited in rows and bytes."""
    CSV = "csv"
    """A stream, with a header line."""
    ARROW = "arrow"
    """An Arrow IPC stream."""


class QueryMode(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"
    """A Spark task that exports its result."""
    AUTO = "auto"
    """Interactive; becomes a batch task when it exceeds the interactive limits."""


class QueryOutcome(StrEnum):
    RUNNING = "Running"
    COMPLETED = "Completed"
    BATCHED = "Batched"
    """Handed over to a Spark task."""
    REFUSED = "Refused"
    """Rejected: a disallowed or invalid statement, or a dataset that the caller may not read."""
    FAILED = "Failed"
    """The process that executed the statement died."""
    OVER_LIMIT = "OverLimit"
    """Exceeded its limit of time, memory or disk space."""
    CANCELED = "Canceled"
    """The caller disconnected."""
    BUSY = "Busy"
    """No query slot was free."""
    LOST = "Lost"
    """The service was killed, or a store was unreachable."""


class TaskQuery(Internal, frozen=True, kw_only=True):
    """`POST /v1/task/query`: queries the inputs of the attempt's task, by their names."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID | None = None
    sql: Sql
    format: QueryFormat = QueryFormat.JSON
    mode: QueryMode = QueryMode.INTERACTIVE
    export: bool = False
    limit: RowLimit | None = None


class UserQuery(Request, frozen=True, kw_only=True):
    """`POST /v1/query`: queries datasets of the org."""

    sql: Sql
    datasets: Annotated[list[DatasetName], Meta(min_length=1, max_length=100)] | None = None
    """Datasets that the statement can use; by default, those that it names."""
    format: QueryFormat = QueryFormat.JSON
    mode: QueryMode = QueryMode.INTERACTIVE
    export: bool = False
    """Write the result as Parquet under the caller's prefix and return its location."""
    limit: RowLimit | None = None
    """Maximum number of rows."""


class QueryColumn(Struct, frozen=True):
    name: str
    type: str
    """DuckDB's type name; for a batch query, Spark's."""


class ExportedFile(Struct, frozen=True, kw_only=True):
    uri: str
    url: str | None
    """Signed URL: anyone can read the file with it until `expires_at`."""
    bytes: int


class QueryExport(Struct, frozen=True, kw_only=True):
    """A query result as Parquet files."""

    prefix: str
    files: list[ExportedFile]
    row_count: int
    expires_at: datetime | None
    """Expiry of the signed URLs. Reading the query again returns fresh ones."""


class QueryReply(Reply, frozen=True, kw_only=True):
    query_id: UUID
    outcome: QueryOutcome
    """`Completed`, or `Batched` with the id of the batch task."""
    columns: list[QueryColumn] = field(default_factory=list)
    rows: Raw = field(default_factory=lambda: Raw(b"[]"))
    """Each row is a list of values, in the order of the columns."""
    row_count: int = 0
    truncated: bool = False
    """True if there are more rows than the limits allow."""
    duration_ms: float = 0.0
    export: QueryExport | None = None
    task_id: UUID | None = None
    """Task of a batch query."""


class RelationColumn(Struct, frozen=True):
    name: str
    type: str
    nullable: bool


class RelationView(Struct, frozen=True, kw_only=True):
    """A dataset that the caller may query."""

    name: str
    """The published name, or `dag:job:output`."""
    sql_name: str
    """The name as it is written in a statement, in quotes where it needs them."""
    dataset: str
    """`dag:job:output`."""
    dataset_uuid: UUID
    published: bool
    storage: str
    columns: list[RelationColumn]
    """Empty until a first version has been written."""


class RelationPage(Reply, frozen=True, kw_only=True):
    relations: list[RelationView]
    next_cursor: str | None


class QueryView(Reply, frozen=True, kw_only=True):
    """The record of a query. Other users see only a hash of its statement."""

    query_id: UUID
    outcome: QueryOutcome
    mode: QueryMode
    code: str | None
    """Error code; null without an error."""
    user: str | None
    task_id: UUID | None
    """Task that sent the query; null for a user."""
    attempt: int | None
    dataset_versions: list[UUID]
    sql_sha256: str
    sql: str | None = None
    """The statement, only for the user who sent it."""
    row_count: int | None
    bytes: int | None
    truncated: bool
    duration_ms: float | None
    started_at: datetime
    batch_task_id: UUID | None
    batch_status: TaskStatus | None
    """Status of the batch task; set only when a single query is read."""
    batch_error: str | None
    export: QueryExport | None
    """With signed URLs only when a single query is read."""


class QueryPage(Reply, frozen=True, kw_only=True):
    queries: list[QueryView]
    next_cursor: str | None
