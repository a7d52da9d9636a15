"""Patterns that a query may match text against.

Java's regular expressions backtrack: `(a+)+b` takes exponential time, `a*a*a*a*a*b` a high power of the text's length,
and a repeated group recurses until the thread's stack overflows, which ends Spark's whole process. A match cannot be
interrupted, and Spark folds constant ones while it plans. So a pattern is a literal, only single characters and
classes repeat, and few repeats can backtrack. The possessive form (`a*+`) never backtracks.
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
    """Returns what is wrong with a regular expression, or None."""
    if len(pattern) > MAX_PATTERN:
        return f"a pattern has at most {MAX_PATTERN} characters"
    at, before, backtracking = 0, "", 0
    while at < len(pattern):
        found = _PIECE.match(pattern, at)
        if found is None or found["escape"] in ("\\Q", "\\E"):
            return f"the pattern is not understood at {pattern[at : at + 10]!r}: write it in a simpler way"
        if found["repeat"]:
            problem, costs = _repeat(found["repeat"], found["mode"], before)
            if problem is not None:
                return problem
            backtracking += costs
        before, at = found.lastgroup or "", found.end()
    if backtracking > MAX_BACKTRACKING:
        return (
            f"the pattern has {backtracking} repeats that may backtrack, and at most {MAX_BACKTRACKING} are allowed: "
            "write possessive ones, such as [0-9]++ and [^,]*+"
        )
    return None


def _repeat(repeat: str, mode: str, before: str) -> tuple[str | None, int]:
    if before in ("", "group", "mode"):
        return "the pattern repeats a repeat, or nothing at all: write it in a simpler way", 0
    if repeat == "?":
        return None, 0
    if before == "close":
        return "the pattern repeats a group: only single characters and classes such as [a-z] may be repeated", 0
    if any(int(number) > MAX_COUNT for number in re.findall(r"[0-9]+", repeat)):
        return f"the pattern repeats more than {MAX_COUNT} times", 0
    fixed = repeat.startswith("{") and "," not in repeat
    return None, 0 if fixed or mode == "+" else 1


def like_problem(pattern: str) -> str | None:
    """Returns what is wrong with a pattern of LIKE, in which each % may backtrack, or None."""
    if len(pattern) > MAX_PATTERN:
        return f"a pattern has at most {MAX_PATTERN} characters"
    if pattern.count("%") > MAX_WILDCARDS:
        return f"a pattern of LIKE has at most {MAX_WILDCARDS} percent signs"
    return None
