"""Slots for queries: a fixed number, a short queue, then 429.

Orgs are served fairly. While others wait, an org can hold at most half of the slots. If the queue is full, the org with
the most waiting queries makes room for an org with fewer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import UUID

from interlock.errors import TooManyRequests


@dataclass(eq=False)
class _Waiting:
    org_id: UUID
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Places:
    def __init__(self, limit: int, *, queue: int, seconds: float) -> None:
        self._most = limit
        self._queue = queue
        self._seconds = seconds
        self._held: Counter[UUID] = Counter()
        self._waiting: list[_Waiting] = []

    @property
    def running(self) -> int:
        return self._held.total()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, org_id: UUID) -> AsyncIterator[None]:
        """Holds a slot while the block runs. Raises TooManyRequests."""
        await self._acquire(org_id)
        try:
            yield
        finally:
            self._release(org_id)

    async def _acquire(self, org_id: UUID) -> None:
        if self.running < self._most and not self._waiting:
            self._held[org_id] += 1
            return
        waiting = self._join(org_id)
        try:
            async with asyncio.timeout(self._seconds):
                await waiting.admitted
        except TimeoutError:
            if not _was_admitted(waiting):
                self._leave(waiting)
                raise self._busy() from None
        except asyncio.CancelledError:
            self._leave(waiting)
            raise

    def _join(self, org_id: UUID) -> _Waiting:
        if len(self._waiting) >= self._queue:
            self._evict_for(org_id)
        waiting = _Waiting(org_id)
        self._waiting.append(waiting)
        self._admit()
        return waiting

    def _evict_for(self, org_id: UUID) -> None:
        """Evicts the newest query of the org with the most waiting ones, unless that org would then have fewer than
        ours.
        """
        by_org = Counter(one.org_id for one in self._waiting)
        greediest = max(by_org, key=by_org.__getitem__, default=org_id)
        if by_org[greediest] <= by_org[org_id] + 1:
            raise self._busy()
        last = next(one for one in reversed(self._waiting) if one.org_id == greediest)
        self._waiting.remove(last)
        if not last.admitted.done():
            last.admitted.set_exception(self._busy())

    def _leave(self, waiting: _Waiting) -> None:
        """Removes a query whose caller disconnected, or releases its slot if it was admitted at the same moment."""
        if _was_admitted(waiting):
            self._release(waiting.org_id)
        elif waiting in self._waiting:
            self._waiting.remove(waiting)

    def _release(self, org_id: UUID) -> None:
        self._held[org_id] -= 1
        if not self._held[org_id]:
            del self._held[org_id]
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.running < self._most:
            chosen = self._next()
            self._waiting.remove(chosen)
            if not chosen.admitted.done():  # otherwise its caller is gone and has not run since
                self._held[chosen.org_id] += 1
                chosen.admitted.set_result(None)

    def _next(self) -> _Waiting:
        share = max(1, self._most // 2)
        return next((one for one in self._waiting if self._held[one.org_id] < share), self._waiting[0])

    def _busy(self) -> TooManyRequests:
        return TooManyRequests(
            f"{self._most} queries are running and {len(self._waiting)} are waiting; retry later, or submit a "
            "batch query.",
            retry_after=max(1.0, self._seconds),
            code="queries_busy",
        )


def _was_admitted(waiting: _Waiting) -> bool:
    done = waiting.admitted
    return done.done() and not done.cancelled() and done.exception() is None
