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
    paused: bool = False
    """Of a source: make nothing new for now, since those downstream are behind."""


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
    sequence: Index | None = None
    """Tells several changes of one scope by one producer apart. Without it they are one event, reported again."""


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


# Sources


class SourceState(StrEnum):
    """Of an always_on source what its task does; others are `ready` unless they are held back."""

    STARTING = "starting"
    QUEUED = "queued"
    RUNNING = "running"
    RESTARTING = "restarting"
    PAUSED = "paused"
    READY = "ready"


class SourceOutput(_Reply, frozen=True, kw_only=True):
    output: str | None
    dataset_uuid: UUID
    dataset_version: UUID
    cursor: int | None
    """How far a stream is complete."""
    last_scope: str | None
    """Of its newest event: a cursor, or a partition."""
    last_at: datetime | None


class SourceView(_Reply, frozen=True, kw_only=True):
    job: str
    job_id: UUID
    current: bool
    """False for one that is being built beside the current one."""
    kind: str
    state: SourceState
    since: datetime | None
    paused: str | None
    """Why it is held back."""
    task_id: UUID | None
    """Of always_on alone: the same through all restarts."""
    attempt: int | None
    restarts: int
    """In a row, each soon after the last."""
    worker_id: str | None
    last_error: str | None
    last_error_at: datetime | None
    next_at: datetime | None
    """When a schedule starts it next."""
    waiting: int
    """Triggers that are not tasks yet, counted up to 1,000."""
    hook: str | None
    """Path of a webhook, once it has a secret."""
    outputs: list[SourceOutput]


class SourceList(_Reply, frozen=True, kw_only=True):
    sources: list[SourceView]


class SourceEvent(_Request, frozen=True, kw_only=True):
    """A scope of an output that has changed, or a payload for a task."""

    output: Name | None = None
    """May be left out by a job with one output."""
    cursor: Position | None = None
    start: Position | None = None
    end: Position | None = None
    payload: Raw | UnsetType = UNSET


class SourceEvents(_Request, frozen=True, kw_only=True):
    events: Annotated[list[SourceEvent], Meta(min_length=1, max_length=1_000)]


class SourceEventsAccepted(_Reply, frozen=True, kw_only=True):
    events: int
    """Scopes that are written."""
    triggers: int
    """Payloads that become tasks."""


class SecretRequest(_Request, frozen=True, kw_only=True):
    rotate: bool = False
    """Replace the secret that is there; it is good for another hour."""


class HookSecret(_Reply, frozen=True, kw_only=True):
    hook_id: str
    path: str
    auth: str
    """`hmac` or `token`: how a call proves itself."""
    secret: str
    """The only time it is shown."""
    previous_until: datetime | None
    """How long the secret before this one is good."""


class HookAccepted(_Reply, frozen=True, kw_only=True):
    accepted: bool = True
    duplicate: bool = False
    """The same call was accepted before, and is not carried out again."""


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
    problems: list[DagProblem] | None = None


class SigningKeyView(_Reply, frozen=True, kw_only=True):
    kid: str
    created_at: datetime
    retired_at: datetime | None
    verify_until: datetime | None


# Datasets


class VersionState(StrEnum):
    """`Building`: made beside the current one, by a DAG version that has not taken over yet."""

    CURRENT = "Current"
    BUILDING = "Building"
    RETIRED = "Retired"
    PURGED = "Purged"


class DatasetSummary(_Reply, frozen=True, kw_only=True):
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


class DatasetPage(_Reply, frozen=True, kw_only=True):
    datasets: list[DatasetSummary]
    next_cursor: str | None


class DatasetVersionView(_Reply, frozen=True, kw_only=True):
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


class DatasetView(_Reply, frozen=True, kw_only=True):
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


class PartitionView(_Reply, frozen=True, kw_only=True):
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


class PartitionPage(_Reply, frozen=True, kw_only=True):
    dataset_version: UUID
    partitions: list[PartitionView]
    next_cursor: str | None


class DatasetEventView(_Reply, frozen=True, kw_only=True):
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


class DatasetEventPage(_Reply, frozen=True, kw_only=True):
    events: list[DatasetEventView]
    next_cursor: str | None


class Direction(StrEnum):
    UP = "up"
    DOWN = "down"
    BOTH = "both"


class LineageJob(_Reply, frozen=True, kw_only=True):
    job_id: UUID
    dag: str | None
    job: str | None
    depth: int
    """Jobs between it and the dataset in question, itself included; negative upstream."""


class LineageDataset(_Reply, frozen=True, kw_only=True):
    dataset_uuid: UUID
    names: list[str]
    dag: str | None
    job: str | None
    output: str | None
    depth: int


class LineageEdge(_Reply, frozen=True, kw_only=True):
    job_id: UUID
    dataset_uuid: UUID
    kind: Literal["reads", "writes"]
    where: str | None = None


class Lineage(_Reply, frozen=True, kw_only=True):
    """Who makes a dataset of what, and who makes what of it: generations that are current, across DAGs."""

    dataset_uuid: UUID
    jobs: list[LineageJob]
    datasets: list[LineageDataset]
    edges: list[LineageEdge]
    truncated: bool
    """There is more than is shown, deeper or beside."""


class InvalidateRequest(_Request, frozen=True, kw_only=True):
    """Have an inclusive range made again. `dry_run` only counts."""

    start: Position
    end: Position
    reason: Annotated[str, Meta(min_length=1, max_length=2_000)]
    dry_run: bool = False


class Invalidated(_Reply, frozen=True, kw_only=True):
    scopes: int
    """Scopes that are made again, or would be; those that follow from them downstream are not counted."""
    dry_run: bool
    invalidation_id: UUID | None
    """Null when nothing was written."""


class ScopeExplanation(_Reply, frozen=True, kw_only=True):
    """Why a job has, or has not, done a scope: a stable `reason`, a sentence, and the facts behind it."""

    job_id: UUID
    start: int
    end: int
    reason: str
    detail: str
    task_id: UUID | None
    facts: dict[str, Any]


# DAGs


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


class DagRequest(_Request, frozen=True, kw_only=True):
    """A DAG file, where a body of JSON is handier than one of YAML."""

    yaml: Annotated[str, Meta(max_length=1_000_000)]


class DagProblem(Struct, frozen=True):
    """What is wrong with a DAG file, where, and what to write instead. Lines and columns count from 1."""

    line: int
    column: int
    message: str
    suggestion: str


class PlannedInput(_Reply, frozen=True, kw_only=True):
    """What there is to read now, so that a reader can tell how much will be built."""

    input: str
    """`job.output`, or a published name."""
    partitions: int
    more: bool
    """There are more than were counted."""
    cursor: int | None
    """How far it is, where it is a stream."""


class PlannedJob(_Reply, frozen=True, kw_only=True):
    name: str
    change: JobChange
    new_versions: list[str]
    """Outputs that get a new dataset version."""
    inputs: list[PlannedInput]
    """Of a job that is built."""


class DagDeployed(_Reply, frozen=True, kw_only=True):
    dag: str
    dag_version: UUID | None
    """Null when it was only asked what would happen."""
    content_hash: str
    state: DagState | None
    dry_run: bool
    plan: list[PlannedJob]


class DagVersionView(_Reply, frozen=True, kw_only=True):
    dag_version: UUID
    content_hash: str
    state: DagState
    deployed_by: str
    deployed_at: datetime
    current_at: datetime | None
    """When it last became current."""
    retired_at: datetime | None


class DagVersionPage(_Reply, frozen=True, kw_only=True):
    versions: list[DagVersionView]
    next_cursor: str | None


class BuildProgress(_Reply, frozen=True, kw_only=True):
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


class DagOutput(_Reply, frozen=True, kw_only=True):
    name: str
    dataset_uuid: UUID
    dataset_version: UUID


class DagJobView(_Reply, frozen=True, kw_only=True):
    job_id: UUID
    name: str
    operator: str
    runtime: str
    source: str | None
    """Its kind, where it is a source."""
    paused: bool
    outputs: list[DagOutput]


class DagSummary(_Reply, frozen=True, kw_only=True):
    name: str
    created_at: datetime
    current: DagVersionView | None
    building: DagVersionView | None


class DagPage(_Reply, frozen=True, kw_only=True):
    dags: list[DagSummary]
    next_cursor: str | None


class DagView(_Reply, frozen=True, kw_only=True):
    name: str
    created_at: datetime
    current: DagVersionView | None
    building: DagVersionView | None
    jobs: list[DagJobView]
    """Of the current version."""
    publish: list[str]
    progress: list[BuildProgress]
    """Of the jobs that are being built."""


class DagDocument(_Reply, frozen=True, kw_only=True):
    """A deployed version in canonical form: a file with this content deploys the same."""

    dag_version: UUID
    content_hash: str
    document: Raw


class RollbackRequest(_Request, frozen=True, kw_only=True):
    """Without `to`, the version that was current before."""

    to: Annotated[str, Meta(min_length=4, max_length=64, pattern=r"^[0-9a-f]+$(?!\n)")] | None = None


class PurgeRequest(_Request, frozen=True, kw_only=True):
    """By the beginning of its content hash."""

    version: Annotated[str, Meta(min_length=4, max_length=64, pattern=r"^[0-9a-f]+$(?!\n)")]


# Backpressure and backfills


class PauseLevel(StrEnum):
    BULK = "bulk"
    """Only bulk work is held back."""
    ALL = "all"


class PauseView(_Reply, frozen=True, kw_only=True):
    """A job that gets no new tasks, because a queue downstream of it is past its limit."""

    job_id: UUID
    job: JobRef
    cause_id: UUID
    cause: JobRef
    """Whose queue it is."""
    level: PauseLevel
    path: list[str]
    """Jobs from the one that is held back down to the cause, in the direction of the data."""
    reason: str
    since: datetime


class PausePage(_Reply, frozen=True, kw_only=True):
    pauses: list[PauseView]
    next_cursor: str | None


class BackfillState(StrEnum):
    """Of the making of its tasks; `run_state` tells how they fare."""

    RUNNING = "Running"
    PAUSED = "Paused"
    DONE = "Done"
    CANCELED = "Canceled"


class BackfillRequest(_Request, frozen=True, kw_only=True):
    """Which scopes of a job to compute again: all that have a position from `start` to `end`."""

    start: Position
    end: Position
    priority: Priority = Priority.BULK
    reason: Annotated[str, Meta(max_length=1_000)] | None = None
    dry_run: bool = False


class BackfillScope(_Reply, frozen=True, kw_only=True):
    input_index: int
    start: int
    end: int


class BackfillView(_Reply, frozen=True, kw_only=True):
    run_id: UUID
    job_id: UUID
    job: JobRef
    start: int
    end: int
    priority: Priority
    reason: str | None
    requested_by: str
    state: BackfillState
    made: int
    """Tasks so far."""
    total: int | None
    """Tasks that it will have, as counted at the start; null when there were too many to count."""
    counts: Counts
    run_state: RunState
    created_at: datetime
    ended_at: datetime | None


class BackfillAnswer(_Reply, frozen=True, kw_only=True):
    """How much there is to compute, and, unless that was all that was asked, the backfill that does it."""

    scopes: int
    more: bool
    """There are more than were counted."""
    first: list[BackfillScope]
    dry_run: bool
    backfill: BackfillView | None = None


class BackfillPage(_Reply, frozen=True, kw_only=True):
    backfills: list[BackfillView]
    next_cursor: str | None
