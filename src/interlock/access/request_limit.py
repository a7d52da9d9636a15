"""Rate limit per API key: counted in Valkey for all gateways, or per process while Valkey is unavailable."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from interlock.stores.valkey import Coordination
from interlock.telemetry import LIMITS_UNAVAILABLE


class RequestLimit:
    """A rate limit that works without Valkey: each process then applies the whole limit on its own."""

    def __init__(
        self, coordination: Coordination | None, per_second: int, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self.per_second = per_second
        """Requests of one key per second; 0 for no limit."""
        self._coordination = coordination
        self._seconds = seconds
        self._window = 0
        self._used: Counter[str] = Counter()

    async def wait(self, key: str) -> float | None:
        """Counts one request. Returns the seconds to wait if the key has sent more than its limit in this second."""
        if not self.per_second:
            return None
        counted = None if self._coordination is None else await self._coordination.count(key, window_seconds=1.0)
        if counted is None:
            LIMITS_UNAVAILABLE.labels(limit="requests").inc()
            counted = self._count_here(key)
        used, left = counted
        return max(0.001, left) if used > self.per_second else None

    def _count_here(self, key: str) -> tuple[int, float]:
        now = self._seconds()
        if int(now) != self._window:
            self._window, self._used = int(now), Counter()
        self._used[key] += 1
        return self._used[key], self._window + 1 - now
