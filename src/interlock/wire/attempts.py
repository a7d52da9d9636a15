"""Bodies that workers and attempts exchange with the dispatcher: claim, heartbeat, complete, events, batches."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from interlock.schemas import DatasetSchema
from interlock.wire.access import TaskSecret
from interlock.wire.base import Attempt, Index, Internal, Position, TaskStatus, Text, WorkerId
from interlock.wire.tasks import Crash, JobRef


class Receipt(Struct, frozen=True):
    """A received message. A claim that carries it settles it after the claim has committed."""

    queue: str
    message_id: str
    receipt: str


class ClaimRange(Struct, frozen=True, omit_defaults=True):
    """A run, an inclusive range of indexes, and the message that contained the range."""

    run_id: UUID
    start: Index
    end: Index
    message: Receipt | None = None


class ClaimRequest(Internal, frozen=True, kw_only=True):
    """Claims one task, a list of tasks, a range of indexes of a run, or several such ranges as a whole."""

    worker_id: WorkerId
    task_id: UUID | None = None
    task_ids: Annotated[list[UUID], Meta(max_length=10_000)] | None = None
    run_id: UUID | None = None
    start: Index | None = None
    end: Index | None = None
    ranges: Annotated[list[ClaimRange], Meta(max_length=100)] | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    grouped: bool = False
    """Return groups, which contain shared fields once. Tasks with tokens or outputs are still returned one by one."""
    tokens: bool = True
    """False if the worker itself reports for the tasks: signing tokens is the most expensive part of a claim."""
    message: Receipt | None = None


class WriteGrant(Struct, frozen=True):
    """An output of the job and the attempt's own prefixes for it."""

    output_index: int
    dataset_uuid: UUID
    dataset_version: UUID
    write_prefix: str
    buffer_prefix: str


class TaskInput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input of the job with this task's scope. The task does not read an input without a scope."""

    input_index: int
    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    read_prefix: str
    """Prefix of the files. Only files that the registry lists as committed are valid."""
    where: str | None = None
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    cursor: int | None = None
    """For a stream that is read incrementally: the position up to which it is complete."""
    changed_start: int | None = None
    """For a scope that is processed again: the part that was rewritten."""
    changed_end: int | None = None


class TaskPayload(Struct, frozen=True, kw_only=True):
    task_id: UUID
    attempt: int
    job_id: UUID
    job: JobRef
    operator: str
    config: Raw
    inputs: list[TaskInput]
    payload: Raw
    org_id: UUID
    run_id: UUID | None
    index: int | None
    outputs: list[WriteGrant]
    partition: str | None = None
    """For a job with time partitions: their length and time zone, such as `daily Europe/Berlin`."""
    timeout_at: datetime | None
    """Null if the task is fetched before its first claim."""


class ClaimReply(Internal, frozen=True, kw_only=True):
    """`Claimed` with the lease and the task, or `NotClaimed` with a reason; the worker then acks the message."""

    status: Literal["Claimed", "NotClaimed"]
    reason: (
        Literal["AlreadyRunning", "Completed", "Failed", "Canceled", "NotFound", "LimitReached", "NotDue"] | None
    ) = None
    task_id: UUID | None = None
    attempt: int | None = None
    lease_token: UUID | None = None
    lease_expires_at: datetime | None = None
    capability_token: str | None = None
    task: TaskPayload | None = None
    secrets: list[TaskSecret] = field(default_factory=list)
    """Secrets of the task's org that the task's config refers to."""


class GroupedTask(Struct, frozen=True, array_like=True):
    task_id: UUID
    index: int | None
    payload: Raw


class ClaimGroup(Struct, frozen=True, kw_only=True):
    """Claimed tasks of one run, or of one job without a run, at the same attempt."""

    job_id: UUID
    job: JobRef
    operator: str
    config: Raw
    org_id: UUID
    run_id: UUID | None
    attempt: int
    lease_token: UUID
    lease_expires_at: datetime
    timeout_at: datetime
    tasks: list[GroupedTask]
    partition: str | None = None
    """See `TaskPayload`."""
    secrets: list[TaskSecret] = field(default_factory=list)
    """See `ClaimReply`."""


class ClaimBatchReply(Internal, frozen=True, kw_only=True):
    claims: list[ClaimReply]
    groups: list[ClaimGroup] = field(default_factory=list)
    remaining: int = 0
    """Tasks of the requested range that still wait, because of `limit` or of a limit of their run. If the claim carried
    a message, the message is delivered again for them; otherwise the caller must claim again.
    """


class FetchReply(Internal, frozen=True, kw_only=True):
    status: TaskStatus
    task: TaskPayload


class Heartbeat(Internal, frozen=True, kw_only=True):
    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    progress: Annotated[float, Meta(ge=0, le=1)] | None = None
    progress_text: Annotated[str, Meta(max_length=500)] | None = None
    token: bool = False
    """Request a capability token. A token that expires soon is renewed without a request."""


class HeartbeatReply(Internal, frozen=True, kw_only=True):
    status: Literal["Running"]
    task_id: UUID
    lease_expires_at: datetime
    cancel_requested: bool
    capability_token: str | None = None
    paused: bool = False
    """For a source: produce nothing new for now, since jobs downstream are behind."""


class Refusal(Internal, frozen=True, kw_only=True):
    """One refused item of a batch. The other items are not affected."""

    task_id: UUID
    code: str
    detail: str
    stale: str | None = None


class HeartbeatBatch(Internal, frozen=True, kw_only=True):
    items: Annotated[list[Heartbeat], Meta(min_length=1, max_length=10_000)]


class HeartbeatBatchReply(Internal, frozen=True, kw_only=True):
    items: list[HeartbeatReply]
    refused: list[Refusal] = field(default_factory=list)


class Event(Internal, frozen=True, kw_only=True):
    """A scope of a dataset version changed: a cursor, or an inclusive partition."""

    dataset_uuid: UUID
    dataset_version: UUID
    cursor: Position | None = None
    partition_key: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    start: Position | None = None
    end: Position | None = None
    sequence: Index | None = None
    """Distinguishes several changes of one scope by one producer. Without it they are one event, reported again."""


class Output(Internal, frozen=True, kw_only=True):
    output_index: Annotated[int, Meta(ge=0, le=10_000)] = 0
    dataset_uuid: UUID
    dataset_version: UUID
    location: Annotated[str, Meta(min_length=1, max_length=2_000)]
    cursor: Position | None = None
    partition_key: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    start: Position | None = None
    end: Position | None = None
    row_count: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    bytes: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    schema_hash: Annotated[str, Meta(max_length=200)] | None = None
    min: Position | None = None
    """The smallest value of the range column, if there are rows and it is known."""
    max: Position | None = None


class TaskFile(Internal, frozen=True, kw_only=True):
    """A partition as currently committed."""

    start: int
    end: int
    location: str
    commit: int
    row_count: int | None = None
    bytes: int | None = None


class InputData(Internal, frozen=True, kw_only=True):
    """The data a task reads from one input: its scope, and the files or the table with the rows.

    The dataset is the one that stores the rows: for ranges that were cut from another dataset, it is that other
    dataset.
    """

    input_index: int
    name: str
    """Name of the output that is read; unique among the inputs of a task."""
    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    """With `parquet` the rows are in `files`, otherwise in `table`, in the schema `datasets` of the data database."""
    start: int | None = None
    """Null if the task does not read this input."""
    end: int | None = None
    where: str | None = None
    schema: DatasetSchema | None = None
    files: list[TaskFile] = field(default_factory=list)
    """Ordered by range. The first and the last may extend beyond the scope."""
    table: str | None = None


class OutputData(Internal, frozen=True, kw_only=True):
    """The location where a task writes one output, and the partition that is already there."""

    output_index: int
    name: str
    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    write_prefix: str
    schema: DatasetSchema | None = None
    unique_key: list[str] = field(default_factory=list)
    """If not empty, rows are merged into those of `current` and replace rows with the same key."""
    current: TaskFile | None = None
    """The committed partition with exactly the task's scope."""


class ExportGrant(Internal, frozen=True, kw_only=True):
    """The location where an attempt of a batch query writes its result, and the org whose rows it reads."""

    prefix: str
    org_id: UUID


class LoadBatch(Internal, frozen=True, kw_only=True):
    """One published batch that a task loads on Spark."""

    publish_id: UUID
    batch_uri: str
    record_count: int


class BufferLoad(Internal, frozen=True, kw_only=True):
    """The batches that a `buffer_load` task loads. Taken from the publish records, not from the task's payload."""

    batches: list[LoadBatch]
    """Ordered by time of publishing."""
    schema: DatasetSchema
    unique_key: list[str]
    replace_rows: bool
    limit_bytes: int
    """Limit per batch."""


class ListLoad(Internal, frozen=True, kw_only=True):
    """The list from which a `list_load` task creates tasks. Taken from the ingest record, not from its payload."""

    run_id: UUID
    shard: int
    format: str
    parts: list[str]
    """URIs, in order."""
    line_limit: int
    slot_pointer: str | None = None


class RunExport(Internal, frozen=True, kw_only=True):
    """The rows that a `run_export` task writes to files. Taken from the export record, not from its payload."""

    export_id: UUID
    run_id: UUID
    format: str
    stretches: int
    """Number of staged objects, `{rows_prefix}{number:06}.jsonl` from 0 on. Each becomes one file."""
    rows_prefix: str
    packs_prefix: str
    prefix: str
    """The prefix that the attempt writes to."""


class TaskData(Internal, frozen=True, kw_only=True):
    task_id: UUID
    inputs: list[InputData]
    outputs: list[OutputData]
    export: ExportGrant | None = None
    """Only for a batch query."""
    load: BufferLoad | None = None
    """Only for a task that loads published batches."""
    list_load: ListLoad | None = None
    """Only for a task that reads a staged list."""
    run_export: RunExport | None = None
    """Only for a task that exports a run."""


class DataRequest(Internal, frozen=True, kw_only=True):
    """Requests task data for attempts that hold their lease. It also announces that they are about to write."""

    items: Annotated[list[Release], Meta(min_length=1, max_length=100)]


class DataReply(Internal, frozen=True, kw_only=True):
    items: list[TaskData]
    refused: list[Refusal] = field(default_factory=list)


class Completion(Internal, frozen=True, kw_only=True):
    """The end of an attempt, with the events and outputs that become visible with it."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    status: Literal["Completed", "Failed", "Canceled"]
    events: Annotated[list[Event], Meta(max_length=10_000)] = field(default_factory=list)
    outputs: Annotated[list[Output], Meta(max_length=1_000)] = field(default_factory=list)
    error_message: Text | None = None
    error_class: Annotated[str, Meta(max_length=200)] | None = None
    result: Raw | UnsetType = UNSET
    crash: Crash | None = None


class CompletionReply(Internal, frozen=True, kw_only=True):
    task_id: UUID
    status: TaskStatus
    """The current status of the task. A `Failed` task may still be retried."""
    duplicate: bool = False
    retry_at: datetime | None = None


class CompletionGroup(Internal, frozen=True, kw_only=True):
    """Tasks of a run that completed under one lease and report only their results."""

    run_id: UUID
    attempt: Attempt
    lease_token: UUID
    indexes: Annotated[list[Annotated[int, Meta(ge=0, lt=2**62)]], Meta(min_length=1, max_length=10_000)]
    results: Annotated[list[Raw], Meta(max_length=10_000)]
    """One per index."""

    def __post_init__(self) -> None:
        if len(self.results) != len(self.indexes):
            raise ValueError(f"{len(self.indexes)} indexes need the same number of results, got {len(self.results)}")


class CompletionBatch(Internal, frozen=True, kw_only=True):
    items: Annotated[list[Completion], Meta(max_length=10_000)] = field(default_factory=list)
    groups: Annotated[list[CompletionGroup], Meta(max_length=1_000)] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.items and not self.groups:
            raise ValueError("`items` or `groups` is required")


class CompletionBatchReply(Internal, frozen=True, kw_only=True):
    accepted: int
    refused: list[Refusal] = field(default_factory=list)


class Release(Internal, frozen=True, kw_only=True):
    task_id: UUID
    attempt: Attempt
    lease_token: UUID


class ReleaseBatch(Internal, frozen=True, kw_only=True):
    """Attempts that a worker returns unfinished, on a drain or a deploy. They do not count against the policy."""

    items: Annotated[list[Release], Meta(min_length=1, max_length=10_000)]


class ReleaseReply(Internal, frozen=True, kw_only=True):
    released: int


class EventBatch(Internal, frozen=True, kw_only=True):
    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    events: Annotated[list[Event], Meta(min_length=1, max_length=10_000)]


class EventsAccepted(Internal, frozen=True, kw_only=True):
    accepted: int
    duplicates: int = 0


class BufferPublish(Internal, frozen=True, kw_only=True):
    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    dataset_uuid: UUID
    dataset_version: UUID
    batch_uri: Annotated[str, Meta(min_length=1, max_length=2_000)]
    record_count: Annotated[int, Meta(ge=0, le=2**62)]


class BufferPublished(Internal, frozen=True, kw_only=True):
    publish_id: UUID
    duplicate: bool = False
