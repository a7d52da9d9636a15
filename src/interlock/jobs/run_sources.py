"""Sources of the tasks of a run, as the ingest reads them; and the messages that wake the ingest."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

import msgspec

from interlock.settings import INGEST_QUEUE, Settings
from interlock.stores.postgres import Connection, queries
from interlock.wire.jobs import ListFormat

if TYPE_CHECKING:
    import pyarrow as pa


_sql = queries(__name__, "ingest")


async def announce(connection: Connection, settings: Settings, run_ids: Sequence[UUID]) -> None:
    """Sends wake-ups for runs, in the transaction that records them."""
    await _sql.announce(connection, queue=INGEST_QUEUE, run_ids=list(run_ids), direct=settings.queue_direct)


class StagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part as it was when the run was submitted. A different tag means that the list was changed."""

    etag: str
    size: int


class StagedSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="upload"):
    """A list in parts, under the prefix of an upload."""

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
    """Position of a scope, from which the following scopes are read."""

    input_index: int
    start: int
    end: int


START: Final = ScopePlace(input_index=-1, start=0, end=0)
"""Before the first scope."""


class ScopesSource(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="scopes"):
    """The scopes of the run's job that overlap `start` to `end`: the source of a backfill."""

    start: int
    end: int
    after: ScopePlace = START
    calendar: str | None = None
    """For a source job: the calendar whose partitions are the scopes."""


def part_uri(prefix: str, part: int) -> str:
    """Returns the URI of a part. Parts are numbered from 1."""
    return f"{prefix}{part:05}"


@dataclass(frozen=True)
class Place:
    """Position for reading on: after the last loaded batch."""

    part: int = 1
    byte: int = 0
    line: int = 0
    reached: str | None = None
    """`reached` of the last batch."""


@dataclass(frozen=True)
class Batch:
    """Rows that are loaded together or not at all. Its part and first byte identify it for every reader."""

    part: int
    first_byte: int
    end_byte: int
    first_line: int
    lines: int
    """Number of indexes used by the batch."""
    table: pa.Table
    """In the format of `rows.table_of`."""
    reached: str | None = None
    """For a source that may change: the position from which the next batch is read. If another process has loaded a
    batch here, it may have differed, so everything this process read after it is discarded."""


class Source(Protocol):
    def batches(self, place: Place) -> AsyncGenerator[Batch]:
        """Yields batches in order, starting at a place. A repeated batch is identical, unless it has `reached`."""

    async def verify(self) -> None:
        """Runs after the last batch, before any row is visible. Raises BadList if the list is not as submitted."""
