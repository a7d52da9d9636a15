"""Limits on the memory that one statement can allocate in a driver that other tasks share.

`repeat`, `space`, `lpad`, `sequence` and similar functions allocate the number of elements that their argument names,
and Spark folds constant calls while it plans. Their counts must therefore be literals, which can be checked here.
Patterns must be literals, too. In addition, `growth` limits how much larger than the inputs a value can become through
nested calls, within an expression or across subqueries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from interlock.spark.built_in.plan_listing import Node

MAX_COUNT: Final = 10_000
MAX_GROWTH: Final = 100_000
MAX_DIGITS: Final = 100
MIN_ERROR: Final = 0.001

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
"""Functions whose value contains all of their arguments."""
FACTORS: Final = {"hex": 2, "base64": 2, "encode": 4, "url_encode": 3, "to_json": 2, "to_csv": 2, "bin": 64, "conv": 64}
REPLACING: Final = {"replace": 2, "regexp_replace": 2}
"""Position of the replacement among the arguments. It may be inserted at every character."""
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
    """Returns the text of a non-null literal, including a negative number; else None."""
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
    """Returns the problem with the sizes that a call requests, or None."""
    check = _CHECKS.get(name)
    return None if check is None else check(name, arguments)


def count_of(name: str, arguments: Sequence[Node]) -> int:
    """Returns how many copies of its first argument the value may contain. The call must have passed `call_problem`."""
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
        return f"the count of {name} must be an integer literal of at most {MAX_COUNT}"
    return None


def _sequence(name: str, arguments: Sequence[Node]) -> str | None:
    ends = [_place(one) for one in arguments[:2]]
    advice = f"the bounds of {name} must be integer or date literals at most {MAX_COUNT} apart: use range(…) for more"
    places = [one for one in ends if one is not None]
    if len(places) < len(ends):
        return advice
    return advice if places and max(places) - min(places) > MAX_COUNT else None


def _place(node: Node) -> int | None:
    """Returns the value of an integer literal, or the day number of a date literal."""
    return _whole(node) if _kind(node) in (None, "tinyint", "smallint", "int", "bigint", "date") else None


def _formatted(name: str, arguments: Sequence[Node]) -> str | None:
    text = literal(arguments[0]) if arguments else ""
    if text is None or re.search(rf"[0-9]{{{_LONGEST_WIDTH},}}", text):
        return f"the format of {name} must be a literal with widths of at most {_LONGEST_WIDTH - 1} digits"
    return None


def _digits(name: str, arguments: Sequence[Node]) -> str | None:
    text = literal(arguments[1]) if len(arguments) > 1 else ""
    if text is None or (re.fullmatch(r"-?[0-9]+", text) and abs(int(text)) > MAX_DIGITS) or len(text) > MAX_DIGITS:
        return f"the digits of {name} must be a literal: a number of at most {MAX_DIGITS}, or a format"
    return None


def _error(name: str, arguments: Sequence[Node]) -> str | None:
    text = literal(arguments[1]) if len(arguments) > 1 else "1"
    try:
        fits = text is not None and float(text) >= MIN_ERROR
    except ValueError:
        fits = False
    return None if fits else f"the error of {name} must be a literal of at least {MIN_ERROR}"


def _bins(name: str, arguments: Sequence[Node]) -> str | None:
    count = _whole(arguments[1]) if len(arguments) > 1 else 1
    fits = count is not None and count <= MAX_COUNT
    return None if fits else f"the number of bins of {name} must be a literal of at most {MAX_COUNT}"


def _pattern_at(*places: int) -> Callable[[str, Sequence[Node]], str | None]:
    def check(name: str, arguments: Sequence[Node]) -> str | None:
        return next(
            (bad for at in places if at < len(arguments) and (bad := pattern_problem(name, arguments[at]))), None
        )

    return check


def _replaced(name: str, arguments: Sequence[Node]) -> str | None:
    if len(arguments) > REPLACING[name] and literal(arguments[REPLACING[name]]) is None:
        return f"the replacement of {name} must be a string literal"
    return pattern_problem(name, arguments[1]) if name == "regexp_replace" else None


def pattern_problem(name: str, pattern: Node) -> str | None:
    text = literal(pattern)
    if text is None:
        return f"the pattern of {name} must be a string literal"
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


MAX_PATTERN: Final = 1000
MAX_BACKTRACKING: Final = 4
MAX_WILDCARDS: Final = 5
MAX_REPEAT: Final = 1000

_PIECE: Final = re.compile(
    r"""(?P<escape>\\(?:[QE]|.))
      | (?P<cls>\[\^?(?:\\[^QE]|[^\[\]\\&])+\])
      | (?P<group>\((?:\?(?::|=|!|<=|<!|>|i\)|<[A-Za-z][A-Za-z0-9]*>))?)
      | (?P<close>\))
      | (?P<repeat>[*+?]|\{[0-9]+(?:,[0-9]*)?\})(?P<mode>[+?]?)
      | (?P<plain>[^\\\[\](){}*+?])""",
    re.VERBOSE | re.DOTALL,
)


def regex_problem(pattern: str) -> str | None:
    """Returns the problem with a regular expression, or None."""
    if len(pattern) > MAX_PATTERN:
        return f"the pattern has {len(pattern)} characters, at most {MAX_PATTERN} are allowed"
    at, before, backtracking = 0, "", 0
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None or found["escape"] in ("\\Q", "\\E"):
            return f"the pattern has unsupported syntax at {pattern[at : at + 10]!r}: use a simpler pattern"
        if found["repeat"]:
            problem, costs = _repeat(found["repeat"], found["mode"], before)
            if problem is not None:
                return problem
            backtracking += costs
        before, at = found.lastgroup or "", found.end()
    if backtracking > MAX_BACKTRACKING:
        return (
            f"the pattern has {backtracking} repeats that may backtrack, at most {MAX_BACKTRACKING} are allowed: use "
            "possessive repeats, such as [0-9]++ and [^,]*+"
        )
    return None


def _repeat(repeat: str, mode: str, before: str) -> tuple[str | None, int]:
    if before in ("", "group", "mode"):
        return f"the pattern has {repeat} after another repeat or after nothing: use a simpler pattern", 0
    if repeat == "?":
        return None, 0
    if before == "close":
        return "the pattern repeats a group: only single characters and classes such as [a-z] may repeat", 0
    if any(int(number) > MAX_REPEAT for number in re.findall(r"[0-9]+", repeat)):
        return f"the pattern has the repeat {repeat}, at most {MAX_REPEAT} times are allowed", 0
    fixed = repeat.startswith("{") and "," not in repeat
    return None, 0 if fixed or mode == "+" else 1


def like_problem(pattern: str) -> str | None:
    """Returns the problem with a LIKE pattern, in which each % may backtrack, or None."""
    if len(pattern) > MAX_PATTERN:
        return f"the pattern has {len(pattern)} characters, at most {MAX_PATTERN} are allowed"
    if pattern.count("%") > MAX_WILDCARDS:
        return f"the LIKE pattern has {pattern.count('%')} percent signs, at most {MAX_WILDCARDS} are allowed"
    return None
