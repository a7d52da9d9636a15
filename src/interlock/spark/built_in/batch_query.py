"""`batch_query`: runs a query that is too large for a synchronous answer, and exports the result as Parquet.

The statement has passed the gate of the query service, and must also pass that of the operator `sql`. The relations are
the inputs of the task in order, under the names that the statement uses for them. The dispatcher chooses the location
of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct
from pyspark import TaskContext as SparkTask
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from interlock.spark import objects
from interlock.spark.built_in.sql import selected
from interlock.spark.context import TaskContext
from interlock.spark.operators import operator
from interlock.spark.partition_file import ROWS_PER_GROUP
from interlock.workers.failures import BadConfig

MAX_FILES: Final = 32
_ANSWER: Final = pa.schema([("uri", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64())])


class _Payload(Struct, frozen=True):
    query_id: UUID
    sql: str
    relations: list[str]
    """Name of each input in the statement."""


@operator()
def batch_query(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> dict[str, Any]:
    """Runs the query and returns the location and size of the result."""
    asked = _asked(ctx)
    export = ctx.data.export
    if export is None or len(asked.relations) != len(ctx.data.inputs):
        raise BadConfig(
            "batch_query runs only in tasks that the query service creates: use POST /v1/query with `mode: batch`."
        )
    named = {asked.relations[one.input_index]: inputs[one.name] for one in ctx.data.inputs}
    frame = selected(ctx.spark, asked.sql, named)
    files = _exported(frame, Part(export.prefix, _columns(frame)))
    return {
        "prefix": export.prefix,
        "files": [{"uri": file["uri"], "bytes": file["bytes"]} for file in files],
        "row_count": sum(file["rows"] for file in files),
    }


def _asked(ctx: TaskContext) -> _Payload:
    try:
        return msgspec.convert(ctx.payload, _Payload)
    except msgspec.ValidationError as error:
        raise BadConfig(
            "batch_query runs only in tasks that the query service creates: use POST /v1/query with `mode: batch`. "
            f"The payload is invalid: {error}."
        ) from None


def _columns(frame: DataFrame) -> pa.Schema:
    counted = Counter(name.lower() for name in frame.columns)
    if twice := [name for name, times in counted.items() if times > 1]:
        raise BadConfig(f"Two columns of the result are named {twice[0]}: rename one of them with AS.")
    try:
        return to_arrow_schema(frame.schema, timezone="UTC")
    except Exception as error:
        raise BadConfig(
            f"A column has a type that cannot be written to Parquet: {error}. Cast it to another type."
        ) from None


def _exported(frame: DataFrame, part: Part) -> list[dict[str, Any]]:
    answers = frame.coalesce(MAX_FILES).mapInArrow(part.write, from_arrow_schema(_ANSWER)).collect()
    files = [{"uri": answer.uri, "rows": answer.rows, "bytes": answer.bytes} for answer in answers]
    # A result without rows still has columns, so one empty file is written for its schema.
    return sorted(files, key=lambda file: str(file["uri"])) or [part.written(0, iter(()))]


@dataclass(frozen=True)
class Part:
    """Writes one file per partition. Spark pickles it and sends it to the executors.

    The name of a file contains the number of its partition, so the files of a sorted result sort by name.
    """

    prefix: str
    schema: pa.Schema

    def write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Function for `mapInArrow`."""
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return
        task = SparkTask.get()
        number = 0 if task is None else task.partitionId()
        yield pa.RecordBatch.from_pylist([self.written(number, _with(first, batches))], schema=_ANSWER)

    def written(self, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        uri = f"{self.prefix}part-{number:05}.parquet"
        rows = 0
        with objects.replacing(uri) as draft:
            with pq.ParquetWriter(draft, self.schema, compression="zstd", store_schema=False) as writer:
                for batch in batches:
                    rows += batch.num_rows
                    writer.write_batch(batch.cast(self.schema), ROWS_PER_GROUP)
            size = draft.stat().st_size
        return {"uri": uri, "rows": rows, "bytes": size}


def _with(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest
