"""Every JSON body on the wire, as the server and the client SDK both use it.

Names are a contract. Requests of users refuse unknown fields, so that a typo is an error and not a silent default;
requests of workers ignore them, so that workers and dispatchers of neighbouring versions understand each other.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$(?!\n)")]
OperatorName = Annotated[
    str, Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_.]*)?$(?!\n)")
]
WorkerId = Annotated[str, Meta(min_length=1, max_length=200)]
JsonPointer = Annotated[str, Meta(pattern=r"^(/[^/]*)+$(?!\n)", max_length=500)]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86_400)]
Attempt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, Meta(ge=0, le=2**62)]
Position = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Text = Annotated[str, Meta(max_length=10_000)]


class TaskStatus(StrEnum):
    QUEUED = "Queued"
    RUNNING = "Running"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELED = "Canceled"


class RunState(StrEnum):
    INGESTING = "Ingesting"
    RUNNING = "Running"
    PAUSED = "Paused"
    COMPLETED = "Completed"
    COMPLETED_WITH_FAILURES = "CompletedWithFailures"
    FAILED = "Failed"
    CANCELED = "Canceled"


class Outcome(StrEnum):
    """How an attempt ended. `Released` gives the attempt back: it does not count against the policy."""

    COMPLETED = "Completed"
    FAILED = "Failed"
    LEASE_EXPIRED = "LeaseExpired"
    TIMED_OUT = "TimedOut"
    CANCELED = "Canceled"
    RELEASED = "Released"


class Priority(StrEnum):
    NORMAL = "normal"
    BULK = "bulk"


class _Request(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What a user sends."""


class _Internal(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What workers and the dispatcher say to each other."""


class _Reply(Struct, kw_only=True, frozen=True):
    """What a user gets."""


# Jobs and runs


class Policy(_Request, frozen=True, kw_only=True):
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


class Scaling(_Request, frozen=True, kw_only=True):
    """Concurrency caps, enforced at claim. `key` points into the payload: `/host` caps per host."""

    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    key: JsonPointer | None = None
    max_concurrency_per_key: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class DatasetRef(_Request, frozen=True, kw_only=True):
    dataset_uuid: UUID
    dataset_version: UUID


class JobRequest(_Request, frozen=True, kw_only=True):
    """`POST /v1/jobs`: a closed list of tasks for an operator. A named job may be posted to again."""

    tasks: list[Raw]
    name: Name | None = None
    operator: OperatorName | None = None
    runtime: Name = "platform"
    config: dict[str, Any] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    scaling: Scaling = field(default_factory=Scaling)
    priority: Priority = Priority.NORMAL
    outputs: Annotated[list[DatasetRef], Meta(max_length=100)] = field(default_factory=list)
    dedupe_by: JsonPointer | None = None
    update: bool = False


class JobAccepted(_Reply, frozen=True, kw_only=True):
    job_id: UUID
    run_id: UUID
    state: RunState
    total: int
    deduplicated: int
    tasks_url: str


class Counts(_Reply, frozen=True, kw_only=True):
    """Tasks per status. `dead` is the part of Failed that no retry will touch."""

    Queued: int = 0
    Running: int = 0
    Completed: int = 0
    Failed: int = 0
    Canceled: int = 0
    dead: int = 0


class RunView(_Reply, frozen=True, kw_only=True):
    run_id: UUID
    job_id: UUID
    state: RunState
    total: int | None
    counts: Counts
    cancel_requested: bool
    created_at: datetime
    ended_at: datetime | None


class JobView(_Reply, frozen=True, kw_only=True):
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


class JobPage(_Reply, frozen=True, kw_only=True):
    jobs: list[JobView]
    next_cursor: str | None


class RunPage(_Reply, frozen=True, kw_only=True):
    runs: list[RunView]
    next_cursor: str | None


# Tasks


class JobRef(Struct, frozen=True):
    dag_name: str | None
    name: str | None


class TaskView(_Reply, frozen=True, kw_only=True):
    task_id: UUID
    job_id: UUID
    job: JobRef
    run_id: UUID | None
    index: int | None
    status: TaskStatus
    attempt: int
    dead: bool
    cancel_requested: bool
    priority: Priority
    payload: Raw
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    retry_at: datetime | None
    worker_id: str | None
    lease_expires_at: datetime | None
    progress: float | None
    progress_text: str | None
    error_class: str | None
    error_message: str | None
    result: Raw
    """What the operator returned; JSON null until there is something."""


class TaskPage(_Reply, frozen=True, kw_only=True):
    """A page may be short, even empty, while `next_cursor` is set: follow it until it is null."""

    tasks: list[TaskView]
    next_cursor: str | None


class Crash(Struct, frozen=True, omit_defaults=True):
    """How a worker's child process died."""

    exit_code: int | None = None
    signal: str | None = None
    oom: bool = False


class AttemptView(_Reply, frozen=True, kw_only=True):
    attempt: int
    outcome: Outcome | None
    worker_id: str | None
    started_at: datetime
    ended_at: datetime | None
    error_class: str | None = None
    error_message: str | None = None
    crash: Crash | None = None


class AttemptPage(_Reply, frozen=True, kw_only=True):
    attempts: list[AttemptView]


class Explanation(_Reply, frozen=True, kw_only=True):
    """Why a task is where it is: a stable `reason`, a sentence, and the facts behind it."""

    task_id: UUID
    status: TaskStatus
    reason: str
    detail: str
    facts: dict[str, Any]


class CancelRequest(_Request, frozen=True, kw_only=True):
    """Cancel by filter. `dry_run` only counts."""

    job: str | None = None
    run: UUID | None = None
    status: TaskStatus | None = None
    dry_run: bool = False


class Changed(_Reply, frozen=True, kw_only=True):
    """How many tasks a bulk action reached; `remaining` are handled in the background."""

    matched: int
    dry_run: bool = False
    remaining: bool = False


class RedriveRequest(_Request, frozen=True, kw_only=True):
    """Give dead letters a fresh set of attempts."""

    job: str | None = None
    run: UUID | None = None
    error_class: str | None = None
    dry_run: bool = False
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 10_000


# Claim, heartbeat, complete


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


class ClaimRequest(_Internal, frozen=True, kw_only=True):
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


class TaskPayload(Struct, frozen=True, kw_only=True):
    task_id: UUID
    attempt: int
    job_id: UUID
    job: JobRef
    operator: str
    config: Raw
    inputs: list[Raw]
    payload: Raw
    org_id: UUID
    run_id: UUID | None
    index: int | None
    outputs: list[WriteGrant]
    timeout_at: datetime | None
    """None when it is fetched before its first claim."""


class ClaimReply(_Internal, frozen=True, kw_only=True):
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


class ClaimBatchReply(_Internal, frozen=True, kw_only=True):
    claims: list[ClaimReply]
    groups: list[ClaimGroup] = field(default_factory=list)
    remaining: int = 0
    """Tasks of the asked range that were claimable but beyond `limit`; a new message for them is on its way."""


class FetchReply(_Internal, frozen=True, kw_only=True):
    status: TaskStatus
    task: TaskPayload


class Heartbeat(_Internal, frozen=True, kw_only=True):
    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    progress: Annotated[float, Meta(ge=0, le=1)] | None = None
    progress_text: Annotated[str, Meta(max_length=500)] | None = None
    token: bool = False
    """Ask for a capability token now; one near its end is renewed unasked."""


class HeartbeatReply(_Internal, frozen=True, kw_only=True):
    status: Literal["Running"]
    task_id: UUID
    lease_expires_at: datetime
    cancel_requested: bool
    capability_token: str | None = None


class Refusal(_Internal, frozen=True, kw_only=True):
    """One item of a batch that was refused; its neighbours are not touched by it."""

    task_id: UUID
    code: str
    detail: str
    stale: str | None = None


class HeartbeatBatch(_Internal, frozen=True, kw_only=True):
    items: Annotated[list[Heartbeat], Meta(min_length=1, max_length=10_000)]


class HeartbeatBatchReply(_Internal, frozen=True, kw_only=True):
    items: list[HeartbeatReply]
    refused: list[Refusal] = field(default_factory=list)


class Event(_Internal, frozen=True, kw_only=True):
    """A scope of a dataset version changed: a cursor, or an inclusive partition."""

    dataset_uuid: UUID
    dataset_version: UUID
    cursor: Position | None = None
    partition_key: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    start: Position | None = None
    end: Position | None = None


class Output(_Internal, frozen=True, kw_only=True):
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


class Completion(_Internal, frozen=True, kw_only=True):
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


class CompletionReply(_Internal, frozen=True, kw_only=True):
    task_id: UUID
    status: TaskStatus
    """The task's status now: `Failed` may still have retries to come."""
    duplicate: bool = False
    retry_at: datetime | None = None


class CompletionGroup(_Internal, frozen=True, kw_only=True):
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


class CompletionBatch(_Internal, frozen=True, kw_only=True):
    items: Annotated[list[Completion], Meta(max_length=10_000)] = field(default_factory=list)
    groups: Annotated[list[CompletionGroup], Meta(max_length=1_000)] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.items and not self.groups:
            raise ValueError("A report needs `items` or `groups`")


class CompletionBatchReply(_Internal, frozen=True, kw_only=True):
    accepted: int
    refused: list[Refusal] = field(default_factory=list)


class Release(_Internal, frozen=True, kw_only=True):
    task_id: UUID
    attempt: Attempt
    lease_token: UUID


class ReleaseBatch(_Internal, frozen=True, kw_only=True):
    """Attempts given back unfinished: a drain or a deploy. None of them is used up."""

    items: Annotated[list[Release], Meta(min_length=1, max_length=10_000)]


class ReleaseReply(_Internal, frozen=True, kw_only=True):
    released: int


class EventBatch(_Internal, frozen=True, kw_only=True):
    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    events: Annotated[list[Event], Meta(min_length=1, max_length=10_000)]


class EventsAccepted(_Internal, frozen=True, kw_only=True):
    accepted: int
    duplicates: int = 0


class BufferPublish(_Internal, frozen=True, kw_only=True):
    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    dataset_uuid: UUID
    dataset_version: UUID
    batch_uri: Annotated[str, Meta(min_length=1, max_length=2_000)]
    record_count: Annotated[int, Meta(ge=0, le=2**62)]


class BufferPublished(_Internal, frozen=True, kw_only=True):
    publish_id: UUID
    duplicate: bool = False


# Queues


class ReceiveRequest(_Internal, frozen=True, kw_only=True):
    queue: Name
    worker_id: WorkerId
    max: Annotated[int, Meta(ge=1, le=100)] = 10
    wait_seconds: Annotated[float, Meta(ge=0, le=30)] = 20.0
    visibility_seconds: Annotated[float, Meta(ge=1, le=43_200)] = 30.0


class QueueMessage(Struct, frozen=True):
    message_id: str
    receipt: str
    body: Raw
    receives: int
    enqueued_at: datetime


class ReceiveReply(_Internal, frozen=True, kw_only=True):
    messages: list[QueueMessage]


class MessageRef(Struct, frozen=True):
    message_id: str
    receipt: str


class SettleRequest(_Internal, frozen=True, kw_only=True):
    """`extend`, `ack` and `nack` take the same shape; each reads the fields it needs."""

    queue: Name
    items: Annotated[list[MessageRef], Meta(min_length=1, max_length=1_000)]
    visibility_seconds: Annotated[float, Meta(ge=1, le=43_200)] = 30.0
    delay_seconds: Annotated[float, Meta(ge=0, le=43_200)] = 0.0


class Settled(_Internal, frozen=True, kw_only=True):
    settled: int
    """Fewer than asked: the others' receipts are stale, their messages went to another receiver or are gone."""


class QueueView(_Reply, frozen=True, kw_only=True):
    queue: str
    depth: int
    in_flight: int
    oldest_age_seconds: float | None
    dead_letters: int


class QueueList(_Reply, frozen=True, kw_only=True):
    queues: list[QueueView]


class DeadMessage(_Reply, frozen=True, kw_only=True):
    message_id: str
    body: Raw
    receives: int
    enqueued_at: datetime
    dead_at: datetime


class DeadMessagePage(_Reply, frozen=True, kw_only=True):
    messages: list[DeadMessage]


# Principals


class Role(StrEnum):
    READER = "reader"
    WRITER = "writer"
    ADMIN = "admin"


class KeyRequest(_Request, frozen=True, kw_only=True):
    user: Name
    role: Role = Role.READER
    scopes: list[str] | None = None
    """Narrows what the role allows; unset keeps all of it."""
    expires_in_days: Annotated[float, Meta(gt=0, le=3650)] | None = None
    org: Name | None = None
    """Another org than the caller's: needs the `platform` scope."""


class KeyView(_Reply, frozen=True, kw_only=True):
    key_id: str
    org: str
    user: str
    role: Role
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class KeyCreated(_Reply, frozen=True, kw_only=True):
    key: str
    """The only time it is shown: what is stored is its hash."""
    view: KeyView


class KeyList(_Reply, frozen=True, kw_only=True):
    keys: list[KeyView]


class WorkerTokenRequest(_Request, frozen=True, kw_only=True):
    name: Name
    runtimes: list[Name] | None = None
    expires_in_days: Annotated[float, Meta(gt=0, le=3650)] | None = None


class WorkerTokenView(_Reply, frozen=True, kw_only=True):
    token_id: str
    name: str
    runtimes: list[str] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class WorkerTokenCreated(_Reply, frozen=True, kw_only=True):
    token: str
    view: WorkerTokenView


class WorkerTokenList(_Reply, frozen=True, kw_only=True):
    tokens: list[WorkerTokenView]


class OrgRequest(_Request, frozen=True, kw_only=True):
    name: Name


class OrgView(_Reply, frozen=True, kw_only=True):
    org_id: UUID
    name: str


class WorkerView(_Reply, frozen=True, kw_only=True):
    worker_id: str
    queue: str
    last_seen_at: datetime


class WorkerList(_Reply, frozen=True, kw_only=True):
    workers: list[WorkerView]


class Health(_Reply, frozen=True, kw_only=True):
    status: Literal["ok", "degraded"]
    checks: dict[str, str]


class Problem(Struct, frozen=True, omit_defaults=True):
    """RFC 9457. `code` is stable; `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str = ""
    stale: str | None = None
    retry_after_ms: int | None = None
    errors: list[str] | None = None


class SigningKeyView(_Reply, frozen=True, kw_only=True):
    kid: str
    created_at: datetime
    retired_at: datetime | None
    verify_until: datetime | None
