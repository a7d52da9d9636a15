"""Reads rows of a table in the data database as Arrow, on Spark's executors.

Numerics are read as text, since a float would round them and a fixed type would overflow. They are then cast to the
declared type, or the read fails. Each part of the scope is read by one statement, so it is a consistent snapshot. A
rewrite that commits between two parts emits an event, which recomputes the scope.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as postgres
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DecimalType, StructField, StructType

from interlock.spark.columns import type_of
from interlock.spark.context import Scope
from interlock.workers.failures import DataDatabaseAway, SchemaMismatch

SCHEMA: Final = "datasets"
POSITIONS_PER_PART: Final = 5_000
"""A longer scope is read in several parts concurrently."""
MAX_PARTS: Final = 32

_CAST: Final = {
    "bigint": "int8",
    "binary": "bytea",
    "boolean": "bool",
    "date": "date",
    "double": "float8",
    "float": "float4",
    "int": "int4",
    "smallint": "int2",
    "string": "text",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "tinyint": "int2",
}
_SPARK: Final = {
    "bigint": "bigint",
    "boolean": "boolean",
    "bytea": "binary",
    "date": "date",
    "double precision": "double",
    "integer": "int",
    "real": "float",
    "smallint": "smallint",
    "timestamp with time zone": "timestamp",
    "timestamp without time zone": "timestamp_ntz",
}
_BEGIN: Final = ("set transaction isolation level repeatable read, read only", "set local timezone to 'UTC'")
_COLUMNS: Final = """
    select a.attname, format_type(a.atttypid, null), a.attnotnull
    from pg_attribute a
    where a.attrelid = to_regclass({table}) and a.attnum > 0 and not a.attisdropped
    order by a.attnum
"""
_AWAY: Final = ("08", "53", "57")
"""SQLSTATE classes: connection failure, insufficient resources, shutting down."""


@dataclass(frozen=True)
class Table:
    url: str
    name: str
    range_column: str
    where: str | None
    """Canonical text, which PostgreSQL reads unchanged."""

    def frame(self, spark: SparkSession, columns: StructType, scope: Scope) -> DataFrame:
        count = min((scope.end - scope.start) // POSITIONS_PER_PART + 1, MAX_PARTS)
        parts = _Parts(self.url, [self._select(columns, part) for part in _split(scope, count)], _arrow(columns))
        return spark.range(0, count, 1, count).mapInArrow(parts.read, columns)

    def _select(self, columns: StructType, part: Scope) -> str:
        listed = ", ".join(map(_cast, columns))
        condition = "" if self.where is None else f" and ({self.where})"
        # Safe from injection: names are quoted, bounds are integers, and the condition was parsed and re-serialized.
        return (
            f"select {listed} from {_relation(self.name)} "  # noqa: S608
            f"where {_quoted(self.range_column)} between {part.start} and {part.end}{condition}"
        )


@dataclass(frozen=True)
class _Parts:
    """The statements of all parts. Spark pickles it and sends it to the executors."""

    url: str
    statements: list[str]
    schema: pa.Schema

    def read(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Function for `mapInArrow` over the numbers of the parts."""
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from self._rows(self.statements[number])

    def _rows(self, statement: str) -> Iterator[pa.RecordBatch]:
        with _readable_errors(), postgres.connect(self.url) as connection, connection.cursor() as cursor:
            for setting in _BEGIN:
                cursor.execute(setting)
            cursor.execute(statement)
            for batch in cursor.fetch_record_batch():
                yield _typed(batch, self.schema)


def table_columns(url: str, name: str) -> StructType:
    """Returns the columns of a table, for an input without declared columns. Numerics become text: no type fits all."""
    with _readable_errors(), postgres.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(_COLUMNS.format(table=_literal(_relation(name))))
        rows = cursor.fetchall()
    if not rows:
        raise SchemaMismatch(
            f"The data database has no table {SCHEMA}.{name}: the job that writes it has not run yet. Run it first."
        )
    return StructType(
        [StructField(column, type_of(_SPARK.get(kind, "string")), not full) for column, kind, full in rows]
    )


def _arrow(columns: StructType) -> pa.Schema:
    # All columns are nullable here, so that an unexpected null arrives and is reported: the table is not ours.
    return pa.schema([field.with_nullable(True) for field in to_arrow_schema(columns, timezone="UTC")])


def _split(scope: Scope, count: int) -> list[Scope]:
    size = scope.end - scope.start + 1
    bounds = [scope.start + size * number // count for number in range(count + 1)]
    return [Scope(start, end - 1) for start, end in pairwise(bounds)]


def _cast(field: StructField) -> str:
    kind = field.dataType
    target = "text" if isinstance(kind, DecimalType) else _CAST.get(kind.simpleString())
    if target is None:
        raise SchemaMismatch(
            f"Column {field.name} is declared as {kind.simpleString()}, which cannot be read from a table: declare it "
            "as string."
        )
    return f"{_quoted(field.name)}::{target} as {_quoted(field.name)}"


def _typed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for field, column in zip(schema, batch.columns, strict=True):
        try:
            arrays.append(_decimal(column, field.type) if pa.types.is_decimal(field.type) else column.cast(field.type))
        except pa.ArrowInvalid:
            raise SchemaMismatch(
                f"Column {field.name} has a value that does not fit into {field.type}: declare a wider type, or string."
            ) from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _decimal(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Casts text to decimal. Arrow truncates a text with far too many digits silently, so these are counted first."""
    digits = pc.utf8_length(pc.replace_substring_regex(texts, "^-?0*|[.]", ""))
    if (pc.max(digits).as_py() or 0) > kind.precision:
        raise pa.ArrowInvalid("too many digits")
    return texts.cast(kind)


def _relation(table: str) -> str:
    return f"{SCHEMA}.{_quoted(table)}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except adbc_driver_manager.Error as error:
        if error.sqlstate is None or error.sqlstate.startswith(_AWAY):
            # The driver's message about a malformed URL may quote part of its password, so it is not passed on.
            raise DataDatabaseAway(
                "The data database does not answer Spark's executors: check INTERLOCK_DATA_URL of the worker, and "
                "that the executors can reach that address."
            ) from None
        raise SchemaMismatch(f"The data database refused to read the rows of an input: {_first_line(error)}") from None


def _first_line(error: adbc_driver_manager.Error) -> str:
    return str(error).splitlines()[0].strip()
