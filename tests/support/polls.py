"""Polling for events in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE = 90.0
"""Timeout in seconds for anything that must happen: far more than it takes on an idle machine."""

LOOK_SECONDS = 0.001, 0.02
"""First and longest poll interval. Busy waiting would take CPU time from the process that the test waits for."""

T = TypeVar("T")


async def eventually(look: Callable[[], T | None], seconds: float = PATIENCE) -> T:
    """Polls until `look` returns something true."""

    async def see() -> T | None:
        return look()

    return await answered(see, seconds)


async def answered(ask: Callable[[], Awaitable[T | None]], seconds: float = PATIENCE) -> T:
    """Polls until `ask` returns something true."""
    pause, longest = LOOK_SECONDS
    async with asyncio.timeout(seconds):
        while not (answer := await ask()):
            await asyncio.sleep(pause)  # noqa: TID251 - the interval between two polls
            pause = min(2 * pause, longest)
        return answer
