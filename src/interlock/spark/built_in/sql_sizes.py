"""Limits on the memory that one statement can allocate in a driver that other tasks share.

`repeat`, `space`, `lpad`, `sequence` and similar functions allocate the number of elements that their argument names,
and Spark folds constant calls while it plans. Their counts must therefore be literals, which can be checked here.
Patterns must be literals, too. In addition, `growth` limits how much larger than the inputs a value can become through
nested calls, within an expression or across subqueries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Final

from interlock.spark.built_in.plan_listing import MAX_TYPES, Node

MAX_COUNT: Final = 10_000
MAX_GROWTH: Final = 100_000
MAX_ROWS: Final = 10_000_000
"""Rows of `range`, which are all in memory if an aggregate collects them."""
MAX_DIGITS: Final = 100
MIN_ERROR: Final = 0.001

_LONGEST_WIDTH: Final = 4

SUMMED: Final = frozenset(
    [
        "concat",
        "array",
        "struct",
        "named_struct",
        "map",
        "map_concat",
        "array_append",
        "array_prepend",
        "array_insert",
        "arrays_zip",
        "flatten",
        "format_string",
        "printf",
        "overlay",
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


MULTIPLIED: Final = HIGHER_ORDER | frozenset(
    [
        "array_join",
        "concat_ws",
        # Their time is a product: each compares all of one argument with all of another.
        "array_except",
        "array_intersect",
        "array_union",
        "arrays_overlap",
        "btrim",
        "contains",
        "find_in_set",
        "instr",
        "levenshtein",
        "locate",
        "ltrim",
        "position",
        "rtrim",
        "split_part",
        "substring_index",
        "trim",
    ]
)
"""Functions whose value or time is a product of the sizes of their arguments."""


def literal(node: Node) -> str | None:
    """Returns the text of a literal, including a negative number; None for others, for null and for binary."""
    if node.kind == "expressions.UnaryMinus":
        inner = literal(node.fields[0])
        return None if inner is None else f"-{inner}"
    if node.kind != "expressions.Literal" or node.fields[0].kind == "[B":
        return None
    return node.fields[0].text


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
    if name in _FORMATS:
        return max((literal(arguments[0]) or "").count("%"), 1) if arguments else 1
    return FACTORS.get(name, 1)


def literal_growth(node: Node) -> int:
    """Returns the growth of a literal: 1 for at most 100 characters, which is as long as ordinary values are."""
    return 1 + len(node.fields[0].text or "") // ORDINARY_LENGTH


ORDINARY_LENGTH: Final = 100
_FORMATS: Final = ("format_string", "printf")
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


MAX_WINDOWS: Final = 100
"""Sliding windows that contain one row: Spark copies the row, and its expressions, for each."""
_MICROSECONDS: Final = {
    "microsecond": 1,
    "millisecond": 1000,
    "second": 10**6,
    "minute": 60 * 10**6,
    "hour": 3600 * 10**6,
    "day": 86_400 * 10**6,
    "week": 7 * 86_400 * 10**6,
}
_DURATION: Final = re.compile(r"([0-9]+)\s+([a-z]+)")


def _duration(node: Node) -> int | None:
    """Returns a duration such as '1 hour 30 minutes' in microseconds; None if it is not a literal of that form."""
    text = (literal(node) or "").strip().lower().removeprefix("interval ")
    if re.fullmatch("[0-9]{1,18}", text):
        return int(text)
    if not re.fullmatch(r"(?:\s*[0-9]{1,9}\s+[a-z]+)+", text):
        return None
    parts = [(int(number), _MICROSECONDS.get(unit.removesuffix("s"))) for number, unit in _DURATION.findall(text)]
    return None if any(unit is None for _, unit in parts) else sum(number * (unit or 0) for number, unit in parts)


def windows_per_row(arguments: Sequence[Node]) -> int:
    """Returns how many windows of `window(time, duration, slide)` contain a row."""
    durations = [_duration(one) or 1 for one in arguments[1:3]]
    return -(-durations[0] // durations[1]) if len(durations) > 1 else 1


def _window(name: str, arguments: Sequence[Node]) -> str | None:
    if any(not _duration(one) for one in arguments[1:3]) or windows_per_row(arguments) > MAX_WINDOWS:
        return (
            f"the durations of {name} must be literals such as '1 hour', "
            f"and the first at most {MAX_WINDOWS} times the second"
        )
    return None


_SCHEMAS: Final = {"from_json": 1, "from_csv": 1, "variant_get": 2, "try_variant_get": 2}
"""Position of the schema among the arguments."""


def _schema(name: str, arguments: Sequence[Node]) -> str | None:
    if len(arguments) <= _SCHEMAS[name]:
        return None
    text = literal(arguments[_SCHEMAS[name]])
    if text is None or len(re.findall("[<{]", text)) > MAX_TYPES or "/*" in text:
        return f"the schema of {name} must be a literal with at most {MAX_TYPES} array<, map< and struct<, no comment"
    return None


_STRUCTS: Final = frozenset(["arrays_zip", "json_tuple", "map", "map_from_arrays", "named_struct", "stack", "struct"])
"""Functions whose value has the fields of all arguments."""
_PAIRS: Final = frozenset(["histogram_numeric", "session_window", "window"])
"""Functions whose value is a struct of two fields."""


def fields_of_call(name: str, arguments: Sequence[Node], fields: Sequence[int]) -> int:
    """Returns the most fields that the value of a call has, from the fields of its arguments."""
    at = _SCHEMAS.get(name, len(arguments))
    if at < len(arguments):
        return fields_of_type(literal(arguments[at]) or "")
    if name in HIGHER_ORDER:
        return prod(max(one, 1) for one in fields)
    return 2 if name in _PAIRS else sum(fields) if name in _STRUCTS else max([1, *fields])


def fields_of_type(text: str) -> int:
    return 1 + text.count(",")


_DATE_FORMATS: Final = [
    "date_format",
    "from_unixtime",
    "to_binary",
    "to_char",
    "to_date",
    "to_number",
    "to_timestamp",
    "to_timestamp_ltz",
    "to_timestamp_ntz",
    "to_unix_timestamp",
    "to_varchar",
    "try_to_binary",
    "try_to_date",
    "try_to_number",
    "try_to_timestamp",
]
"""Functions whose second argument is a format, which Spark compiles."""


def _format(name: str, arguments: Sequence[Node]) -> str | None:
    text = literal(arguments[1]) if len(arguments) > 1 else ""
    fits = text is not None and len(text) <= MAX_PATTERN
    return None if fits else f"the format of {name} must be a literal of at most {MAX_PATTERN} characters"


def _range(name: str, arguments: Sequence[Node]) -> str | None:
    bounds = [_whole(one) for one in arguments]
    start, end, *others = bounds if len(bounds) > 1 else [0, *bounds, 0]
    fits = start is not None and end is not None and abs(end - start) <= MAX_ROWS
    if not fits or any(one is None or abs(one) > MAX_COUNT for one in others):
        return (
            f"the bounds of {name} must be integer literals at most {MAX_ROWS} apart, "
            f"its step and number of partitions literals of at most {MAX_COUNT}"
        )
    return None


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
    **dict.fromkeys(_SCHEMAS, _schema),
    **dict.fromkeys(_DATE_FORMATS, _format),
    "sequence": _sequence,
    "window": _window,
    "range": _range,
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
