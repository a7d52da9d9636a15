"""Writes the file of a partition from Arrow batches, in one Spark task.

The task returns problems with the rows in its answer instead of raising them: Spark would retry a failed task, and show
a stack trace instead of a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from interlock.spark import objects
from interlock.workers.context import TaskFailed
from interlock.workers.failures import CorruptFile, DuplicateKey, NullInColumn, RowOutsideScope, SchemaMismatch

if TYPE_CHECKING:
    from interlock.spark.context import Scope

ROWS_PER_GROUP: Final = 250_000

ANSWER: Final = pa.schema(
    [
        ("row_count", pa.int64()),
        ("bytes", pa.int64()),
        ("min", pa.int64()),
        ("max", pa.int64()),
        ("error_class", pa.string()),
        ("message", pa.string()),
    ]
)


@dataclass(frozen=True)
class Answer:
    """Answer of the Spark task: statistics of the file, or the failure."""

    row_count: int | None = None
    bytes: int | None = None
    min: int | None = None
    max: int | None = None
    error_class: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class Written:
    row_count: int
    bytes: int
    min: int | None
    """Least value of the range column."""
    max: int | None


@dataclass(frozen=True)
class PartitionFile:
    """A file to write, and the constraints on its rows. Spark pickles it and sends it to an executor."""

    output: str
    location: str
    schema: pa.Schema
    """A column that is not nullable here must contain no null."""
    scope: Scope
    range_column: str | None = None
    unique_key: Sequence[str] = ()
    current: str | None = None
    """The current file. Its rows are kept, except those whose key occurs in the new rows."""

    def write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Function for `mapInArrow` over a single partition."""
        try:
            done = self.written(batches)
            answer = Answer(done.row_count, done.bytes, done.min, done.max)
        except TaskFailed as failed:
            answer = Answer(error_class=failed.error_class, message=str(failed))
        yield pa.RecordBatch.from_pylist([asdict(answer)], schema=ANSWER)

    def written(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Writes the file. Raises TaskFailed if the rows violate a constraint or cannot be written."""
        rows = _Rows(self)
        with objects.replacing(self.location) as draft:
            with pq.ParquetWriter(
                draft, self.schema, compression="zstd", store_schema=False, write_page_index=True
            ) as writer:
                for batch in rows.checked(batches):
                    writer.write_batch(batch, ROWS_PER_GROUP)
            size = draft.stat().st_size
        return Written(rows.count, size, rows.min, rows.max)


class _Rows:
    """Checks and counts the rows of a file while they are written."""

    def __init__(self, file: PartitionFile) -> None:
        self._file = file
        self._keys: list[pa.RecordBatch] = []
        self.count = 0
        self.min: int | None = None
        self.max: int | None = None

    def checked(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield self._new(batch)
        if self._file.unique_key:
            yield from self._kept()

    def _new(self, given: pa.RecordBatch) -> pa.RecordBatch:
        batch = _conformed(given, self._file.schema)
        self._check_nulls(batch)
        if self._file.unique_key:
            self._keys.append(batch.select(self._file.unique_key))
        self._take(batch)
        return batch

    def _take(self, batch: pa.RecordBatch) -> None:
        self.count += batch.num_rows
        column = self._file.range_column
        if column is None or not batch.num_rows:
            return
        bounds = pc.min_max(batch[column]).as_py()
        lowest, highest = int(bounds["min"]), int(bounds["max"])
        scope = self._file.scope
        for value in (lowest, highest):
            if value not in scope:
                raise RowOutsideScope(
                    f"Output {self._file.output} has a row with {column} {value}, outside the task's range {scope}: "
                    "filter the rows by ctx.scope, or declare range_column=None if the output has no range column."
                )
        self.min = lowest if self.min is None else min(self.min, lowest)
        self.max = highest if self.max is None else max(self.max, highest)

    def _check_nulls(self, batch: pa.RecordBatch) -> None:
        needed = {*self._file.unique_key, self._file.range_column}
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if column.null_count and (not field.nullable or field.name in needed):
                why = "a key or range column" if field.name in needed else "which is declared as not null"
                raise NullInColumn(
                    f"Output {self._file.output} has a null in column {field.name}, {why}: fill the value in the "
                    "operator, or filter such rows out."
                )

    # Rows of the current file

    def _kept(self) -> Iterator[pa.RecordBatch]:
        key = list(self._file.unique_key)
        fields = [self._file.schema.field(name) for name in key]
        new = pa.Table.from_batches(self._keys, pa.schema(fields))
        self._check_unique(new)
        if self._file.current is not None:
            for group in _row_groups(self._file.current):
                for batch in _without(_conformed(group, self._file.schema), new, key).to_batches():
                    self._take(batch)
                    yield batch

    def _check_unique(self, new: pa.Table) -> None:
        key = new.column_names
        counted = new.group_by(key).aggregate([([], "count_all")])
        doubled = counted.filter(pc.field("count_all") > 1)
        if doubled.num_rows:
            shown = ", ".join(f"{name} {doubled[name][0].as_py()}" for name in key)
            raise DuplicateKey(
                f"Output {self._file.output} has {doubled['count_all'][0].as_py()} new rows with the unique key {shown}"
                ": keep one row per key in the operator, for example with dropDuplicates or a window."
            )


def _conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the batch with the columns of the schema, in its order. A column that was added later is null."""
    if unknown := [name for name in batch.schema.names if name not in schema.names]:
        raise SchemaMismatch(
            f"Column {unknown[0]} of the existing rows would be lost: add it to the columns that the operator returns."
        )
    arrays = [
        batch[field.name].cast(field.type) if field.name in batch.schema.names else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _without(batch: pa.RecordBatch, keys: pa.Table, key: list[str]) -> pa.Table:
    """Returns the rows whose key is not in `keys`. Joins row numbers only, since Arrow cannot join every type."""
    number = "#" * (max(map(len, key)) + 1)
    numbers = pa.array(range(batch.num_rows), pa.int64())
    numbered = pa.Table.from_batches([batch.select(key)]).append_column(number, numbers)
    kept = numbered.join(keys, keys=key, join_type="left anti")[number]
    return pa.Table.from_batches([batch]).take(kept.combine_chunks().sort())


def _row_groups(location: str) -> Iterator[pa.RecordBatch]:
    try:
        with objects.open_parquet(location) as file:
            yield from pq.ParquetFile(file).iter_batches(batch_size=ROWS_PER_GROUP)
    except (pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise CorruptFile(
            f"{location}, the current file to which rows are added, is not readable: {error}. Recompute its range "
            "(interlock dataset invalidate)."
        ) from None
