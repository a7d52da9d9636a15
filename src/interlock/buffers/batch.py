"""A batch as an attempt left it, made rows of the declared shape: all of them, or none and the reasons why.

What refuses a row is one thing only, `Shape.typed` behind Arrow's reader: first over the whole batch, and where that
fails over ever smaller parts, down to the rows that are wrong. So no row is judged by two rules.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from interlock.buffers.shape import Shape, Wrong
from interlock.schemas import Column, decimal_digits
from interlock.wire import BadRow, BatchRefusal

MOST_SHOWN: Final = 100
MOST_COUNTED: Final = 10_000
"""Bad rows. Past so many, nobody needs to know how many more there are."""
_PARTS: Final = 1_000
_BLOCK_BYTES: Final = 16 << 20
_NO_BOMB_BYTES: Final = 64 << 20
_MOST_RATIO: Final = 50
_MOST_UNPACKED: Final = 4 << 30
"""What a Parquet file becomes in memory: so much at most, and not so many times its size once it is worth a word."""
_ROWS_AT_ONCE: Final = 1 << 16
_WIDEST_NUMBER: Final = 16
_PARQUET: Final = b"PAR1"
_GZIP: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"
_OTHER_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
_UNREADABLE: Final = (pa.ArrowException, UnicodeDecodeError)


class BadBatch(Exception):
    """A batch that is refused whole."""

    def __init__(self, code: str, detail: str, bad_rows: int = 0, rows: Sequence[BadRow] = ()) -> None:
        super().__init__(detail)
        self.refusal = BatchRefusal(code=code, detail=detail, bad_rows=bad_rows, rows=list(rows))


@dataclass(frozen=True)
class Batch:
    table: pa.Table
    lines: Sequence[int] | None = None
    """By row, where lines without one stand between them; else rows are counted from 1."""

    def line(self, row: int) -> int:
        return row + 1 if self.lines is None else self.lines[row]


@dataclass
class _Found:
    """What is wrong so far."""

    count: int = 0
    rows: list[BadRow] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        self.count += 1
        if len(self.rows) < MOST_SHOWN:
            self.rows.append(BadRow(line=line, reason=reason))

    @property
    def enough(self) -> bool:
        return self.count >= MOST_COUNTED

    def refuse(self) -> None:
        if not self.count:
            return
        number = f"at least {self.count}" if self.enough else str(self.count)
        noun = "row is" if self.count == 1 else "rows are"
        first = self.rows[0]
        raise BadBatch(
            "bad_rows",
            f"{number} {noun} not what the dataset declares; the first in line {first.line}: {first.reason}. "
            "Publish a corrected batch, or declare what it has.",
            self.count,
            self.rows,
        )


def read(path: Path, uri: str, shape: Shape, record_count: int) -> Batch:
    """Raises BadBatch."""
    batch = _read_parquet(path, shape) if _is_parquet(path, uri) else _read_lines(path, shape)
    if batch.table.num_rows != record_count:
        raise BadBatch(
            "record_count",
            f"The batch has {batch.table.num_rows} rows, and was published with a record_count of {record_count}: it "
            "was cut short, or changed after it was published. Publish it anew, under another name.",
        )
    _check_keys(batch, shape)
    return batch


def _is_parquet(path: Path, uri: str) -> bool:
    """By its name and by what is in it, which must agree."""
    name = uri.rpartition("/")[2].lower()
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, path.stat().st_size - 4))
        end = file.read(4)
    if name.endswith(".parquet") and (start, end) != (_PARQUET, _PARQUET):
        raise BadBatch("truncated", "The batch is called .parquet, and is none, or cut short: write it anew.")
    if start[:2] == _GZIP:
        raise BadBatch("bad_encoding", "The batch is compressed: write JSON lines as they are, or Parquet.")
    if start == _PARQUET and name.endswith((".jsonl", ".ndjson", ".json")):
        raise BadBatch("bad_encoding", "The batch is called .jsonl, and is Parquet: call it .parquet.")
    return start == _PARQUET


# JSON lines


def _read_lines(path: Path, shape: Shape) -> Batch:
    if path.stat().st_size == 0:
        return Batch(shape.typed(shape.json_schema.empty_table(), from_json=True))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:2] in _OTHER_BOMS or 0 in data[:4096]:
            raise BadBatch("bad_encoding", "The batch is not UTF-8: write JSON lines in UTF-8.")
        count = _line_count(data)
        try:
            with memoryview(data) as view:
                table = _parsed(view, shape)
            if table.num_rows == count:
                return Batch(table)
        except (Wrong, *_UNREADABLE):
            pass
        return _line_by_line(data, shape)


def _line_count(data: mmap.mmap) -> int:
    newlines, at = 0, 0
    while chunk := data[at : at + _BLOCK_BYTES]:
        newlines += chunk.count(b"\n")
        at += len(chunk)
    return newlines + (data[-1:] != b"\n")


def _parsed(data: Any, shape: Shape, block: int = _BLOCK_BYTES) -> pa.Table:
    """Any: what gives bytes."""
    raw = pj.read_json(
        pa.BufferReader(pa.py_buffer(data)),
        read_options=pj.ReadOptions(block_size=block),
        parse_options=pj.ParseOptions(explicit_schema=shape.json_schema, unexpected_field_behavior="error"),
    )
    raw.validate(full=True)
    return shape.typed(raw, from_json=True)


def _line_by_line(data: mmap.mmap, shape: Shape) -> Batch:
    """Also the way of good batches with empty lines between, or with lines longer than a block."""
    tables, lines, found = [], [], _Found()
    numbered = _numbered(data)
    while part := list(islice(numbered, _PARTS)):
        table = _part(b"\n".join(line for _, line in part), len(part), shape)
        if table is not None:
            tables.append(table)
            lines += [number for number, _ in part]
            continue
        for number, line in part:
            if _part(line, 1, shape) is None:
                found.add(number, _explained(line, shape))
        if found.enough:
            break
        tables += [one for _, line in part if (one := _part(line, 1, shape)) is not None]
        lines += [number for number, _ in part]
    found.refuse()
    empty = shape.typed(shape.json_schema.empty_table(), from_json=True)
    return Batch(pa.concat_tables([empty, *tables]), lines)


def _numbered(data: mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """Lines with something in them."""
    data.seek(0)
    for number, line in enumerate(iter(data.readline, b""), 1):
        text = line.removeprefix(_BOM).strip() if number == 1 else line.strip()
        if text:
            yield number, text


def _part(data: bytes, rows: int, shape: Shape) -> pa.Table | None:
    try:
        table = _parsed(data, shape, max(_BLOCK_BYTES, len(data) + 1))
    except (Wrong, *_UNREADABLE):
        return None
    return table if table.num_rows == rows else None


def _explained(line: bytes, shape: Shape) -> str:
    """Why a line is no row, in words that name the column and never the value."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"it is no JSON: {error}"
    if not isinstance(row, dict):
        return "it is no JSON object"
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
        return "a column is there twice, or has a value that its type does not hold"
    return "there is more than one row in the line"


def _type_problem(value: object, column: Column) -> str | None:
    if value is None:
        return None
    allowed = _json_types(column.type)
    if isinstance(value, allowed) and not (isinstance(value, bool) and bool not in allowed):
        return None
    said = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return f"column {column.name!r} is {said[type(value)]}, and declared as {column.type}"


def _json_types(written: str) -> tuple[type, ...]:
    if decimal_digits(written):
        return (int, float, str)
    if written in ("float", "double"):
        return (int, float)
    if written == "boolean":
        return (bool,)
    return (int,) if written in ("bigint", "int", "smallint", "tinyint") else (str,)


# Parquet


def _read_parquet(path: Path, shape: Shape) -> Batch:
    try:
        with pq.ParquetFile(path) as file:
            if wrong := _problem(file.schema_arrow.empty_table(), shape):
                raise _bad_columns(wrong)
            _check_unpacked(path, file.schema_arrow)
            raw = file.read()
        raw.validate(full=True)
    except (*_UNREADABLE, OSError) as error:
        why = str(error).partition("\n")[0][:200]
        raise BadBatch("truncated", f"The batch cannot be read as Parquet ({why}): write it anew.") from None
    try:
        return Batch(shape.typed(raw, from_json=False))
    except Wrong as wrong:
        _find_rows(raw, shape)
        raise _bad_columns(str(wrong)) from None


def _bad_columns(wrong: str) -> BadBatch:
    return BadBatch("bad_columns", f"The columns of the batch are not as declared: {wrong}.")


def _check_unpacked(path: Path, schema: pa.Schema) -> None:
    """Before it is unpacked: a value that is there once may stand for millions, and the sink is everybody's."""
    most = min(_MOST_UNPACKED, max(_NO_BOMB_BYTES, _MOST_RATIO * path.stat().st_size))
    widest = max((field.type.byte_width for field in schema if pa.types.is_fixed_size_binary(field.type)), default=1)
    texts = [field.name for field in schema if _is_text(field.type)]
    unpacked = 0
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        for part in file.iter_batches(batch_size=max(1, min(_ROWS_AT_ONCE, most // widest))):
            unpacked += sum(_unpacked_size(column) for column in part.columns)
            if unpacked > most:
                raise BadBatch("too_large", f"The batch unpacks to more than {most} bytes: write smaller ones.")


def _unpacked_size(column: pa.Array) -> int:
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    if not _is_text(column.type.value_type):
        return _WIDEST_NUMBER * len(column)
    return int(pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0)


def _is_text(kind: Any) -> bool:
    """Or bytes: what has no length of its own. Any: pyarrow comes without types."""
    kinds = pa.types
    return any(one(kind) for one in (kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary))


def _find_rows(raw: pa.Table, shape: Shape) -> None:
    """Raises BadBatch with the rows that are wrong; returns where it is the columns that are."""
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


def _check_keys(batch: Batch, shape: Shape) -> None:
    """Where the first row of a key stays, a second one in the same batch is a mistake; else the last one wins."""
    if shape.update or not repeated(batch.table, shape.key):
        return
    found, seen = _Found(), dict[tuple[Any, ...], int]()
    for row, key in enumerate(zip(*(batch.table.column(name).to_pylist() for name in shape.key), strict=True)):
        first = seen.setdefault(key, row)
        if first != row:
            found.add(batch.line(row), f"it has the unique_key of line {batch.line(first)}")
    found.refuse()


def repeated(table: pa.Table, key: Sequence[str]) -> bool:
    names = list(key)
    return bool(table.select(names).group_by(names, use_threads=False).aggregate([]).num_rows < table.num_rows)


def distinct(table: pa.Table, key: Sequence[str], *, last: bool) -> pa.Table:
    """One row of each key: the first or the last."""
    if not repeated(table, key):
        return table
    names, which = list(key), "max" if last else "min"
    numbered = table.select(names).append_column("_row", pa.array(np.arange(table.num_rows)))
    kept = numbered.group_by(names).aggregate([("_row", which)]).column(f"_row_{which}")
    return table.take(np.sort(kept.to_numpy()))
