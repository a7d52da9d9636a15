"""Staged lists: uploaded in parts by signed URLs, verified against the submission, read in chunks."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Final
from uuid import UUID

from interlock.errors import Conflict, NotFound, TooLarge
from interlock.jobs.run_sources import Batch, Place, StagedPart, StagedSource, part_uri
from interlock.jobs.task_rows import (
    BadList,
    Chunk,
    LineTooLong,
    PartReader,
    Shape,
    Unpacked,
    compression_of,
    header_of,
    rows_of,
    too_long,
)
from interlock.settings import Settings
from interlock.stores.objects import LONGEST_SECONDS, Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.idempotency import Repeat, once
from interlock.wire.jobs import ListFormat, ListPart, ListSource, ListUpload, UploadRequest

_HASHED_AT_ONCE: Final = 1 << 20


class StagedList:
    def __init__(self, objects: Objects, source: StagedSource, run_id: UUID, shape: Shape) -> None:
        self._objects = objects
        self.source = source
        self._run_id = run_id
        self._shape = shape
        self._digest = hashlib.sha256()

    async def batches(self, place: Place) -> AsyncGenerator[Batch]:
        line, self._digest = place.line, hashlib.sha256()
        with tempfile.TemporaryDirectory(prefix="interlock-ingest-") as folder:
            for part in range(1, len(self.source.parts) + 1):
                path = Path(folder) / str(part)
                await self._fetch(part, path)
                if part >= place.part:
                    chunks = self._chunks(path, part, place.byte if part == place.part else 0, line)
                    while (batch := await asyncio.to_thread(next, chunks, None)) is not None:
                        line = batch.first_line + batch.lines
                        yield batch
                elif self._shape.format is ListFormat.CSV and part == 1:
                    await asyncio.to_thread(self._read_header, path)
                path.unlink()

    async def verify(self) -> None:
        if self.source.sha256 is not None and self._digest.hexdigest() != self.source.sha256:
            raise BadList("wrong_checksum", "The list does not match the submitted `sha256`: upload it again.")

    async def check(self) -> bool:
        """Verifies the whole list before another process reads it. Returns True if a part is compressed."""
        self._digest, packed = hashlib.sha256(), False
        with tempfile.TemporaryDirectory(prefix="interlock-ingest-") as folder:
            for part in range(1, len(self.source.parts) + 1):
                path = Path(folder) / "part"
                await self._fetch(part, path)
                packed = packed or await asyncio.to_thread(_is_packed, path)
        await self.verify()
        return packed

    async def _fetch(self, part: int, path: Path) -> None:
        """Downloads a part to a private file, so that it cannot change while it is read."""
        known = self.source.parts[part - 1]
        try:
            found = await self._objects.read_to(self.source.uri(part), path, known.size)
        except TooLarge:
            raise _changed(part) from None
        if found is None:
            raise BadList("list_missing", f"Part {part} of the list no longer exists: upload it again.")
        if (found.etag, found.size) != (known.etag, known.size):
            raise _changed(part)
        if self.source.sha256 is not None:
            await asyncio.to_thread(self._hash, path)

    def _hash(self, path: Path) -> None:
        with path.open("rb") as file:
            while data := file.read(_HASHED_AT_ONCE):
                self._digest.update(data)

    def _read_header(self, path: Path) -> None:
        stream = Unpacked(path, 1)
        try:
            self._take_header(self._reader(stream, 1))
        finally:
            stream.close()

    def _reader(self, stream: Unpacked, part: int) -> PartReader:
        return PartReader(stream, part, self._shape.format, line_limit=self._shape.line_limit)

    def _take_header(self, reader: PartReader) -> None:
        columns = header_of(reader.header())
        self._shape = Shape(self._shape.format, self._shape.line_limit, columns, self._shape.slot_pointer)

    def _chunks(self, path: Path, part: int, byte: int, line: int) -> Iterator[Batch]:
        stream = Unpacked(path, part)
        try:
            reader = self._reader(stream, part)
            if self._shape.format is ListFormat.CSV and part == 1:
                self._take_header(reader)
            if byte:
                reader.skip_to(byte)
            for first, data in reader.chunks():
                batch = self._batch(Chunk(part, first, data, line))
                line += batch.lines
                yield batch
        except LineTooLong:
            raise too_long(line, self._shape.line_limit) from None
        finally:
            stream.close()

    def _batch(self, chunk: Chunk) -> Batch:
        rows = rows_of(chunk, self._shape, self._run_id)
        return Batch(chunk.part, chunk.first_byte, chunk.end_byte, chunk.first_line, rows.lines, rows.table)


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return compression_of(file.read(4)) is not None


def _changed(part: int) -> BadList:
    return BadList(
        "list_changed", f"Part {part} was overwritten after the run was submitted: submit a new run of the new list."
    )


_sql = queries(__name__, "ingest")
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
