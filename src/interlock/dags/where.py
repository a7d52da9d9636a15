"""The language of `where`: its parser, its syntax tree, and the canonical text of a condition."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final, TypeAlias

from interlock.errors import InvalidWhere
from interlock.schemas import CONDITION_TOKEN


class LiteralKind(StrEnum):
    STRING = "string"
    INTEGER = "integer"
    DECIMAL = "decimal"
    BOOLEAN = "boolean"
    DATE = "date"
    TIMESTAMP = "timestamp"


@dataclass(frozen=True, slots=True)
class Column:
    """A column by its exact, case-sensitive name. Used as a condition, it is a boolean column."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant. The kind separates values that Python treats as equal, such as 1, 1.0 and true."""

    kind: LiteralKind
    value: str | int | Decimal | bool | date | datetime


Value: TypeAlias = Column | Literal


@dataclass(frozen=True, slots=True)
class Comparison:
    operator: str
    """One of =, <>, <, <=, >, >=."""
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
    """AND. Never contains another AllOf: nested ANDs are flattened."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """OR. Never contains another AnyOf."""

    conditions: tuple[Condition, ...]


Condition: TypeAlias = Column | Comparison | OneOf | Between | Like | IsNull | Not | AllOf | AnyOf


def columns(condition: Condition) -> frozenset[str]:
    """Returns the names of the columns that a condition reads."""
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
    """Returns canonical text for PostgreSQL and DuckDB: quoted names, one spelling, no redundant parentheses."""
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
            # Without the TZ, PostgreSQL would drop the zone silently.
            return f"TIMESTAMP{'TZ' if moment.tzinfo else ''} '{moment.isoformat(sep=' ')}'"
        case Literal(LiteralKind.BOOLEAN, truth):
            return "TRUE" if truth else "FALSE"
        case Literal(LiteralKind.STRING, str() as text):
            return _quoted(text)
        case Literal(_, number):
            return str(number)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


MAX_LENGTH: Final = 10_000
MAX_DEPTH: Final = 50
MAX_DIGITS: Final = 100
MAX_EXPONENT: Final = 300
MAX_NAME: Final = 255

ALLOWED: Final = "comparisons, AND, OR, NOT, IN, BETWEEN, LIKE and IS NULL over columns and literals"


def parse(text: str) -> Condition:
    """Parses a condition. Raises only InvalidWhere, which has the position."""
    if len(text) > MAX_LENGTH:
        raise InvalidWhere(
            f"is longer than {MAX_LENGTH} characters: write a shorter condition", position=MAX_LENGTH + 1
        )
    condition = _Parser(list(_tokens(text))).whole()
    if len(sql(condition)) > MAX_LENGTH:
        # The canonical text is stored, so it must be parseable again.
        sentence = f"is longer than {MAX_LENGTH} characters with its names quoted: write a shorter condition"
        raise InvalidWhere(sentence, position=1)
    return condition


# Tokens


class _Kind(StrEnum):
    WORD = "word"
    NAME = "quoted name"
    STRING = "string"
    NUMBER = "number"
    SYMBOL = "symbol"
    END = "end"


@dataclass(frozen=True, slots=True)
class _Token:
    kind: _Kind
    text: str
    position: int
    """Starts at 1, as users count."""


_ADVICE: Final = {
    ";": "a second statement is not allowed: write one condition",
    "'": "this string is not closed: close it with ', and write '' for a quote inside it",
    '"': 'this quoted name is not closed: close it with ", and write "" for a quote inside it',
    ".": 'names cannot contain dots: write the column alone, or quote it as "a.b" if the dot is part of its name',
    "`": 'names are quoted with ", not with `',
    "$": "parameters are not allowed: write the value itself",
    "?": "parameters are not allowed: write the value itself",
    ":": "casts and parameters are not allowed: write the literal in the column's own type",
    "\\": "a backslash is allowed only inside a string",
}


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        found = CONDITION_TOKEN.match(text, position)
        if found is None:
            raise _unknown(text, position)
        kind = found.lastgroup or ""
        if kind == "comment":
            raise InvalidWhere(f"comments are not allowed: remove {found[0]!r}", position=position + 1)
        if kind != "space":
            yield _Token(_Kind[kind], _checked(found[0], position), position + 1)
        position = found.end()
    yield _Token(_Kind.END, "", len(text) + 1)


def _unknown(text: str, position: int) -> InvalidWhere:
    character = text[position]
    advice = _ADVICE.get(character)
    if character in "0123456789":
        advice = "this is not a number: write 1000, -1.5 or 2e6"
    if advice is None:
        advice = f"unexpected character {_shown(character)}: write {ALLOWED}"
    return InvalidWhere(advice, position=position + 1)


def _shown(character: str) -> str:
    return repr(character) if character.isprintable() else f"U+{ord(character):04X}"


_INVISIBLE: Final = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _checked(text: str, start: int) -> str:
    """Rejects invisible characters: a reviewer must be able to trust the visible text of a condition."""
    if not text.isascii() or not text.isprintable():
        for offset, character in enumerate(text):
            if unicodedata.category(character) in _INVISIBLE:
                sentence = f"the invisible character U+{ord(character):04X} is not allowed: remove it"
                raise InvalidWhere(sentence, position=start + offset + 1)
    return text


# Parser

_RESERVED: Final = frozenset({"AND", "OR", "NOT", "IN", "BETWEEN", "IS", "NULL", "LIKE", "TRUE", "FALSE"})
# fmt: off
_REFUSED: Final = frozenset({
    "ALL", "ANY", "ARRAY", "AS", "CASE", "CAST", "COLLATE", "CURRENT_DATE", "CURRENT_TIME", "CURRENT_TIMESTAMP",
    "CURRENT_USER", "DELETE", "DISTINCT", "DROP", "ELSE", "END", "ESCAPE", "EXCEPT", "EXISTS", "FROM", "GLOB",
    "GROUP", "HAVING", "ILIKE", "INSERT", "INTERSECT", "INTERVAL", "ISNULL", "JOIN", "LIMIT", "NOTNULL",
    "ORDER", "OVERLAPS", "REGEXP", "RLIKE", "ROW", "SELECT", "SESSION_USER", "SIMILAR", "SOME", "TABLE", "THEN",
    "UNION", "UPDATE", "USER", "VALUES", "WHEN", "WHERE", "WITH"
})
# fmt: on
"""Keywords of other SQL constructs. As column names they must be quoted, so that no reader is misled."""

_COMPARISONS: Final = {"=": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_NUMBER: Final = re.compile(r"[+-]?[0-9]+")
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIMESTAMP: Final = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?) ?(Z|[+-][0-9]{2}:[0-9]{2})?"
)


class _Parser:
    """Recursive descent parser with a method per grammar rule. Limits the depth before Python's own stack does."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def whole(self) -> Condition:
        condition = self._condition()
        if self._next.kind is not _Kind.END:
            raise self._unexpected()
        return condition

    # Conditions

    def _condition(self) -> Condition:
        parts = [self._all_of()]
        while self._takes("OR"):
            parts.append(self._all_of())
        return parts[0] if len(parts) == 1 else AnyOf(_flat(parts, AnyOf))

    def _all_of(self) -> Condition:
        parts = [self._negated()]
        while self._takes("AND"):
            parts.append(self._negated())
        return parts[0] if len(parts) == 1 else AllOf(_flat(parts, AllOf))

    def _negated(self) -> Condition:
        if not self._is("NOT"):
            return self._predicate()
        self._enter()
        self._at += 1
        condition = Not(self._negated())
        self._depth -= 1
        return condition

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"is nested more than {MAX_DEPTH} levels deep: write a flatter condition")

    def _predicate(self) -> Condition:
        if self._is("("):
            return self._group()
        start = self._next
        value = self._value()
        if self._next.text in _COMPARISONS and self._next.kind is _Kind.SYMBOL:
            return self._comparison(value, start)
        if self._takes("IS"):
            negated = self._takes("NOT")
            self._expect("NULL", "IS tests only for NULL: write IS NULL, IS NOT NULL, or just the boolean column")
            return IsNull(self._column(value, start), negated)
        negated = self._takes("NOT")
        if self._takes("IN"):
            return OneOf(self._column(value, start), self._options(), negated)
        if self._takes("BETWEEN"):
            return self._between(value, start, negated=negated)
        if self._takes("LIKE"):
            return Like(self._column(value, start), self._pattern(), negated)
        if negated:
            raise self._error("NOT is not allowed here: write NOT IN, NOT BETWEEN or NOT LIKE")
        return self._column(value, start)

    def _group(self) -> Condition:
        self._enter()
        self._at += 1
        condition = self._condition()
        self._expect(")", "this parenthesis is not closed: close it with )")
        self._depth -= 1
        return condition

    def _comparison(self, left: Value, start: _Token) -> Comparison:
        operator = _COMPARISONS[self._take().text]
        right = self._value()
        self._needs_column(start, left, right)
        return Comparison(operator, left, right)

    def _between(self, value: Value, start: _Token, *, negated: bool) -> Between:
        low = self._value()
        self._expect("AND", "BETWEEN takes two values: write BETWEEN low AND high")
        high = self._value()
        self._needs_column(start, value, low, high)
        return Between(value, low, high, negated)

    def _options(self) -> tuple[Literal, ...]:
        self._expect("(", "IN takes a list: write IN ('a', 'b')")
        options = [self._option()]
        while self._takes(","):
            options.append(self._option())
        self._expect(")", "this list is not closed: close it with ), and put commas between its literals")
        return tuple(options)

    def _option(self) -> Literal:
        start = self._next
        value = self._value()
        if isinstance(value, Column):
            raise InvalidWhere(
                "a list may contain only literals: compare columns with = and OR", position=start.position
            )
        return value

    def _pattern(self) -> str:
        if self._next.kind is not _Kind.STRING:
            raise self._error("LIKE takes a string: write LIKE 'abc%'")
        if "\\" in self._next.text:
            # PostgreSQL treats it as an escape, DuckDB does not: a pattern must have one meaning.
            raise self._error("a pattern cannot contain a backslash: % matches any text, _ any one character")
        return _unquoted(self._take().text)

    # Values

    def _value(self) -> Value:
        token = self._next
        match token.kind:
            case _Kind.NUMBER:
                return self._number()
            case _Kind.STRING:
                return Literal(LiteralKind.STRING, _unquoted(self._take().text))
            case _Kind.NAME:
                return self._named(_unquoted(self._take().text), token)
            case _Kind.WORD:
                return self._word()
            case _:
                raise self._unexpected()

    def _word(self) -> Value:
        token = self._next
        word = token.text.upper()
        if word in ("TRUE", "FALSE"):
            self._at += 1
            return Literal(LiteralKind.BOOLEAN, word == "TRUE")
        if word == "NULL":
            raise self._error("a comparison with NULL is never true: write IS NULL or IS NOT NULL")
        if word in _RESERVED | _REFUSED:
            raise self._unexpected()
        self._at += 1
        if word in ("DATE", "TIMESTAMP", "TIMESTAMPTZ") and self._next.kind is _Kind.STRING:
            return self._date() if word == "DATE" else self._timestamp(zoned=word == "TIMESTAMPTZ")
        if self._is("("):
            raise InvalidWhere(f"function {token.text}(…) is not allowed: write {ALLOWED}", position=token.position)
        if self._next.kind is _Kind.STRING:
            raise InvalidWhere(f"{token.text} '…' is not a literal: write DATE or TIMESTAMP", position=token.position)
        return self._named(token.text, token)

    def _named(self, name: str, token: _Token) -> Column:
        if not 0 < len(name) <= MAX_NAME:
            raise InvalidWhere(f"invalid column name: write 1 to {MAX_NAME} characters", position=token.position)
        return Column(name)

    def _number(self) -> Literal:
        token = self._take()
        digits, _, exponent = token.text.lower().partition("e")
        if len(digits) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > MAX_EXPONENT:
            raise InvalidWhere("this number is out of range: write a smaller one", position=token.position)
        if _NUMBER.fullmatch(token.text):
            return Literal(LiteralKind.INTEGER, int(token.text))
        return Literal(LiteralKind.DECIMAL, Decimal(token.text))

    def _date(self) -> Literal:
        text = _unquoted(self._next.text)
        try:
            day = date.fromisoformat(text) if _DATE.fullmatch(text) else None
        except ValueError:
            day = None
        if day is None:
            raise self._error("this is not a date: write DATE '2026-01-31'")
        self._at += 1
        return Literal(LiteralKind.DATE, day)

    def _timestamp(self, *, zoned: bool) -> Literal:
        found = _TIMESTAMP.fullmatch(_unquoted(self._next.text))
        try:
            moment = _moment(*found.groups()) if found and (found[3] or not zoned) else None
        except (ValueError, OverflowError):
            moment = None
        if moment is None:
            raise self._error("this is not a timestamp: write TIMESTAMP '2026-01-31 23:59:59', optionally with +00:00")
        self._at += 1
        return Literal(LiteralKind.TIMESTAMP, moment)

    # Tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._next
        self._at += 1
        return token

    def _is(self, text: str) -> bool:
        token = self._next
        return token.kind in (_Kind.WORD, _Kind.SYMBOL) and token.text.upper() == text

    def _takes(self, text: str) -> bool:
        found = self._is(text)
        self._at += found
        return found

    def _expect(self, text: str, advice: str) -> None:
        if not self._takes(text):
            raise self._error(advice)

    def _column(self, value: Value, start: _Token) -> Column:
        if not isinstance(value, Column):
            raise InvalidWhere("this is not a column: name one of the input's columns", position=start.position)
        return value

    def _needs_column(self, start: _Token, *values: Value) -> None:
        if not any(isinstance(value, Column) for value in values):
            raise InvalidWhere("this compares no column: name one of the input's columns", position=start.position)

    def _unexpected(self) -> InvalidWhere:
        token = self._next
        if token.kind is _Kind.END:
            return self._error("ends too early: a condition or a value is missing")
        if token.text == "(":
            return self._error(
                "subqueries are not allowed, and parentheses hold only conditions and lists: write a value"
            )
        if token.kind is _Kind.WORD and token.text.upper() in _REFUSED:
            quoted = f'"{token.text}"'
            return self._error(f"{token.text} is not allowed: write {ALLOWED}, or {quoted} for a column of that name")
        return self._error(f"unexpected {token.text[:20]!r}: write {ALLOWED}")

    def _error(self, sentence: str) -> InvalidWhere:
        return InvalidWhere(sentence, position=self._next.position)


def _flat(parts: list[Condition], connective: type[AllOf] | type[AnyOf]) -> tuple[Condition, ...]:
    flat: list[Condition] = []
    for part in parts:
        if isinstance(part, AllOf | AnyOf) and isinstance(part, connective):
            flat.extend(part.conditions)
        else:
            flat.append(part)
    return tuple(flat)


def _unquoted(text: str) -> str:
    quote = text[0]
    return text[1:-1].replace(quote * 2, quote)


def _moment(day: str, time: str, zone: str | None) -> datetime:
    """Parses a timestamp. With a zone it is converted to UTC, so that two spellings of one moment are equal."""
    moment = datetime.fromisoformat(f"{day}T{time}{'+00:00' if zone == 'Z' else zone or ''}")
    return moment.astimezone(UTC) if zone else moment
