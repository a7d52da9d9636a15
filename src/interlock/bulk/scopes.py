"""The scopes of a job in a range, as rows of tasks: what a backfill is made of.

They are read as they are now, and that changes: a batch says where it ended, and the next one is read from there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa

from interlock.adapters.postgres import Database, Row
from interlock.bulk.backfills import place_of, scopes_after
from interlock.bulk.rows import table_of
from interlock.bulk.sources import Batch, Place, ScopePlace, ScopesSource

_PAGE: Final = 5000
"""Scopes that one statement looks at."""
_LARGEST: Final = 50_000
"""Of a batch: two of them are in memory."""
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
        """Each has a task at least; what is left without one at the end is in none."""
        at = self._source.after if place.reached is None else _place.decode(place.reached)
        line, more = place.line, True
        while more:
            ready, at, more = await self._next(at)
            if ready:
                yield self._batch(ready, at, line)
                line += len(ready)

    async def verify(self) -> None:
        """There is nothing that it should be: it is what was found."""

    async def _next(self, at: ScopePlace) -> tuple[list[Row], ScopePlace, bool]:
        """Scopes that every input has, the last one that was looked at for them, and whether there may be others."""
        ready: list[Row] = []
        while len(ready) < self._rows:
            most = min(_PAGE, self._rows - len(ready))
            async with self._database.connection() as connection:
                page = await scopes_after(connection, self._job_id, self._source, at, most)
            ready += [scope for scope in page if scope["commit_id"] is not None]
            at = place_of(page[-1]) if page else at
            if len(page) < most:
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
    """As a task that an event makes has it: see give_scopes. What was read of a stream is said to have changed."""
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
