"""Converts Spark types, with which datasets are declared, to DuckDB types."""

from __future__ import annotations

import re
from typing import Final

_PLAIN: Final = {
    "bigint": "BIGINT",
    "binary": "BLOB",
    "boolean": "BOOLEAN",
    "byte": "TINYINT",
    "date": "DATE",
    "double": "DOUBLE",
    "float": "FLOAT",
    "int": "INTEGER",
    "integer": "INTEGER",
    "long": "BIGINT",
    "real": "FLOAT",
    "short": "SMALLINT",
    "smallint": "SMALLINT",
    "string": "VARCHAR",
    "timestamp": "TIMESTAMPTZ",
    "timestamp_ltz": "TIMESTAMPTZ",
    "timestamp_ntz": "TIMESTAMP",
    "tinyint": "TINYINT",
    "void": "INTEGER",
}
_DECIMAL: Final = re.compile(r"(?:decimal|dec|numeric)(?:\((\d{1,2})(?:,\s*(\d{1,2}))?\))?")
_TEXT: Final = re.compile(r"(?:varchar|char)\(\d+\)")
_NESTED: Final = re.compile(r"(array|map|struct)<(.*)>", re.DOTALL)
_MAX_DEPTH: Final = 50


class UnknownType(ValueError):
    """Raised for a declared type without a DuckDB equivalent."""


def duckdb_type(spark: str, depth: int = 0) -> str:
    """Converts `array<struct<a:int>>` to `STRUCT("a" INTEGER)[]`. Raises UnknownType."""
    word = spark.strip()
    lower = word.lower()
    if depth > _MAX_DEPTH:
        raise UnknownType(spark)
    if plain := _PLAIN.get(lower):
        return plain
    if _TEXT.fullmatch(lower):
        return "VARCHAR"
    if decimal := _DECIMAL.fullmatch(lower):
        return f"DECIMAL({int(decimal[1] or 10)},{int(decimal[2] or 0)})"
    nested = _NESTED.fullmatch(word) or _NESTED.fullmatch(lower)
    if nested is None:
        raise UnknownType(spark)
    return _nested(nested[1].lower(), _split(nested[2]), depth + 1)


def _nested(kind: str, parts: list[str], depth: int) -> str:
    if kind == "array" and len(parts) == 1:
        return f"{duckdb_type(parts[0], depth)}[]"
    if kind == "map" and len(parts) == 2:
        return f"MAP({duckdb_type(parts[0], depth)}, {duckdb_type(parts[1], depth)})"
    if kind == "struct" and parts:
        return f"STRUCT({', '.join(_field(part, depth) for part in parts)})"
    raise UnknownType(kind)


def _field(part: str, depth: int) -> str:
    name, colon, kind = part.partition(":")
    if not colon:
        raise UnknownType(part)
    bare = name.strip().removeprefix("`").removesuffix("`").replace("``", "`")
    kind = re.sub(r"\s+not null$", "", kind.strip(), flags=re.IGNORECASE)
    escaped = bare.replace('"', '""')
    return f'"{escaped}" {duckdb_type(kind, depth)}'


def _split(inner: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(inner):
        if character in "<(":
            depth += 1
        elif character in ">)":
            depth -= 1
        elif character == "," and not depth:
            parts.append(inner[begin:at])
            begin = at + 1
    return [*parts, inner[begin:]]
