"""Packs: result bodies too long for a row, concatenated into one object per report and run.

    {root}/runs/{run_id}/results/{pack}.pack

A pack is written before the transaction that refers to it, and is immutable. A pack whose report was refused has no
reference; it is deleted with its run. The run's prefix is therefore recorded before its first pack is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID, uuid4

from interlock.failpoints import failpoint
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries

_sql = queries(__name__, "results")
_BETWEEN: Final = b"\n"
"""Separator: packs of results without line breaks can be read line by line."""
_REMEMBERED: Final = 10_000
"""Number of runs remembered as recorded, which saves a write per report."""


@dataclass(frozen=True)
class Place:
    """The location of one result."""

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
        """Writes one pack that contains all bodies."""
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
        """Moves long results from `results` into packs. Returns their locations as arguments of `complete_by_index`."""
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
        # A character has at most four bytes in UTF-8, so only candidates are encoded to be measured.
        return len(text) * 4 > self.inline_bytes and len(text.encode()) > self.inline_bytes

    async def result_of(self, row: Row) -> bytes | None:
        """Returns the result of a task from its row or its pack; None if it has no result or the pack is gone."""
        if row["pack"] is None:
            text: str | None = row["result"]
            return None if text is None else text.encode()
        return await self._read(row, row["pack_length"])

    async def part(self, row: Row) -> bytes | None:
        """Returns a chunk of a log from its pack; None if the pack is gone."""
        return await self._read(row, row["size"])

    async def _read(self, row: Row, length: int) -> bytes | None:
        uri = pack_uri(self._objects.root, row["run_id"], row["pack"])
        return await self._objects.read_range(uri, row["pack_offset"], length)


async def forget_results(connection: Connection, settings: Settings, run_id: UUID) -> None:
    """Deletes the run's receipt now, and its packs later, when no report can write another one."""
    await _sql.forget_exports(connection, run_id=run_id)
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
