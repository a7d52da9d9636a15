"""Deletes files that nobody reads or will commit: of attempts that lost, and of partitions that were replaced.

A place is condemned in one transaction, after which no commit can point at it, and its files are deleted after that. A
crash in between leaves the row: it comes due again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import msgspec

from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.errors import TooLarge
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.schemas import MARKER, MOST_MARKER_BYTES, Marker
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
        self._stale = timedelta(seconds=settings.upload_stale_seconds)

    async def run_once(self) -> int:
        judged = await self._database.run(self._condemn)
        condemned = [row["place"] for row in judged if row["verdict"] == "sweep"]
        for place in condemned:
            FILES_SWEPT.inc(await self._sweep(place))
        if condemned:
            await failpoint("sweep.before_forgotten")
            async with self._database.connection() as connection:
                await _sql.swept(connection, places=condemned)
        return len(judged) + await self._sweep_uploads()

    async def _sweep_uploads(self) -> int:
        """Of what never became an object nobody but the store knows."""
        swept = await self._objects.sweep_uploads(self._database.clock.now() - self._stale)
        FILES_SWEPT.inc(swept)
        return swept

    async def _sweep(self, place: str) -> int:
        if place.endswith("/"):
            return await self._objects.delete_under(place)
        folder, _, name = place.rpartition("/")
        marked = await self._marked(f"{folder}/{MARKER}")
        await self._objects.delete(place)
        if marked in (name, None):
            await self._objects.delete(f"{folder}/{MARKER}")
        return 1

    async def _marked(self, marker: str) -> str | None:
        """The file that it is about. None for one that is gone, or that nobody can read: it was written by an attempt,
        and whatever stands in there must not keep anything from being swept."""
        try:
            raw = await self._objects.read(marker, MOST_MARKER_BYTES)
            return None if raw is None else _marker.decode(raw).file
        except (TooLarge, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    async def _condemn(self, connection: Connection) -> list[Row]:
        rows: list[Row] = await _sql.condemn(connection, most=_BATCH, keep=self._keep, again=self._again)
        await failpoint("sweep.before_commit")
        return rows
