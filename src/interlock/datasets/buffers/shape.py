"""The declared shape of a buffered dataset version, and the conversion of Arrow columns to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cached_property
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from interlock.schemas import Column, DatasetSchema, decimal_digits, table_type

_PLAIN: Final = {
    "bigint": pa.int64(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "double": pa.float64(),
    "float": pa.float32(),
    "int": pa.int32(),
    "smallint": pa.int16(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "tinyint": pa.int8(),
}
_TEXT_IN_JSON: Final = frozenset({"binary", "date", "timestamp", "timestamp_ntz"})
_HEX: Final = r"^0x([0-9a-fA-F]{2})*$"
_YEARS: Final = (date(1, 1, 1), date(9999, 12, 31))
_MOMENTS: Final = (datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC))


class Wrong(Exception):
    """Rows do not match the declaration. The message names the column and never quotes a value."""


@dataclass(frozen=True)
class Shape:
    """Declared columns and the unique key."""

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    update: bool
    """True if a row replaces an existing row with the same key."""

    @classmethod
    def of(cls, schema: DatasetSchema, key: Sequence[str], *, update: bool) -> Shape:
        return cls(tuple(schema.columns), tuple(key), update)

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @cached_property
    def json_schema(self) -> pa.Schema:
        """Schema for reading JSON: integers at full width, timestamps and bytes as text."""
        return pa.schema([(column.name, _read_as(column.type)) for column in self.columns])

    @cached_property
    def table_columns(self) -> str:
        """The columns as JSON, for the functions of sink_schema.sql."""
        listed = [
            {"name": column.name, "type": table_type(column.type), "nullable": column.nullable}
            for column in self.columns
        ]
        return msgspec.json.encode(listed).decode()

    def typed(self, raw: pa.Table, *, from_json: bool) -> pa.Table:
        """Converts rows to the declared columns. Raises Wrong for the first column that does not match."""
        if unknown := [name for name in raw.column_names if name not in self.names]:
            raise Wrong(f"column {unknown[0]!r} is not declared")
        arrays = [_array(raw, column, from_json=from_json) for column in self.columns]
        return pa.table(arrays, names=self.names)


def arrow_type(written: str) -> Any:
    """Any: pyarrow has no type information."""
    digits = decimal_digits(written)
    return pa.decimal128(*digits) if digits else _PLAIN[written]


def _read_as(written: str) -> Any:
    if written in _TEXT_IN_JSON:
        return pa.string()
    kind = arrow_type(written)
    if pa.types.is_integer(kind):
        return pa.int64()
    return pa.float64() if pa.types.is_floating(kind) else kind


def _array(raw: pa.Table, column: Column, *, from_json: bool) -> pa.ChunkedArray:
    kind = arrow_type(column.type)
    found = raw.column(column.name) if column.name in raw.column_names else pa.nulls(raw.num_rows, kind)
    if pa.types.is_dictionary(found.type):
        found = found.cast(found.type.value_type)
    fits = pa.types.is_null(found.type) or (from_json or _fits(found.type, kind))
    if not fits:
        raise Wrong(f"column {column.name!r} is {found.type}, but declared as {column.type}")
    if not column.nullable and found.null_count:
        raise Wrong(f"column {column.name!r} is null or missing, but declared as not null")
    try:
        made = _bytes_of(found) if from_json and column.type == "binary" else found.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, Wrong):
        raise Wrong(f"column {column.name!r} has a value that {column.type} cannot hold") from None
    _check_values(made, column, from_json=from_json)
    return made


def _fits(found: Any, wanted: Any) -> bool:
    """Accepts a Parquet type of the same kind, whatever its width. Kinds are never converted into each other."""
    kinds = pa.types
    same = (
        (kinds.is_integer, kinds.is_integer),
        (kinds.is_decimal, lambda kind: kinds.is_decimal(kind) or kinds.is_integer(kind)),
        (kinds.is_floating, kinds.is_floating),
        (kinds.is_boolean, kinds.is_boolean),
        (kinds.is_string, lambda kind: kinds.is_string(kind) or kinds.is_large_string(kind)),
        (kinds.is_binary, _is_bytes),
        (kinds.is_date, kinds.is_date),
        (kinds.is_timestamp, lambda kind: kinds.is_timestamp(kind) and (kind.tz is None) == (wanted.tz is None)),
    )
    return any(bool(is_wanted(wanted) and is_found(found)) for is_wanted, is_found in same)


def _is_bytes(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _bytes_of(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    good = pc.all(pc.match_substring_regex(texts, _HEX)).as_py()
    if good is False:
        raise Wrong
    values = [None if text is None else bytes.fromhex(text[2:]) for text in texts.to_pylist()]
    return pa.chunked_array([pa.array(values, pa.binary())])


def _check_values(made: pa.ChunkedArray, column: Column, *, from_json: bool) -> None:
    """Rejects values that Arrow accepts but PostgreSQL or JSON cannot represent."""
    kind = made.type
    if pa.types.is_string(kind):
        if pc.any(pc.match_substring(made, "\x00")).as_py():
            raise Wrong(f"column {column.name!r} has a NUL character, which PostgreSQL cannot store")
    elif pa.types.is_floating(kind):
        if from_json and pc.all(pc.is_finite(made)).as_py() is False:
            raise Wrong(f"column {column.name!r} has a number that is not finite")
    elif (pa.types.is_date(kind) or pa.types.is_timestamp(kind)) and not _within_years(made):
        raise Wrong(f"column {column.name!r} is outside the years 1 to 9999")


def _within_years(made: pa.ChunkedArray) -> bool:
    kind = made.type
    first, last = _YEARS if pa.types.is_date(kind) else _MOMENTS
    if pa.types.is_timestamp(kind) and kind.tz is None:
        first, last = _MOMENTS[0].replace(tzinfo=None), _MOMENTS[1].replace(tzinfo=None)
    ends = pc.min_max(made)
    within = pc.and_(
        pc.greater_equal(ends["min"], pa.scalar(first, kind)), pc.less_equal(ends["max"], pa.scalar(last, kind))
    )
    return within.as_py() is not False
