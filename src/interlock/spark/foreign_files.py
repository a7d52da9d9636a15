"""Infers the columns of Parquet files that were not written by Interlock and have no marker with a schema.

Spark has no unsigned types. Each unsigned type is read as the next wider signed one, so that no value overflows:
uint32 as bigint, uint64 as decimal(20,0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, DecimalType, DoubleType, IntegerType, LongType, StructField, StructType

from interlock.spark import objects
from interlock.spark.columns import type_of
from interlock.workers.failures import CorruptFile, FileMissing, SchemaMismatch

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
    path = objects.folder_path(location)
    try:
        return pq.read_schema(path if path is not None else pa.BufferReader(objects.read(location)))
    except FileNotFoundError:
        raise FileMissing(f"{location} no longer exists: recompute its range (interlock dataset invalidate).") from None
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
