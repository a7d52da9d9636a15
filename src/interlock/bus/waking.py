"""Wakes those who wait for commands, once these are committed: at once, and on a busy bus a few milliseconds later.

written ─► names of queues ─► one notice of all of them ─► a pause, in which more names come together
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import structlog

from interlock.adapters.postgres import Database
from interlock.bus.effects import wake
from interlock.errors import InterlockError

log = structlog.get_logger()

_PAUSE_SECONDS: Final = 0.005
"""A notice for every write would take as long as the writes."""


class GatheredWakes:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: set[str] = set()
        self._waking: asyncio.Task[None] | None = None

    def add(self, queues: Iterable[str]) -> None:
        self._waiting.update(queues)
        if self._waiting and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._wake_all(), name="bus-wakes")

    async def _wake_all(self) -> None:
        while self._waiting:
            queues, self._waiting = self._waiting, set()
            try:
                async with self._database.connection() as connection:
                    await wake(connection, queues)
            except InterlockError as error:  # who waits looks by itself
                log.warning("bus.nobody_woken", reason=str(error))
            await asyncio.sleep(_PAUSE_SECONDS)

    async def close(self) -> None:
        """What is written is told of."""
        if self._waking is not None:
            await self._waking
