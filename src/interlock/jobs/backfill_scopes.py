"""The scopes of a job in a range, as task rows: the source of a backfill.

Scopes are read as they are now, and they may change: each batch records its end, and the next one is read from there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa

from interlock.jobs.backfills import place_of, scopes_after
from interlock.jobs.run_sources import Batch, Place, ScopePlace, ScopesSource
from interlock.jobs.task_rows import table_of
from interlock.stores.postgres import Database, Row

_PAGE: Final = 5000
"""Scopes inspected per statement."""
_LARGEST: Final = 50_000
"""Maximum rows per batch: two batches are in memory."""
_place = msgspec.json.Decoder(ScopePlace)


class Scopes:
    def __init__(
        self,
        database: Database,
        source: ScopesSource,
        run_id: UUID,
        job_id: UUID,
        slot_pointer: str | None,
        *,
        batch_rows: int,
    ) -> None:
        self._database = database
        self._source = source
        self._run_id = run_id
        self._job_id = job_id
        self._slot_pointer = slot_pointer
        self._rows = min(batch_rows, _LARGEST)

    async def batches(self, place: Place) -> AsyncGenerator[Batch]:
        """Yields batches of at least one task. Trailing scopes without a task are in no batch."""
        at = self._source.after if place.reached is None else _place.decode(place.reached)
        line, more = place.line, True
        while more:
            ready, at, more = await self._next(at)
            if ready:
                yield self._batch(ready, at, line)
                line += len(ready)

    async def verify(self) -> None:
        """Does nothing: scopes have no checksum to verify against."""

    async def _next(self, at: ScopePlace) -> tuple[list[Row], ScopePlace, bool]:
        """Returns scopes that every input has, the last scope inspected, and whether more may follow."""
        ready: list[Row] = []
        while len(ready) < self._rows:
            limit = min(_PAGE, self._rows - len(ready))
            async with self._database.connection() as connection:
                page = await scopes_after(connection, self._job_id, self._source, at, limit)
            ready += [scope for scope in page if scope["commit_id"] is not None]
            at = place_of(page[-1]) if page else at
            if len(page) < limit:
                return ready, at, False
        return ready, at, True

    def _batch(self, scopes: list[Row], reached: ScopePlace, line: int) -> Batch:
        count = len(scopes)
        payloads = pa.array([_payload(scope) for scope in scopes], pa.string())
        indexes = np.arange(line, line + count, dtype=np.int64)
        return Batch(
            part=1,
            first_byte=line,
            end_byte=line + count,
            first_line=line,
            lines=count,
            table=table_of(self._run_id, indexes, payloads, self._slot_pointer),
            reached=msgspec.json.encode(reached).decode(),
        )


def _payload(scope: Row) -> str:
    """Builds the same payload as a task created by an event; see give_scopes. Stream ranges count as changed."""
    start, end = scope["range_start"], scope["range_end"]
    changed = (start, end) if scope["of_stream"] else (None, None)
    return msgspec.json.encode(
        {
            "input_index": scope["input_index"],
            "partition_key": f"{start}-{end}",
            "start": start,
            "end": end,
            "changed_start": changed[0],
            "changed_end": changed[1],
            "commit": scope["commit_id"],
        }
    ).decode()
