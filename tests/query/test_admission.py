"""Slots for queries: their number, the queue, refusals, and fairness between orgs."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from interlock.errors import TooManyRequests
from interlock.query.admission import Places

A, B, C = (UUID(int=number) for number in (1, 2, 3))


class Crowd:
    """Queries that arrive, wait, run and end under control of the test."""

    def __init__(self, limit: int, queue: int, seconds: float = 30.0) -> None:
        self.places = Places(limit, queue=queue, seconds=seconds)
        self.running: list[str] = []
        self.refused: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, org: UUID) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._query(name, org))
        await self.settled()

    async def _query(self, name: str, org: UUID) -> None:
        try:
            async with self.places.place(org):
                self.running.append(name)
                try:
                    await self._ends[name].wait()
                finally:
                    self.running.remove(name)
        except TooManyRequests:
            self.refused.append(name)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await self.settled()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await self.settled()

    async def settled(self) -> None:
        """Waits until everything that can happen without the test has happened."""
        loop = asyncio.get_running_loop()
        for _ in range(5):
            turn = loop.create_future()
            loop.call_soon(turn.set_result, None)
            await turn

    async def clear(self) -> None:
        for name in list(self._tasks):
            await self.leave(name)


async def test_waiting_query_starts_when_a_slot_is_released() -> None:
    crowd = Crowd(limit=2, queue=2)
    for name in ("a1", "a2", "a3"):
        await crowd.come(name, A)
    assert crowd.running == ["a1", "a2"]
    assert (crowd.places.running, crowd.places.waiting) == (2, 1)
    await crowd.end("a1")
    assert crowd.running == ["a2", "a3"]
    await crowd.clear()
    assert (crowd.places.running, crowd.places.waiting) == (0, 0)


async def test_full_queue_refuses_immediately_with_retry_after() -> None:
    crowd = Crowd(limit=1, queue=1)
    for name in ("a1", "a2"):
        await crowd.come(name, A)
    with pytest.raises(TooManyRequests) as refused:
        async with crowd.places.place(A):
            pytest.fail("there was no place")
    assert int(refused.value.headers["Retry-After"]) >= 1
    await crowd.clear()


async def test_waiting_query_is_refused_after_the_timeout() -> None:
    crowd = Crowd(limit=1, queue=1, seconds=0.01)
    await crowd.come("a1", A)
    await crowd.come("a2", A)
    await crowd._tasks["a2"]
    assert crowd.refused == ["a2"]
    assert crowd.places.waiting == 0
    await crowd.clear()


async def test_without_a_queue_excess_queries_are_refused() -> None:
    crowd = Crowd(limit=1, queue=0)
    await crowd.come("a1", A)
    await crowd.come("a2", A)
    assert crowd.refused == ["a2"]
    await crowd.clear()


async def test_org_gets_at_most_half_of_the_slots_while_others_wait() -> None:
    crowd = Crowd(limit=4, queue=10)
    for number in range(8):
        await crowd.come(f"a{number}", A)
    assert crowd.running == ["a0", "a1", "a2", "a3"]
    await crowd.come("b0", B)
    await crowd.come("b1", B)
    await crowd.end("a0")
    await crowd.end("a1")
    assert crowd.running == ["a2", "a3", "b0", "b1"]
    await crowd.clear()


async def test_single_org_may_use_all_slots() -> None:
    crowd = Crowd(limit=3, queue=3)
    for number in range(5):
        await crowd.come(f"a{number}", A)
    await crowd.end("a0")
    assert crowd.running == ["a1", "a2", "a3"]
    await crowd.clear()


async def test_org_with_most_waiting_queries_makes_room_for_others() -> None:
    crowd = Crowd(limit=1, queue=3)
    for number in range(4):
        await crowd.come(f"a{number}", A)
    await crowd.come("b0", B)
    assert crowd.refused == ["a3"]
    await crowd.come("c0", C)
    assert crowd.refused == ["a3", "a2"]
    await crowd.come("c1", C)
    assert crowd.refused == ["a3", "a2", "c1"], "each waits as often as the others then"
    await crowd.clear()


async def test_cancelled_waiter_holds_no_slot() -> None:
    crowd = Crowd(limit=1, queue=2)
    for name in ("a1", "a2", "a3"):
        await crowd.come(name, A)
    await crowd.leave("a2")
    await crowd.end("a1")
    assert crowd.running == ["a3"]
    await crowd.clear()
    assert (crowd.places.running, crowd.places.waiting) == (0, 0)


async def test_waiter_cancelled_at_admission_passes_its_slot_on() -> None:
    crowd = Crowd(limit=1, queue=2)
    for name in ("a1", "a2", "a3"):
        await crowd.come(name, A)
    crowd._ends["a1"].set()
    await asyncio.wait({crowd._tasks["a1"]})
    await crowd.leave("a2")
    assert crowd.running == ["a3"]
    await crowd.clear()
    assert crowd.places.running == 0
