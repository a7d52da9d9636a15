"""Places for queries: so many at once, a short queue, then a refusal.

Orgs are served fairly. While others wait, none may hold more than half of the places; and when the queue is full, the
org that waits most often makes room for one that waits less.
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
    def __init__(self, most: int, *, queue: int, seconds: float) -> None:
        self._most = most
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
        """Held for as long as the block runs. Raises TooManyRequests."""
        await self._take(org_id)
        try:
            yield
        finally:
            self._give_back(org_id)

    async def _take(self, org_id: UUID) -> None:
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
            self._make_room(org_id)
        waiting = _Waiting(org_id)
        self._waiting.append(waiting)
        self._admit()
        return waiting

    def _make_room(self, org_id: UUID) -> None:
        """The newest of the org that waits most often goes, if that org then still waits as often as the other."""
        by_org = Counter(one.org_id for one in self._waiting)
        greediest = max(by_org, key=by_org.__getitem__, default=org_id)
        if by_org[greediest] <= by_org[org_id] + 1:
            raise self._busy()
        last = next(one for one in reversed(self._waiting) if one.org_id == greediest)
        self._waiting.remove(last)
        if not last.admitted.done():
            last.admitted.set_exception(self._busy())

    def _leave(self, waiting: _Waiting) -> None:
        """The caller went away, perhaps in the very moment in which it got its place."""
        if _was_admitted(waiting):
            self._give_back(waiting.org_id)
        elif waiting in self._waiting:
            self._waiting.remove(waiting)

    def _give_back(self, org_id: UUID) -> None:
        self._held[org_id] -= 1
        if not self._held[org_id]:
            del self._held[org_id]
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.running < self._most:
            chosen = self._next()
            self._waiting.remove(chosen)
            if not chosen.admitted.done():  # else its caller has gone, and has not run since
                self._held[chosen.org_id] += 1
                chosen.admitted.set_result(None)

    def _next(self) -> _Waiting:
        share = max(1, self._most // 2)
        return next((one for one in self._waiting if self._held[one.org_id] < share), self._waiting[0])

    def _busy(self) -> TooManyRequests:
        return TooManyRequests(
            f"{self._most} queries run here and {len(self._waiting)} wait: try again in a moment, or send it as a "
            "batch query.",
            retry_after=max(1.0, self._seconds),
            code="queries_busy",
        )


def _was_admitted(waiting: _Waiting) -> bool:
    done = waiting.admitted
    return done.done() and not done.cancelled() and done.exception() is None
