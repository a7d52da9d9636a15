"""What a worker and an attempt say to the dispatcher: claim, heartbeat, complete, events, batches."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from interlock.schemas import DatasetSchema
from interlock.wire.base import Attempt, Index, Internal, Position, TaskStatus, Text, WorkerId
from interlock.wire.secrets import TaskSecret
from interlock.wire.tasks import Crash, JobRef


class Receipt(Struct, frozen=True):
    """A received message. Given with a claim, it is settled once that has committed."""

    queue: str
    message_id: str
    receipt: str


class ClaimRange(Struct, frozen=True, omit_defaults=True):
    """A run and an inclusive range of indexes, with the message that named it."""

    run_id: UUID
    start: Index
    end: Index
    message: Receipt | None = None


class ClaimRequest(Internal, frozen=True, kw_only=True):
    """One task, a list of tasks, a run with an inclusive range of indexes, or several such ranges taken whole."""

    worker_id: WorkerId
    task_id: UUID | None = None
    task_ids: Annotated[list[UUID], Meta(max_length=10_000)] | None = None
    run_id: UUID | None = None
    start: Index | None = None
    end: Index | None = None
    ranges: Annotated[list[ClaimRange], Meta(max_length=100)] | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    grouped: bool = False
    """Answer in groups that say once what their tasks share. Tasks with tokens or outputs are answered one by one."""
    tokens: bool = True
    """False when the wrapper itself reports for the tasks: signing is the dearest part of a claim."""
    message: Receipt | None = None


class WriteGrant(Struct, frozen=True):
    """An output of the job and the attempt's own prefixes for it."""

    output_index: int
    dataset_uuid: UUID
    dataset_version: UUID
    write_prefix: str
    buffer_prefix: str


class TaskInput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input of the job with the scope that this task is about. One without a scope has no part in this task."""

    input_index: int
    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    read_prefix: str
    """Of files; which of them count is what the registry says."""
    where: str | None = None
    partition_key: str | None = None
    start: int | None = None
    end: int | None = None
    cursor: int | None = None
    """How far the stream is complete, when it is one that is read from where the last task ended."""
    changed_start: int | None = None
    """The part of the scope that was rewritten, when it is given again."""
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
    timeout_at: datetime | None
    """None when it is fetched before its first claim."""


class ClaimReply(Internal, frozen=True, kw_only=True):
    """`Claimed` with the lease and the task, or `NotClaimed` with a reason; then the message is to be acked."""

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
    """Those that the task's config names, of the task's org."""


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
    secrets: list[TaskSecret] = field(default_factory=list)
    """As in `ClaimReply`."""


class ClaimBatchReply(Internal, frozen=True, kw_only=True):
    claims: list[ClaimReply]
    groups: list[ClaimGroup] = field(default_factory=list)
    remaining: int = 0
    """Tasks of the asked range that wait, beyond `limit` or for a limit of their run. If the claim named a message, it
    comes again for them; otherwise the caller must ask again."""


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
    """Ask for a capability token now; one near its end is renewed unasked."""


class HeartbeatReply(Internal, frozen=True, kw_only=True):
    status: Literal["Running"]
    task_id: UUID
    lease_expires_at: datetime
    cancel_requested: bool
    capability_token: str | None = None
    paused: bool = False
    """Of a source: make nothing new for now, since those downstream are behind."""


class Refusal(Internal, frozen=True, kw_only=True):
    """One item of a batch that was refused; its neighbours are not touched by it."""

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
    """Tells several changes of one scope by one producer apart. Without it they are one event, reported again."""


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
    """The smallest value of the range column, when there are rows and it is known."""
    max: Position | None = None


class TaskFile(Internal, frozen=True, kw_only=True):
    """A partition as it is committed now."""

    start: int
    end: int
    location: str
    commit: int
    row_count: int | None = None
    bytes: int | None = None


class InputData(Internal, frozen=True, kw_only=True):
    """What a task reads of one input: its scope, and the files or the table that have it.

    The dataset is the one that has the rows: behind ranges that were cut of a dataset stands that dataset.
    """

    input_index: int
    name: str
    """Of the output that it is; unique among the inputs of a task."""
    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    """`parquet`: `files`. Otherwise `table`, in the schema `datasets` of the data database."""
    start: int | None = None
    """Null when the input has no part in this task."""
    end: int | None = None
    where: str | None = None
    schema: DatasetSchema | None = None
    files: list[TaskFile] = field(default_factory=list)
    """In the order of their ranges; those at the ends may reach beyond the scope."""
    table: str | None = None


class OutputData(Internal, frozen=True, kw_only=True):
    """Where a task writes one output, and what is there already."""

    output_index: int
    name: str
    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    write_prefix: str
    schema: DatasetSchema | None = None
    unique_key: list[str] = field(default_factory=list)
    """Not empty: rows are added to those of `current`, and replace those with the same key."""
    current: TaskFile | None = None
    """The partition with the bounds of the task's scope."""


class ExportGrant(Internal, frozen=True, kw_only=True):
    """Where an attempt of a batch query writes its result, and whose rows it reads."""

    prefix: str
    org_id: UUID


class LoadBatch(Internal, frozen=True, kw_only=True):
    """One published batch that a task loads on Spark."""

    publish_id: UUID
    batch_uri: str
    record_count: int


class BufferLoad(Internal, frozen=True, kw_only=True):
    """What a task of `buffer_load` loads: from the records of the publishes, whatever its payload says."""

    batches: list[LoadBatch]
    """In the order of their publishing."""
    schema: DatasetSchema
    unique_key: list[str]
    replace_rows: bool
    limit_bytes: int
    """Of one batch."""


class ListLoad(Internal, frozen=True, kw_only=True):
    """What a task of `list_load` makes tasks of: from the record of the ingest, whatever its payload says."""

    run_id: UUID
    shard: int
    format: str
    parts: list[str]
    """URIs, in their order."""
    line_limit: int
    slot_pointer: str | None = None


class RunExport(Internal, frozen=True, kw_only=True):
    """What a task of `run_export` makes files of: from the record of the export, whatever its payload says."""

    export_id: UUID
    run_id: UUID
    format: str
    stretches: int
    """Staged objects, `{rows_prefix}{number:06}.jsonl`, from 0 on; each becomes one file."""
    rows_prefix: str
    packs_prefix: str
    prefix: str
    """Where the attempt writes."""


class TaskData(Internal, frozen=True, kw_only=True):
    task_id: UUID
    inputs: list[InputData]
    outputs: list[OutputData]
    export: ExportGrant | None = None
    """Of a batch query alone."""
    load: BufferLoad | None = None
    """Of a task that loads published batches alone."""
    list_load: ListLoad | None = None
    """Of a task that reads a staged list alone."""
    run_export: RunExport | None = None
    """Of a task that exports a run alone."""


class DataRequest(Internal, frozen=True, kw_only=True):
    """Of attempts that hold their tasks. Asking says that they are about to write."""

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
    """The task's status now: `Failed` may still have retries to come."""
    duplicate: bool = False
    retry_at: datetime | None = None


class CompletionGroup(Internal, frozen=True, kw_only=True):
    """Tasks of a run that completed under one lease, with nothing to say but their results."""

    run_id: UUID
    attempt: Attempt
    lease_token: UUID
    indexes: Annotated[list[Annotated[int, Meta(ge=0, lt=2**62)]], Meta(min_length=1, max_length=10_000)]
    results: Annotated[list[Raw], Meta(max_length=10_000)]
    """One per index."""

    def __post_init__(self) -> None:
        if len(self.results) != len(self.indexes):
            raise ValueError(f"{len(self.indexes)} indexes need as many results, not {len(self.results)}")


class CompletionBatch(Internal, frozen=True, kw_only=True):
    items: Annotated[list[Completion], Meta(max_length=10_000)] = field(default_factory=list)
    groups: Annotated[list[CompletionGroup], Meta(max_length=1_000)] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.items and not self.groups:
            raise ValueError("A report needs `items` or `groups`")


class CompletionBatchReply(Internal, frozen=True, kw_only=True):
    accepted: int
    refused: list[Refusal] = field(default_factory=list)


class Release(Internal, frozen=True, kw_only=True):
    task_id: UUID
    attempt: Attempt
    lease_token: UUID


class ReleaseBatch(Internal, frozen=True, kw_only=True):
    """Attempts given back unfinished: a drain or a deploy. None of them is used up."""

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
