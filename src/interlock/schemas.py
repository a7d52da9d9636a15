"""Columns of dataset versions, rules of schema evolution, and the marker that completes an attempt's output.

Types use Spark's names: `bigint`, `decimal(38,0)`, `array<string>`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

MARKER: Final = "_marker.json"
"""The last object that an attempt writes under its prefix. Its presence means that the output is complete."""
MAX_MARKER_BYTES: Final = 1 << 20
"""Maximum size of a marker: the attempt writes it, and the platform reads it into memory."""
PARQUET_END_BYTES: Final = 8
MAX_FOOTER_BYTES: Final = 4 << 20
"""Maximum size of a Parquet footer: every column of every row group becomes objects in the memory of its reader."""
HOT_RANGE_COLUMN: Final = "block_number"
"""The range column of tables in the data database, which follower sources fill."""
CONDITION_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\n]+)
      | (?P<comment>--|/\*|\#)
      | (?P<WORD>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<NUMBER>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z0-9_.]))
      | (?P<STRING>'(?:[^']|'')*+')
      | (?P<NAME>"(?:[^"]|"")*+")
      | (?P<SYMBOL><=|>=|<>|!=|[=<>(),])""",
    re.VERBOSE,
)
"""A token of a `where` condition, for `dags`, which parses conditions, and `spark`, which translates them."""

BATCH_COLUMN: Final = "_batch"
"""A column of tables that a sink fills: the number of the batch that loaded the row. Readers filter by it."""
TABLE_TYPES: Final = {
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
"""PostgreSQL types of Spark types. `table_type` handles decimals."""
_DECIMAL: Final = re.compile(r"decimal\(([1-9][0-9]?),([0-9][0-9]?)\)")
_MAX_DIGITS: Final = 38


def table_type(written: str) -> str | None:
    """Returns the PostgreSQL type of a column, or None if tables do not support the type."""
    if digits := decimal_digits(written):
        return f"numeric({digits[0]},{digits[1]})"
    return TABLE_TYPES.get(written)


def decimal_digits(written: str) -> tuple[int, int] | None:
    """Returns precision and scale of a decimal type, or None for any other type."""
    found = _DECIMAL.fullmatch(written)
    if found is None or not int(found[2]) <= int(found[1]) <= _MAX_DIGITS:
        return None
    return int(found[1]), int(found[2])


def footer_bytes(end: bytes) -> int:
    """Returns the size of a Parquet footer from the last PARQUET_END_BYTES of the file; 0 if it is not Parquet."""
    return int.from_bytes(end[:4], "little") if end[4:] in (b"PAR1", b"PARE") else 0


class Column(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=255)]
    type: Annotated[str, Meta(min_length=1, max_length=10_000)]
    nullable: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.type}{'' if self.nullable else ' not null'}"


class DatasetSchema(Struct, frozen=True):
    columns: Annotated[list[Column], Meta(max_length=10_000)]
    range_column: str | None = None
    """The column with the position of a row within a range. Without it, partitions are always read completely."""


class Marker(Struct, frozen=True, kw_only=True):
    """The marker of one output of one attempt."""

    file: Annotated[str, Meta(min_length=1, max_length=1_000)]
    """The file name, relative to the folder of the marker."""
    row_count: Annotated[int, Meta(ge=0, le=2**62)]
    bytes: Annotated[int, Meta(ge=0, le=2**62)]
    schema: DatasetSchema
    min: int | None = None
    """Smallest value of the range column."""
    max: int | None = None
    based_on: int | None = None
    """The commit of the partition whose rows this output extends, for appends."""


class SchemaClash(Exception):
    """Raised when a schema is incompatible with the previous one. The message names the difference."""


def hash_of(schema: DatasetSchema) -> str:
    return hashlib.sha256(msgspec.json.encode(schema)).hexdigest()


def evolved(before: DatasetSchema, after: DatasetSchema) -> DatasetSchema:
    """Returns the schema of a version after a file with schema `after` is added. Raises SchemaClash.

    New columns must be nullable. A file may also lack a nullable column, because it was written before the column was
    added, or by an older operator.
    """
    if before.range_column != after.range_column:
        raise SchemaClash(f"the range column changed from {before.range_column} to {after.range_column}")
    known = {column.name: column for column in before.columns}
    given = {column.name: column for column in after.columns}
    for column in before.columns:
        _check_kept(column, given.get(column.name))
    added = [column for column in after.columns if column.name not in known]
    for column in added:
        if not column.nullable:
            raise SchemaClash(f"column {column.name} is new and not null, but existing rows have no value for it")
    return DatasetSchema([*before.columns, *added], before.range_column) if added else before


def _check_kept(column: Column, now: Column | None) -> None:
    if now is None:
        if not column.nullable:
            raise SchemaClash(f"column {column.name} is missing, but it is not nullable")
    elif now.type != column.type:
        raise SchemaClash(f"column {column.name} changed its type from {column.type} to {now.type}")
    elif now.nullable and not column.nullable:
        raise SchemaClash(f"column {column.name} was not null and is nullable now")
