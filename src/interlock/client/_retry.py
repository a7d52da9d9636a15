"""How long a call is tried, and how long it pauses between tries."""

from __future__ import annotations

import asyncio
import random
import time

from interlock.errors import InterlockError, TooManyRequests

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 2.0


class Backoff:
    """Pauses double up to a cap, with full jitter; after `patience` seconds in all, the failure stands."""

    def __init__(self, patience: float) -> None:
        self._give_up_at = time.monotonic() + patience
        self._pause = FIRST_PAUSE_SECONDS

    async def before_retry(self, failure: InterlockError) -> None:
        pause = self._next_pause(failure)
        if time.monotonic() + pause > self._give_up_at:
            raise failure
        await asyncio.sleep(pause)

    def _next_pause(self, failure: InterlockError) -> float:
        if isinstance(failure, TooManyRequests):
            return failure.retry_after
        pause = self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing
        self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)
        return pause
