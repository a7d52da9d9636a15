"""`buffer_load`: loads published batches on Spark's executors, if they are too large for the sink.

Each batch is one Spark task: it checks the rows with the sink's own code and copies them to the staging table of this
attempt. The sink commits the rows when the task has completed.
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

from interlock.datasets.buffers import batch
from interlock.datasets.buffers.batch import BadBatch
from interlock.datasets.buffers.binary_copy import PUBLISH
from interlock.datasets.buffers.shape import Shape
from interlock.spark import objects
from interlock.spark.context import TaskContext
from interlock.spark.operators import operator
from interlock.stores.postgres import queries
from interlock.wire.attempts import BufferLoad, LoadBatch
from interlock.workers.failures import BadConfig, DataDatabaseAway, FileMissing

_sql = queries(__name__, "buffer_load")
_SCHEMA: Final = "datasets"
_FOUND: Final = pa.schema(
    [("number", pa.int64()), ("rows", pa.int64()), ("bytes", pa.int64()), ("refusal", pa.string())]
)


@operator(inputs={})
def buffer_load(ctx: TaskContext) -> dict[str, Any]:
    """Stages the batches of the load and returns the counts of batches, refused batches and rows."""
    load = ctx.data.load
    if load is None:
        raise BadConfig(
            "buffer_load runs only in tasks that the sink creates: publish batches with POST /v1/task/buffer-publish."
        )
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
    """Stages batches. Spark pickles it and sends it to the executors."""

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
        """Function for `mapInArrow` over the numbers of the batches, counted from 1."""
        for part in numbers:
            for number in part.column(0).to_pylist():
                found = {"number": number} | self._one(number, self.load.batches[number - 1])
                yield pa.RecordBatch.from_pylist([found], schema=_FOUND)

    def keep(self, found: list[dict[str, Any]]) -> None:
        """Records the outcome of each batch for the sink. Called last, when every row is staged."""
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
                return _refused(BadBatch("missing", "The file at batch_uri no longer exists: publish the batch again."))
            size = path.stat().st_size
            if size > self.load.limit_bytes:
                limit = self.load.limit_bytes
                message = f"The batch has {size} bytes, the limit is {limit}: publish smaller batches."
                return _refused(BadBatch("too_large", message))
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
            # One transaction: an executor that dies leaves no rows, and its retry starts from the beginning.
            cursor.execute(_sql.unstage.sql, (self.staging, number))
            cursor.adbc_ingest(self.staging, numbered.to_reader(), mode="append", db_schema_name=_SCHEMA)

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        """Yields a cursor in a transaction. Typed Any because the driver has no type annotations."""
        try:
            with postgres.connect(self.url) as connection:
                with connection.cursor() as cursor:
                    yield cursor
                connection.commit()
        except adbc_driver_manager.Error as error:
            # The driver's message about a malformed URL may quote part of its password, so it is not passed on.
            state = f" (SQLSTATE {error.sqlstate})" if error.sqlstate else ""
            raise DataDatabaseAway(
                f"Spark's executors cannot write to the data database{state}: check INTERLOCK_DATA_URL of the worker, "
                "and that the executors can reach that address."
            ) from None


@contextmanager
def _local(uri: str) -> Iterator[Path | None]:
    """Yields a local path of the batch, or None if the batch does not exist."""
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
