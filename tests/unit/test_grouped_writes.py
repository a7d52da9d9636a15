"""Writes that wait for each other are made together, and fail apart."""

from __future__ import annotations

import asyncio

import pytest

from interlock.bus.writing import GroupedWrites
from interlock.errors import Unavailable


class Store:
    """Writes when it is let; refuses what it is told to."""

    def __init__(self, *, refuses: str = "", error: type[Exception] = ValueError) -> None:
        self.groups: list[list[str]] = []
        self.open = asyncio.Event()
        self.entered = asyncio.Semaphore(0)
        self._refuses = refuses
        self._error = error

    async def write(self, group: list[str]) -> None:
        self.groups.append(group)
        self.entered.release()
        await self.open.wait()
        if self._refuses and self._refuses in group:
            raise self._error(self._refuses)


def writes(store: Store, most: int = 100, much: int = 1) -> GroupedWrites[str]:
    return GroupedWrites(store.write, weight=len, most=most, much=much)


async def begin(grouped: GroupedWrites[str], store: Store, requests: str) -> list[asyncio.Task[None]]:
    """One task a letter. The first two are being written, the others wait."""
    tasks = []
    for letter in requests:
        tasks.append(asyncio.create_task(grouped.put(letter)))
        if len(tasks) <= 2:
            await store.entered.acquire()
    await asyncio.wait(tasks, timeout=0)
    return tasks


async def test_what_waits_while_two_writes_are_under_way_is_written_by_the_next() -> None:
    store = Store()
    grouped = writes(store)
    tasks = await begin(grouped, store, "abcde")
    assert store.groups == [["a"], ["b"]]
    store.open.set()
    await asyncio.gather(*tasks)
    assert store.groups == [["a"], ["b"], ["c", "d", "e"]]


async def test_little_waits_for_the_write_that_is_under_way_and_much_does_not() -> None:
    store = Store()
    grouped = writes(store, much=4)
    tasks = [asyncio.create_task(grouped.put("a"))]
    await store.entered.acquire()
    tasks += [asyncio.create_task(grouped.put(each)) for each in "bcd"]
    await asyncio.wait(tasks, timeout=0)
    assert store.groups == [["a"]]
    tasks.append(asyncio.create_task(grouped.put("e")))
    await store.entered.acquire()
    assert store.groups == [["a"], ["b", "c", "d", "e"]]
    tasks += [asyncio.create_task(grouped.put(each)) for each in ("fghi", "j")]
    await asyncio.wait(tasks, timeout=0)
    store.open.set()
    await asyncio.gather(*tasks)
    assert store.groups[2:] == [["fghi", "j"]]


async def test_a_group_holds_no_more_than_it_may() -> None:
    store = Store()
    grouped = writes(store, most=2)
    tasks = await begin(grouped, store, "abcdefg")
    store.open.set()
    await asyncio.gather(*tasks)
    assert sorted("".join(group) for group in store.groups) == ["a", "b", "cd", "ef", "g"]


async def test_one_that_cannot_be_written_fails_alone() -> None:
    store = Store(refuses="d")
    grouped = writes(store)
    tasks = await begin(grouped, store, "abcde")
    store.open.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in outcomes] == [type(None), type(None), type(None), ValueError, type(None)]
    assert store.groups[2:] == [["c", "d", "e"], ["c"], ["d"], ["e"]]


async def test_a_store_that_is_away_is_not_asked_once_for_each() -> None:
    store = Store(refuses="d", error=Unavailable)
    grouped = writes(store)
    tasks = await begin(grouped, store, "abcde")
    store.open.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in outcomes[2:]] == [Unavailable] * 3
    assert store.groups[2:] == [["c", "d", "e"]]


async def test_a_caller_that_has_gone_keeps_nobody_from_being_answered() -> None:
    store = Store()
    grouped = writes(store)
    gone, *others = await begin(grouped, store, "abcd")
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    store.open.set()
    await asyncio.gather(*others)
    await grouped.close()
    assert store.groups == [["a"], ["b"], ["c", "d"]]


async def test_one_that_comes_as_the_last_writers_end_is_written() -> None:
    store = Store()
    store.open.set()
    grouped = writes(store)

    async def twice() -> None:
        await grouped.put("a")
        await grouped.put("c")

    async with asyncio.timeout(10):
        await asyncio.gather(twice(), grouped.put("b"))
    assert store.groups == [["a", "b"], ["c"]]
