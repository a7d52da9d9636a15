"""Splits a staged list into chunks of whole lines, converts them to rows of `tasks`, and loads these into a shard.

Whatever the size of the list, only a few chunks are in memory. Arrow and NumPy convert them. A line ends with LF or
CRLF; the last line may end with the file. In CSV, a line feed between quotes belongs to the value. A leading byte order
mark is removed, and gzip and zstd are decompressed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from uuid import UUID

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as postgres
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from interlock.errors import Unavailable
from interlock.jobs.run_sources import Batch
from interlock.stores.postgres import queries
from interlock.strict_json import MAX_DEPTH, first_not_strict, is_plain, opened, pointed
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


_LINE_FEED: Final = 10
_CARRIAGE_RETURN: Final = 13
_ESCAPED: Final = r'["\\\x00-\x1f]'
_MAX_COLUMNS: Final = 1000
_DECODED_AT_ONCE: Final = 500


@dataclass(frozen=True)
class Shape:
    """Format of the lines, and additional columns of the rows."""

    format: ListFormat
    line_limit: int
    columns: tuple[str, ...] = ()
    """Column names of CSV."""
    slot_pointer: str | None = None


@dataclass(frozen=True)
class Rows:
    table: pa.Table
    """Columns task_id, task_index, payload; also slot_key if the job has a concurrency limit per key."""
    lines: int
    """Number of lines in the chunk, including blank ones; it determines the first line of the next chunk."""


def rows_of(chunk: Chunk, shape: Shape, run_id: UUID) -> Rows:
    if shape.format is ListFormat.CSV:
        payloads = _records(chunk, shape)
        indexes, lines = _counted(chunk.first_line, len(payloads)), len(payloads)
    else:
        texts, lines = _lines(chunk, shape.line_limit)
        indexes, texts = _without_blanks(texts, _counted(chunk.first_line, lines))
        payloads = texts if shape.format is ListFormat.JSONL else json_strings(texts)
    _require_strict(indexes, payloads, shape.format)
    return Rows(table_of(run_id, indexes, payloads, shape.slot_pointer), lines)


def rows_of_lines(lines: pa.Array, ids: pa.Array, indexes: np.ndarray[Any, Any], shape: Shape) -> pa.Table:
    """Like `rows_of`, for lines that are already split, numbered and hashed."""
    ended = pc.ends_with(lines, pattern="\r")
    if pc.any(ended).as_py():
        lines = pc.if_else(ended, pc.binary_slice(lines, 0, -1), lines)
    first = int(indexes[0]) if len(indexes) else 0
    _require_length(np.asarray(pc.binary_length(lines)), shape.line_limit, first)
    texts = _as_utf8(lines, first)
    kept = np.asarray(pc.greater(pc.binary_length(texts), 0))
    indexes, texts, ids = indexes[kept], texts.filter(pa.array(kept)), ids.filter(pa.array(kept))
    payloads = texts if shape.format is ListFormat.JSONL else json_strings(texts)
    _require_strict(indexes, payloads, shape.format)
    columns = {"task_id": ids, "task_index": pa.array(indexes), "payload": payloads}
    if shape.slot_pointer is not None:
        columns["slot_key"] = pa.array(_slot_keys(indexes, payloads, shape.slot_pointer), pa.string())
    return pa.table(columns)


def table_of(run_id: UUID, indexes: np.ndarray[Any, Any], payloads: pa.Array, slot_pointer: str | None) -> pa.Table:
    """Builds rows for a shard. All other columns of a task follow from its run."""
    columns = {"task_id": task_ids(run_id, indexes), "task_index": pa.array(indexes), "payload": payloads}
    if slot_pointer is not None:
        columns["slot_key"] = pa.array(_slot_keys(indexes, payloads, slot_pointer), pa.string())
    return pa.table(columns)


def no_rows(run_id: UUID) -> pa.Table:
    return table_of(run_id, _counted(0, 0), pa.array([], pa.string()), None)


def task_ids(run_id: UUID, indexes: np.ndarray[Any, Any]) -> pa.Array:
    """Same as interlock.run_task_id in SQL: the first 16 bytes of each hash."""
    sha256, prefix = hashlib.sha256, f"{run_id}:".encode()
    joined = b"".join([sha256(b"%b%d" % (prefix, index)).digest()[:16] for index in indexes.tolist()])
    offsets = np.arange(0, len(joined) + 1, 16, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(indexes), [None, pa.py_buffer(offsets), pa.py_buffer(joined)])


def json_strings(texts: pa.Array) -> pa.Array:
    """Encodes each text as a JSON string."""
    quoted = pc.binary_join_element_wise('"', texts, '"', "")
    escaped = pc.match_substring_regex(texts, _ESCAPED)
    if not pc.any(escaped).as_py():
        return quoted
    encode = msgspec.json.encode
    replaced = pa.array([encode(text).decode() for text in texts.filter(escaped).to_pylist()], pa.string())
    return pc.replace_with_mask(quoted, escaped, replaced)


def header_of(line: bytes) -> tuple[str, ...]:
    try:
        names = tuple(next(csv.reader(io.StringIO(line.decode().rstrip("\r\n"), newline=""), strict=True), ()))
    except (csv.Error, UnicodeDecodeError):
        raise BadList("bad_csv", "The first line of the list must be a CSV header in UTF-8.") from None
    if not names or not all(names) or len(set(names)) < len(names) or len(names) > _MAX_COLUMNS:
        raise BadList("bad_csv", f"The CSV header must name every column once, and at most {_MAX_COLUMNS} columns.")
    return names


def _lines(chunk: Chunk, limit: int) -> tuple[pa.Array, int]:
    data = chunk.data if chunk.data.endswith(b"\n") else chunk.data + b"\n"
    buffer = np.frombuffer(data, np.uint8)
    feeds = buffer == _LINE_FEED
    ends = np.flatnonzero(feeds)
    dropped = feeds
    if b"\r\n" in data:
        dropped = feeds.copy()
        dropped[:-1] |= (buffer[:-1] == _CARRIAGE_RETURN) & feeds[1:]
    kept = np.cumsum(~dropped, dtype=np.int32)
    offsets = np.empty(len(ends) + 1, np.int32)
    offsets[0] = 0
    offsets[1:] = kept[ends]
    _require_length(np.diff(offsets), limit, chunk.first_line)
    text = buffer[~dropped].tobytes()
    lines = pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(text)])
    return _as_utf8(lines, chunk.first_line), len(ends)


def _require_length(lengths: np.ndarray[Any, Any], limit: int, first: int) -> None:
    if len(lengths) and lengths.max() > limit:
        line = first + int(np.argmax(lengths > limit))
        raise too_long(line, limit)


def _as_utf8(lines: pa.Array, first: int) -> pa.Array:
    try:
        return lines.cast(pa.string())
    except pa.ArrowInvalid:
        line = next(number for number, one in enumerate(lines.to_pylist(), first + 1) if not _is_utf8(one))
        raise BadList("not_utf8", f"Line {line} is not UTF-8.") from None


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _counted(first: int, count: int) -> np.ndarray[Any, Any]:
    return np.arange(first, first + count, dtype=np.int64)


def _without_blanks(texts: pa.Array, indexes: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], pa.Array]:
    """Drops blank lines, which are not tasks. The other lines keep their numbers."""
    blank = pc.equal(pc.binary_length(texts), 0)
    if not pc.any(blank).as_py():
        return indexes, texts
    kept = pc.invert(blank)
    return indexes[np.asarray(kept)], texts.filter(kept)


def _records(chunk: Chunk, shape: Shape) -> pa.Array:
    """Converts each record to a JSON object of strings, with the column names of the header."""

    def refuse(row: Any) -> str:
        at = chunk.first_line + (row.number or 1)
        wrong.append(f"Record {at} has {row.actual_columns} values, but the header has {row.expected_columns} columns.")
        return "error"

    wrong: list[str] = []
    try:
        table = pa_csv.read_csv(
            io.BytesIO(chunk.data),
            read_options=pa_csv.ReadOptions(
                column_names=list(shape.columns), use_threads=False, block_size=len(chunk.data) + 1
            ),
            parse_options=pa_csv.ParseOptions(newlines_in_values=True, invalid_row_handler=refuse),
            convert_options=_as_text(shape.columns),
        )
    except pa.ArrowInvalid:
        detail = wrong[0] if wrong else f"A record after record {chunk.first_line} is not valid CSV in UTF-8."
        raise BadList("bad_csv", detail) from None
    payloads = _objects(shape.columns, table)
    lengths = np.asarray(pc.binary_length(payloads))
    _require_length(lengths, shape.line_limit, chunk.first_line)
    return payloads


def _as_text(columns: Sequence[str]) -> pa_csv.ConvertOptions:
    return pa_csv.ConvertOptions(
        column_types=dict.fromkeys(columns, pa.string()),
        strings_can_be_null=False,
        quoted_strings_can_be_null=False,
    )


def _objects(columns: Sequence[str], table: pa.Table) -> pa.Array:
    names = [msgspec.json.encode(name).decode() for name in columns]
    pieces: list[Any] = []
    for number, name in enumerate(names):
        values = json_strings(table.column(number).combine_chunks())
        pieces += [f"{',' if number else '{'}{name}:", values]
    return pc.binary_join_element_wise(*pieces, "}", "")


def _require_strict(indexes: np.ndarray[Any, Any], payloads: pa.Array, kind: ListFormat) -> None:
    """Raises BadList for the first line that is not strict JSON. Strings we encoded can only contain NULs."""
    if kind is ListFormat.JSONL:
        suspects = None if _is_plain(payloads) else np.arange(len(payloads))
    else:
        suspects = np.flatnonzero(np.asarray(pc.match_substring(payloads, "\\u0000")))
    if suspects is None or not len(suspects):
        return
    found = first_not_strict([text.encode() for text in payloads.take(pa.array(suspects)).to_pylist()])
    if found is not None:
        place, reason = found
        raise BadList("bad_json", f"Line {indexes[suspects[place]] + 1} cannot be stored: {reason}.")


def _is_plain(payloads: pa.Array) -> bool:
    """Checks all lines as one JSON list. PostgreSQL checks that each line is JSON on its own."""
    long = pc.greater(pc.binary_length(payloads), MAX_DEPTH)
    if any(opened(text.encode()) > MAX_DEPTH for text in payloads.filter(long).to_pylist()):
        return False
    # In pieces, so that decoded values are freed before the garbage collector scans them repeatedly.
    starts = pa.array([*range(0, len(payloads), _DECODED_AT_ONCE), len(payloads)], pa.int32())
    joined = pc.binary_join(pa.ListArray.from_arrays(starts, payloads), ",")
    return all(is_plain(b"[%b]" % piece.as_buffer()) for piece in joined)


def _slot_keys(indexes: np.ndarray[Any, Any], payloads: pa.Array, pointer: str) -> list[str | None]:
    """Extracts slot keys row by row: few jobs have a limit per key, and a key may be anywhere in the payload."""
    decode = msgspec.json.decode
    keys = []
    for index, payload in zip(indexes.tolist(), payloads.to_pylist(), strict=True):
        try:
            keys.append(pointed(decode(payload), pointer))
        except (msgspec.DecodeError, RecursionError):
            raise not_json(index) from None
        except ValueError:
            raise BadList(
                "bad_pointer", f"Line {index + 1}: the value at {pointer!r} is too long or not text."
            ) from None
    return keys


def not_json(index: int) -> BadList:
    return BadList("bad_json", f"Line {index + 1} is not JSON that can be stored.")


def too_long(index: int, limit: int) -> BadList:
    return BadList("line_too_long", f"Line {index + 1} has more than {limit} bytes (payload_limit_bytes).")


_sql = queries(__name__, "ingest")
_SCHEMA: Final = "interlock"
_COPIED: Final = re.compile(r"COPY tasks_\d+, line (\d+), column")
# SQLSTATE classes of errors about a value: malformed text, invalid encoding, or nesting beyond the server's stack.
_OF_A_VALUE: Final = ("22", "54001")
_GONE: Final = "42P01"


class ShardGone(Exception):
    """The run was deleted together with its shard."""


class ShardLoader:
    """Loads one run over its own connection, which has no limits for short statements. All methods block."""

    def __init__(self, url: str, run_id: UUID, shard: int, load_task: UUID | None = None) -> None:
        self._run_id = run_id
        self._shard = shard
        self._load_task = load_task
        """The Spark task that loads the list; None if the ingest process loads it."""
        with _translated_errors():
            self._connection = postgres.connect(url)

    def close(self) -> None:
        self._connection.close()

    def load(self, batch: Batch) -> bool:
        """Returns False if the batch was loaded before, or the run was canceled or deleted."""
        try:
            with self._transaction() as cursor:
                if not self._begin(cursor, batch, batch.table.num_rows):
                    return False
                if batch.table.num_rows:
                    copy(cursor, self._shard, batch.table.to_reader())
        except adbc_driver_manager.Error as error:
            raise _meaning(error, batch.table) from None
        return True

    def load_all(self, batch: Batch, tables: Iterable[pa.Table]) -> bool:
        """Like `load`, for rows that arrive in several tables and are counted on the way. `batch` has their origin."""
        rows, table = 0, batch.table
        try:
            with self._transaction() as cursor:
                if not self._begin(cursor, batch, 0):
                    return False
                for table in tables:
                    if table.num_rows:
                        copy(cursor, self._shard, table.to_reader())
                    rows += table.num_rows
                _execute(cursor, "set_chunk_rows", **self._named(batch), rows=rows, lines=batch.lines)
        except adbc_driver_manager.Error as error:
            raise _meaning(error, table) from None
        return True

    def finish(self) -> bool:
        """Adds keys and indexes, and attaches the shard as a partition. Returns False if the shard is gone."""
        with _translated_errors(), self._transaction() as cursor:
            cursor.execute(_sql.finish_shard.sql, (self._shard,))
            row = cursor.fetchone()
        return bool(row and row[0])

    def _begin(self, cursor: Any, batch: Batch, rows: int) -> bool:
        ours = "" if self._load_task is None else str(self._load_task)
        place = {"end_byte": batch.end_byte, "first_line": batch.first_line, "lines": batch.lines}
        more = {"reached": batch.reached or "", "load_task": ours}
        _execute(cursor, "begin_chunk", **self._named(batch), **place, **more, rows=rows)
        return cursor.fetchone() is not None

    def _named(self, batch: Batch) -> dict[str, Any]:
        return {"run_id": str(self._run_id), "part": batch.part, "first_byte": batch.first_byte}

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Any: the driver has no type information."""
        try:
            with self._connection.cursor() as cursor:
                # Rows and ledger commit together. The following step commits synchronously, and so flushes them too.
                cursor.execute("set local synchronous_commit = off")
                yield cursor
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise


def _execute(cursor: Any, name: str, **values: Any) -> None:
    statement = getattr(_sql, name)
    cursor.execute(statement.sql, [values[one] for one in _sql.driver_adapter.var_sorted[name]])


def copy(cursor: Any, shard: int, rows: pa.RecordBatchReader) -> None:
    cursor.adbc_ingest(f"tasks_{shard}", rows, mode="append", db_schema_name=_SCHEMA)


def _meaning(error: adbc_driver_manager.Error, table: pa.Table) -> Exception:
    """Converts a database error. The server's message may quote a payload, so only the line number is used."""
    state = error.sqlstate or ""
    if state == _GONE:
        return ShardGone()
    copied = _COPIED.findall(str(error))
    if state.startswith(_OF_A_VALUE) and copied:
        # Earlier matches may be quoted data; the last one is from the server itself.
        return not_json(table.column("task_index")[int(copied[-1]) - 1].as_py())
    return _unavailable(error)


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except adbc_driver_manager.Error as error:
        raise _unavailable(error) from None


def _unavailable(error: adbc_driver_manager.Error) -> Unavailable:
    state = f" (SQLSTATE {error.sqlstate})" if error.sqlstate else ""
    return Unavailable(f"The state database cannot load the rows of a list{state}; the load will be retried.")
