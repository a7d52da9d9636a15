"""Jobs and runs: submission, uploads, status, receipts, exports, reruns."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import Meta, Raw, field

from interlock.wire.base import Index, JsonPointer, Name, OperatorName, Priority, Reply, Request, RunState, Seconds
from interlock.wire.tasks import JobRef

MAX_PARTS = 1000


class ListFormat(StrEnum):
    """jsonl: one JSON value per line. lines: each line is a string. csv: a header line, then strings."""

    JSONL = "jsonl"
    CSV = "csv"
    LINES = "lines"


class ListSource(Request, frozen=True, kw_only=True):
    """A list that was uploaded to the URLs of `POST /v1/uploads`. `sha256` covers the uploaded bytes of all parts in
    order."""

    upload_id: UUID
    format: ListFormat = ListFormat.JSONL
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")] | None = None


class UploadRequest(Request, frozen=True, kw_only=True):
    """Parts are uploaded separately and may be uploaded in parallel. A line must not span two parts."""

    parts: Annotated[int, Meta(ge=1, le=MAX_PARTS)] = 1


class ListPart(Reply, frozen=True, kw_only=True):
    part_number: int
    url: str


class ListUpload(Reply, frozen=True, kw_only=True):
    upload_id: UUID
    url: str
    """PUT the first part here. Most lists have only one part."""
    parts: list[ListPart]
    expires_at: datetime
    """The URLs are valid until then. A list that no run uses is kept until then."""


class TasksRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/jobs/{id}/tasks`: adds tasks to a run that was submitted with `open`."""

    tasks: Annotated[list[Raw], Meta(min_length=1)]


class TasksAdded(Reply, frozen=True, kw_only=True):
    job_id: UUID
    run_id: UUID
    state: RunState
    first_index: int
    added: int


class Policy(Request, frozen=True, kw_only=True):
    """Retries and timeouts. Unset values come from the runtime's defaults."""

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
    """Concurrency limits, enforced at claim.

    `key` is a JSON pointer into the payload: `/host` limits tasks per host.
    """

    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    key: JsonPointer | None = None
    max_concurrency_per_key: Annotated[int, Meta(ge=1, le=100_000)] | None = None


class RateLimit(Request, frozen=True, kw_only=True):
    """Limits how many tasks per second start for each key."""

    key: Annotated[str, Meta(pattern=r"^(host|(/[^/]*)+)$(?!\n)", max_length=500)]
    """A JSON pointer into the payload, or `host`: the host of the URL in the payload or in its `url`."""
    per_second: Annotated[float, Meta(ge=0.001, le=1_000_000)]


class RunLimits(Request, frozen=True, kw_only=True):
    """Limits of one run. When the deadline or the tolerated share of failures is exceeded, the remaining tasks are
    canceled and the run is `Failed`.
    """

    max_concurrency: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """Limits running tasks of this run; `scaling` limits all runs of the job together."""
    rate: RateLimit | None = None
    tolerated_failure_share: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of its tasks that may fail permanently."""
    deadline_seconds: Annotated[float, Meta(gt=0, le=366 * 86_400)] | None = None
    """Counted from the submission."""


class DatasetRef(Request, frozen=True, kw_only=True):
    dataset_uuid: UUID
    dataset_version: UUID


class JobRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/jobs`: submits a list of tasks for an operator. A named job may be submitted to repeatedly.

    The list is closed, in this request or in an upload; with `open`, more tasks can be added later.
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
    """Limits of the run that this request creates."""
    retention_days: Annotated[float, Meta(gt=0, le=3660)] | None = None
    """How long the run, its tasks and results are kept after it has ended: up to ten years. Defaults to the setting
    `retention_days`, which is 14 days by default."""
    priority: Priority = Priority.NORMAL
    outputs: Annotated[list[DatasetRef], Meta(max_length=100)] = field(default_factory=list)
    dedupe_by: JsonPointer | None = None
    update: bool = False

    @property
    def listed(self) -> list[Raw]:
        return self.tasks or []


class JobAccepted(Reply, frozen=True, kw_only=True):
    """201: the tasks exist. 202: they are created in the background and `total` is not known yet; see `status_url`."""

    job_id: UUID
    run_id: UUID
    state: RunState
    total: int | None
    deduplicated: int
    tasks_url: str
    status_url: str | None = None


class Counts(Reply, frozen=True, kw_only=True):
    """Tasks per status. `dead` is the part of Failed that is not retried."""

    Queued: int = 0
    Running: int = 0
    Completed: int = 0
    Failed: int = 0
    Canceled: int = 0
    dead: int = 0


class ErrorCount(Reply, frozen=True, kw_only=True):
    error_class: str
    tasks: int


class RunView(Reply, frozen=True, kw_only=True):
    run_id: UUID
    job_id: UUID
    job: JobRef | None = None
    state: RunState
    total: int | None
    counts: Counts
    errors: list[ErrorCount] = field(default_factory=list)
    """Dead tasks by the error class of their last attempt, most frequent first. At most 100 classes are counted
    separately; the others are `(other)`."""
    rerun_of: UUID | None = None
    """The run whose tasks this run repeats."""
    cancel_requested: bool
    reason: str | None = None
    """Reason why the run as a whole failed: its deadline, too many failures, or an unreadable list."""
    rate: float | None = None
    """Tasks that end per second, for an active run; null if unknown."""
    eta_seconds: float | None = None
    """Estimated seconds until the last task ends, at that rate."""
    retention_days: float | None = None
    """How long the run, its tasks and results are kept after it has ended."""
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
    """State of the newest run."""
    run: RunView | None


class JobPage(Reply, frozen=True, kw_only=True):
    jobs: list[JobView]
    next_cursor: str | None


class RunPage(Reply, frozen=True, kw_only=True):
    runs: list[RunView]
    next_cursor: str | None


class RunReceipt(Reply, frozen=True, kw_only=True):
    """The outcome of every task of a run that has ended."""

    org_id: UUID
    job_id: UUID
    run_id: UUID
    state: RunState
    total: int
    """Number of tasks that the run should have."""
    indexes: int
    """The highest index plus one; greater than `total` if duplicate items were dropped."""
    completed: int
    failed: int
    canceled: int
    complete: bool
    """True if all `total` tasks exist and have ended."""
    ids: str
    """Digest of all task ids, computed as described in docs/bulk.md."""
    outcomes: str
    """Digest of all task ids with their final status."""
    created_at: datetime
    ended_at: datetime


class ReceiptReply(Reply, frozen=True, kw_only=True):
    """`Pending` while a large run is being read: call again to continue."""

    run_id: UUID
    state: Literal["Pending", "Signed"]
    walked: int
    of: int
    receipt: RunReceipt | None = None
    signed: str | None = None
    """The receipt as a JWT, signed with ES256."""
    key: dict[str, Any] | None = None
    """The public key of the signature, as a JWK. Its `kid` is the RFC 7638 thumbprint."""


class ReceiptKeys(Reply, frozen=True, kw_only=True):
    """Public keys that currently sign receipts, as a JWK set. Store them: receipts remain valid after key rotation."""

    keys: list[dict[str, Any]]


class RerunRequest(Request, frozen=True, kw_only=True):
    """Creates a new run from tasks of a run: all of them, or those that match the filters."""

    run: str | None = None
    """A run of the job, by its id or a unique prefix. Defaults to the newest."""
    status: Annotated[list[Literal["Completed", "Failed", "Canceled"]], Meta(max_length=3)] = field(
        default_factory=list
    )
    error_class: Annotated[str, Meta(max_length=200)] | None = None
    """Error class of the last attempt."""
    first: Index = 0
    last: Index | None = None


class ExportFormat(StrEnum):
    PARQUET = "parquet"
    JSONL = "jsonl"
    ZIP = "zip"


class ExportState(StrEnum):
    STAGING = "Staging"
    """Rows are being copied from the state database."""
    RUNNING = "Running"
    """Spark writes the files, or the task waits for a Spark worker."""
    COMPLETED = "Completed"
    FAILED = "Failed"


class ExportRequest(Request, frozen=True, kw_only=True):
    """Exports all tasks of a run that has ended, with payloads, outcomes and results."""

    format: ExportFormat = ExportFormat.PARQUET
    run: str | None = None
    """A run of the job, by its id or a unique prefix. Defaults to the newest."""


class ExportPart(Reply, frozen=True, kw_only=True):
    """A file of an export, as in the manifest."""

    name: str
    rows: int
    bytes: int
    sha256: str
    first: int
    """Index of the first task in the file."""
    last: int
    url: str | None = None
    """Signed URL, valid for one day."""


class ExportManifest(Reply, frozen=True, kw_only=True):
    """`manifest.json`, next to the files of an export."""

    export_id: UUID
    run_id: UUID
    format: ExportFormat
    rows: int
    bytes: int
    parts: list[ExportPart]


class ExportView(Reply, frozen=True, kw_only=True):
    export_id: UUID
    job_id: UUID
    run_id: UUID
    format: ExportFormat
    state: ExportState
    staged: int
    """Number of indexes whose rows have been copied."""
    of: int
    created_at: datetime
    task_id: UUID | None = None
    """The Spark task."""
    error: str | None = None
    rows: int | None = None
    bytes: int | None = None
    manifest_url: str | None = None
    """Signed URL, valid for one day."""
    parts: list[ExportPart] = field(default_factory=list)
    next_cursor: str | None = None
    """Cursor of `parts`."""
