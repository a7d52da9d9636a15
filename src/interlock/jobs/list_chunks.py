"""Splits a staged list into chunks of whole lines. Whatever its size, only a few chunks are in memory.

A line ends with LF or CRLF; the last line may end with the file. In CSV, a line feed between quotes belongs to the
value. A leading byte order mark is removed, and gzip and zstd are decompressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa

from interlock.wire.jobs import ListFormat

CHUNK_BYTES: Final = 8 << 20
_READ_BYTES: Final = 1 << 20
_BOM: Final = b"\xef\xbb\xbf"
_OTHER_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
# UTF-8 text cannot start with either of these.
_MAGIC: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class BadList(Exception):
    """A list is invalid; `detail` is for its author. A retry would not help."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class LineTooLong(Exception):
    """The next line exceeds the limit. Raised before the whole line is in memory."""


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a part. Positions refer to the decompressed data."""

    part: int
    first_byte: int
    data: bytes
    first_line: int
    """Line number in the whole list, from 0; in CSV, the record number."""

    @property
    def end_byte(self) -> int:
        return self.first_byte + len(self.data)


def compression_of(head: bytes) -> str | None:
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


class Unpacked:
    """The bytes of one part, decompressed while reading."""

    def __init__(self, path: Path, part: int) -> None:
        self._part = part
        with path.open("rb") as file:
            self.compression = compression_of(file.read(4))
        self._stream: Any = pa.OSFile(str(path), "rb")
        if self.compression is not None:
            self._stream = pa.CompressedInputStream(self._stream, self.compression)

    def read(self, size: int) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except (OSError, pa.ArrowInvalid) as error:
            if self.compression is None:
                raise
            raise BadList(
                "bad_compression", f"Part {self._part} is not a complete {self.compression} file: upload it again."
            ) from error
        return data

    def close(self) -> None:
        self._stream.close()


class PartReader:
    """Reads the chunks of one part, starting at any chunk boundary."""

    def __init__(self, stream: Unpacked | BinaryIO, part: int, form: ListFormat, *, line_limit: int) -> None:
        self._stream = stream
        self._part = part
        self._csv = form is ListFormat.CSV
        self._limit = line_limit
        self._rest = b""
        self._at = 0
        """Position of the first byte of `_rest`."""

    def header(self) -> bytes:
        """Reads the header line of CSV, which is not a record."""
        self._start()
        while True:
            end = self._first_end()
            if end or not self._more():
                break
        line, self._rest = (self._rest[:end], self._rest[end:]) if end else (self._rest, b"")
        self._at += len(line)
        return line

    def skip_to(self, byte: int) -> None:
        """Skips to a chunk boundary; the chunks before it are loaded."""
        self._start()
        while byte - self._at > len(self._rest):
            self._at += len(self._rest)
            self._rest = self._stream.read(_READ_BYTES)
            if not self._rest:
                raise BadList("list_changed", f"Part {self._part} is shorter than it was: upload the list again.")
        self._rest = self._rest[byte - self._at :]
        self._at = byte

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
        """Yields the first byte position and the data of each chunk."""
        self._start()
        size = max(size, self._limit + 2)
        while True:
            ended = not self._fill(size)
            end = len(self._rest) if ended else self._last_end()
            if not end and not ended:
                raise LineTooLong
            if end:
                data, self._rest = self._rest[:end], self._rest[end:]
                first, self._at = self._at, self._at + end
                yield first, data
            if ended:
                return

    def _start(self) -> None:
        if self._at or self._rest:
            return
        self._rest = self._stream.read(_READ_BYTES)
        if self._rest.startswith(_OTHER_BOMS):
            raise BadList("not_utf8", f"Part {self._part} is UTF-16; write it in UTF-8.")
        if self._rest.startswith(_BOM):
            self._rest, self._at = self._rest[len(_BOM) :], len(_BOM)

    def _more(self) -> bool:
        data = self._stream.read(_READ_BYTES)
        self._rest += data
        return bool(data) and len(self._rest) <= self._limit

    def _fill(self, size: int) -> bool:
        """Reads up to `size` bytes. Returns False at the end of the part."""
        pieces, have = [self._rest], len(self._rest)
        while have < size:
            data = self._stream.read(min(_READ_BYTES, size - have))
            if not data:
                self._rest = b"".join(pieces)
                return False
            pieces.append(data)
            have += len(data)
        self._rest = b"".join(pieces)
        return True

    def _first_end(self) -> int:
        end = self._rest.find(b"\n") + 1
        while self._csv and end and self._rest.count(b'"', 0, end) % 2:
            end = self._rest.find(b"\n", end) + 1
        return end

    def _last_end(self) -> int:
        """Returns the position after the last line feed that ends a line: in CSV, after an even number of quotes."""
        end = self._rest.rfind(b"\n") + 1
        odd = self._csv and self._rest.count(b'"', 0, end) % 2
        while odd and end:
            before = self._rest.rfind(b"\n", 0, end - 1) + 1
            odd = (odd + self._rest.count(b'"', before, end)) % 2
            end = before
        return end
