"""Where time comes from. Lease arithmetic happens in Postgres; this clock steers it there in tests."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime: ...

    def simulated(self) -> datetime | None:
        """The instant Postgres shall take for now, or None to let it use its own clock."""


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def simulated(self) -> datetime | None:
        return None


class ManualClock:
    """Stands still until a test moves it; the database sees the same instant."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime.fromtimestamp(int(time.time()), UTC)

    def now(self) -> datetime:
        return self._now

    def simulated(self) -> datetime | None:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
