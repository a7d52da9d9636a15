"""Rows of Arrow as PostgreSQL's COPY takes them. Text and not binary: Arrow writes CSV itself, and fast."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from interlock.buffers.batch import distinct
from interlock.buffers.shape import Shape

PUBLISH: Final = "_publish"
"""Which of the publishes that are loaded together a row came with, counted from 1."""
_ROWS_AT_ONCE: Final = 50_000
_OPTIONS: Final = pa_csv.WriteOptions(include_header=False)


def together(tables: Sequence[pa.Table], shape: Shape) -> pa.Table:
    """Rows of several batches, in the order of their publishing, one of each key."""
    numbered = [
        table.add_column(0, PUBLISH, pa.array(np.full(table.num_rows, number, np.int16)))
        for number, table in enumerate(tables, 1)
    ]
    return distinct(pa.concat_tables(numbered), shape.key, last=shape.update)


async def csv(table: pa.Table) -> AsyncIterator[bytes]:
    """The next part is written while the server takes this one."""
    starts = range(0, table.num_rows, _ROWS_AT_ONCE)
    ahead: asyncio.Task[bytes] | None = None
    try:
        for start in starts:
            part = await (ahead or _later(table, start))
            ahead = _later(table, start + _ROWS_AT_ONCE) if start + _ROWS_AT_ONCE in starts else None
            yield part
    finally:
        if ahead is not None:
            ahead.cancel()


def _later(table: pa.Table, start: int) -> asyncio.Task[bytes]:
    return asyncio.create_task(asyncio.to_thread(_written, table.slice(start, _ROWS_AT_ONCE)))


def _written(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pa_csv.write_csv(_in_hex(table), out, _OPTIONS)
    return out.getvalue()


def _in_hex(table: pa.Table) -> pa.Table:
    for at, field in enumerate(table.schema):
        if pa.types.is_binary(field.type):
            texts = [None if value is None else f"\\x{value.hex()}" for value in table.column(at).to_pylist()]
            table = table.set_column(at, field.name, pa.array(texts, pa.string()))
    return table
