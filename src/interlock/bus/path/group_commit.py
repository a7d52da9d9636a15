"""Group commit: requests that arrive while a write is under way share the next one.

request ─┐                 ┌─ statement ─► committed ─► every request gets its reply
request ─┼─► waiting ──────┤ one write at a time, two under load; then one commit serves many requests
request ─┘                 └─ if a write fails, but the database is there: again, each request by itself
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from interlock.errors import Unavailable

T = TypeVar("T")

_MAX_WEIGHT, _BUSY_WEIGHT = 500, 100


class GroupCommit(Generic[T]):
    """Writes requests in groups.

    `write` makes a group durable, or raises without any effect; `weight` returns the size of a request. A group has a
    weight of about `max_weight`. When requests of `busy_weight` wait, a second write starts while the first is with the
    database. Below that, one larger write is faster: each write has a fixed cost on both sides.
    """

    def __init__(
        self,
        write: Callable[[list[T]], Awaitable[None]],
        *,
        weight: Callable[[T], int],
        max_weight: int = _MAX_WEIGHT,
        busy_weight: int = _BUSY_WEIGHT,
    ) -> None:
        self._write = write
        self._weight = weight
        self._max_weight = max_weight
        self._busy_weight = busy_weight
        self._waiting: deque[tuple[T, asyncio.Future[None]]] = deque()
        self._waiting_weight = 0
        self._writers: set[asyncio.Task[None]] = set()

    async def put(self, request: T) -> None:
        """Returns once the request is durable. A caller that is cancelled does not know whether it is."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, done))
        self._waiting_weight += self._weight(request)
        if not self._writers or (len(self._writers) == 1 and self._waiting_weight >= self._busy_weight):
            self._writers.add(asyncio.create_task(self._write_all(), name="bus-writes"))
        await done

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                await self._write_next()
        finally:
            # Here, not in a callback of the task: a request that arrives in between would wait for no writer.
            self._writers = {writer for writer in self._writers if writer is not asyncio.current_task()}

    async def _write_next(self) -> None:
        group = list(self._next())
        try:
            await self._write([request for request, _ in group])
        except Exception as error:  # every caller gets it, or the result of its own request alone
            if len(group) == 1 or isinstance(error, Unavailable):
                _settle(group, error)
            else:
                await self._write_one_by_one(group)
        else:
            _settle(group, None)

    def _next(self) -> Iterator[tuple[T, asyncio.Future[None]]]:
        room = self._max_weight
        while self._waiting and room > 0:
            entry = self._waiting.popleft()
            weight = self._weight(entry[0])
            room -= weight
            self._waiting_weight -= weight
            yield entry

    async def _write_one_by_one(self, group: list[tuple[T, asyncio.Future[None]]]) -> None:
        """Writes each request by itself, so that one that cannot be written does not fail the others."""
        for entry in group:
            try:
                await self._write([entry[0]])
            except Exception as error:  # only its own caller gets it
                _settle([entry], error)
            else:
                _settle([entry], None)

    async def close(self) -> None:
        """Waits for writes that are under way."""
        await asyncio.gather(*self._writers)


def _settle(group: list[tuple[T, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, done in group:
        if done.done():  # the caller was cancelled
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
