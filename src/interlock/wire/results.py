"""What comes out of a run: receipts, exports, and runs of the same tasks again."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import Meta, field

from interlock.wire.base import Index, Reply, Request, RunState


class RunReceipt(Reply, frozen=True, kw_only=True):
    """What became of every task of a run that has ended."""

    org_id: UUID
    job_id: UUID
    run_id: UUID
    state: RunState
    total: int
    """Tasks that the run was to have."""
    indexes: int
    """One more than the highest index; more than `total` where items were left out as duplicates."""
    completed: int
    failed: int
    canceled: int
    complete: bool
    """Each of `total` tasks is there, and has ended."""
    ids: str
    """Digest over the full ids of all tasks, as docs/bulk.md says how."""
    outcomes: str
    """The same over each id and what its task has ended as."""
    created_at: datetime
    ended_at: datetime


class ReceiptReply(Reply, frozen=True, kw_only=True):
    """`Pending` while a large run is being walked: ask again, and it goes on from there."""

    run_id: UUID
    state: Literal["Pending", "Signed"]
    walked: int
    of: int
    receipt: RunReceipt | None = None
    signed: str | None = None
    """The receipt as a JWT, by ES256."""
    key: dict[str, Any] | None = None
    """The public half of the key that has signed it, as a JWK. Its `kid` is the thumbprint of RFC 7638."""


class ReceiptKeys(Reply, frozen=True, kw_only=True):
    """Public keys that sign receipts now, as a JWK set. Keep them: receipts outlive them."""

    keys: list[dict[str, Any]]


class RerunRequest(Request, frozen=True, kw_only=True):
    """Which tasks of a run are to be the tasks of a new one; without a filter, all of them."""

    run: UUID | None = None
    """Default: the job's newest run."""
    status: Annotated[list[Literal["Completed", "Failed", "Canceled"]], Meta(max_length=3)] = field(
        default_factory=list
    )
    error_class: Annotated[str, Meta(max_length=200)] | None = None
    """Of the last attempt."""
    first: Index = 0
    last: Index | None = None


class ExportFormat(StrEnum):
    PARQUET = "parquet"
    JSONL = "jsonl"
    ZIP = "zip"


class ExportState(StrEnum):
    STAGING = "Staging"
    """Its rows are copied out of the state database."""
    RUNNING = "Running"
    """Its files are made on Spark, or wait for a Spark worker."""
    COMPLETED = "Completed"
    FAILED = "Failed"


class ExportRequest(Request, frozen=True, kw_only=True):
    """All tasks of a run that has ended, with payloads, outcomes and results."""

    format: ExportFormat = ExportFormat.PARQUET
    run: UUID | None = None
    """Default: the job's newest run."""


class ExportPart(Reply, frozen=True, kw_only=True):
    """A file of an export, as the manifest has it."""

    name: str
    rows: int
    bytes: int
    sha256: str
    first: int
    """Index of its first task."""
    last: int
    url: str | None = None
    """Signed, for a day."""


class ExportManifest(Reply, frozen=True, kw_only=True):
    """`manifest.json` beside the files."""

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
    """Indexes of the run whose rows are copied."""
    of: int
    created_at: datetime
    task_id: UUID | None = None
    """On Spark."""
    error: str | None = None
    rows: int | None = None
    bytes: int | None = None
    manifest_url: str | None = None
    """Signed, for a day."""
    parts: list[ExportPart] = field(default_factory=list)
    next_cursor: str | None = None
    """Of the parts."""
