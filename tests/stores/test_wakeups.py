"""Wake-ups by topic: none is lost between a check and the wait, and each wakes one waiter."""

from __future__ import annotations

import asyncio

from interlock.stores.notifications import Wakeups

SOON = 0.01
LATE = 60.0


async def waiting(wakeups: Wakeups, topic: str, count: int) -> list[asyncio.Task[bool]]:
    """Starts tasks and returns them once all are waiting."""
    tasks = [asyncio.create_task(wakeups.wait(topic, LATE)) for _ in range(count)]
    while len(wakeups._waiting[topic]) < count:
        await asyncio.wait(tasks, timeout=0)
    return tasks


async def test_wake_before_the_wait_is_not_lost() -> None:
    wakeups = Wakeups()
    wakeups.wake("a")
    assert await wakeups.wait("a", LATE) is True
    assert await wakeups.wait("a", SOON) is False


async def test_wake_releases_one_waiter_of_its_topic() -> None:
    wakeups = Wakeups()
    tasks = await waiting(wakeups, "a", 3)
    others = await waiting(wakeups, "b", 1)
    wakeups.wake("a")
    done, left = await asyncio.wait([*tasks, *others], return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(left)) == (1, 3)
    wakeups.close()
    await asyncio.gather(*tasks, *others)


async def test_waiter_that_timed_out_consumes_no_wake() -> None:
    wakeups = Wakeups()
    assert await wakeups.wait("a", SOON) is False
    (gone,) = await waiting(wakeups, "a", 1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    (still,) = await waiting(wakeups, "a", 1)
    wakeups.wake("a")
    assert await still is True


async def test_new_connection_wakes_all_waiters() -> None:
    wakeups = Wakeups()
    tasks = await waiting(wakeups, "a", 3) + await waiting(wakeups, "b", 2)
    wakeups.wake_all()
    assert await asyncio.gather(*tasks) == [True] * 5


async def test_close_ends_current_and_later_waits() -> None:
    wakeups = Wakeups()
    tasks = await waiting(wakeups, "a", 2)
    wakeups.close()
    await asyncio.gather(*tasks)
    assert await wakeups.wait("a", LATE) is False
