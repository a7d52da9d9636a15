"""Writes an operator's DataFrame as the file of a partition, under the attempt's own prefix.

Each output is one Spark job. Its last stage is a single task that checks the rows, counts them and writes the file. The
marker is written last. No reader sees the file before the dispatcher has committed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, functions
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from interlock.schemas import MARKER, DatasetSchema, Marker, SchemaClash, evolved, hash_of
from interlock.spark import objects
from interlock.spark.columns import check_range_column, checked_output, quoted, schema_of, struct_of, type_of
from interlock.spark.context import Scope
from interlock.spark.partition_file import ANSWER, PartitionFile, Written
from interlock.wire.attempts import Event, Output, OutputData
from interlock.workers.failures import NoScope, SchemaMismatch, WrongColumns, WrongOutputs, failure

_FILES: Final = "parquet"
_ANSWER: Final = from_arrow_schema(ANSWER)


def write(
    frame: DataFrame,
    output: OutputData,
    declared: StructType | None,
    scope: Scope | None,
    range_column: str | None,
    suffix: Callable[[Scope], str] = str,
) -> tuple[Output, Event]:
    """Writes one output. `range_column` applies only if the output has a column of that name.

    `suffix` is the range in the name of the file.
    """
    if scope is None:
        raise NoScope(
            f"Output {output.name} has no range: the task has neither an input nor a payload with a range. Give the "
            'job an input or `partition: daily`, or trigger it with a payload such as {"start": 0, "end": 99}.'
        )
    if output.storage != _FILES:
        raise WrongOutputs(
            f"Output {output.name} has storage {output.storage}, but Spark operators write only parquet: change the "
            "storage of the output to parquet."
        )
    columns = checked_output(frame.schema, declared, output.name)
    placed_by = range_column if range_column in columns.names else None
    if placed_by is not None:
        check_range_column(columns, placed_by, output.name)
    schema = _following(output, schema_of(columns, placed_by))
    file = _file(output, schema, scope, suffix(scope))
    written = _run(_selected(frame, columns, schema), file)
    return _committed(output, file, written, schema, scope)


def _following(output: OutputData, schema: DatasetSchema) -> DatasetSchema:
    """Returns the schema of the file. With a unique_key, rows are merged into the current file and keep its columns."""
    if output.schema is None:
        return schema
    try:
        merged = evolved(output.schema, schema)
    except SchemaClash as clash:
        raise SchemaMismatch(
            f"Output {output.name} does not match the schema of its dataset: {clash}. Only nullable columns can be "
            "added; for any other change, edit the job's definition and deploy it, which creates a new dataset version."
        ) from None
    return merged if output.unique_key else schema


def _file(output: OutputData, schema: DatasetSchema, scope: Scope, suffix: str) -> PartitionFile:
    struct = struct_of(schema)
    if missing := [name for name in output.unique_key if name not in struct.names]:
        raise WrongColumns(
            f"Output {output.name} has no column {missing[0]}, which its unique_key lists: add the column to the "
            f"DataFrame, or remove it from unique_key. Columns: {', '.join(struct.names)}."
        )
    return PartitionFile(
        output=output.name,
        location=f"{output.write_prefix}{output.name}_{suffix}.parquet",
        schema=_arrow(struct),
        scope=scope,
        range_column=schema.range_column,
        unique_key=tuple(output.unique_key),
        current=output.current.location if output.unique_key and output.current is not None else None,
    )


def _arrow(struct: StructType) -> pa.Schema:
    try:
        return to_arrow_schema(struct, timezone="UTC")
    except Exception as error:
        raise WrongColumns(
            f"A column has a type that cannot be written to Parquet: {error}. Cast it to another type."
        ) from None


def _selected(frame: DataFrame, columns: StructType, schema: DatasetSchema) -> DataFrame:
    names = [quoted(column.name) for column in schema.columns]
    given = set(columns.names)
    if given == {column.name for column in schema.columns}:
        return frame if frame.columns == [column.name for column in schema.columns] else frame.select(*names)
    return frame.select(
        *(
            functions.col(quoted(column.name))
            if column.name in given
            else functions.lit(None).cast(type_of(column.type)).alias(column.name)
            for column in schema.columns
        )
    )


def _run(frame: DataFrame, file: PartitionFile) -> Written:
    answers = frame.coalesce(1).mapInArrow(file.write, _ANSWER).collect()
    if not answers:
        # Spark knew from the plan that the frame is empty, and ran no task.
        return file.written(iter(()))
    answer = answers[0]
    if answer.error_class is not None:
        raise failure(answer.error_class, answer.message)
    return Written(answer.row_count, answer.bytes, answer.min, answer.max)


def _committed(
    output: OutputData, file: PartitionFile, written: Written, schema: DatasetSchema, scope: Scope
) -> tuple[Output, Event]:
    marker = Marker(
        file=file.location.removeprefix(output.write_prefix),
        row_count=written.row_count,
        bytes=written.bytes,
        schema=schema,
        min=written.min,
        max=written.max,
        based_on=output.current.commit if output.unique_key and output.current is not None else None,
    )
    objects.write(output.write_prefix + MARKER, msgspec.json.encode(marker))
    key = f"{scope.start}-{scope.end}"
    reported = Output(
        output_index=output.output_index,
        dataset_uuid=output.dataset_uuid,
        dataset_version=output.dataset_version,
        location=file.location,
        partition_key=key,
        start=scope.start,
        end=scope.end,
        row_count=written.row_count,
        bytes=written.bytes,
        schema_hash=hash_of(schema),
        min=written.min,
        max=written.max,
    )
    changed = Event(
        dataset_uuid=output.dataset_uuid,
        dataset_version=output.dataset_version,
        partition_key=key,
        start=scope.start,
        end=scope.end,
    )
    return reported, changed
