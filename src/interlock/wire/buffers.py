"""Batches of buffered datasets, as users see them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from msgspec import field

from interlock.wire.base import Reply


class PublishStatus(StrEnum):
    """What became of a published batch."""

    PENDING = "Pending"
    LOADING = "Loading"
    LOADED = "Loaded"
    REFUSED = "Refused"
    FAILED = "Failed"


class BadRow(Reply, frozen=True, kw_only=True):
    line: int
    """Of JSON lines; of Parquet the row, counted from 1."""
    reason: str


class BatchRefusal(Reply, frozen=True, kw_only=True):
    """Why a batch was not loaded."""

    code: str
    detail: str
    bad_rows: int = 0
    """How many there are; counting stops at 10,000."""
    rows: list[BadRow] = field(default_factory=list)
    """The first 100 of them."""


class BufferView(Reply, frozen=True, kw_only=True):
    """A published batch."""

    publish_id: UUID
    dataset: str | None = None
    """Its published name, or `dag:job:output`: as a query names it. None for one that no DAG has declared."""
    dataset_uuid: UUID
    dataset_version: UUID
    task_id: UUID
    attempt: int
    batch_uri: str
    record_count: int
    status: PublishStatus
    published_at: datetime
    settled_at: datetime | None = None
    """When it was loaded, refused or given up."""
    batch: int | None = None
    """Its number in the dataset version, which is the cursor that readers were told."""
    rows: int | None = None
    bytes: int | None = None
    redrives: int = 0
    load_task: UUID | None = None
    """The task that loads it on Spark."""
    swept_at: datetime | None = None
    """When its file was deleted."""
    refusal: BatchRefusal | None = None


class BufferPage(Reply, frozen=True, kw_only=True):
    buffers: list[BufferView]
    next_cursor: str | None = None
