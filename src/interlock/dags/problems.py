"""Problems of a DAG file: position, description and fix. All problems are collected before any is shown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

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
