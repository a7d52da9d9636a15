"""Objects that the gateway serves from a directory."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from interlock.wire.base import Reply, Request


class ObjectView(Reply, frozen=True, kw_only=True):
    key: str
    size: int
    etag: str
    """Changes with the content, and means nothing else."""
    modified_at: datetime


class ObjectPage(Reply, frozen=True, kw_only=True):
    objects: list[ObjectView]
    next_cursor: str | None


class UploadStarted(Reply, frozen=True, kw_only=True):
    key: str
    upload_id: str


class UploadPart(Request, frozen=True, kw_only=True):
    part_number: Annotated[int, Meta(ge=1, le=10_000)]
    etag: Annotated[str, Meta(max_length=200)]
    """As the answer to the part's PUT has it."""


class UploadParts(Request, frozen=True, kw_only=True):
    parts: Annotated[list[UploadPart], Meta(min_length=1, max_length=10_000)]
    """All that the object is to be made of, in the order of their numbers."""
