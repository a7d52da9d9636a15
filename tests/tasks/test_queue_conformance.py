"""The behaviour of all adapters of the queue port. Add a new adapter to ADAPTERS; it must pass unchanged.

`pass_time` advances the clock; an adapter with its own clock waits instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import asyncpg
import pytest

from interlock.clock import ManualClock
from interlock.stores.notifications import Listener, Wakeups
from interlock.stores.postgres import Database
from interlock.tasks import postgres_queue
from interlock.tasks.postgres_queue import PgQueue
from interlock.tasks.queue import Handle, Outgoing, Queue, Received
from tests.support.system import until

MAX_RECEIVES = 3
Q = "work"


@dataclass
class Adapter:
    """A separate queue for each test, with the helpers that the test needs."""

    queue: Queue
    other: Queue
    """The same queue as another process sees it."""
    pass_time: Callable[[float], Awaitable[None]]
    waiting: Callable[[], Awaitable[int]]
    """Returns the number of waiting receivers."""
    lose_notifications: Callable[[], Awaitable[None]]
    drain: Callable[[], None]


@asynccontextmanager
async def _pgqueue(state_url: str, clock: ManualClock | None) -> AsyncIterator[Adapter]:
    async with AsyncExitStack() as stack:
        sides = []
        for _ in range(2):
            database = await Database.open(state_url, clock=clock, name="interlock-test")
            stack.push_async_callback(database.close)
            wakeups = Wakeups()
            sides.append((PgQueue(database, wakeups, max_receives=MAX_RECEIVES), wakeups))
        (queue, wakeups), (other, _) = sides
        listener = Listener(state_url, wakeups)
        listening = asyncio.create_task(listener.run())
        await listener.connected.wait()

        async def stop() -> None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

        stack.push_async_callback(stop)

        async def pass_time(seconds: float) -> None:
            assert clock is not None
            clock.advance(seconds)

        async def waiting() -> int:
            await other.depth(Q)
            return len(wakeups._waiting[f"queue:{Q}"])

        async def lose_notifications() -> None:
            listener.connected.clear()
            connection = await asyncpg.connect(state_url)
            killed = (
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'interlock-listen'"
            )
            await connection.execute(f"{killed} and datname = current_database()")
            await connection.close()

        yield Adapter(queue, other, pass_time, waiting, lose_notifications, wakeups.close)


ADAPTERS = {"pgqueue": _pgqueue}


@pytest.fixture(params=ADAPTERS)
async def adapter(request: pytest.FixtureRequest, state_url: str, clock: ManualClock) -> AsyncIterator[Adapter]:
    """An adapter on a clock that only the test advances."""
    async with ADAPTERS[request.param](state_url, clock) as made:
        yield made


@pytest.fixture(params=ADAPTERS)
async def live(request: pytest.FixtureRequest, state_url: str) -> AsyncIterator[Adapter]:
    """An adapter on the real clock, for long polls."""
    async with ADAPTERS[request.param](state_url, None) as made:
        yield made


def message(n: int, **more: object) -> Outgoing:
    return Outgoing(json.dumps({"n": n}), **more)  # type: ignore[arg-type]


async def receive(queue: Queue, limit: int = 10, visibility: float = 30, wait: float = 0) -> list[Received]:
    return await queue.receive(Q, wait_seconds=wait, limit=limit, visibility_seconds=visibility)


def numbers(messages: list[Received]) -> list[int]:
    return [json.loads(m.body)["n"] for m in messages]


def handle(message: Received) -> Handle:
    return Handle(message.message_id, message.receipt)


# Send and receive


async def test_message_is_received_with_its_body_and_count(adapter: Adapter, clock: ManualClock) -> None:
    await adapter.queue.send(Q, [message(7)])
    (received,) = await receive(adapter.other)
    assert (numbers([received]), received.receives) == ([7], 1)
    assert abs(received.enqueued_at - clock.now()) < timedelta(seconds=2)


async def test_batch_is_received_in_order_up_to_the_limit(adapter: Adapter) -> None:
    for n in range(5):
        await adapter.queue.send(Q, [message(n)])
        await adapter.pass_time(1)
    assert numbers(await receive(adapter.queue, limit=2)) == [0, 1]
    assert numbers(await receive(adapter.queue, limit=10)) == [2, 3, 4]


async def test_empty_batch_sends_nothing(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [])
    assert await receive(adapter.queue) == []


async def test_queues_are_independent(adapter: Adapter) -> None:
    await adapter.queue.send("elsewhere", [message(1, dedupe_key="k")])
    await adapter.queue.send(Q, [message(2, dedupe_key="k")])
    assert numbers(await receive(adapter.queue)) == [2]


async def test_concurrent_receivers_get_disjoint_messages(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(n) for n in range(60)])
    batches = await asyncio.gather(*(receive(q, limit=10) for q in (adapter.queue, adapter.other) * 5))
    taken = [n for batch in batches for n in numbers(batch)]
    taken += numbers(await receive(adapter.queue, limit=100))
    assert sorted(taken) == list(range(60))


async def test_delayed_message_is_invisible_until_due(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1, delay_seconds=10)])
    await adapter.pass_time(9)
    assert await receive(adapter.queue) == []
    await adapter.pass_time(1)
    assert numbers(await receive(adapter.queue)) == [1]


# Visibility


async def test_message_is_redelivered_after_its_visibility_timeout(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1)])
    (first,) = await receive(adapter.queue, visibility=30)
    await adapter.pass_time(29)
    assert await receive(adapter.queue) == []
    await adapter.pass_time(1)
    (second,) = await receive(adapter.queue)
    assert (second.message_id, second.receives) == (first.message_id, 2)
    assert second.receipt != first.receipt


async def test_extend_prolongs_the_visibility_timeout(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1)])
    (received,) = await receive(adapter.queue, visibility=30)
    await adapter.pass_time(20)
    assert await adapter.queue.extend(Q, [handle(received)], 30) == 1
    await adapter.pass_time(29)
    assert await receive(adapter.queue) == []
    await adapter.pass_time(1)
    assert len(await receive(adapter.queue)) == 1


async def test_acked_message_is_deleted(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1), message(2)])
    received = await receive(adapter.queue)
    assert await adapter.queue.ack(Q, [handle(m) for m in received]) == 2
    assert await adapter.queue.ack(Q, [handle(m) for m in received]) == 0
    await adapter.pass_time(3600)
    assert await receive(adapter.queue) == []


async def test_nacked_message_returns_after_its_delay(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1)])
    (received,) = await receive(adapter.queue)
    assert await adapter.queue.nack(Q, [handle(received)], 0) == 1
    (again,) = await receive(adapter.queue)
    assert again.receives == 2
    assert await adapter.queue.nack(Q, [handle(again)], 10) == 1
    assert await receive(adapter.queue) == []
    await adapter.pass_time(10)
    assert len(await receive(adapter.queue)) == 1


async def test_replaced_message_is_redelivered_with_a_new_count(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1)])
    (received,) = await receive(adapter.queue)
    assert await adapter.queue.replace(Q, handle(received), json.dumps({"n": 2})) == 1
    (rest,) = await receive(adapter.other)
    assert (numbers([rest]), rest.receives) == ([2], 1)
    assert await adapter.queue.ack(Q, [handle(received)]) == 0
    assert await adapter.queue.ack(Q, [handle(rest)]) == 1


# Receipts


async def test_stale_receipt_settles_nothing(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1)])
    (stale,) = await receive(adapter.queue, visibility=30)
    await adapter.pass_time(30)
    (fresh,) = await receive(adapter.other, visibility=30)
    old = [handle(stale)]
    assert await adapter.queue.extend(Q, old, 600) == 0
    assert await adapter.queue.nack(Q, old, 0) == 0
    assert await adapter.queue.ack(Q, old) == 0
    assert await adapter.queue.replace(Q, old[0], "{}") == 0
    await adapter.pass_time(29)
    assert await receive(adapter.queue) == []
    assert await adapter.queue.ack(Q, [handle(fresh)]) == 1


async def test_receipt_settles_nothing_in_another_queue(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1)])
    (received,) = await receive(adapter.queue)
    assert await adapter.queue.ack("elsewhere", [handle(received)]) == 0
    assert await adapter.queue.ack(Q, [handle(received)]) == 1


async def test_valid_handles_count_among_stale_ones(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1), message(2)])
    first, second = await receive(adapter.queue)
    nonsense = [Handle("x", "y"), Handle("", ""), Handle("9" * 40, str(uuid4())), Handle("-1", str(uuid4()))]
    mixed = [*nonsense, handle(first), Handle(second.message_id, str(uuid4())), handle(first)]
    assert await adapter.queue.extend(Q, nonsense, 30) == 0
    assert await adapter.queue.ack(Q, mixed) == 1
    assert await adapter.queue.ack(Q, []) == 0
    assert await adapter.queue.ack(Q, [handle(second)]) == 1


# Dedupe


async def test_queued_dedupe_key_is_not_sent_twice(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1, dedupe_key="k")])
    await adapter.other.send(Q, [message(1, dedupe_key="k")])
    await adapter.queue.send(Q, [message(1, dedupe_key="k"), message(1, dedupe_key="k"), message(2)])
    assert sorted(numbers(await receive(adapter.queue))) == [1, 2]
    assert await adapter.queue.depth(Q) == 0


async def test_resent_dedupe_key_rearms_the_message_in_flight(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1, dedupe_key="k")])
    (out,) = await receive(adapter.queue)
    await adapter.queue.send(Q, [message(1, dedupe_key="k")])
    (again,) = await receive(adapter.other)
    assert again.receives == 1
    assert await adapter.queue.ack(Q, [handle(out)]) == 0
    assert await adapter.queue.ack(Q, [handle(again)]) == 1


async def test_dedupe_key_is_free_after_its_message_is_settled(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1, dedupe_key="k")])
    await adapter.queue.ack(Q, [handle(m) for m in await receive(adapter.queue)])
    await adapter.queue.send(Q, [message(2, dedupe_key="k")])
    assert numbers(await receive(adapter.queue)) == [2]


async def test_concurrent_senders_of_one_key_leave_one_message(adapter: Adapter) -> None:
    sends = [q.send(Q, [message(1, dedupe_key="k")]) for q in (adapter.queue, adapter.other) * 10]
    await asyncio.gather(*sends)
    assert len(await receive(adapter.queue, limit=100)) == 1


# Dead letters


async def exhaust(adapter: Adapter) -> None:
    """Receives everything once more than allowed, without settling it."""
    for _ in range(MAX_RECEIVES + 1):
        await receive(adapter.queue, limit=100, visibility=1)
        await adapter.pass_time(1)


async def test_message_received_too_often_is_a_dead_letter(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1)])
    deliveries: list[Received] = []
    for _ in range(MAX_RECEIVES):
        deliveries += await receive(adapter.queue, visibility=1)
        await adapter.pass_time(1)
    assert [delivery.receives for delivery in deliveries] == [1, 2, 3]
    assert await receive(adapter.queue) == []
    assert await adapter.queue.ack(Q, [handle(delivery) for delivery in deliveries]) == 0
    (dead,) = await adapter.queue.dead_letters(Q, 10)
    assert (json.loads(dead.body), dead.message_id) == ({"n": 1}, deliveries[0].message_id)
    assert dead.dead_at >= dead.enqueued_at
    assert await adapter.queue.dead_letter_count(Q) == 1
    assert await adapter.queue.dead_letters("elsewhere", 10) == []


async def test_buried_message_is_a_dead_letter_immediately(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1), message(2)])
    first, second = await receive(adapter.queue, limit=2)
    assert await adapter.queue.bury(Q, [handle(first)]) == 1
    assert await adapter.queue.bury(Q, [handle(first)]) == 0
    assert await adapter.queue.bury("elsewhere", [handle(second)]) == 0
    (dead,) = await adapter.queue.dead_letters(Q, 10)
    assert dead.message_id == first.message_id
    assert await adapter.queue.ack(Q, [handle(second)]) == 1
    assert await adapter.queue.redrive(Q, 10) == 1
    assert [again.message_id for again in await receive(adapter.queue)] == [first.message_id]


async def test_redriven_dead_letters_are_delivered_as_new(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(n) for n in range(3)])
    await exhaust(adapter)
    assert await adapter.queue.redrive(Q, 2) == 2
    received = await receive(adapter.queue)
    assert [m.receives for m in received] == [1, 1]
    assert await adapter.queue.dead_letter_count(Q) == 1
    assert await adapter.queue.redrive(Q, 10) == 1
    assert await adapter.queue.redrive(Q, 10) == 0


async def test_resent_key_of_a_dead_letter_requeues_it(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1, dedupe_key="k")])
    await exhaust(adapter)
    assert await adapter.queue.dead_letter_count(Q) == 1
    await adapter.queue.send(Q, [message(1, dedupe_key="k")])
    assert len(await receive(adapter.queue)) == 1
    assert await adapter.queue.dead_letter_count(Q) == 0


# Statistics


async def test_depth_in_flight_and_age_follow_the_messages(adapter: Adapter) -> None:
    queue = adapter.queue

    async def facts() -> tuple[int, int, float | None]:
        return await queue.depth(Q), await queue.in_flight(Q), await queue.oldest_age(Q)

    assert await facts() == (0, 0, None)
    await queue.send(Q, [message(1), message(2)])
    await queue.send(Q, [message(3, delay_seconds=100)])
    await adapter.pass_time(5)
    assert await facts() == (2, 0, 5.0)
    (first,) = await receive(queue, limit=1)
    assert (await facts())[:2] == (1, 1)
    await queue.ack(Q, [handle(first)])
    assert await facts() == (1, 0, 5.0)
    await adapter.pass_time(95)
    assert (await facts())[0] == 2


# Priorities


async def test_normal_messages_are_received_before_bulk(adapter: Adapter) -> None:
    await adapter.queue.send(Q, [message(1, priority=1), message(2, priority=1)])
    await adapter.pass_time(1)
    await adapter.queue.send(Q, [message(3), message(4)])
    assert numbers(await receive(adapter.queue)) == [3, 4, 1, 2]


async def test_bulk_is_received_during_endless_normal_load(adapter: Adapter) -> None:
    """A tenth of the receives prefer bulk, so a hundred receives without bulk have a probability of 1 in 37,000."""
    await adapter.queue.send(Q, [message(-1, priority=1)])
    for n in range(1000):
        await adapter.queue.send(Q, [message(n), message(n)])
        if numbers(await receive(adapter.queue, limit=1)) == [-1]:
            return
    pytest.fail("bulk starved")


# Long polls


async def test_receive_without_wait_returns_immediately(live: Adapter) -> None:
    assert await receive(live.queue, wait=0) == []


async def test_waiting_receiver_is_woken_by_a_message(live: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_queue, "_POLL_SECONDS", 600.0)
    waiter = asyncio.create_task(receive(live.queue, wait=60))
    await until(live.waiting)
    await live.other.send(Q, [message(1)])
    async with asyncio.timeout(10):
        assert numbers(await waiter) == [1]


async def test_batch_wakes_one_receiver_per_message(live: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_queue, "_POLL_SECONDS", 600.0)
    waiters = [asyncio.create_task(receive(live.queue, limit=1, wait=60)) for _ in range(5)]

    async def all_wait() -> bool:
        return await live.waiting() == 5

    await until(all_wait)
    await live.other.send(Q, [message(n) for n in range(5)])
    async with asyncio.timeout(10):
        batches = await asyncio.gather(*waiters)
    assert sorted(n for batch in batches for n in numbers(batch)) == list(range(5))


@pytest.mark.parametrize("how", ["delayed", "nacked", "unsettled"])
async def test_waiting_receiver_gets_a_message_once_visible(
    live: Adapter, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(postgres_queue, "_POLL_SECONDS", 600.0)
    await live.queue.send(Q, [message(1, delay_seconds=0.3 if how == "delayed" else 0)])
    if how != "delayed":
        (first,) = await receive(live.other, visibility=0.3)
        if how == "nacked":
            await live.other.nack(Q, [handle(first)], 0.3)
    async with asyncio.timeout(10):
        assert numbers(await receive(live.queue, wait=60)) == [1]


async def test_lost_notification_delays_but_loses_no_message(live: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_queue, "_POLL_SECONDS", 0.2)
    waiter = asyncio.create_task(receive(live.queue, wait=60))
    await until(live.waiting)
    await live.lose_notifications()
    await live.other.send(Q, [message(1)])
    async with asyncio.timeout(10):
        assert numbers(await waiter) == [1]


async def test_notifications_work_after_a_reconnect(live: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_queue, "_POLL_SECONDS", 600.0)
    waiter = asyncio.create_task(receive(live.queue, wait=60))
    await until(live.waiting)
    await live.lose_notifications()
    await live.other.send(Q, [message(1)])
    # The message was sent while no connection listened. The poll after the reconnect finds it.
    async with asyncio.timeout(10):
        assert numbers(await waiter) == [1]


async def test_drain_ends_all_waits(live: Adapter) -> None:
    waiters = [asyncio.create_task(receive(live.queue, wait=60)) for _ in range(3)]
    await until(live.waiting)
    live.drain()
    async with asyncio.timeout(10):
        assert await asyncio.gather(*waiters) == [[], [], []]
        assert await receive(live.queue, wait=60) == []
