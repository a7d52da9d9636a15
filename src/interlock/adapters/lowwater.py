"""Where a scan that takes the oldest first may begin.

While somebody holds an old snapshot, a backup or a forgotten session, PostgreSQL keeps every index entry that has died
since. A scan from the beginning then steps over all of them, pass after pass, and a queue gets slower with every task
it has served. A loop knows how far it has come: below that lies hardly anything but the dead.

Hardly: a transaction may commit late, and what another process had locked may come back. Rows carry the time at which
their transaction began, so the mark never passes the begin of the oldest transaction of Interlock that was open before
the scan, and a scan begins a little below the mark. And now and then one begins at the very beginning: always, while
that costs next to nothing, as it does when there is no such snapshot; else so rarely that it takes a small share of the
time.
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
"""Of the time, at most, goes to scans from the beginning."""
_WHOLES = 3
"""The quickest of so many counts, so that one slow moment of the machine does not."""
_SLACK = timedelta(seconds=2)


@dataclass
class Look(Generic[P]):
    """One scan. `since` is where it begins; whoever scans sets `reached` to how far it got."""

    since: P
    reached: P | None = None
    skipped: bool = False
    """There was no scan after all, so how long it took means nothing."""


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
        """A scan that raises moves nothing. The mark stays at or below `floor`, which must be known before the scan."""
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
    """Along an index of times, as the database tells them."""
    return LowWater(BEGINNING, lambda moment: moment - _SLACK)
