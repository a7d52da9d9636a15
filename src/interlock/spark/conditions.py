"""Translates a `where` to Spark SQL.

The input is canonical text: names in double quotes, strings in single quotes with '' for a quote inside, and only the
SQL that the language of `where` has. PostgreSQL reads it unchanged. Spark differs: it quotes names with backticks,
interprets backslashes in strings, and reads a number with an exponent as a double.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final

from interlock.workers.failures import BadConfig

_TOKEN: Final = re.compile(
    r"""(?P<name>"(?:[^"]|"")*")
      | (?P<string>'(?:[^']|'')*')
      | (?P<zoned>\bTIMESTAMPTZ\b)
      | (?P<local>\bTIMESTAMP\b)
      | (?P<number>(?<![A-Za-z0-9_])[+-]?[0-9]+(?:\.[0-9]*)?(?:E[+-]?[0-9]+)?)""",
    re.VERBOSE,
)
_MAX_DIGITS: Final = 38
"""Most digits of a decimal in Spark."""


def columns(where: str) -> list[str]:
    """Returns the names of the columns that a condition reads, without duplicates."""
    return list(dict.fromkeys(_unquoted(found[0]) for found in _TOKEN.finditer(where) if found.lastgroup == "name"))


def spark_text(where: str) -> str:
    return _TOKEN.sub(lambda found: _SPELLINGS[found.lastgroup or ""](found[0]), where)


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


_SPELLINGS: Final[dict[str, Callable[[str], str]]] = {
    "name": _name,
    "string": _string,
    "zoned": lambda _: "TIMESTAMP_LTZ",
    "local": lambda _: "TIMESTAMP_NTZ",
    "number": _number,
}
