"""What is wrong with a file: where, what, and what to write instead. All of it is found before any of it is told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

MAX_PROBLEMS: Final = 200
"""More are counted, not listed: nobody reads on, and looking for suggestions takes time."""
_MAX_COMPARISONS: Final = 50_000
"""Looking for similar names is quadratic; a hostile file must not make it slow."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Both counted from 1."""

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
        """In the order of the file."""
        listed = [problem for _, problem in sorted(self._found, key=lambda found: found[0])]
        if self._unlisted:
            what = f"there are {self._unlisted} more problems"
            listed.append(Problem(self.file, 1, 1, what, "mend those above first"))
        return listed

    def suggest(self, word: str, known: Iterable[str], otherwise: str) -> str:
        """What to write instead of a misspelt word: the nearest known one."""
        candidates = list(known)
        self._comparisons += len(candidates)
        if self._comparisons <= _MAX_COMPARISONS and len(self._found) < MAX_PROBLEMS:
            # Case is what people get wrong first, and difflib takes it for a different letter.
            folded = {name.casefold(): name for name in candidates}
            near = difflib.get_close_matches(word.casefold()[:100], folded, n=1)
            if near:
                return f"write {folded[near[0]]}"
        return otherwise


def listing(names: Iterable[str], most: int = 12) -> str:
    """A few names for a sentence."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:most])
    return f"{shown}, …" if len(ordered) > most else shown


def quoted(text: object, most: int = 60) -> str:
    """A user's own word in a sentence: short, and with nothing in it that a terminal would obey."""
    plain = str(text)
    return repr(plain if len(plain) <= most else plain[: most - 1] + "…")
