"""How crash tests wait for what another process is about to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE = 90.0
"""Seconds for whatever must happen: far more than it takes on a machine that does nothing else."""

LOOK_SECONDS = 0.02
"""Between two looks. Spinning would take the processor from the process that is waited for."""

T = TypeVar("T")


async def eventually(look: Callable[[], T | None], seconds: float = PATIENCE) -> T:
    """Looks again and again until there is something to see."""

    async def see() -> T | None:
        return look()

    return await answered(see, seconds)


async def answered(ask: Callable[[], Awaitable[T | None]], seconds: float = PATIENCE) -> T:
    """Asks again and again until the answer is something."""
    async with asyncio.timeout(seconds):
        while not (answer := await ask()):  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(LOOK_SECONDS)  # noqa: TID251 - between two looks at what is waited for
        return answer
