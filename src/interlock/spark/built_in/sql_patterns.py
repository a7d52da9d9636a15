"""Checks of the patterns that a query may use.

Java's regular expressions backtrack: `(a+)+b` takes exponential time, `a*a*a*a*a*b` a high power of the text's length,
and a repeated group recurses until the thread's stack overflows, which ends Spark's whole process. A match cannot be
interrupted, and Spark folds constant matches while it plans. A pattern must therefore be a literal, may repeat only
single characters and classes, and may have few repeats that backtrack. The possessive form (`a*+`) never backtracks.
"""

from __future__ import annotations

import re
from typing import Final

MAX_PATTERN: Final = 1000
MAX_BACKTRACKING: Final = 4
MAX_WILDCARDS: Final = 5
MAX_COUNT: Final = 1000

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
    if any(int(number) > MAX_COUNT for number in re.findall(r"[0-9]+", repeat)):
        return f"the pattern has the repeat {repeat}, at most {MAX_COUNT} times are allowed", 0
    fixed = repeat.startswith("{") and "," not in repeat
    return None, 0 if fixed or mode == "+" else 1


def like_problem(pattern: str) -> str | None:
    """Returns the problem with a LIKE pattern, in which each % may backtrack, or None."""
    if len(pattern) > MAX_PATTERN:
        return f"the pattern has {len(pattern)} characters, at most {MAX_PATTERN} are allowed"
    if pattern.count("%") > MAX_WILDCARDS:
        return f"the LIKE pattern has {pattern.count('%')} percent signs, at most {MAX_WILDCARDS} are allowed"
    return None
