"""Random conditions of `where`, and a model of their meaning in plain Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from interlock.dags.where import (
    AllOf,
    AnyOf,
    Between,
    Column,
    Comparison,
    Condition,
    IsNull,
    Like,
    Literal,
    LiteralKind,
    Not,
    OneOf,
    Value,
)

Row = Mapping[str, Any]
NUMBERS = ("block_number", "number", "amount")
ODD = 'Odd "na`me'
TEXTS = ("text", ODD)
FLAG = "flag"

numbers = st.integers(-20, 60)
large_numbers = st.sampled_from([0, 2**63, -(2**63), 10**19, 10**37, 10**60])
texts = st.text(alphabet="aB'\"\\%_`é{}$1 ", max_size=4)


def _literal(value: int | str | bool) -> Literal:
    kind = {int: LiteralKind.INTEGER, str: LiteralKind.STRING, bool: LiteralKind.BOOLEAN}[type(value)]
    return Literal(kind, value)


_number_values = st.one_of(st.sampled_from(NUMBERS).map(Column), st.one_of(numbers, large_numbers).map(_literal))
_text_values = st.one_of(st.sampled_from(TEXTS).map(Column), texts.map(_literal))
_operators = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])
_columns = st.sampled_from([*NUMBERS, *TEXTS, FLAG]).map(Column)

predicates: st.SearchStrategy[Condition] = st.one_of(
    st.builds(Comparison, _operators, st.sampled_from(NUMBERS).map(Column), _number_values),
    # The order of two texts depends on the collation of the database.
    st.builds(Comparison, st.sampled_from(["=", "<>"]), st.sampled_from(TEXTS).map(Column), _text_values),
    st.builds(
        OneOf,
        st.sampled_from(NUMBERS).map(Column),
        st.lists(numbers.map(_literal), min_size=1, max_size=3).map(tuple),
        st.booleans(),
    ),
    st.builds(
        OneOf,
        st.sampled_from(TEXTS).map(Column),
        st.lists(texts.map(_literal), min_size=1, max_size=3).map(tuple),
        st.booleans(),
    ),
    st.builds(Between, st.sampled_from(NUMBERS).map(Column), _number_values, _number_values, st.booleans()),
    st.builds(
        Like,
        st.sampled_from(TEXTS).map(Column),
        texts.map(lambda text: text.replace("\\", "")),
        st.booleans(),
    ),
    st.builds(IsNull, _columns, st.booleans()),
    st.just(Column(FLAG)),
)

conditions: st.SearchStrategy[Condition] = st.recursive(
    predicates,
    lambda inner: st.one_of(
        inner.map(Not),
        st.lists(inner.filter(lambda one: not isinstance(one, AllOf)), min_size=2, max_size=3).map(
            lambda parts: AllOf(tuple(parts))
        ),
        st.lists(inner.filter(lambda one: not isinstance(one, AnyOf)), min_size=2, max_size=3).map(
            lambda parts: AnyOf(tuple(parts))
        ),
    ),
    max_leaves=5,
)

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "<>": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def holds(condition: Condition, row: Row) -> bool | None:
    """Evaluates a condition in SQL's three-valued logic: None is unknown."""
    match condition:
        case AllOf(parts):
            return _all([holds(part, row) for part in parts])
        case AnyOf(parts):
            return _not(_all([_not(holds(part, row)) for part in parts]))
        case Not(inner):
            return _not(holds(inner, row))
        case IsNull(Column(name), negated):
            return (row[name] is None) != negated
        case Column(name):
            truth: bool | None = row[name]
            return truth
        case _:
            return _predicate(condition, row)


def _predicate(condition: Comparison | OneOf | Between | Like, row: Row) -> bool | None:
    match condition:
        case Comparison(operator, left, right):
            return _compared(operator, _value(left, row), _value(right, row))
        case OneOf(value, options, negated):
            found = _not(_all([_not(_compared("=", _value(value, row), _value(one, row))) for one in options]))
            return _not(found) if negated else found
        case Between(value, low, high, negated):
            inside = _all(
                [
                    _compared(">=", _value(value, row), _value(low, row)),
                    _compared("<=", _value(value, row), _value(high, row)),
                ]
            )
            return _not(inside) if negated else inside
        case Like(Column(name), pattern, negated):
            if row[name] is None:
                return None
            parts = [".*" if c == "%" else "." if c == "_" else re.escape(c) for c in pattern]
            return (re.fullmatch("".join(parts), row[name], re.DOTALL) is not None) != negated


def _value(value: Value, row: Row) -> Any:
    return row[value.name] if isinstance(value, Column) else value.value


def _compared(operator: str, left: Any, right: Any) -> bool | None:
    return None if left is None or right is None else _COMPARE[operator](left, right)


def _not(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def _all(truths: list[bool | None]) -> bool | None:
    if False in truths:
        return False
    return None if None in truths else True
