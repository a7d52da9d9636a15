"""How tests wait for what another process is about to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE = 90.0
"""Seconds for whatever must happen: far more than it takes on a machine that does nothing else."""

LOOK_SECONDS = 0.001, 0.02
"""Between two looks, at first and at most. Spinning would take the processor from the process that is waited for."""

T = TypeVar("T")


async def eventually(look: Callable[[], T | None], seconds: float = PATIENCE) -> T:
    """Looks again and again until there is something to see."""

    async def see() -> T | None:
        return look()

    return await answered(see, seconds)


async def answered(ask: Callable[[], Awaitable[T | None]], seconds: float = PATIENCE) -> T:
    """Asks again and again until the answer is something."""
    pause, longest = LOOK_SECONDS
    async with asyncio.timeout(seconds):
        while not (answer := await ask()):
            await asyncio.sleep(pause)  # noqa: TID251 - between two looks at what is waited for
            pause = min(2 * pause, longest)
        return answer
