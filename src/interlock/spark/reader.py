"""Reads the granted scope of an input as a DataFrame: only its rows and its columns.

The dispatcher lists the files when the attempt starts, so a rewrite that commits during the attempt does not affect it.
Ranges and conditions are filters of the scan itself, so Spark skips row groups and pages that they exclude.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.types import StructField, StructType

from interlock.schemas import HOT_RANGE_COLUMN
from interlock.spark import conditions
from interlock.spark.columns import pinned, quoted, struct_of
from interlock.spark.context import Scope
from interlock.spark.foreign_files import inferred
from interlock.spark.tables import Table, table_columns
from interlock.wire import InputData
from interlock.workers.failures import SchemaMismatch

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
            frame = frame.filter(conditions.spark_text(data.where))
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
    named = [] if data.where is None else conditions.columns(data.where)
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
