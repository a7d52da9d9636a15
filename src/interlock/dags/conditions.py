"""What a `where` says, as a tree: its columns, and its canonical text."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import TypeAlias


class LiteralKind(StrEnum):
    STRING = "string"
    INTEGER = "integer"
    DECIMAL = "decimal"
    BOOLEAN = "boolean"
    DATE = "date"
    TIMESTAMP = "timestamp"


@dataclass(frozen=True, slots=True)
class Column:
    """By its exact name: capitals count. As a condition by itself, a boolean column."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """The kind keeps apart what Python takes for equal, such as 1, 1.0 and true."""

    kind: LiteralKind
    value: str | int | Decimal | bool | date | datetime


Value: TypeAlias = Column | Literal


@dataclass(frozen=True, slots=True)
class Comparison:
    operator: str
    """One of = <> < <= > >=."""
    left: Value
    right: Value


@dataclass(frozen=True, slots=True)
class OneOf:
    value: Column
    options: tuple[Literal, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Between:
    value: Value
    low: Value
    high: Value
    negated: bool


@dataclass(frozen=True, slots=True)
class Like:
    column: Column
    pattern: str
    negated: bool


@dataclass(frozen=True, slots=True)
class IsNull:
    column: Column
    negated: bool


@dataclass(frozen=True, slots=True)
class Not:
    condition: Condition


@dataclass(frozen=True, slots=True)
class AllOf:
    """AND. Never holds another AllOf: nesting of the same connective is flattened."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """OR. Never holds another AnyOf."""

    conditions: tuple[Condition, ...]


Condition: TypeAlias = Column | Comparison | OneOf | Between | Like | IsNull | Not | AllOf | AnyOf


def columns(condition: Condition) -> frozenset[str]:
    """Names of the columns that a condition reads."""
    match condition:
        case AllOf(conditions) | AnyOf(conditions):
            return frozenset[str]().union(*map(columns, conditions))
        case Not(inner):
            return columns(inner)
        case Comparison(_, left, right):
            return _names(left, right)
        case Between(value, low, high, _):
            return _names(value, low, high)
        case OneOf(Column(name)) | Like(Column(name)) | IsNull(Column(name)) | Column(name):
            return frozenset({name})


def _names(*values: Value) -> frozenset[str]:
    return frozenset(value.name for value in values if isinstance(value, Column))


# Canonical text


def sql(condition: Condition) -> str:
    """Canonical text, as PostgreSQL and DuckDB read it: names quoted, one spelling, only the parentheses it needs."""
    match condition:
        case AnyOf(conditions):
            return " OR ".join(map(sql, conditions))
        case AllOf(conditions):
            return " AND ".join(_grouped(inner, AnyOf) for inner in conditions)
        case Not(inner):
            return f"NOT {_grouped(inner, AnyOf, AllOf)}"
        case _:
            return _predicate(condition)


def _grouped(condition: Condition, *loose: type) -> str:
    return f"({sql(condition)})" if isinstance(condition, loose) else sql(condition)


def _predicate(condition: Column | Comparison | OneOf | Between | Like | IsNull) -> str:
    match condition:
        case Column():
            return _value(condition)
        case Comparison(operator, left, right):
            return f"{_value(left)} {operator} {_value(right)}"
        case OneOf(value, options, negated):
            return f"{_value(value)} {_not(negated)}IN ({', '.join(map(_value, options))})"
        case Between(value, low, high, negated):
            return f"{_value(value)} {_not(negated)}BETWEEN {_value(low)} AND {_value(high)}"
        case Like(column, pattern, negated):
            return f"{_value(column)} {_not(negated)}LIKE {_quoted(pattern)}"
        case IsNull(column, negated):
            return f"{_value(column)} IS {_not(negated)}NULL"


def _not(negated: bool) -> str:
    return "NOT " if negated else ""


def _value(value: Value) -> str:
    match value:
        case Column(name):
            return '"' + name.replace('"', '""') + '"'
        case Literal(LiteralKind.DATE, date() as day):
            return f"DATE '{day.isoformat()}'"
        case Literal(LiteralKind.TIMESTAMP, datetime() as moment):
            # Without the TZ, PostgreSQL would drop the zone and say nothing.
            return f"TIMESTAMP{'TZ' if moment.tzinfo else ''} '{moment.isoformat(sep=' ')}'"
        case Literal(LiteralKind.BOOLEAN, truth):
            return "TRUE" if truth else "FALSE"
        case Literal(LiteralKind.STRING, str() as text):
            return _quoted(text)
        case Literal(_, number):
            return str(number)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
