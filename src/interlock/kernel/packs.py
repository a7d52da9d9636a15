"""Results that do not belong into a row: the long ones of a report, one behind the other in one object per run.

    {root}/runs/{run_id}/results/{pack}.pack

A pack is written before the transaction that points at it, and never again. One whose report was refused is pointed at
by nobody, and goes with its run: that there may be packs of a run is noted before the first one is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID, uuid4

from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.failpoints import failpoint
from interlock.settings import Settings

_sql = queries("results")
_exports_sql = queries("exports")
_BETWEEN: Final = b"\n"
"""So that a pack of results without line breaks can be read line by line."""
_REMEMBERED: Final = 10_000
"""Runs that are known to be noted, and need not be noted again."""


@dataclass(frozen=True)
class Place:
    """Of one result."""

    pack: UUID
    offset: int
    length: int


class Packs:
    def __init__(self, database: Database, objects: Objects, *, inline_bytes: int) -> None:
        self._database = database
        self._objects = objects
        self.inline_bytes = inline_bytes
        self._noted: OrderedDict[UUID, None] = OrderedDict()

    async def write(self, run_id: UUID, bodies: Sequence[bytes]) -> list[Place]:
        """One pack of all of them."""
        pack, offset = uuid4(), 0
        places = []
        for body in bodies:
            places.append(Place(pack, offset, len(body)))
            offset += len(body) + len(_BETWEEN)
        await self._note(run_id)
        await self._objects.put(pack_uri(self._objects.root, run_id, pack), _BETWEEN.join(bodies))
        await failpoint("pack.written")
        return places

    async def _note(self, run_id: UUID) -> None:
        if run_id in self._noted:
            return
        async with self._database.connection() as connection:
            await _sql.expect_packs(connection, place=results_prefix(self._objects.root, run_id))
        self._noted[run_id] = None
        if len(self._noted) > _REMEMBERED:
            self._noted.popitem(last=False)

    async def pack_groups(self, arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
        """What `complete_by_index` is told of the results that are too long for it; takes them out of `results`."""
        results: list[str | None] = arrays["results"]
        long = [n for n, text in enumerate(results) if text is not None and self._is_long(text)]
        if not long:
            return {"packs": [], "offsets": [], "lengths": []}
        offsets: list[int | None] = [None] * len(results)
        lengths: list[int | None] = [None] * len(results)
        packs: list[UUID | None] = []
        for run_id, first, last in zip(arrays["run_ids"], arrays["firsts"], arrays["lasts"], strict=True):
            mine = [n for n in long if first - 1 <= n < last]
            places = await self.write(run_id, [(results[n] or "").encode() for n in mine]) if mine else []
            for n, place in zip(mine, places, strict=True):
                results[n], offsets[n], lengths[n] = None, place.offset, place.length
            packs.append(places[0].pack if places else None)
        return {"packs": packs, "offsets": offsets, "lengths": lengths}

    def _is_long(self, text: str) -> bool:
        # A character has at most four bytes: only what may be too long is encoded to be measured.
        return len(text) * 4 > self.inline_bytes and len(text.encode()) > self.inline_bytes

    async def result_of(self, row: Row) -> bytes | None:
        """The result of a task, wherever it is; None when it has none, or its pack is gone."""
        if row["pack"] is None:
            text: str | None = row["result"]
            return None if text is None else text.encode()
        uri = pack_uri(self._objects.root, row["run_id"], row["pack"])
        return await self._objects.read_range(uri, row["pack_offset"], row["pack_length"])


async def forget_results(connection: Connection, settings: Settings, run_id: UUID) -> None:
    """With the run itself: its receipt goes now, its packs a while after, when no report can bring another one."""
    await _exports_sql.forget_exports(connection, run_id=run_id)
    await _sql.condemn_packs(
        connection,
        run_id=run_id,
        place=results_prefix(settings.objects_root, run_id),
        grace=settings.sweep_grace_seconds,
        keep=settings.replaced_files_seconds,
    )


def results_prefix(root: str, run_id: UUID) -> str:
    return f"{root}/runs/{run_id}/results/"


def pack_uri(root: str, run_id: UUID, pack: UUID) -> str:
    return f"{results_prefix(root, run_id)}{pack}.pack"
