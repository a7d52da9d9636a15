"""Lists of tasks that are too long for a request: uploads, and runs that stay open for more."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated
from uuid import UUID

from msgspec import Meta, Raw

from interlock.wire.base import Reply, Request, RunState

MOST_PARTS = 1000


class ListFormat(StrEnum):
    """jsonl: a JSON value on each line. lines: each line is a text. csv: names of columns first, then texts."""

    JSONL = "jsonl"
    CSV = "csv"
    LINES = "lines"


class ListSource(Request, frozen=True, kw_only=True):
    """A list that was put where `POST /v1/uploads` said. `sha256` is of its bytes as they were put, part after part."""

    upload_id: UUID
    format: ListFormat = ListFormat.JSONL
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")] | None = None


class UploadRequest(Request, frozen=True, kw_only=True):
    """Several parts are put apart from each other, at once if need be. A line lies within one part."""

    parts: Annotated[int, Meta(ge=1, le=MOST_PARTS)] = 1


class ListPart(Reply, frozen=True, kw_only=True):
    part_number: int
    url: str


class ListUpload(Reply, frozen=True, kw_only=True):
    upload_id: UUID
    url: str
    """Of the first part, which most lists have alone: PUT it there."""
    parts: list[ListPart]
    expires_at: datetime
    """The URLs are good until then, and a list that no run was made of is kept until then."""


class TasksRequest(Request, frozen=True, kw_only=True):
    """`POST /v1/jobs/{id}/tasks`: more tasks for a run that was submitted with `open`."""

    tasks: Annotated[list[Raw], Meta(min_length=1)]


class TasksAdded(Reply, frozen=True, kw_only=True):
    job_id: UUID
    run_id: UUID
    state: RunState
    first_index: int
    added: int
