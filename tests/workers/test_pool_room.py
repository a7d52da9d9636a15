"""The number of tasks that a pool of children lets a worker claim. The child is real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from interlock.wire.attempts import Completion, Event
from interlock.workers.claimed_tasks import Held, Pace
from interlock.workers.pool import Pool
from interlock.workers.process import Launch


class Nobody:
    """A report sink that must not receive reports."""

    def complete(self, completion: Completion) -> None:
        raise AssertionError(completion)

    def completed(self, held: Held, result: bytes) -> None:
        raise AssertionError(held, result)

    def printed(self, held: Held, stream: str, line: str) -> None:
        raise AssertionError(held, stream, line)

    def release(self, held: Iterable[Held]) -> None:
        assert not list(held)

    def emit(self, held: Held, events: list[Event], answer: Callable[[int, str | None], None]) -> None:
        raise AssertionError(held, events, answer)

    def fail(self, error: BaseException) -> None:
        raise error


@pytest.mark.parametrize("shares", [(300, 100), (1, 2, 3), (7, 70, 700)])
async def test_last_free_child_is_available_after_calls_in_flight_end(shares: tuple[int, ...]) -> None:
    pace = Pace(100)
    known = ("echo", b"{}")
    pace.learn(known, 0.001)
    pool = Pool(Launch(), pace, Nobody(), 60)
    pool.start(1)
    while not pool.room(None):
        pool.room_made.clear()
        await pool.room_made.wait()
    in_flight = [pool.reserved(tasks, known) for tasks in shares]
    for reservation in in_flight:
        reservation.__enter__()
    assert pool.room(None) == 0
    for reservation in in_flight:
        reservation.__exit__(None, None, None)
    assert pool.room(None) == 1
    pool.drain()
    async with asyncio.timeout(30):
        await pool.ended()
