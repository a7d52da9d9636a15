"""Concurrent writes are grouped, and fail individually."""

from __future__ import annotations

import asyncio

import pytest

from interlock.bus.path.persistence import GroupCommit
from interlock.errors import Unavailable


class Store:
    """Blocks each write until it is released, and rejects a given item."""

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


def writes(store: Store, limit: int = 100, much: int = 1) -> GroupCommit[str]:
    return GroupCommit(store.write, weight=len, max_weight=limit, busy_weight=much)


async def begin(grouped: GroupCommit[str], store: Store, requests: str) -> list[asyncio.Task[None]]:
    """Starts a task per letter. The first two are being written, the others wait."""
    tasks = []
    for letter in requests:
        tasks.append(asyncio.create_task(grouped.put(letter)))
        if len(tasks) <= 2:
            await store.entered.acquire()
    await asyncio.wait(tasks, timeout=0)
    return tasks


async def test_requests_waiting_for_two_writes_share_the_next() -> None:
    store = Store()
    grouped = writes(store)
    tasks = await begin(grouped, store, "abcde")
    assert store.groups == [["a"], ["b"]]
    store.open.set()
    await asyncio.gather(*tasks)
    assert store.groups == [["a"], ["b"], ["c", "d", "e"]]


async def test_second_write_starts_only_under_load() -> None:
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


async def test_weight_of_a_group_is_limited() -> None:
    store = Store()
    grouped = writes(store, limit=2)
    tasks = await begin(grouped, store, "abcdefg")
    store.open.set()
    await asyncio.gather(*tasks)
    assert sorted("".join(group) for group in store.groups) == ["a", "b", "cd", "ef", "g"]


async def test_request_that_cannot_be_written_fails_alone() -> None:
    store = Store(refuses="d")
    grouped = writes(store)
    tasks = await begin(grouped, store, "abcde")
    store.open.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in outcomes] == [type(None), type(None), type(None), ValueError, type(None)]
    assert store.groups[2:] == [["c", "d", "e"], ["c"], ["d"], ["e"]]


async def test_unavailable_store_is_not_retried_per_request() -> None:
    store = Store(refuses="d", error=Unavailable)
    grouped = writes(store)
    tasks = await begin(grouped, store, "abcde")
    store.open.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in outcomes[2:]] == [Unavailable] * 3
    assert store.groups[2:] == [["c", "d", "e"]]


async def test_cancelled_caller_does_not_block_the_others() -> None:
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


async def test_request_arriving_as_the_writer_ends_is_written() -> None:
    store = Store()
    store.open.set()
    grouped = writes(store)

    async def twice() -> None:
        await grouped.put("a")
        await grouped.put("c")

    async with asyncio.timeout(10):
        await asyncio.gather(twice(), grouped.put("b"))
    assert store.groups == [["a", "b"], ["c"]]
