"""Ids of commands that strict routes have delivered, as far as this process knows.

An id that was handed on is not known yet: its command may be refused, and is then sent again under the same id. Only
what the slow stage has delivered is a duplicate when it comes again; `confirmed` says which those are.
"""

from __future__ import annotations

from typing import Final

_MOST: Final = 100_000
_MOST_OPEN: Final = 10_000


class Seen:
    def __init__(self) -> None:
        self._delivered: dict[tuple[str, str], float] = {}
        self._open: dict[tuple[str, str], float] = {}

    def knows(self, source: str, command_id: str, now: float) -> bool:
        until = self._delivered.get((source, command_id))
        return until is not None and until > now

    def handed_on(self, source: str, command_id: str, until: float) -> None:
        if len(self._open) >= _MOST_OPEN:
            del self._open[next(iter(self._open))]
        self._open[source, command_id] = until

    def open(self, most: int, now: float) -> list[tuple[str, str]]:
        """Ids to ask about, oldest first; what has run out meanwhile is forgotten."""
        self._open = {entry: until for entry, until in self._open.items() if until > now}
        return list(self._open)[:most]

    def confirmed(self, source: str, command_id: str, until: float) -> None:
        self._open.pop((source, command_id), None)
        if len(self._delivered) >= _MOST:
            del self._delivered[next(iter(self._delivered))]
        self._delivered[source, command_id] = until
