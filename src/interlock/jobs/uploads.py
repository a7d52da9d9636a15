"""Uploads of lists that are too long for a request: a signed URL per part, under a prefix of the upload's own."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from interlock.errors import Conflict, NotFound
from interlock.jobs.run_sources import StagedPart, StagedSource, part_uri
from interlock.settings import Settings
from interlock.stores.objects import LONGEST_SECONDS, Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.idempotency import Repeat, once
from interlock.wire import ListFormat, ListPart, ListSource, ListUpload, UploadRequest

_sql = queries("jobs", "ingest")
_ENDPOINT: Final = "POST /v1/uploads"


def upload_prefix(root: str, org_id: UUID, upload_id: UUID) -> str:
    return f"{root}/uploads/{org_id}/{upload_id}/"


class Uploads:
    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self._database = database
        self._settings = settings
        self._objects = objects
        self._seconds = settings.upload_hours * 3600

    async def create(self, request: UploadRequest, org_id: UUID, repeat: Repeat) -> ListUpload:
        async def work(connection: Connection) -> ListUpload:
            return await self._create(connection, request, org_id)

        return await once(self._database, self._settings, org_id, _ENDPOINT, repeat, ListUpload, 201, work)

    async def _create(self, connection: Connection, request: UploadRequest, org_id: UUID) -> ListUpload:
        row: Row = await _sql.insert_upload(connection, org_id=org_id, parts=request.parts, seconds=self._seconds)
        prefix = self._prefix(org_id, row["upload_id"])
        lifetime = min(self._seconds, LONGEST_SECONDS)
        parts = [
            ListPart(part_number=part, url=await self._objects.sign("PUT", part_uri(prefix, part), lifetime))
            for part in range(1, request.parts + 1)
        ]
        return ListUpload(upload_id=row["upload_id"], url=parts[0].url, parts=parts, expires_at=row["sweep_at"])

    async def stage(self, lines: bytes, org_id: UUID) -> ListSource:
        """Stages a list from a request. The row is written first, so that the sweeper always finds the object."""
        async with self._database.transaction() as connection:
            row: Row = await _sql.insert_upload(connection, org_id=org_id, parts=1, seconds=self._seconds)
        await self._objects.put(part_uri(self._prefix(org_id, row["upload_id"]), 1), lines)
        return ListSource(upload_id=row["upload_id"], format=ListFormat.JSONL)

    async def found(self, source: ListSource, org_id: UUID) -> StagedSource:
        """Records the parts that exist now. The run is created from exactly these, or it fails."""
        async with self._database.connection() as connection:
            row: Row | None = await _sql.known_upload(connection, upload_id=source.upload_id, org_id=org_id)
        if row is None:
            raise NotFound(f"There is no upload {source.upload_id} in this org, or it has expired: create another one.")
        prefix = self._prefix(org_id, source.upload_id)
        parts = await self._parts(prefix, row["parts"])
        if None in parts:
            raise Conflict(
                f"Part {parts.index(None) + 1} of the upload is missing: PUT it, then submit again.",
                code="upload_incomplete",
            )
        return StagedSource(
            upload_id=source.upload_id,
            prefix=prefix,
            format=source.format,
            sha256=source.sha256,
            parts=[part for part in parts if part is not None],
        )

    async def keep_same(self, connection: Connection, source: StagedSource, org_id: UUID) -> bool:
        """Keeps a list for another run, in the transaction that creates it. Returns False if it is gone or changed."""
        row = await _sql.keep_upload(connection, upload_id=source.upload_id, org_id=org_id, seconds=self._seconds)
        return bool(row and source.parts and await self._parts(source.prefix, row["parts"]) == source.parts)

    async def _parts(self, prefix: str, count: int) -> list[StagedPart | None]:
        """Returns the existing parts in order, with None for a missing one."""
        there = {one.uri: StagedPart(etag=one.etag, size=one.size) async for one in self._objects.list_under(prefix)}
        return [there.get(part_uri(prefix, part)) for part in range(1, count + 1)]

    async def keep(self, connection: Connection, source: StagedSource, org_id: UUID) -> None:
        """Extends the lifetime of the upload, in the transaction that creates the run."""
        row = await _sql.keep_upload(connection, upload_id=source.upload_id, org_id=org_id, seconds=self._seconds)
        if row is None:
            raise NotFound(f"Upload {source.upload_id} has just expired: create another one.")

    def _prefix(self, org_id: UUID, upload_id: UUID) -> str:
        return upload_prefix(self._objects.root, org_id, upload_id)
