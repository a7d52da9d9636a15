"""Reads the granted scope of an input as a DataFrame: only its rows and its columns.

The dispatcher lists the files when the attempt starts, so a rewrite that commits during the attempt does not affect it.
Ranges and conditions are filters of the scan itself, so Spark skips row groups and pages that they exclude.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, DecimalType, DoubleType, IntegerType, LongType, StructField, StructType

from interlock.schemas import HOT_RANGE_COLUMN
from interlock.spark import columns, objects
from interlock.spark.columns import pinned, quoted, struct_of, type_of
from interlock.spark.context import Scope
from interlock.spark.tables import Table, table_columns
from interlock.wire.attempts import InputData
from interlock.workers.failures import CorruptFile, SchemaMismatch

_FILES: Final = "parquet"
_PATTERN: Final = re.compile(r"([\[\]{}*?\\])")
"""Characters that Spark interprets as a glob pattern in a path."""
_ONLY_FILES: Final = {"recursiveFileLookup": "true"}
"""Without this option, a folder named `a=b` in the path would become a column."""


class Reader:
    """Reads the inputs of one attempt."""

    def __init__(self, spark: SparkSession, table_url: Callable[[], str]) -> None:
        self._spark = spark
        self._table_url = table_url

    def frame(self, data: InputData, declared: StructType | None) -> DataFrame:
        """Returns a lazy DataFrame; only its files are located now. Raises SchemaMismatch or FileMissing."""
        if data.start is None or data.end is None:
            return self._nothing(pinned(declared, _registered(data), data.name))
        scope = Scope(data.start, data.end)
        if data.storage == _FILES:
            return self._from_files(data, declared, scope)
        return self._from_table(data, declared, scope)

    def _from_files(self, data: InputData, declared: StructType | None, scope: Scope) -> DataFrame:
        locations = [file.location for file in data.files]
        known = _registered(data) or (inferred(locations, data.name) if locations else None)
        given = pinned(declared, known, data.name)
        if not locations or known is None:
            return self._nothing(given)
        # Files that lie within the scope need no filter, which would only cost time.
        cut = any(file.start < scope.start or file.end > scope.end for file in data.files)
        placed_by = data.schema.range_column if data.schema is not None and cut else None
        read = _with_columns(given, known, _filtered_by(data, placed_by), data.name)
        paths = [_PATTERN.sub(r"\\\1", location) for location in locations]
        frame = self._spark.read.schema(read).options(**_ONLY_FILES).parquet(*paths)
        if placed_by is not None:
            frame = frame.filter(functions.col(quoted(placed_by)).between(scope.start, scope.end))
        if data.where is not None:
            frame = frame.filter(columns.spark_text(data.where))
        return frame if read is given else frame.select(*map(quoted, given.names))

    def _from_table(self, data: InputData, declared: StructType | None, scope: Scope) -> DataFrame:
        if data.table is None:
            raise SchemaMismatch(f"Input {data.name} has neither files nor a table: deploy its DAG again.")
        url = self._table_url()
        known = _registered(data) or (table_columns(url, data.table) if declared is None else None)
        given = pinned(declared, known, data.name)
        placed_by = (data.schema.range_column if data.schema is not None else None) or HOT_RANGE_COLUMN
        return Table(url, data.table, placed_by, data.where).frame(self._spark, given, scope)

    def _nothing(self, columns: StructType) -> DataFrame:
        return self._spark.createDataFrame([], columns)


def _registered(data: InputData) -> StructType | None:
    return None if data.schema is None else struct_of(data.schema)


def _filtered_by(data: InputData, placed_by: str | None) -> list[str]:
    named = [] if data.where is None else columns.columns(data.where)
    return named if placed_by is None else [placed_by, *named]


def _with_columns(given: StructType, known: StructType, needed: Sequence[str], name: str) -> StructType:
    """Adds the columns that the filters need. Names are case-sensitive here, which Spark does not enforce."""
    there = {field.name: field for field in known}
    if unknown := [column for column in needed if column not in there]:
        raise SchemaMismatch(
            f"The where of input {name} uses the column {unknown[0]}, but the dataset has only "
            f"{', '.join(there) or 'none'}: use one of these columns, and deploy the DAG again."
        )
    more: list[StructField] = [there[column] for column in dict.fromkeys(needed) if column not in given.names]
    return StructType([*given.fields, *more]) if more else given


_READ_AT_ONCE: Final = 8
_UNSIGNED: Final = {pa.uint8(): "smallint", pa.uint16(): "int", pa.uint32(): "bigint", pa.uint64(): "decimal(20,0)"}
_WIDER: Final[dict[frozenset[str], DataType]] = {
    frozenset({"tinyint", "int"}): IntegerType(),
    frozenset({"smallint", "int"}): IntegerType(),
    frozenset({"tinyint", "smallint"}): IntegerType(),
    frozenset({"tinyint", "bigint"}): LongType(),
    frozenset({"smallint", "bigint"}): LongType(),
    frozenset({"int", "bigint"}): LongType(),
    frozenset({"bigint", "decimal(20,0)"}): DecimalType(20, 0),
    frozenset({"float", "double"}): DoubleType(),
}
"""The type as which Spark reads both types of a pair without loss."""


def inferred(locations: Sequence[str], name: str) -> StructType:
    """Returns the union of the columns of several files. Raises SchemaMismatch, CorruptFile or FileMissing."""
    with ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="footers") as readers:
        schemas = list(readers.map(_footer, locations))
    columns: dict[str, DataType] = {}
    for schema in schemas:
        for field in schema:
            kind = _spark_type(field, name)
            columns[field.name] = _joined(columns.get(field.name, kind), kind, field.name, name)
    return StructType([StructField(column, kind, True) for column, kind in columns.items()])


def _footer(location: str) -> pa.Schema:
    try:
        with objects.open_parquet(location) as file:
            return pq.read_schema(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise CorruptFile(
            f"{location} is not readable as Parquet ({error}): recompute its range (interlock dataset invalidate)."
        ) from None


def _spark_type(field: pa.Field, name: str) -> DataType:
    kind = field.type
    if kind in _UNSIGNED:
        return type_of(_UNSIGNED[kind])
    for applies, plain in _PLAIN:
        if applies(kind):
            return _spark_type(field.with_type(plain(kind)), name)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        raise SchemaMismatch(
            f"Column {field.name} of input {name} has nanosecond timestamps, which Spark cannot read: write the "
            "column in microseconds."
        )
    try:
        return from_arrow_type(kind, prefer_timestamp_ntz=True)
    except PySparkException:
        raise SchemaMismatch(
            f"Column {field.name} of input {name} has type {kind}, which Spark cannot read: write the column with "
            "another type."
        ) from None


_PLAIN: Final[Sequence[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], pa.DataType]]]] = (
    (pa.types.is_dictionary, lambda kind: kind.value_type),
    (pa.types.is_large_string, lambda _: pa.string()),
    (pa.types.is_large_binary, lambda _: pa.binary()),
    (pa.types.is_fixed_size_binary, lambda _: pa.binary()),
)
"""Arrow types that Parquet stores as another type."""


def _joined(one: DataType, other: DataType, column: str, name: str) -> DataType:
    if one == other:
        return one
    wider = _WIDER.get(frozenset({one.simpleString(), other.simpleString()}))
    if wider is None:
        raise SchemaMismatch(
            f"Column {column} of input {name} is {one.simpleString()} in one file and {other.simpleString()} in "
            "another: write all files with the same type."
        )
    return wider
