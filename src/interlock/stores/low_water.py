"""Low-water marks: the start of a scan that takes the oldest rows first.

While a backup or a forgotten session holds an old snapshot, PostgreSQL keeps every index entry that has died since. A
scan from the beginning then skips all of them on every pass, and a queue gets slower with every task it has served. A
loop therefore remembers how far it has come; almost all entries below that mark are dead.

Almost: a transaction may commit late, and rows locked by another process may return. Rows carry the start time of their
transaction. So the mark never passes the start of the oldest transaction of Interlock that was open before the scan,
and a scan starts slightly below the mark. In addition, some scans start at the beginning: every time while that is
cheap, which it is without such a snapshot, and otherwise only so often that it uses a small share of the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Protocol, TypeVar


class Ordered(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


P = TypeVar("P", bound=Ordered)

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
_CHEAP_SECONDS = 0.02
_SHARE = 0.02
"""Maximum share of time for scans from the beginning."""
_WHOLES = 3
"""Number of scans of which the fastest counts, so that one slow scan has no effect."""
_SLACK = timedelta(seconds=2)


@dataclass
class Look(Generic[P]):
    """One scan. It starts at `since`; the caller sets `reached` to its end."""

    since: P
    reached: P | None = None
    skipped: bool = False
    """True if there was no scan, so that its duration is ignored."""


class LowWater(Generic[P]):
    def __init__(self, beginning: P, below: Callable[[P], P], *, timer: Callable[[], float] = time.monotonic) -> None:
        self._beginning = beginning
        self._below = below
        self._timer = timer
        self._mark: P | None = None
        self._whole_ended = 0.0
        self._whole_took: deque[float] = deque(maxlen=_WHOLES)

    @contextmanager
    def look(self, floor: P | None = None) -> Iterator[Look[P]]:
        """Runs a scan.

        If it raises, the mark stays. The mark never passes `floor`, which must be read before the scan.
        """
        started = self._timer()
        whole = self._mark is None or self._may_start_over(started)
        look: Look[P] = Look(self._beginning if whole or self._mark is None else self._below(self._mark))
        yield look
        if whole and not look.skipped:
            self._whole_ended = self._timer()
            self._whole_took.append(self._whole_ended - started)
        if look.reached is not None:
            self._mark = look.reached if floor is None else min(look.reached, floor)

    def _may_start_over(self, now: float) -> bool:
        if len(self._whole_took) < _WHOLES:
            return True
        took = min(self._whole_took)
        return took < _CHEAP_SECONDS or now - self._whole_ended >= took / _SHARE


def low_water() -> LowWater[datetime]:
    """Returns a mark for an index on database times."""
    return LowWater(BEGINNING, lambda moment: moment - _SLACK)
