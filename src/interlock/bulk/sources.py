"""What a run is made of: rows by index, in batches that a crash may come between.

A source of another kind is a struct here that says what it is, and a class with `batches` and `verify` that reads it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

import msgspec

from interlock.wire import ListFormat

if TYPE_CHECKING:
    import pyarrow as pa


class StagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """As it was when the run was submitted: what has another tag since is another list."""

    etag: str
    size: int


class StagedSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="upload"):
    """A list in parts, below the folder of an upload."""

    upload_id: UUID
    prefix: str
    format: ListFormat
    sha256: str | None
    parts: list[StagedPart]

    @property
    def bytes(self) -> int:
        return sum(part.size for part in self.parts)

    def uri(self, part: int) -> str:
        return part_uri(self.prefix, part)


class ScopePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A scope of a job, where those behind it are asked for."""

    input_index: int
    start: int
    end: int


START: Final = ScopePlace(input_index=-1, start=0, end=0)
"""Before every scope."""


class ScopesSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="scopes"):
    """The scopes of the run's job that have a position from `start` to `end`: what a backfill computes again."""

    start: int
    end: int
    after: ScopePlace = START


def part_uri(prefix: str, part: int) -> str:
    """Parts are counted from 1."""
    return f"{prefix}{part:05}"


@dataclass(frozen=True)
class Place:
    """Where a source is read on: behind the last batch that was loaded."""

    part: int = 1
    byte: int = 0
    line: int = 0
    reached: str | None = None
    """As the batch before it has said."""


@dataclass(frozen=True)
class Batch:
    """Rows that are loaded together or not at all. Its part and first byte name it, whoever reads it again."""

    part: int
    first_byte: int
    end_byte: int
    first_line: int
    lines: int
    """As many as indexes were given out for."""
    table: pa.Table
    """As `rows.table_of` makes it."""
    reached: str | None = None
    """Of a source that may change: from where on it is read by whoever comes after this batch. One that another process
    has loaded may have been another then, and so what was read behind it counts for nothing."""


class Source(Protocol):
    def batches(self, place: Place) -> AsyncGenerator[Batch]:
        """In order, from a place on; each as it was the first time, or with the place that it has reached."""

    async def verify(self) -> None:
        """After the last one, and before anybody sees a row: raises BadList when this is not what was submitted."""
