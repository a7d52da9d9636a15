"""Messages below the low-water mark of a queue are found by the next scan from the beginning."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import pytest

from interlock.clock import ManualClock
from interlock.stores import low_water
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Database
from interlock.tasks.postgres_queue import PgQueue
from interlock.tasks.queue import Handle, Outgoing, Received


@pytest.fixture
async def queue(state_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PgQueue]:
    """A queue for which scanning from the beginning has become expensive."""
    monkeypatch.setattr(low_water, "_CHEAP_SECONDS", 0.0)
    monkeypatch.setattr(low_water, "_SHARE", 1e-9)
    database = await Database.open(state_url, clock=clock)
    made = PgQueue(database, Wakeups(), bulk_share=0)
    for _ in range(3):
        assert await receive(made) == []
    yield made
    await database.close()


async def receive(queue: PgQueue) -> list[Received]:
    return await queue.receive("work", wait_seconds=0, limit=10, visibility_seconds=30)


async def commit_late(state_url: str, clock: ManualClock, body: str) -> None:
    """Inserts a message in a transaction that began a minute ago and commits only now."""
    connection = await asyncpg.connect(state_url)
    sql = "insert into interlock.queue_messages (queue, body, visible_at) values ('work', $1, $2)"
    await connection.execute(sql, body, clock.now() - timedelta(minutes=1))
    await connection.close()


async def test_message_below_the_mark_waits_for_a_full_scan(
    queue: PgQueue, state_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commit_late(state_url, clock, '"late"')
    await queue.send("work", [Outgoing('"now"')])
    assert [message.body for message in await receive(queue)] == ['"now"']
    assert await receive(queue) == []
    monkeypatch.setattr(low_water, "_SHARE", 1.0)
    assert [message.body for message in await receive(queue)] == ['"late"']


async def test_message_of_a_late_commit_is_received_immediately(
    state_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the time at which its transaction began, and later messages have been received since."""
    monkeypatch.setattr(low_water, "_CHEAP_SECONDS", 0.0)
    monkeypatch.setattr(low_water, "_SHARE", 1e-9)
    monkeypatch.setattr(low_water, "_SLACK", timedelta(0))
    database, writer = await Database.open(state_url), await Database.open(state_url, size=1)
    queue = PgQueue(database, Wakeups(), bulk_share=0)
    for _ in range(3):
        assert await receive(queue) == []
    async with writer.transaction() as late:
        await late.execute("insert into interlock.queue_messages (queue, body) values ('work', '\"late\"')")
        await queue.send("work", [Outgoing('"now"')])
        assert [message.body for message in await receive(queue)] == ['"now"']
        assert await receive(queue) == []
    assert [message.body for message in await receive(queue)] == ['"late"']
    await writer.close()
    await database.close()


async def test_returned_or_due_messages_are_never_below_the_mark(queue: PgQueue, clock: ManualClock) -> None:
    await queue.send("work", [Outgoing('"delayed"', delay_seconds=20), Outgoing('"lost"')])
    assert [message.body for message in await receive(queue)] == ['"lost"']
    clock.advance(25)
    assert [message.body for message in await receive(queue)] == ['"delayed"']
    clock.advance(3600)
    assert sorted(message.body for message in await receive(queue)) == ['"delayed"', '"lost"']


async def test_normal_messages_do_not_move_the_mark_of_bulk(queue: PgQueue, clock: ManualClock) -> None:
    await queue.send("work", [Outgoing(f'"bulk {n}"', priority=1) for n in range(3)])
    for _ in range(3):
        clock.advance(60)
        await queue.send("work", [Outgoing('"normal"') for _ in range(10)])
        taken = await receive(queue)
        assert {message.body for message in taken} == {'"normal"'}
        await queue.ack("work", [Handle(message.message_id, message.receipt) for message in taken])
    assert [message.body for message in await receive(queue)] == ['"bulk 0"', '"bulk 1"', '"bulk 2"']
