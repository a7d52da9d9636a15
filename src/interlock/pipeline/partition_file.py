"""The file of a partition, written by one task of Spark's from Arrow batches.

What is wrong with the rows is told in the task's answer, not raised: Spark would try a failed task again, and show
a trace of its own instead of a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from interlock.pipeline import objects
from interlock.pipeline.failures import CorruptFile, DuplicateKey, NullInColumn, RowOutsideScope, SchemaMismatch
from interlock.workers.context import TaskFailed

if TYPE_CHECKING:
    from interlock.pipeline.context import Scope

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
    """Of Spark's task: what was written, or what is wrong."""

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
    """Of the range column."""
    max: int | None


@dataclass(frozen=True)
class PartitionFile:
    """What is to be written, and what must hold of the rows. Sent to whoever runs Spark's task."""

    output: str
    location: str
    schema: pa.Schema
    """A column that is not nullable there must have no null."""
    scope: Scope
    range_column: str | None = None
    unique_key: Sequence[str] = ()
    current: str | None = None
    """The file whose rows stay, but for those that have the key of a new one."""

    def write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For `mapInArrow` over a single partition."""
        try:
            done = self.written(batches)
            answer = Answer(done.row_count, done.bytes, done.min, done.max)
        except TaskFailed as failed:
            answer = Answer(error_class=failed.error_class, message=str(failed))
        yield pa.RecordBatch.from_pylist([asdict(answer)], schema=ANSWER)

    def written(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Raises the TaskFailed that says what is wrong with the rows, or why they cannot be written."""
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
    """Rows on their way into the file: counted, and refused when they do not belong there."""

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
        least, most = int(bounds["min"]), int(bounds["max"])
        scope = self._file.scope
        for value in (least, most):
            if value not in scope:
                raise RowOutsideScope(
                    f"Output {self._file.output} has a row with {column} {value}, and the task is about {scope}: let "
                    "the operator keep to ctx.scope, or declare with range_column=None that rows belong to no place."
                )
        self.min = least if self.min is None else min(self.min, least)
        self.max = most if self.max is None else max(self.max, most)

    def _check_nulls(self, batch: pa.RecordBatch) -> None:
        needed = {*self._file.unique_key, self._file.range_column}
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if column.null_count and (not field.nullable or field.name in needed):
                why = "which tells where rows belong" if field.name in needed else "which is declared as not null"
                raise NullInColumn(
                    f"Output {self._file.output} has a null in column {field.name}, {why}: let the operator fill it or "
                    "leave such rows out."
                )

    # Rows that were there before

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
                ": let the operator say which one counts, such as with dropDuplicates or a window."
            )


def _conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of a file, in its order; one that joined later is null in older rows."""
    if unknown := [name for name in batch.schema.names if name not in schema.names]:
        raise SchemaMismatch(f"Column {unknown[0]} of the rows that are there would be lost: declare it in the output.")
    arrays = [
        batch[field.name].cast(field.type) if field.name in batch.schema.names else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _without(batch: pa.RecordBatch, keys: pa.Table, key: list[str]) -> pa.Table:
    """Rows whose key is none of these. By their numbers: not every type can take part in a join of Arrow's."""
    number = "#" * (max(map(len, key)) + 1)
    numbers = pa.array(range(batch.num_rows), pa.int64())
    numbered = pa.Table.from_batches([batch.select(key)]).append_column(number, numbers)
    kept = numbered.join(keys, keys=key, join_type="left anti")[number]
    return pa.Table.from_batches([batch]).take(kept.combine_chunks().sort())


def _row_groups(location: str) -> Iterator[pa.RecordBatch]:
    try:
        file = pq.ParquetFile(pa.BufferReader(objects.read(location)))
        yield from file.iter_batches(batch_size=ROWS_PER_GROUP)
    except (pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise CorruptFile(f"{location}, whose rows are added to, cannot be read: {error}") from None
