"""Makes decisions durable: what waits while a write is under way goes into the next one, as one statement.

request ─┐                 ┌─ statement ─► committed ─► each request is answered
request ─┼─► waiting ──────┤ one at a time, two when much waits; under load a commit serves many requests
request ─┘                 └─ one that fails for another reason than the database: again, each request by itself
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

from interlock.errors import Unavailable

T = TypeVar("T")

_MOST, _MUCH = 500, 100


class GroupedWrites(Generic[T]):
    """`write` makes a group of requests durable, or raises with none of it done; `weight` says how large each is.

    Where `much` waits, one write is with the database while the next is put together. Less goes faster together with
    what comes meanwhile: a write costs both sides more than what is in it.
    """

    def __init__(
        self,
        write: Callable[[list[T]], Awaitable[None]],
        *,
        weight: Callable[[T], int],
        most: int = _MOST,
        much: int = _MUCH,
    ) -> None:
        self._write = write
        self._weight = weight
        self._most = most
        self._much = much
        self._waiting: deque[tuple[T, asyncio.Future[None]]] = deque()
        self._amount = 0
        self._writers: set[asyncio.Task[None]] = set()

    async def put(self, request: T) -> None:
        """Returns once it is durable. Who is cancelled meanwhile does not know whether it is."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, done))
        self._amount += self._weight(request)
        if not self._writers or (len(self._writers) == 1 and self._amount >= self._much):
            self._writers.add(asyncio.create_task(self._empty(), name="bus-writes"))
        await done

    async def _empty(self) -> None:
        try:
            while self._waiting:
                await self._write_next()
        finally:
            # At once, not when the task is known to be done: whoever comes in between would wait for nobody.
            self._writers = {writer for writer in self._writers if writer is not asyncio.current_task()}

    async def _write_next(self) -> None:
        group = list(self._next())
        try:
            await self._write([request for request, _ in group])
        except Exception as error:  # each caller gets it, or what comes of its own request alone
            if len(group) == 1 or isinstance(error, Unavailable):
                _settle(group, error)
            else:
                await self._one_by_one(group)
        else:
            _settle(group, None)

    def _next(self) -> Iterator[tuple[T, asyncio.Future[None]]]:
        room = self._most
        while self._waiting and room > 0:
            entry = self._waiting.popleft()
            weight = self._weight(entry[0])
            room -= weight
            self._amount -= weight
            yield entry

    async def _one_by_one(self, group: list[tuple[T, asyncio.Future[None]]]) -> None:
        """One that cannot be written must not keep others from it."""
        for entry in group:
            try:
                await self._write([entry[0]])
            except Exception as error:  # its own caller gets it
                _settle([entry], error)
            else:
                _settle([entry], None)

    async def close(self) -> None:
        """What is under way is finished."""
        await asyncio.gather(*self._writers)


def _settle(group: list[tuple[T, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, done in group:
        if done.done():  # its caller has gone
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
