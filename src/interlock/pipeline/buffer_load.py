"""`buffer_load`: published batches that are too much for the sink, read and checked by Spark's executors.

Each batch is one of Spark's tasks: its rows are checked by the sink's own code, and copied to the staging table of this
attempt. The sink commits them when the task has completed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as postgres
import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Raw
from pyspark.sql.pandas.types import from_arrow_schema

from interlock.adapters.postgres import queries
from interlock.buffers import batch
from interlock.buffers.batch import BadBatch
from interlock.buffers.copying import PUBLISH
from interlock.buffers.shape import Shape
from interlock.pipeline import objects
from interlock.pipeline.context import TaskContext
from interlock.pipeline.failures import BadConfig, DataDatabaseAway, FileMissing
from interlock.pipeline.operators import operator
from interlock.wire import BufferLoad, LoadBatch

_sql = queries("sink", "data")
_SCHEMA: Final = "datasets"
_FOUND: Final = pa.schema(
    [("number", pa.int64()), ("rows", pa.int64()), ("bytes", pa.int64()), ("refusal", pa.string())]
)


@operator(inputs={})
def buffer_load(ctx: TaskContext) -> dict[str, Any]:
    """How many rows were staged, and how many batches refused."""
    load = ctx.data.load
    if load is None:
        raise BadConfig("This is no task of a sink: publish batches with POST /v1/task/buffer-publish instead.")
    loader = Loader(ctx.table_url, f"staging_{ctx.task_id.hex}_{ctx.attempt}", load)
    loader.prepare()
    count = len(load.batches)
    numbers = ctx.spark.range(1, count + 1, 1, count)
    found = numbers.mapInArrow(loader.stage, from_arrow_schema(_FOUND)).collect()
    loader.keep([row.asDict() for row in found])
    refused = sum(row.refusal is not None for row in found)
    return {"batches": count, "refused": refused, "rows": sum(row.rows for row in found)}


@dataclass(frozen=True)
class Loader:
    """Sent to whoever runs Spark's tasks."""

    url: str
    staging: str
    load: BufferLoad

    @property
    def shape(self) -> Shape:
        return Shape.of(self.load.schema, self.load.unique_key, update=self.load.replace_rows)

    def prepare(self) -> None:
        with self._cursor() as cursor:
            cursor.execute(_sql.staging.sql, (self.staging, self.shape.table_columns))

    def stage(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For `mapInArrow` over the numbers of batches, from 1."""
        for part in numbers:
            for number in part.column(0).to_pylist():
                found = {"number": number} | self._one(number, self.load.batches[number - 1])
                yield pa.RecordBatch.from_pylist([found], schema=_FOUND)

    def keep(self, found: list[dict[str, Any]]) -> None:
        """What the sink goes by: written last, when every row is there."""
        listed = [
            {
                "publish_id": self.load.batches[one["number"] - 1].publish_id,
                "rows": one["rows"],
                "bytes": one["bytes"],
                "refusal": None if one["refusal"] is None else Raw(one["refusal"].encode()),
            }
            for one in found
        ]
        with self._cursor() as cursor:
            cursor.execute(_sql.keep_staged.sql, (self.staging, msgspec.json.encode(listed).decode()))

    def _one(self, number: int, published: LoadBatch) -> dict[str, Any]:
        with _local(published.batch_uri) as path:
            if path is None:
                return _refused(BadBatch("missing", "There is no file at batch_uri any more: publish it anew."))
            size = path.stat().st_size
            if size > self.load.limit_bytes:
                limit = self.load.limit_bytes
                return _refused(BadBatch("too_large", f"The batch has more than {limit} bytes: write smaller ones."))
            try:
                rows = batch.read(path, published.batch_uri, self.shape, published.record_count).table
            except BadBatch as bad:
                return _refused(bad)
            self._copy(number, rows)
            return {"rows": rows.num_rows, "bytes": size, "refusal": None}

    def _copy(self, number: int, rows: pa.Table) -> None:
        unique = batch.distinct(rows, self.shape.key, last=self.shape.update)
        numbered = unique.add_column(0, PUBLISH, pa.array(np.full(unique.num_rows, number, np.int16)))
        with self._cursor() as cursor:
            # One transaction: an executor that dies leaves nothing, and the next one begins anew.
            cursor.execute(_sql.unstage.sql, (self.staging, number))
            cursor.adbc_ingest(self.staging, numbered.to_reader(), mode="append", db_schema_name=_SCHEMA)

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        """Any: the driver comes without types."""
        try:
            with postgres.connect(self.url) as connection:
                with connection.cursor() as cursor:
                    yield cursor
                connection.commit()
        except adbc_driver_manager.Error as error:
            # What the driver says of a malformed address may quote a piece of its password.
            state = f" (SQLSTATE {error.sqlstate})" if error.sqlstate else ""
            raise DataDatabaseAway(
                f"The data database does not take the rows where Spark's executors run{state}: check "
                "INTERLOCK_DATA_URL of the worker, and that they can reach it."
            ) from None


@contextmanager
def _local(uri: str) -> Iterator[Path | None]:
    """The batch as a file here; None when there is none."""
    here = objects.folder_path(uri)
    if here is not None:
        yield here if here.is_file() else None
        return
    with tempfile.NamedTemporaryFile(prefix="interlock-") as file:
        try:
            file.write(objects.read(uri))
        except FileMissing:
            yield None
            return
        file.flush()
        yield Path(file.name)


def _refused(bad: BadBatch) -> dict[str, Any]:
    return {"rows": 0, "bytes": 0, "refusal": msgspec.json.encode(bad.refusal).decode()}
