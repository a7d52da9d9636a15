"""A staged list: downloaded part by part, verified against the submission, read in chunks."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Final
from uuid import UUID

from interlock.errors import TooLarge
from interlock.jobs.list_chunks import BadList, Chunk, LineTooLong, PartReader, Unpacked, compression_of
from interlock.jobs.run_sources import Batch, Place, StagedSource
from interlock.jobs.task_rows import Shape, header_of, rows_of, too_long
from interlock.stores.objects import Objects
from interlock.wire import ListFormat

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
