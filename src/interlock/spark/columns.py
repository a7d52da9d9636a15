"""Compares the columns that operators declare with those of datasets and DataFrames.

Types are compared by their names in Spark, such as `array<string>`, which do not include the nullability of elements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import lru_cache
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import types
from pyspark.sql.types import DataType, StructField, StructType

from interlock.schemas import CONDITION_TOKEN, Column, DatasetSchema
from interlock.spark.operators import Schema
from interlock.workers.failures import BadConfig, BadOperator, SchemaMismatch, WrongColumns

_PRIMITIVE: Final[dict[str, DataType]] = {
    kind.simpleString(): kind
    for kind in (
        types.BinaryType(),
        types.BooleanType(),
        types.ByteType(),
        types.DateType(),
        types.DoubleType(),
        types.FloatType(),
        types.IntegerType(),
        types.LongType(),
        types.ShortType(),
        types.StringType(),
        types.TimestampNTZType(),
        types.TimestampType(),
    )
}
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_WHOLE: Final = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)


def parsed(schema: Schema, of: str) -> StructType:
    """Parses a declared schema. DDL needs a session, since only Spark can parse it."""
    return _normal(schema) if isinstance(schema, StructType) else _from_ddl(schema, of)


@lru_cache(maxsize=1000)
def _from_ddl(text: str, of: str) -> StructType:
    try:
        struct = StructType.fromDDL(text)
    except PySparkException as error:
        raise BadOperator(f"The schema of {of} does not parse: {_first_line(error)}") from None
    if not isinstance(struct, StructType):
        raise BadOperator(
            f"The schema of {of} has no columns: write it like `block_number bigint not null, data string`."
        )
    return _normal(struct)


def _normal(struct: StructType) -> StructType:
    """Replaces `varchar` and `char` with string, as Spark does in DataFrames."""
    if not any(isinstance(field.dataType, types.VarcharType | types.CharType) for field in struct):
        return struct
    return StructType(
        [
            StructField(field.name, types.StringType(), field.nullable)
            if isinstance(field.dataType, types.VarcharType | types.CharType)
            else field
            for field in struct
        ]
    )


@lru_cache(maxsize=10_000)
def type_of(text: str) -> DataType:
    """Returns a type by its name. Simple types are looked up here, because Spark's parser is slow."""
    if text in _PRIMITIVE:
        return _PRIMITIVE[text]
    if found := _DECIMAL.fullmatch(text):
        return types.DecimalType(int(found[1]), int(found[2]))
    try:
        return DataType.fromDDL(text)
    except PySparkException as error:
        raise SchemaMismatch(f"This version of Spark has no type {text!r}: {_first_line(error)}") from None


def struct_of(schema: DatasetSchema) -> StructType:
    return StructType([StructField(column.name, type_of(column.type), column.nullable) for column in schema.columns])


def schema_of(struct: StructType, range_column: str | None) -> DatasetSchema:
    columns = [Column(field.name, field.dataType.simpleString(), field.nullable) for field in struct]
    return DatasetSchema(columns, range_column)


def pinned(declared: StructType | None, registered: StructType | None, name: str) -> StructType:
    """Returns the columns of an input that the operator gets. Raises SchemaMismatch."""
    if declared is None or registered is None:
        return declared or registered or StructType([])
    there = {field.name: field for field in registered}
    problems = [problem for field in declared if (problem := _read_problem(field, there.get(field.name))) is not None]
    if problems:
        raise SchemaMismatch(
            f"Input {name} does not match the operator's declaration: {'; '.join(problems)}. Declare columns that the "
            f"dataset has: {_listed(registered)}."
        )
    return declared


def _read_problem(field: StructField, there: StructField | None) -> str | None:
    if there is None:
        return f"it has no column {field.name}"
    if there.dataType.simpleString() != field.dataType.simpleString():
        return f"{field.name} is {there.dataType.simpleString()}, not {field.dataType.simpleString()}"
    return None


def checked_output(given: StructType, declared: StructType | None, name: str) -> StructType:
    """Returns the columns of an output, in the declared order. Raises WrongColumns, which lists the differences.

    Without a declaration all columns are nullable: the nullability that Spark infers changes with the plan, and a
    schema must be stable.
    """
    _check_names(given, name)
    if declared is None:
        _check_types(given, name)
        return StructType([StructField(field.name, field.dataType, True) for field in given])
    have = {field.name: field.dataType.simpleString() for field in given}
    want = {field.name: field.dataType.simpleString() for field in declared}
    problems = [
        *_names("missing", (column for column in want if column not in have)),
        *_names("not declared", (column for column in have if column not in want)),
        *(f"{column} is {have[column]}, not {kind}" for column, kind in want.items() if have.get(column, kind) != kind),
    ]
    if problems:
        raise WrongColumns(
            f"Output {name} has other columns than the operator declares: {'; '.join(problems)}. Select and cast "
            "exactly the declared columns in the operator, or change the declaration."
        )
    return declared


def _check_names(given: StructType, name: str) -> None:
    seen: set[str] = set()
    for column in given.names:
        if column.lower() in seen:
            raise WrongColumns(
                f"Output {name} has the column {column} twice (names are case-insensitive): rename one of them."
            )
        seen.add(column.lower())
    if not seen:
        raise WrongColumns(f"Output {name} has no columns: select at least one in the operator.")


def _check_types(given: StructType, name: str) -> None:
    for field in given:
        if isinstance(field.dataType, types.NullType):
            raise WrongColumns(
                f"Column {field.name} of output {name} has the type void: cast it, for example to string."
            )


def check_range_column(struct: StructType, column: str, name: str) -> None:
    kind = struct[column].dataType
    if not isinstance(kind, _WHOLE) and not (isinstance(kind, types.DecimalType) and kind.scale == 0):
        raise BadOperator(
            f"Range column {column} of output {name} has type {kind.simpleString()}, but must be an integer. Set "
            "range_column= of the operator to another column, or to None."
        )


def quoted(name: str) -> str:
    """Quotes a name for Spark."""
    return "`" + name.replace("`", "``") + "`"


def _names(what: str, columns: Iterable[str]) -> list[str]:
    found = list(columns)
    return [f"{what}: {', '.join(found)}"] if found else []


def _listed(struct: StructType) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in struct)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


_MAX_DIGITS: Final = 38
"""Most digits of a decimal in Spark."""


def columns(where: str) -> list[str]:
    """Returns the names of the columns that a condition reads, without duplicates."""
    tokens = CONDITION_TOKEN.finditer(where)
    return list(dict.fromkeys(_unquoted(found[0]) for found in tokens if found.lastgroup == "NAME"))


def spark_text(where: str) -> str:
    return CONDITION_TOKEN.sub(lambda found: _SPELLINGS.get(found.lastgroup or "", str)(found[0]), where)


def _name(text: str) -> str:
    """Quotes a name for Spark.

    A quoted name cannot escape `$`, and Spark's parser may replace `${…}` with settings and environment variables.
    """
    name = _unquoted(text)
    if "${" in name:
        raise BadConfig(f"The where uses the column {name!r}, and ${{ is not allowed in a name: rename the column.")
    return "`" + name.replace("`", "``") + "`"


def _string(text: str) -> str:
    return "'" + _unquoted(text).replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\u0024{") + "'"


def _number(text: str) -> str:
    """Writes a number exactly if Spark has a type for it. A number larger than any decimal is compared as a double.

    Spark folds a comparison of an integer column with a literal beyond bigint to true or false, even for nulls. A cast
    is evaluated later, and correctly.
    """
    number = Decimal(text)
    _, digits, exponent = number.as_tuple()
    scale = max(-int(exponent), 0)
    precision = max(len(digits) + max(int(exponent), 0), scale)
    if precision > _MAX_DIGITS:
        return f"{number:E}D"
    if not -(2**63) <= number < 2**63:
        return f"CAST('{number:f}' AS DECIMAL({precision},{scale}))"
    return f"{number:f}BD" if scale or "E" in text else text


def _unquoted(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote)


_WORDS: Final = {"TIMESTAMPTZ": "TIMESTAMP_LTZ", "TIMESTAMP": "TIMESTAMP_NTZ"}
_SPELLINGS: Final[dict[str, Callable[[str], str]]] = {
    "NAME": _name,
    "STRING": _string,
    "WORD": lambda word: _WORDS.get(word, word),
    "NUMBER": _number,
}
