"""Limits on what one statement can allocate in a driver that other tasks share.

Counts are literals, so that they can be checked here: `repeat`, `space`, `lpad`, `sequence` and their like allocate as
many elements as they are told, and Spark folds constant calls while it plans. Patterns are literals, too.
Beyond that, `growth` bounds how much larger than its inputs a value can become when calls are nested, within an
expression or through subqueries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from interlock.pipeline.built_in.plan_listing import Node
from interlock.pipeline.built_in.sql_patterns import like_problem, regex_problem

MAX_COUNT: Final = 10_000
MAX_GROWTH: Final = 100_000
MAX_DIGITS: Final = 100
LEAST_ERROR: Final = 0.001

_LONGEST_WIDTH: Final = 4

SUMMED: Final = frozenset(
    [
        "concat",
        "concat_ws",
        "array",
        "struct",
        "named_struct",
        "map",
        "map_concat",
        "array_union",
        "array_append",
        "array_prepend",
        "array_insert",
        "arrays_zip",
        "flatten",
        "format_string",
        "printf",
        "overlay",
        "array_join",
        "map_from_arrays",
        "to_json",
        "to_csv",
        "elt",
    ]
)
"""Functions whose value holds all of their arguments."""
FACTORS: Final = {"hex": 2, "base64": 2, "encode": 4, "url_encode": 3, "to_json": 2, "to_csv": 2, "bin": 64, "conv": 64}
REPLACING: Final = {"replace": 2, "regexp_replace": 2}
"""The place of the replacement, which may be put in at every character."""
HIGHER_ORDER: Final = frozenset(
    [
        "aggregate",
        "array_sort",
        "exists",
        "filter",
        "forall",
        "map_filter",
        "map_zip_with",
        "reduce",
        "transform",
        "transform_keys",
        "transform_values",
        "zip_with",
    ]
)


def literal(node: Node) -> str | None:
    """The text of a literal that is not null, also of a negative number."""
    if node.kind == "expressions.UnaryMinus":
        inner = literal(node.fields[0])
        return None if inner is None else f"-{inner}"
    return node.fields[0].text if node.kind == "expressions.Literal" else None


def _whole(node: Node) -> int | None:
    text = literal(node)
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,18}", text) else None


def _kind(node: Node) -> str | None:
    return node.fields[1].text if node.kind == "expressions.Literal" else None


def call_problem(name: str, arguments: Sequence[Node]) -> str | None:
    """Returns what is wrong with the sizes that a call asks for, or None."""
    check = _CHECKS.get(name)
    return None if check is None else check(name, arguments)


def count_of(name: str, arguments: Sequence[Node]) -> int:
    """How many times its first argument a value may hold. The call has passed `call_problem`."""
    if name in _COUNTS and len(arguments) > _COUNTS[name]:
        return max(_whole(arguments[_COUNTS[name]]) or 1, 1)
    if name in REPLACING and len(arguments) > REPLACING[name]:
        return max(len(literal(arguments[REPLACING[name]]) or ""), 1)
    if name == "sequence":
        ends = [_place(one) or 0 for one in arguments[:2]]
        return max(ends) - min(ends) + 1 if ends else 1
    return FACTORS.get(name, 1)


_COUNTS: Final = {"repeat": 1, "space": 0, "lpad": 1, "rpad": 1, "array_repeat": 1, "stack": 0, "array_insert": 1}


def _counted(name: str, arguments: Sequence[Node]) -> str | None:
    if len(arguments) <= _COUNTS[name]:
        return None
    count = _whole(arguments[_COUNTS[name]])
    if count is None or abs(count) > MAX_COUNT:
        return f"{name} takes a whole number of at most {MAX_COUNT} as its count, written out"
    return None


def _sequence(name: str, arguments: Sequence[Node]) -> str | None:
    ends = [_place(one) for one in arguments[:2]]
    advice = f"{name} takes numbers or dates that are written out, at most {MAX_COUNT} apart: use range(…) for more"
    places = [one for one in ends if one is not None]
    if len(places) < len(ends):
        return advice
    return advice if places and max(places) - min(places) > MAX_COUNT else None


def _place(node: Node) -> int | None:
    """A whole number, or the day of a date."""
    return _whole(node) if _kind(node) in (None, "tinyint", "smallint", "int", "bigint", "date") else None


def _formatted(name: str, arguments: Sequence[Node]) -> str | None:
    text = literal(arguments[0]) if arguments else ""
    if text is None or re.search(rf"[0-9]{{{_LONGEST_WIDTH},}}", text):
        return f"{name} takes a format that is written out, with widths of at most {_LONGEST_WIDTH - 1} digits"
    return None


def _digits(name: str, arguments: Sequence[Node]) -> str | None:
    text = literal(arguments[1]) if len(arguments) > 1 else ""
    if text is None or (re.fullmatch(r"-?[0-9]+", text) and abs(int(text)) > MAX_DIGITS) or len(text) > MAX_DIGITS:
        return f"{name} takes its digits as a number of at most {MAX_DIGITS} or a format, written out"
    return None


def _error(name: str, arguments: Sequence[Node]) -> str | None:
    text = literal(arguments[1]) if len(arguments) > 1 else "1"
    try:
        fits = text is not None and float(text) >= LEAST_ERROR
    except ValueError:
        fits = False
    return None if fits else f"{name} takes an error of at least {LEAST_ERROR}, written out"


def _bins(name: str, arguments: Sequence[Node]) -> str | None:
    count = _whole(arguments[1]) if len(arguments) > 1 else 1
    return None if count is not None and count <= MAX_COUNT else f"{name} takes at most {MAX_COUNT} bins, written out"


def _pattern_at(*places: int) -> Callable[[str, Sequence[Node]], str | None]:
    def check(name: str, arguments: Sequence[Node]) -> str | None:
        return next(
            (bad for at in places if at < len(arguments) and (bad := pattern_problem(name, arguments[at]))), None
        )

    return check


def _replaced(name: str, arguments: Sequence[Node]) -> str | None:
    if len(arguments) > REPLACING[name] and literal(arguments[REPLACING[name]]) is None:
        return f"{name} takes its replacement as text that is written out"
    return pattern_problem(name, arguments[1]) if name == "regexp_replace" else None


def pattern_problem(name: str, pattern: Node) -> str | None:
    text = literal(pattern)
    if text is None:
        return f"{name} takes its pattern as text that is written out"
    return like_problem(text) if name in _LIKE else regex_problem(text)


_LIKE: Final = frozenset({"like", "ilike"})
_CHECKS: Final[dict[str, Callable[[str, Sequence[Node]], str | None]]] = {
    **dict.fromkeys(_COUNTS, _counted),
    **dict.fromkeys(REPLACING, _replaced),
    **dict.fromkeys(
        (
            *_LIKE,
            "rlike",
            "regexp",
            "regexp_like",
            "regexp_count",
            "regexp_extract",
            "regexp_extract_all",
            "regexp_instr",
            "regexp_substr",
            "split",
        ),
        _pattern_at(1),
    ),
    "str_to_map": _pattern_at(1, 2),
    "sequence": _sequence,
    "format_string": _formatted,
    "printf": _formatted,
    "format_number": _digits,
    "approx_count_distinct": _error,
    "histogram_numeric": _bins,
}
