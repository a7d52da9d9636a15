"""Encodes Arrow rows in PostgreSQL's binary COPY format.

Measured with rows of seven columns, CPU per row here and in the server: 0.5 µs and 0.8 µs. Arrow's CSV writer needs
2.3 µs and 1.5 µs, asyncpg's `copy_records_to_table` 7.9 µs and 0.8 µs.

A row is the number of columns, then each column's length and bytes. NumPy lays fixed-length columns, and the lengths of
the others, side by side; Arrow then joins these blocks with the variable-length values between them, row by row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from interlock.datasets.buffers.batch import distinct
from interlock.datasets.buffers.shape import Shape

PUBLISH: Final = "_publish"
"""Column with the number, from 1, of the publish that a row came with, among those loaded together."""
_START: Final = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
_END: Final = b"\xff\xff"
_BYTES_AT_ONCE: Final = 2 << 20
_NULL: Final = -1
_EPOCH_DAYS: Final = 10_957
_EPOCH_MICROSECONDS: Final = _EPOCH_DAYS * 86_400 * 1_000_000
"""PostgreSQL's epoch is the year 2000."""
_NEGATIVE: Final = 0x4000
_LIMB: Final = np.uint64(0xFFFF_FFFF)
_LIMB_BITS: Final = np.uint64(32)
_DIGIT: Final = np.uint64(10_000)
_DECIMALS_OF_A_DIGIT: Final = 4

Values = npt.NDArray[Any]
"""Any: one value per row, of the column's type."""


def together(tables: Sequence[pa.Table], shape: Shape) -> pa.Table:
    """Combines rows of several batches in the order of publishing, one row per key."""
    numbered = [
        table.add_column(0, PUBLISH, pa.array(np.full(table.num_rows, number, np.int16)))
        for number, table in enumerate(tables, 1)
    ]
    return distinct(pa.concat_tables(numbered), shape.key, last=shape.update)


async def binary(table: pa.Table) -> AsyncIterator[pa.Buffer]:
    """Yields COPY data in parts of a few MiB, or of one row. Encodes the next part while the server reads this one."""
    yield pa.py_buffer(_START)
    rows = max(1, table.num_rows * _BYTES_AT_ONCE // max(1, table.nbytes))
    starts = range(0, table.num_rows, rows)
    ahead: asyncio.Task[pa.Buffer] | None = None
    try:
        for start in starts:
            part = await (ahead or _later(table.slice(start, rows)))
            ahead = _later(table.slice(start + rows, rows)) if start + rows in starts else None
            yield part
    finally:
        if ahead is not None:
            ahead.cancel()
    yield pa.py_buffer(_END)


def _later(part: pa.Table) -> asyncio.Task[pa.Buffer]:
    return asyncio.create_task(asyncio.to_thread(_written, part))


def _written(table: pa.Table) -> pa.Buffer:
    row = _Row(table.num_rows)
    row.add(np.dtype(">i2"), table.num_columns)
    for column in table.columns:
        _add_column(row, _one_chunk(column))
    joined = pc.binary_join_element_wise(*row.pieces(), pa.scalar(b"", pa.large_binary()))
    return joined.buffers()[2]


class _Row:
    """The pieces of all rows, from left to right."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: list[pa.Array] = []
        self._side_by_side: list[tuple[np.dtype[Any], Values | int]] = []

    def add(self, kind: np.dtype[Any], values: Values | int) -> None:
        """Adds a field with the same length in every row."""
        self._side_by_side.append((kind, values))

    def add_bytes(self, values: pa.Array) -> None:
        """Adds a variable-length field with its length prefix; null has no bytes."""
        lengths = pc.fill_null(pc.binary_length(values), _NULL)
        self.add(np.dtype(">i4"), lengths.to_numpy(zero_copy_only=False))
        self._close()
        self._pieces.append(pc.fill_null(values, b"") if values.null_count else values)

    def pieces(self) -> list[pa.Array]:
        self._close()
        return self._pieces

    def _close(self) -> None:
        if not self._side_by_side:
            return
        kinds = [(f"f{at}", kind) for at, (kind, _) in enumerate(self._side_by_side)]
        block = np.empty(self._count, np.dtype(kinds))
        for (name, _), (_, values) in zip(kinds, self._side_by_side, strict=True):
            block[name] = values
        self._pieces.append(_cut(block, np.ones(self._count, np.bool_)))
        self._side_by_side = []


def _add_column(row: _Row, column: pa.Array) -> None:
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        row.add_bytes(column.cast(pa.large_binary()))
        return
    values = _values(column)
    if column.null_count:
        there = np.asarray(column.is_valid())
        row.add_bytes(_cut(values[there], there))
    else:
        row.add(np.dtype(">i4"), values.dtype.itemsize)
        row.add(values.dtype, values)


def _cut(values: Values, there: npt.NDArray[np.bool_]) -> pa.Array:
    """Returns the bytes of the values as an array, null in rows without a value."""
    ends = np.cumsum(there, dtype=np.int64) * values.dtype.itemsize
    offsets = np.concatenate((np.zeros(1, np.int64), ends))
    known = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.Array.from_buffers(
        pa.large_binary(), len(there), [known, pa.py_buffer(offsets), pa.py_buffer(values.view(np.uint8))]
    )


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _values(column: pa.Array) -> Values:
    """Returns the values as PostgreSQL encodes them, big-endian. Values of null rows are arbitrary."""
    kinds, kind = pa.types, column.type
    if kinds.is_decimal(kind):
        return _decimals(column)
    if kinds.is_boolean(kind):
        return _numbers(column.cast(pa.uint8()))
    if kinds.is_date(kind):
        return (_numbers(column.view(pa.int32())) - _EPOCH_DAYS).astype(">i4")
    if kinds.is_timestamp(kind):
        return (_numbers(column.view(pa.int64())) - _EPOCH_MICROSECONDS).astype(">i8")
    numbers = _numbers(column.cast(pa.int16()) if kinds.is_int8(kind) else column)
    return numbers.astype(numbers.dtype.newbyteorder(">"))


def _numbers(column: pa.Array) -> Values:
    """Reads Arrow's memory directly: the pandas conversion would turn integers next to nulls into floats."""
    kind = np.dtype(column.type.to_pandas_dtype())
    return np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + len(column)]


def _decimals(column: pa.Array) -> Values:
    """Encodes decimals as base-10,000 digits, as many before and after the point as the type can need."""
    precision, scale = column.type.precision, column.type.scale
    before, behind = (-(-decimals // _DECIMALS_OF_A_DIGIT) for decimals in (precision - scale, scale))
    count = before + behind
    number = np.empty(
        len(column),
        [("count", ">i2"), ("weight", ">i2"), ("sign", ">i2"), ("scale", ">i2"), ("digits", ">i2", (count,))],
    )
    limbs, negative = _magnitudes(column)
    _times(limbs, 10 ** (behind * _DECIMALS_OF_A_DIGIT - scale))
    for at in reversed(range(count)):
        number["digits"][:, at] = _next_digit(limbs)
    number["count"], number["weight"], number["scale"] = count, before - 1, scale
    number["sign"] = np.where(negative, _NEGATIVE, 0)
    return number


def _magnitudes(column: pa.Array) -> tuple[list[npt.NDArray[np.uint64]], npt.NDArray[np.bool_]]:
    """Splits into 32-bit limbs, lowest first, plus one spare limb for the multiplication."""
    words = np.frombuffer(column.buffers()[1], "<u8").reshape(-1, 2)[column.offset : column.offset + len(column)]
    low, high = words[:, 0], words[:, 1]
    negative = high >> np.uint64(63) == 1
    high = np.where(negative, ~high + (low == 0), high)
    low = np.where(negative, ~low + np.uint64(1), low)
    return [low & _LIMB, low >> _LIMB_BITS, high & _LIMB, high >> _LIMB_BITS, np.zeros_like(low)], negative


def _times(limbs: list[npt.NDArray[np.uint64]], factor: int) -> None:
    carried = np.zeros_like(limbs[0])
    for at, limb in enumerate(limbs):
        product = limb * np.uint64(factor) + carried
        limbs[at], carried = product & _LIMB, product >> _LIMB_BITS


def _next_digit(limbs: list[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    """Removes and returns the lowest digit."""
    rest = np.zeros_like(limbs[0])
    for at in reversed(range(len(limbs))):
        limbs[at], rest = np.divmod(rest << _LIMB_BITS | limbs[at], _DIGIT)
    return rest
