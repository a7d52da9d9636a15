"""A `where` as Spark reads it.

It comes as canonical text: names in double quotes, strings in single ones with '' for a quote inside, and no more of
SQL than the language of `where` has. PostgreSQL takes that as it is. Spark quotes names with backticks, reads
backslashes in strings, and takes a number with an exponent for a double.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final

from interlock.pipeline.failures import BadConfig

_TOKEN: Final = re.compile(
    r"""(?P<name>"(?:[^"]|"")*")
      | (?P<string>'(?:[^']|'')*')
      | (?P<zoned>\bTIMESTAMPTZ\b)
      | (?P<local>\bTIMESTAMP\b)
      | (?P<number>(?<![A-Za-z0-9_])[+-]?[0-9]+(?:\.[0-9]*)?(?:E[+-]?[0-9]+)?)""",
    re.VERBOSE,
)
_MOST_DIGITS: Final = 38
"""Of a decimal in Spark."""


def columns(where: str) -> list[str]:
    """Names of the columns that a condition reads, each once."""
    return list(dict.fromkeys(_unquoted(found[0]) for found in _TOKEN.finditer(where) if found.lastgroup == "name"))


def spark_text(where: str) -> str:
    return _TOKEN.sub(lambda found: _SPELLINGS[found.lastgroup or ""](found[0]), where)


def _name(text: str) -> str:
    """A name has no escape for `$`, and Spark's parser may replace `${…}` by settings and environment variables."""
    name = _unquoted(text)
    if "${" in name:
        raise BadConfig(f"The where names the column {name!r}, and ${{ is refused in it: rename the column.")
    return "`" + name.replace("`", "``") + "`"


def _string(text: str) -> str:
    return "'" + _unquoted(text).replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\u0024{") + "'"


def _number(text: str) -> str:
    """Exact where Spark has a type for it. What is larger than any decimal compares as a double just as well.

    A literal beyond bigint would be compared with whole numbers as true or false at once, also where there is a null: a
    cast is looked at later, and rightly.
    """
    number = Decimal(text)
    _, digits, exponent = number.as_tuple()
    scale = max(-int(exponent), 0)
    precision = max(len(digits) + max(int(exponent), 0), scale)
    if precision > _MOST_DIGITS:
        return f"{number:E}D"
    if not -(2**63) <= number < 2**63:
        return f"CAST('{number:f}' AS DECIMAL({precision},{scale}))"
    return f"{number:f}BD" if scale or "E" in text else text


def _unquoted(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote)


_SPELLINGS: Final[dict[str, Callable[[str], str]]] = {
    "name": _name,
    "string": _string,
    "zoned": lambda _: "TIMESTAMP_LTZ",
    "local": lambda _: "TIMESTAMP_NTZ",
    "number": _number,
}
