"""Wake-ups by topic: none is lost between looking and waiting, and one wakes one."""

from __future__ import annotations

import asyncio

from interlock.adapters.notifications import Wakeups

SOON = 0.01
LATE = 60.0


async def waiting(wakeups: Wakeups, topic: str, count: int) -> list[asyncio.Task[bool]]:
    """Tasks that have begun to wait."""
    tasks = [asyncio.create_task(wakeups.wait(topic, LATE)) for _ in range(count)]
    while len(wakeups._waiting[topic]) < count:
        await asyncio.wait(tasks, timeout=0)
    return tasks


async def test_a_wake_that_comes_before_the_wait_is_not_lost() -> None:
    wakeups = Wakeups()
    wakeups.wake("a")
    assert await wakeups.wait("a", LATE) is True
    assert await wakeups.wait("a", SOON) is False


async def test_a_wake_releases_one_waiter_of_its_topic() -> None:
    wakeups = Wakeups()
    tasks = await waiting(wakeups, "a", 3)
    others = await waiting(wakeups, "b", 1)
    wakeups.wake("a")
    done, left = await asyncio.wait([*tasks, *others], return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(left)) == (1, 3)
    wakeups.close()
    await asyncio.gather(*tasks, *others)


async def test_a_waiter_that_gave_up_takes_no_wake_with_it() -> None:
    wakeups = Wakeups()
    assert await wakeups.wait("a", SOON) is False
    (gone,) = await waiting(wakeups, "a", 1)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    (still,) = await waiting(wakeups, "a", 1)
    wakeups.wake("a")
    assert await still is True


async def test_a_new_connection_wakes_everybody() -> None:
    wakeups = Wakeups()
    tasks = await waiting(wakeups, "a", 3) + await waiting(wakeups, "b", 2)
    wakeups.wake_all()
    assert await asyncio.gather(*tasks) == [True] * 5


async def test_closing_ends_all_waits_now_and_later() -> None:
    wakeups = Wakeups()
    tasks = await waiting(wakeups, "a", 2)
    wakeups.close()
    await asyncio.gather(*tasks)
    assert await wakeups.wait("a", LATE) is False
