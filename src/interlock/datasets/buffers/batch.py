"""Reads a published batch into rows of the declared shape: all of them, or none and the reasons.

Only one thing rejects a row: `Shape.typed`, after Arrow's reader. It runs first over the whole batch and, if that
fails, over smaller and smaller parts, down to the bad rows. So no row is judged by two different rules.
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from interlock.datasets.buffers.shape import Shape, Wrong
from interlock.schemas import MAX_FOOTER_BYTES, PARQUET_END_BYTES, Column, decimal_digits, footer_bytes
from interlock.wire.datasets import BadRow, BatchRefusal

MAX_SHOWN: Final = 100
MAX_COUNTED: Final = 10_000
"""Limit for counting bad rows; beyond it, the exact number does not matter."""
_PARTS: Final = 1_000
_BLOCK_BYTES: Final = 16 << 20
_NO_BOMB_BYTES: Final = 64 << 20
_MAX_RATIO: Final = 50
_MAX_UNPACKED: Final = 4 << 30
"""Limits for the unpacked size of a Parquet file: in total, and relative to its size once it exceeds _NO_BOMB_BYTES."""
_ROWS_AT_ONCE: Final = 1 << 16
_WIDEST_NUMBER: Final = 16
_PARQUET: Final = b"PAR1"
_OBJECT: Final = b"{"
_LOOKED_THROUGH_BYTES: Final = 1 << 18
_LOOKED_AT_BYTES: Final = 4096
"""Bytes checked for NUL, which no text contains."""
_GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_OTHER_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
_UNREADABLE: Final = (pa.ArrowException, UnicodeDecodeError)


class BadBatch(Exception):
    """A whole batch is refused."""

    def __init__(self, code: str, detail: str, bad_rows: int = 0, rows: Sequence[BadRow] = ()) -> None:
        super().__init__(detail)
        self.refusal = BatchRefusal(code=code, detail=detail, bad_rows=bad_rows, rows=list(rows))


@dataclass(frozen=True)
class Batch:
    table: pa.Table
    lines: Sequence[int] | None = None
    """Line number of each row if blank lines lie between rows; None if rows are numbered from 1."""

    def line(self, row: int) -> int:
        return row + 1 if self.lines is None else self.lines[row]


@dataclass
class _Found:
    """Bad rows found so far."""

    count: int = 0
    rows: list[BadRow] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        self.count += 1
        if len(self.rows) < MAX_SHOWN:
            self.rows.append(BadRow(line=line, reason=reason))

    @property
    def enough(self) -> bool:
        return self.count >= MAX_COUNTED

    def refuse(self) -> None:
        if not self.count:
            return
        number = f"at least {self.count}" if self.enough else str(self.count)
        noun = "row is" if self.count == 1 else "rows are"
        first = self.rows[0]
        raise BadBatch(
            "bad_rows",
            f"{number} {noun} not as the dataset declares; the first is line {first.line}: {first.reason}. "
            "Publish a corrected batch, or change the declared columns.",
            self.count,
            self.rows,
        )


@dataclass(frozen=True)
class Source:
    """A batch in memory."""

    content: bytes
    uri: str
    record_count: int


def read_all(sources: Sequence[Source], shape: Shape) -> list[Batch | BadBatch]:
    """Reads batches in one pass if nothing is wrong with any of them, else one by one."""
    plain = [at for at, source in enumerate(sources) if _is_plain(source)]
    found = dict(zip(plain, _read_at_once([sources[at] for at in plain], shape), strict=False))
    return [found.get(at) or _read_or_refuse(source, shape) for at, source in enumerate(sources)]


def _read_or_refuse(source: Source, shape: Shape) -> Batch | BadBatch:
    try:
        return read(source.content, source.uri, shape, source.record_count)
    except BadBatch as bad:
        return bad


def read(source: Path | bytes, uri: str, shape: Shape, record_count: int) -> Batch:
    """Reads a batch from a file or from memory. Raises BadBatch."""
    batch = _read_parquet(source, shape) if _is_parquet(source, uri) else _read_lines(source, shape)
    if batch.table.num_rows != record_count:
        raise BadBatch(
            "record_count",
            f"The batch has {batch.table.num_rows} rows but was published with a record_count of {record_count}: it "
            "was truncated, or changed after it was published. Publish it again under another name.",
        )
    _check_keys(batch, shape)
    return batch


def _is_parquet(source: Path | bytes, uri: str) -> bool:
    """Detects Parquet by file name and by content, which must agree."""
    name = uri.rpartition("/")[2].lower()
    start, end = _ends(source)
    if name.endswith(".parquet") and (start, end) != (_PARQUET, _PARQUET):
        raise BadBatch("truncated", "The batch is named .parquet but is not Parquet, or is truncated: write it again.")
    if start[:2] == _GZIP:
        raise BadBatch("bad_encoding", "The batch is compressed: write uncompressed JSON lines, or Parquet.")
    if start == _PARQUET and name.endswith((".jsonl", ".ndjson", ".json")):
        raise BadBatch("bad_encoding", "The batch is named as JSON but is Parquet: name it .parquet.")
    return start == _PARQUET


def _ends(source: Path | bytes) -> tuple[bytes, bytes]:
    if isinstance(source, bytes):
        return source[:4], source[-4:]
    with source.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, source.stat().st_size - 4))
        return start, file.read(4)


# JSON lines


def _read_lines(source: Path | bytes, shape: Shape) -> Batch:
    if isinstance(source, bytes):
        return _rows(source, shape)
    if source.stat().st_size == 0:
        return _rows(b"", shape)
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _rows(data, shape)


def _rows(data: bytes | mmap.mmap, shape: Shape) -> Batch:
    if data[:2] in _OTHER_BOMS or 0 in data[:_LOOKED_AT_BYTES]:
        raise BadBatch("bad_encoding", "The batch is not UTF-8: write JSON lines in UTF-8.")
    lines = _plain_lines(data)
    if lines is not None:
        with memoryview(data) as view:
            table = _part(view, lines, shape, _BLOCK_BYTES)
        if table is not None:
            return Batch(table)
    return _line_by_line(data, shape)


def _is_plain(source: Source) -> bool:
    """Returns True if the content looks like JSON lines, as many as were published."""
    data = source.content
    if not data.startswith(_OBJECT) or 0 in data[:_LOOKED_AT_BYTES]:
        return False
    return not source.uri.lower().endswith(".parquet") and _plain_lines(data) == source.record_count


def _read_at_once(sources: Sequence[Source], shape: Shape) -> Sequence[Batch | BadBatch]:
    """Reads plain batches as one, so that Arrow's cost per batch arises once. Returns () if one of them is bad."""
    joined = b"".join(_ended(source.content) for source in sources)
    counts = [source.record_count for source in sources]
    table = _part(joined, sum(counts), shape, len(joined) + 1) if joined else None
    if table is None:
        return ()
    batches = [Batch(table.slice(end - count, count)) for end, count in zip(accumulate(counts), counts, strict=True)]
    if shape.update or not repeated(table, shape.key):
        return batches
    return [_refused_by_keys(batch, shape) or batch for batch in batches]


def _ended(lines: bytes) -> bytes:
    return lines if lines.endswith(b"\n") else lines + b"\n"


def _plain_lines(data: bytes | mmap.mmap) -> int | None:
    """Returns the number of lines if each starts with an object, else None.

    Arrow ignores line ends: it would read `{"a":` and `1}{"a":2}` as two rows. But a JSON string contains no line feed,
    and no declared column is an object. So if as many objects are read as there are lines, and each line starts with
    one, each line is exactly one object.
    """
    read = np.frombuffer(data, np.uint8)
    begun, lines = int(data[:1] == _OBJECT), int(data[-1:] != b"\n")
    for at in range(0, len(read), _LOOKED_THROUGH_BYTES):
        ends = read[at : at + _LOOKED_THROUGH_BYTES] == ord(b"\n")
        begins = read[at + 1 : at + 1 + _LOOKED_THROUGH_BYTES] == ord(_OBJECT)
        lines += int(np.count_nonzero(ends))
        begun += int(np.count_nonzero(ends[: len(begins)] & begins))
    return lines if begun == lines else None


def _parsed(data: Any, shape: Shape, block: int) -> pa.Table:
    """Any: an object with the buffer protocol."""
    raw = pj.read_json(
        pa.BufferReader(pa.py_buffer(data)),
        read_options=pj.ReadOptions(block_size=block, use_threads=block < len(data)),
        parse_options=pj.ParseOptions(explicit_schema=shape.json_schema, unexpected_field_behavior="error"),
    )
    raw.validate(full=True)
    return shape.typed(raw, from_json=True)


def _line_by_line(data: bytes | mmap.mmap, shape: Shape) -> Batch:
    """Reads in small parts. Also used for good batches with blank lines, or with lines longer than a block."""
    tables, lines, found = [], [], _Found()
    numbered = _numbered(data)
    while part := list(islice(numbered, _PARTS)):
        table = _of_lines([line for _, line in part], shape)
        if table is not None:
            tables.append(table)
            lines += [number for number, _ in part]
            continue
        for number, line in part:
            if _of_lines([line], shape) is None:
                found.add(number, _explained(line, shape))
        if found.enough:
            break
        tables += [one for _, line in part if (one := _of_lines([line], shape)) is not None]
        lines += [number for number, _ in part]
    found.refuse()
    empty = shape.typed(shape.json_schema.empty_table(), from_json=True)
    return Batch(pa.concat_tables([empty, *tables]), lines)


def _numbered(data: bytes | mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """Yields non-blank lines with their numbers."""
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    file.seek(0)
    for number, line in enumerate(iter(file.readline, b""), 1):
        text = line.removeprefix(_BOM).strip() if number == 1 else line.strip()
        if text:
            yield number, text


def _of_lines(lines: Sequence[bytes], shape: Shape) -> pa.Table | None:
    if not all(line.startswith(_OBJECT) for line in lines):
        return None
    data = b"\n".join(lines)
    return _part(data, len(lines), shape, max(_BLOCK_BYTES, len(data) + 1))


def _part(data: Any, rows: int, shape: Shape, block: int) -> pa.Table | None:
    try:
        table = _parsed(data, shape, block)
    except (Wrong, *_UNREADABLE):
        return None
    return table if table.num_rows == rows else None


def _explained(line: bytes, shape: Shape) -> str:
    """Explains why a line is not a row. Names the column, never the value."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"it is not JSON: {error}"
    if not isinstance(row, dict):
        return "it is not a JSON object"
    known = {column.name: column for column in shape.columns}
    for name, value in row.items():
        if name not in known:
            return f"column {name[:100]!r} is not declared"
        if problem := _type_problem(value, known[name]):
            return problem
    try:
        _parsed(line, shape, max(_BLOCK_BYTES, len(line) + 1))
    except Wrong as wrong:
        return str(wrong)
    except _UNREADABLE:
        return "a column occurs twice, or has a value that its type cannot hold"
    return "the line has more than one row"


def _type_problem(value: object, column: Column) -> str | None:
    if value is None:
        return None
    allowed = _json_types(column.type)
    if isinstance(value, allowed) and not (isinstance(value, bool) and bool not in allowed):
        return None
    found = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return f"column {column.name!r} is {found[type(value)]}, but declared as {column.type}"


def _json_types(written: str) -> tuple[type, ...]:
    if decimal_digits(written):
        return (int, float, str)
    if written in ("float", "double"):
        return (int, float)
    if written == "boolean":
        return (bool,)
    return (int,) if written in ("bigint", "int", "smallint", "tinyint") else (str,)


# Parquet


def _read_parquet(source: Path | bytes, shape: Shape) -> Batch:
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    _check_footer(source, size)
    try:
        with pq.ParquetFile(_opened(source)) as file:
            if wrong := _problem(file.schema_arrow.empty_table(), shape):
                raise _bad_columns(wrong)
            _check_unpacked(source, size, file.schema_arrow)
            raw = file.read()
        raw.validate(full=True)
    except (*_UNREADABLE, OSError) as error:
        why = str(error).partition("\n")[0][:200]
        raise BadBatch("truncated", f"The batch cannot be read as Parquet ({why}): write it again.") from None
    try:
        return Batch(shape.typed(raw, from_json=False))
    except Wrong as wrong:
        _find_rows(raw, shape)
        raise _bad_columns(str(wrong)) from None


def _check_footer(source: Path | bytes, size: int) -> None:
    """Limits the footer before it is parsed, since the sink is shared."""
    if isinstance(source, bytes):
        end = source[-PARQUET_END_BYTES:]
    else:
        with source.open("rb") as file:
            file.seek(max(0, size - PARQUET_END_BYTES))
            end = file.read(PARQUET_END_BYTES)
    if (length := footer_bytes(end)) > MAX_FOOTER_BYTES:
        raise BadBatch(
            "too_large",
            f"The footer of the batch has {length} bytes; the limit is {MAX_FOOTER_BYTES}: write fewer row groups.",
        )


def _opened(source: Path | bytes) -> Any:
    """Any: an input that pyarrow opens."""
    return pa.BufferReader(source) if isinstance(source, bytes) else source


def _bad_columns(wrong: str) -> BadBatch:
    return BadBatch("bad_columns", f"The columns of the batch are not as declared: {wrong}.")


def _check_unpacked(source: Path | bytes, size: int, schema: pa.Schema) -> None:
    """Limits the unpacked size before unpacking: one stored value may expand to millions, and the sink is shared."""
    limit = min(_MAX_UNPACKED, max(_NO_BOMB_BYTES, _MAX_RATIO * size))
    widest = max((field.type.byte_width for field in schema if pa.types.is_fixed_size_binary(field.type)), default=1)
    texts = [field.name for field in schema if _is_text(field.type)]
    unpacked = 0
    with pq.ParquetFile(_opened(source), read_dictionary=texts) as file:
        for part in file.iter_batches(batch_size=max(1, min(_ROWS_AT_ONCE, limit // widest))):
            unpacked += sum(_unpacked_size(column) for column in part.columns)
            if unpacked > limit:
                raise BadBatch("too_large", f"The batch unpacks to more than {limit} bytes: write smaller batches.")


def _unpacked_size(column: pa.Array) -> int:
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    if not _is_text(column.type.value_type):
        return _WIDEST_NUMBER * len(column)
    return int(pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0)


def _is_text(kind: Any) -> bool:
    """Returns True for text and bytes, which have variable length. Any: pyarrow has no type information."""
    kinds = pa.types
    return any(one(kind) for one in (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary))


def _find_rows(raw: pa.Table, shape: Shape) -> None:
    """Raises BadBatch with the bad rows; returns if the columns are at fault instead."""
    if _problem(raw.slice(0, 0), shape) is not None:
        return
    found = _Found()
    for start in range(0, raw.num_rows, _PARTS):
        if found.enough or _problem(raw.slice(start, _PARTS), shape) is None:
            continue
        for row in range(start, min(start + _PARTS, raw.num_rows)):
            if problem := _problem(raw.slice(row, 1), shape):
                found.add(row + 1, problem)
    found.refuse()


def _problem(raw: pa.Table, shape: Shape) -> str | None:
    try:
        shape.typed(raw, from_json=False)
    except Wrong as wrong:
        return str(wrong)
    return None


# Keys


def _refused_by_keys(batch: Batch, shape: Shape) -> BadBatch | None:
    try:
        _check_keys(batch, shape)
    except BadBatch as bad:
        return bad
    return None


def _check_keys(batch: Batch, shape: Shape) -> None:
    """Refuses repeated keys if the first row of a key is kept. With updates, the last row wins instead."""
    if shape.update or not repeated(batch.table, shape.key):
        return
    found, seen = _Found(), dict[tuple[Any, ...], int]()
    for row, key in enumerate(zip(*(batch.table.column(name).to_pylist() for name in shape.key), strict=True)):
        first = seen.setdefault(key, row)
        if first != row:
            found.add(batch.line(row), f"it repeats the unique_key of line {batch.line(first)}")
    found.refuse()


def repeated(table: pa.Table, key: Sequence[str]) -> bool:
    names = list(key)
    return bool(table.select(names).group_by(names, use_threads=False).aggregate([]).num_rows < table.num_rows)


def distinct(table: pa.Table, key: Sequence[str], *, last: bool) -> pa.Table:
    """Keeps one row of each key: the first or the last."""
    if not repeated(table, key):
        return table
    names, which = list(key), "max" if last else "min"
    numbered = table.select(names).append_column("_row", pa.array(np.arange(table.num_rows)))
    kept = numbered.group_by(names).aggregate([("_row", which)]).column(f"_row_{which}")
    return table.take(np.sort(kept.to_numpy()))
