"""Deletes files that nobody reads or will commit: of attempts that lost, and of partitions that were replaced.

A place is condemned in one transaction, after which no commit can point at it, and its files are deleted after that. A
crash in between leaves the row: it comes due again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.schemas import MARKER, Marker
from interlock.settings import Settings
from interlock.telemetry import FILES_SWEPT

_sql = queries("files")
_marker = msgspec.json.Decoder(Marker)
_BATCH: Final = 200
_LEAST_AGAIN_SECONDS: Final = 60.0
"""Until a sweep that failed, or an attempt that still ran, is looked at again."""


class Sweeper(Periodic):
    name = "sweep"

    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self.seconds = settings.sweep_seconds
        self._database = database
        self._objects = objects
        self._again = max(settings.sweep_grace_seconds, _LEAST_AGAIN_SECONDS)
        self._keep = settings.replaced_files_seconds

    async def run_once(self) -> int:
        judged = await self._database.run(self._condemn)
        condemned = [row["place"] for row in judged if row["verdict"] == "sweep"]
        for place in condemned:
            FILES_SWEPT.inc(await self._sweep(place))
        if condemned:
            await failpoint("sweep.before_forgotten")
            async with self._database.connection() as connection:
                await _sql.swept(connection, places=condemned)
        return len(judged)

    async def _sweep(self, place: str) -> int:
        if place.endswith("/"):
            return await self._objects.delete_under(place)
        folder, _, name = place.rpartition("/")
        raw = await self._objects.read(f"{folder}/{MARKER}")
        await self._objects.delete(place)
        if raw is not None and _marker.decode(raw).file == name:
            await self._objects.delete(f"{folder}/{MARKER}")
        return 1

    async def _condemn(self, connection: Connection) -> list[Row]:
        rows: list[Row] = await _sql.condemn(connection, most=_BATCH, keep=self._keep, again=self._again)
        await failpoint("sweep.before_commit")
        return rows
