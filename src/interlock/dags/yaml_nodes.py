"""YAML parsed into a tree that has the line and column of every part.

The tree is built from the parser's events and supports a subset of YAML: mappings with text keys, sequences, and the
scalar types of JSON as written in YAML 1.2. Tags, anchors, aliases and merge keys are rejected, so a file can neither
construct objects nor expand. `yes`, `on` and `12:30` are text here, not booleans and numbers as in YAML 1.1.

A problem of a DAG file has a position, a description and a fix. All problems are collected before any is shown.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import yaml

MAX_PROBLEMS: Final = 200
"""Further problems are counted but not listed: nobody reads them, and the search for suggestions takes time."""
_MAX_COMPARISONS: Final = 50_000
"""The search for similar names is quadratic. This limit keeps a hostile file from making it slow."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in a file. Line and column start at 1."""

    line: int
    column: int


START: Final = Place(1, 1)


@dataclass(frozen=True, slots=True)
class Problem:
    file: str
    line: int
    column: int
    what: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.what}; {self.instead}"


@dataclass(slots=True)
class Report:
    """Collects the problems of one file."""

    file: str
    _found: list[tuple[Place, Problem]] = field(default_factory=list)
    _unlisted: int = 0
    _comparisons: int = 0

    def add(self, place: Place, what: str, instead: str) -> None:
        if len(self._found) < MAX_PROBLEMS:
            self._found.append((place, Problem(self.file, place.line, place.column, what, instead)))
        else:
            self._unlisted += 1

    def __bool__(self) -> bool:
        return bool(self._found)

    def problems(self) -> list[Problem]:
        """Returns the problems in the order of the file."""
        listed = [problem for _, problem in sorted(self._found, key=lambda found: found[0])]
        if self._unlisted:
            what = f"{self._unlisted} more problems are not listed"
            listed.append(Problem(self.file, 1, 1, what, "fix the problems above first"))
        return listed

    def suggest(self, word: str, known: Iterable[str], otherwise: str) -> str:
        """Suggests the most similar known name for a misspelled word, or returns `otherwise`."""
        candidates = list(known)
        self._comparisons += len(candidates)
        if self._comparisons <= _MAX_COMPARISONS and len(self._found) < MAX_PROBLEMS:
            # Wrong case is the most common mistake, and difflib would treat it as a different letter.
            folded = {name.casefold(): name for name in candidates}
            near = difflib.get_close_matches(word.casefold()[:100], folded, n=1)
            if near:
                return f"write {folded[near[0]]}"
        return otherwise


def listing(names: Iterable[str], limit: int = 12) -> str:
    """Joins names for a sentence, at limit `limit` of them."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return f"{shown}, …" if len(ordered) > limit else shown


def quoted(text: object, limit: int = 60) -> str:
    """Quotes user input for a message: shortened, with control characters escaped."""
    plain = str(text)
    return repr(plain if len(plain) <= limit else plain[: limit - 1] + "…")


MAX_BYTES: Final = 1_000_000
MAX_DEPTH: Final = 50

# Uses libyaml if the wheel includes it: a 1 MB file takes under a second instead of ten.
_Parser: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Scalar:
    place: Place
    value: str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Items:
    place: Place
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    key: Place
    node: Node


@dataclass(frozen=True, slots=True)
class Fields:
    place: Place
    entries: dict[str, Entry]


Node: TypeAlias = Scalar | Items | Fields


def plain(node: Node) -> Any:
    """Converts the tree to plain JSON values. Any: the user defines their structure."""
    match node:
        case Scalar(_, value):
            return value
        case Items(_, nodes):
            return [plain(inner) for inner in nodes]
        case Fields(_, entries):
            return {key: plain(entry.node) for key, entry in entries.items()}


def kind_of(node: Node) -> str:
    match node:
        case Items():
            return "a list"
        case Fields():
            return "a mapping"
        case Scalar(_, None):
            return "nothing"
        case Scalar(_, value):
            return f"{_KINDS[type(value)]} {quoted(value)}"


_KINDS: Final = {str: "the text", bool: "the boolean", int: "the number", float: "the number"}


class _Unreadable(Exception):
    """Stops parsing: the rest of the file cannot be interpreted."""


def tree(content: bytes, report: Report) -> Node | None:
    """Parses the only document of a file. Returns None if it cannot be used; the report has the reason."""
    text = _text(content, report)
    if text is None:
        return None
    parser = _Parser(text)
    try:
        return _Composer(parser, report).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark else START
        report.add(place, f"invalid YAML: {error.problem or error.context}", "check indentation, quotes and colons")
    except yaml.YAMLError as error:
        report.add(START, f"invalid YAML: {quoted(error)}", "check indentation, quotes and colons")
    except _Unreadable:
        pass  # already reported
    finally:
        parser.dispose()
    return None


# Outside YAML's printable set. C1 controls and similar characters could also manipulate a terminal.
_CONTROL: Final = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _text(content: bytes, report: Report) -> str | None:
    if len(content) > MAX_BYTES:
        what = f"the file is larger than {MAX_BYTES:,} bytes"
        report.add(START, what, "split the DAG, and connect the parts through published datasets")
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = _place(content[: error.start].decode(errors="replace"))
        report.add(place, f"byte 0x{content[error.start]:02x} is not valid UTF-8", "save the file as UTF-8")
        return None
    found = _CONTROL.search(text)
    if found:
        what = f"control character U+{ord(found[0]):04X} is not allowed in YAML"
        report.add(_place(text[: found.start()]), what, "remove it")
        return None
    return text


def _place(before: str) -> Place:
    return Place(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


class _Composer:
    """Builds the tree from events. Checks depth per event, so that a bracket bomb is never parsed to its end."""

    def __init__(self, parser: Any, report: Report) -> None:
        self._parser = parser
        self._report = report

    def document(self) -> Node | None:
        self._next()
        if self._parser.check_event(yaml.StreamEndEvent):
            self._report.add(START, "the file is empty", "write a DAG with a name and jobs")
            return None
        self._next()
        node = self._node(self._next(), 1)
        self._next()
        if not self._parser.check_event(yaml.StreamEndEvent):
            place = _at(self._next())
            self._report.add(place, "a second document starts here", "keep one DAG per file, without ---")
        return node

    def _next(self) -> Any:
        """Any: PyYAML's events have no types for their attributes."""
        return self._parser.get_event()

    def _node(self, event: Any, depth: int) -> Node:
        place = _at(event)
        self._check(event, place, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            return Items(place, tuple(self._items(depth)))
        if isinstance(event, yaml.MappingStartEvent):
            return Fields(place, self._entries(depth))
        return Scalar(place, self._value(event, place))

    def _check(self, event: Any, place: Place, depth: int) -> None:
        if isinstance(event, yaml.AliasEvent):
            self._refuse(place, f"alias *{event.anchor} is not allowed", "write the value out")
        if event.anchor is not None:
            self._refuse(place, f"anchor &{event.anchor} is not allowed", "write the value out where it is used")
        if event.tag is not None:
            self._refuse(place, f"tag {quoted(event.tag)} is not allowed", "write the value without a tag")
        if depth > MAX_DEPTH:
            self._refuse(place, f"nesting is deeper than {MAX_DEPTH} levels", "flatten the structure")

    def _refuse(self, place: Place, what: str, instead: str) -> None:
        self._report.add(place, what, instead)
        raise _Unreadable

    def _items(self, depth: int) -> Iterator[Node]:
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            yield self._node(event, depth + 1)

    def _entries(self, depth: int) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._key(event, depth)
            entry = Entry(_at(event), self._node(self._next(), depth + 1))
            first = entries.setdefault(key, entry)
            if first is not entry:
                what = f"duplicate key {quoted(key)}, first used on line {first.key.line}"
                self._report.add(entry.key, what, "keep one of the two")
        return entries

    def _key(self, event: Any, depth: int) -> str:
        place = _at(event)
        if not isinstance(event, yaml.ScalarEvent):
            self._refuse(place, "a key must be text", "write name: value")
        if event.value == "<<" and event.implicit[0]:
            self._refuse(place, "merge key << is not allowed", "write the values out")
        self._check(event, place, depth)
        return self._visible(str(event.value), place)

    def _value(self, event: Any, place: Place) -> str | int | float | bool | None:
        text: str = event.value
        return self._resolved(text, place) if event.implicit[0] else self._visible(text, place)

    def _visible(self, text: str, place: Place) -> str:
        found = _CONTROL.search(text)
        if found:
            what = f"control character U+{ord(found[0]):04X} is not allowed in text"
            self._report.add(place, what, "remove it")
        return text

    def _resolved(self, text: str, place: Place) -> str | int | float | bool | None:
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            return self._integer(text, place)
        if _FLOAT.fullmatch(text):
            return self._float(text, place)
        return text

    def _integer(self, text: str, place: Place) -> int:
        if _OCTAL.fullmatch(text):
            self._report.add(
                place, f"{quoted(text)} has a leading zero", "remove the zero, or quote it to keep it as text"
            )
            return 0
        number = int(text, 0) if len(text) <= 20 else 2**64
        if not -(2**63) <= number < 2**63:
            self._report.add(place, f"{quoted(text)} does not fit into 64 bits", "quote it to keep it as text")
            return 0
        return number

    def _float(self, text: str, place: Place) -> float:
        number = float(text) if text[-1].isdigit() or text[-1] == "." else math.inf
        if not math.isfinite(number):
            self._report.add(place, f"{quoted(text)} is not a finite number", "quote it to keep it as text")
            return 0.0
        return number


_WORDS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER: Final = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+")
_OCTAL: Final = re.compile(r"[-+]?0[0-9]+")
_FLOAT: Final = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


def _at(event: Any) -> Place:
    return Place(event.start_mark.line + 1, event.start_mark.column + 1)
