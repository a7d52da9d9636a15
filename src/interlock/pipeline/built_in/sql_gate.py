"""What a query of the operator `sql` may say: one SELECT over the inputs, and nothing that reaches further.

The text is read with the rules of Spark's own lexer, as far as they are let in, and written anew without comments, so
that both see the same tokens. Then every name in the place of a relation must be an input or a query that `WITH` has
named before, and every name in front of a parenthesis a function on the list. What has no place in that is refused:
other tables, files, catalogs, scripts, settings, functions with effects, a second statement.

`${…}` is refused even within strings: Spark replaces it by settings and by the environment of its process before it
reads the text at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from interlock.pipeline.built_in.sql_functions import FUNCTIONS, TABLE_FUNCTIONS
from interlock.pipeline.failures import BadConfig

MAX_LENGTH: Final = 100_000
_SEE: Final = "See docs/built-in-operators.md#sql."


class UnsafeQuery(BadConfig):
    """The query says more than a query may."""


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

    @property
    def word(self) -> str:
        """Upper case of what may be a keyword; empty for everything else."""
        return self.text.upper() if self.kind is _Kind.WORD else ""

    @property
    def name(self) -> str | None:
        """Lower case of what may be an identifier, as Spark compares them."""
        if self.kind is _Kind.NAME:
            return self.text[1:-1].replace("``", "`").lower()
        return self.text.lower() if self.kind is _Kind.WORD else None


_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\n]+)
      | (?P<comment>--[^\r\n]*|/\*(?!\+)(?:(?!/\*|\*/).)*+\*/)
      | (?P<WORD>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<NUMBER>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?:BD|[LSYFDlsyfd])?(?![A-Za-z0-9_]))
      | (?P<STRING>'(?:[^'\\]|\\.|'')*+')
      | (?P<NAME>`(?:[^`]|``)+`)
      | (?P<SYMBOL><=>|<=|>=|<>|!=|==|\|\||->|::|<<|>>|\|(?!>)|/(?!\*)|[=<>(),.*%+\-\[\]&^~!])""",
    re.VERBOSE | re.DOTALL,
)

_ADVICE: Final = {
    ";": "a second statement is refused: write one SELECT",
    '"': "write strings in '…' and names in `…`: what \"…\" means depends on a setting of Spark",
    "'": "this string has no end: close it with '",
    "`": "this quoted name has no end: close it with `",
    "{": "braces are refused",
    "}": "braces are refused",
    "?": "parameters are refused: write the value itself",
    ":": "parameters and paths are refused: write the value itself, or get_json_object, variant_get",
    "@": "versions of tables are refused: the inputs are what the task was granted",
    "/": "a hint is refused, and so is a comment within a comment, or without an end",
    "|": "the pipe |> is refused: write SELECT … FROM …",
}

_REFUSED_WORDS: Final = """
    ALTER ANALYZE BEGIN CACHE CALL CLEAR COPY CREATE DECLARE DELETE DESCRIBE DROP EXECUTE EXPLAIN IDENTIFIER
    INSERT LOAD MERGE MSCK OVERWRITE REFRESH REPAIR RESET REVOKE SET SHOW STREAM TABLE TABLESAMPLE TRUNCATE
    UNCACHE UPDATE USE CURRENT_USER SESSION_USER USER CURRENT_CATALOG CURRENT_DATABASE CURRENT_SCHEMA CURRENT_DATE
    CURRENT_TIME CURRENT_TIMESTAMP LOCALTIMESTAMP
"""
_REFUSED: Final = frozenset(_REFUSED_WORDS.split())
"""Words that begin something else, or that call a function without a parenthesis. A column of such a name is quoted."""

_GROUPING_WORDS: Final = """
    ALL AND ANTI ANY AS BETWEEN BY CASE CROSS CUBE DISTINCT DIV ELSE EXCEPT EXISTS FILTER FOR FROM FULL GROUP
    HAVING IN INNER INTERSECT IS JOIN LATERAL LEFT LIKE LIMIT MINUS NATURAL NOT OFFSET ON OR OUTER OVER PIVOT
    RIGHT RLIKE ROLLUP SELECT SEMI SETS SOME THEN UNION UNPIVOT USING VALUES WHEN WHERE
"""
_BEFORE_PARENTHESIS: Final = frozenset(_GROUPING_WORDS.split())
"""Keywords after which a parenthesis groups. LEFT and RIGHT are functions, too, and harmless."""

_TYPES: Final = frozenset(
    {"decimal", "dec", "numeric", "char", "varchar", "array", "map", "struct", "timestamp", "time"}
)

_BEFORE_SELECT: Final = frozenset({"UNION", "INTERSECT", "EXCEPT", "MINUS", "ALL", "DISTINCT"})


def checked(query: str, inputs: Collection[str]) -> str:
    """The query as Spark may see it: without comments. Raises UnsafeQuery, which knows line and column."""
    if len(query) > MAX_LENGTH:
        raise UnsafeQuery(f"The query is longer than {MAX_LENGTH} characters: write a shorter one.")
    query = query.rstrip().removesuffix(";")
    tokens = _tokens(query)
    _Gate(query, tokens, {name.lower() for name in inputs}).pass_through()
    return _written(tokens)


def _refuse(query: str, position: int, sentence: str) -> UnsafeQuery:
    line = query.count("\n", 0, position) + 1
    column = position - (query.rfind("\n", 0, position) + 1) + 1
    return UnsafeQuery(f"The query is refused at line {line}, column {column}: {sentence}. {_SEE}")


def _tokens(query: str) -> list[_Token]:
    if "${" in query:
        raise _refuse(query, query.index("${"), "Spark would replace ${…} by its own settings: write concat('$', '{')")
    tokens: list[_Token] = []
    position = 0
    while position < len(query):
        found = _TOKEN.match(query, position)
        if found is None:
            raise _refuse(query, position, _advice(query[position]))
        kind = found.lastgroup or ""
        if kind == "STRING" and tokens and tokens[-1].word == "R" and query[position - 1] in "rR":
            raise _refuse(query, position, "raw strings are refused: write '…' with doubled backslashes")
        if kind not in ("space", "comment"):
            tokens.append(_Token(_Kind[kind], found[0], position))
        position = found.end()
    tokens.append(_Token(_Kind.END, "", len(query)))
    return tokens


def _advice(character: str) -> str:
    shown = repr(character) if character.isprintable() else f"the character U+{ord(character):04X}"
    return _ADVICE.get(character, f"{shown} has no place in a query")


def _written(tokens: list[_Token]) -> str:
    """Tokens that stood together stand together again: `decimal(38,0)`, `x'ff'`, `a.b`."""
    parts: list[str] = []
    end = 0
    for token in tokens:
        if parts and token.position > end:
            parts.append(" ")
        parts.append(token.text)
        end = token.position + len(token.text)
    return "".join(parts).strip()


@dataclass(slots=True)
class _Frame:
    """One level of parentheses."""

    names_relation: bool = False
    """The next token is in the place of a relation."""
    in_from: bool = False
    """A comma is followed by a relation."""
    selects: bool = False
    is_empty: bool = True
    defines: str | None = None
    """The name that WITH gives to what stands in these parentheses."""


@dataclass(slots=True)
class _Gate:
    query: str
    tokens: list[_Token]
    relations: set[str]
    at: int = 0
    frames: list[_Frame] = field(default_factory=lambda: [_Frame()])

    def pass_through(self) -> None:
        self._start()
        while self._token.kind is not _Kind.END:
            self._step()
            self.at += 1
        if len(self.frames) > 1:
            raise self._refused("a parenthesis has no end: close it with )")

    # Tokens around

    @property
    def _token(self) -> _Token:
        return self.tokens[self.at]

    def _near(self, offset: int) -> _Token:
        place = self.at + offset
        return self.tokens[place] if 0 <= place < len(self.tokens) else self.tokens[-1]

    def _refused(self, sentence: str) -> UnsafeQuery:
        return _refuse(self.query, self._token.position, sentence)

    # Rules

    def _start(self) -> None:
        if self._token.word == "WITH":
            self.at = 1
            self._definition()
        elif self._token.word != "SELECT":
            raise self._refused("a query begins with SELECT, or with WITH and then SELECT")

    def _definition(self) -> None:
        """`name AS (`, the cursor on the name; leaves it on the parenthesis."""
        name = self._token.name
        if self._token.word == "RECURSIVE":
            raise self._refused("recursion is refused")
        if name is None or self._near(1).word != "AS" or self._near(2).text != "(":
            raise self._refused("WITH is followed by `name AS (SELECT …)`; columns are named in that SELECT")
        self.at += 2
        self._open(_Frame(defines=name))
        self.at += 1

    def _step(self) -> None:
        token, frame = self._token, self.frames[-1]
        if token.word in _REFUSED and self._near(-1).text != ".":
            raise self._refused(
                f"{token.text} has no place in a query; a column of that name is written `{token.text}`"
            )
        if token.word == "WITH":
            raise self._refused("WITH stands at the beginning of the whole query, and nowhere else")
        if token.word == "FROM" and frame.is_empty:
            raise self._refused("a subquery begins with SELECT")
        was_empty, frame.is_empty = frame.is_empty, False
        if token.kind is _Kind.SYMBOL and token.text == "(":
            self._open_checked(frame)
        elif token.kind is _Kind.SYMBOL and token.text == ")":
            self._close()
        elif token.word == "SELECT":
            self._select(frame, at_start=was_empty)
        elif frame.names_relation:
            self._relation(frame)
        else:
            self._plain(token, frame)

    def _select(self, frame: _Frame, *, at_start: bool) -> None:
        """Spark takes almost every keyword for a name where it can: as an alias, SELECT would hide what follows."""
        if not at_start and self._near(-1).word not in _BEFORE_SELECT:
            raise self._refused("SELECT has no place here; a column of that name is written `select`")
        frame.selects, frame.in_from, frame.names_relation = True, False, False

    def _plain(self, token: _Token, frame: _Frame) -> None:
        """Where a comma after FROM parts relations and where something else, is decided on the safe side: after WHERE,
        HAVING or LIMIT there is none that is not in parentheses, unless the word is an alias."""
        is_comma = token.kind is _Kind.SYMBOL and token.text == ","
        if token.word == "FROM" and frame.selects and not self._compares:
            frame.names_relation = frame.in_from = True
        elif token.word == "JOIN" or (is_comma and frame.in_from):
            frame.names_relation = True
        elif self._begins_clause_with_commas:
            frame.in_from = False
        elif token.word == "USING" and self._near(1).kind is _Kind.STRING:
            raise self._refused("scripts are refused")

    @property
    def _begins_clause_with_commas(self) -> bool:
        match self._token.word:
            case "GROUP" | "ORDER" | "SORT" | "CLUSTER" | "DISTRIBUTE":
                return self._near(1).word == "BY"
            case "LATERAL":
                return self._near(1).word == "VIEW"
            case "WINDOW":
                return self._near(2).word == "AS" and self._near(3).text == "("
            case _:
                return False

    @property
    def _compares(self) -> bool:
        """`a IS DISTINCT FROM b`."""
        return self._near(-1).word == "DISTINCT" and (
            self._near(-2).word == "IS" or (self._near(-2).word == "NOT" and self._near(-3).word == "IS")
        )

    def _relation(self, frame: _Frame) -> None:
        token = self._token
        if token.word == "LATERAL":
            return
        frame.names_relation = False
        if token.word == "VALUES":
            # Rows are parted by commas, and relations too: only the parenthesis around it tells where it ends.
            if self._near(-1).text != "(":
                raise self._refused("VALUES stands in parentheses: (VALUES (1, 'a')) AS t(number, text)")
            frame.in_from = False
            return
        name = token.name
        if name is None:
            raise self._refused("the name of an input is expected here")
        if self._near(1).text == "(":
            if name not in TABLE_FUNCTIONS:
                raise self._refused(f"{token.text} is no relation that a query may use: it reads its inputs only")
            return
        if self._near(1).text == "." or name not in self.relations:
            known = ", ".join(sorted(self.relations)) or "none"
            raise self._refused(
                f"{token.text} is neither an input nor named by WITH before this place; there are {known}"
            )

    # Parentheses

    def _open_checked(self, frame: _Frame) -> None:
        before = self._near(-1)
        is_relation = frame.names_relation
        if not is_relation and before.name is not None and before.word not in _BEFORE_PARENTHESIS:
            self._check_function(before)
        frame.names_relation = False
        self._open(_Frame(names_relation=is_relation, in_from=is_relation))

    def _check_function(self, before: _Token) -> None:
        name = before.name or ""
        if self._near(-2).word == "AS":
            return  # names of columns: `AS t(a, b)`; or a type: `AS decimal(38, 0)`
        if self._near(-2).text == ".":
            raise self._refused("a function has no catalog in front of it")
        if name not in FUNCTIONS and name not in TABLE_FUNCTIONS and name not in _TYPES:
            raise self._refused(f"{before.text}(…) is no function that a query may call")

    def _open(self, frame: _Frame) -> None:
        self.frames.append(frame)

    def _close(self) -> None:
        if len(self.frames) == 1:
            raise self._refused("this parenthesis closes nothing")
        closed = self.frames.pop()
        if closed.defines is None:
            return
        # From here on, and not within itself: there the name would be a table of the catalog.
        self.relations.add(closed.defines)
        following = self._near(1)
        if following.text == "," and following.kind is _Kind.SYMBOL:
            self.at += 2
            self._definition()
            self.at -= 1
        elif following.word != "SELECT":
            self.at += 1
            raise self._refused("what WITH names is followed by SELECT")
