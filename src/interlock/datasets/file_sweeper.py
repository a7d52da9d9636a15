"""Deletes unused files: those of attempts that lost, and those of replaced partitions.

One transaction condemns a prefix or file; after that no commit can refer to it. Its files are deleted afterwards. After
a crash in between, the row remains and becomes due again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import msgspec

from interlock.errors import TooLarge
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.schemas import MARKER, MAX_MARKER_BYTES, Marker
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.telemetry import FILES_SWEPT

_sql = queries("tasks", "files")
_marker = msgspec.json.Decoder(Marker)
_BATCH: Final = 200
_MIN_AGAIN_SECONDS: Final = 60.0
"""Delay before a failed sweep is retried, or an attempt that was still running is checked again."""


class Sweeper(Periodic):
    name = "sweep"

    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self.seconds = settings.sweep_seconds
        self._database = database
        self._objects = objects
        self._again = max(settings.sweep_grace_seconds, _MIN_AGAIN_SECONDS)
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
        """Deletes parts of unfinished uploads, which only the store lists."""
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
        """Returns the file that a marker describes, or None if the marker is gone or unreadable.

        An attempt wrote the marker, so its content must not prevent a sweep.
        """
        try:
            raw = await self._objects.read(marker, MAX_MARKER_BYTES)
            return None if raw is None else _marker.decode(raw).file
        except (TooLarge, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    async def _condemn(self, connection: Connection) -> list[Row]:
        rows: list[Row] = await _sql.condemn(connection, limit=_BATCH, keep=self._keep, again=self._again)
        await failpoint("sweep.before_commit")
        return rows
