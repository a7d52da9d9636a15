"""Clocks. Lease arithmetic happens in Postgres, so the manual clock also sets the time that Postgres uses."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime: ...

    def simulated(self) -> datetime | None:
        """Returns the instant that Postgres must use as the current time, or None for its own clock."""


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def simulated(self) -> datetime | None:
        return None


class ManualClock:
    """A clock that only advances when a test moves it. The database sees the same time."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime.fromtimestamp(int(time.time()), UTC)

    def now(self) -> datetime:
        return self._now

    def simulated(self) -> datetime | None:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
