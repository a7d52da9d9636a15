"""What the columns of a dataset version are, what may become of them, and the marker that ends an attempt's files.

Types are written as Spark names them: `bigint`, `decimal(38,0)`, `array<string>`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

MARKER: Final = "_marker.json"
MOST_MARKER_BYTES: Final = 1 << 20
"""Of what an attempt writes itself, and the platform reads whole."""
"""The last object of an attempt's prefix: what stands in it is whole."""
HOT_RANGE_COLUMN: Final = "block_number"
"""Of tables in the data database, which are those of a follower."""

BATCH_COLUMN: Final = "_batch"
"""Of tables that a sink fills: the number of the batch that a row came with, which readers go by."""
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
"""What PostgreSQL calls them; decimals beside."""
_DECIMAL: Final = re.compile(r"decimal\(([1-9][0-9]?),([0-9][0-9]?)\)")
_MOST_DIGITS: Final = 38


def table_type(written: str) -> str | None:
    """The type of a column in a table; None for a type that no table has."""
    if digits := decimal_digits(written):
        return f"numeric({digits[0]},{digits[1]})"
    return TABLE_TYPES.get(written)


def decimal_digits(written: str) -> tuple[int, int] | None:
    """Of a decimal: all, and those after the point."""
    found = _DECIMAL.fullmatch(written)
    if found is None or not int(found[2]) <= int(found[1]) <= _MOST_DIGITS:
        return None
    return int(found[1]), int(found[2])


class Column(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=255)]
    type: Annotated[str, Meta(min_length=1, max_length=10_000)]
    nullable: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.type}{'' if self.nullable else ' not null'}"


class DatasetSchema(Struct, frozen=True):
    columns: Annotated[list[Column], Meta(max_length=10_000)]
    range_column: str | None = None
    """Which says where in a range a row belongs. Without one, partitions are read whole."""


class Marker(Struct, frozen=True, kw_only=True):
    """Of one output of one attempt."""

    file: Annotated[str, Meta(min_length=1, max_length=1_000)]
    """Beside the marker."""
    row_count: Annotated[int, Meta(ge=0, le=2**62)]
    bytes: Annotated[int, Meta(ge=0, le=2**62)]
    schema: DatasetSchema
    min: int | None = None
    """The smallest value of the range column."""
    max: int | None = None
    based_on: int | None = None
    """Commit of the partition whose rows were taken over, for one that is added to."""


class SchemaClash(Exception):
    """A schema does not follow from the one before it; the message says in what."""


def hash_of(schema: DatasetSchema) -> str:
    return hashlib.sha256(msgspec.json.encode(schema)).hexdigest()


def evolved(before: DatasetSchema, after: DatasetSchema) -> DatasetSchema:
    """The schema of a version that gets a file with `after`: columns may join, if they may be null. Raises SchemaClash.

    A file may lack such a column, too: it was written before it joined, or by an older operator.
    """
    if before.range_column != after.range_column:
        raise SchemaClash(f"the range column was {before.range_column} and is {after.range_column} now")
    known = {column.name: column for column in before.columns}
    given = {column.name: column for column in after.columns}
    for column in before.columns:
        _check_kept(column, given.get(column.name))
    added = [column for column in after.columns if column.name not in known]
    for column in added:
        if not column.nullable:
            raise SchemaClash(f"column {column.name} is new and not null: what is there already has no value for it")
    return DatasetSchema([*before.columns, *added], before.range_column) if added else before


def _check_kept(column: Column, now: Column | None) -> None:
    if now is None:
        if not column.nullable:
            raise SchemaClash(f"column {column.name} is gone")
    elif now.type != column.type:
        raise SchemaClash(f"column {column.name} was {column.type} and is {now.type} now")
    elif now.nullable and not column.nullable:
        raise SchemaClash(f"column {column.name} was not null and may be null now")
