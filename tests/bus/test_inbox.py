"""The inbox: a service receives only its own messages, with its own API key."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from uuid import uuid4

import pytest

from interlock.bus.loops import TelemetryBatches
from interlock.bus.path.delivery import target_queue
from interlock.bus.telemetry import emit, telemetry_queue
from interlock.client.bus import Consumer, DeliveredMessage, Delivery, TelemetryConsumer
from interlock.wire.bus_events import CommandFailed, FailureReason, LegacyKeyUsed
from tests.support.bus_targets import Target, target
from tests.support.documentation import read
from tests.support.system import System, until


async def test_command_is_received_extended_and_acknowledged_once(shared: System) -> None:
    bot = await target(shared)
    (command_id,) = await bot.send({"text": "hello"})
    (found,) = await bot.received()
    assert found["body"]["metadata"]["id"] == str(command_id)
    assert found["body"]["command"]["payload"] == {"text": "hello"}
    assert await bot.received() == []
    handle = {"message_id": found["message_id"], "receipt": found["receipt"]}
    assert (await bot.call("extend", {"items": [handle], "visibility_seconds": 60})).json() == {"settled": 1}
    assert (await bot.call("nack", {"items": [handle]})).json() == {"settled": 1}
    (again,) = await bot.received()
    assert again["receives"] == 2
    assert (await bot.call("ack", {"items": [handle]})).json() == {"settled": 0}
    handle["receipt"] = again["receipt"]
    assert (await bot.call("ack", {"items": [handle]})).json() == {"settled": 1}


async def test_waiting_receiver_gets_a_command_immediately(shared: System) -> None:
    bot = await target(shared)
    waiting = asyncio.create_task(bot.received(wait_seconds=20))
    await shared.value("select 1")
    await bot.send("now")
    (found,) = await waiting
    assert found["body"]["command"]["payload"] == "now"


async def test_key_reaches_only_queues_of_its_service(shared: System) -> None:
    mine, other = await target(shared), await target(shared)
    await other.send("secret")
    reply = await mine.call("receive", {}, queue=other.queue)
    assert (reply.status_code, reply.json()["code"]) == (403, "queue_not_yours")
    missing = await mine.call("receive", {}, queue="no-such-queue")
    assert missing.json()["detail"].replace("no-such-queue", other.queue) == reply.json()["detail"]
    for what, body in (
        ("extend", {"items": [{"message_id": "1", "receipt": "x"}]}),
        ("ack", {"items": [{"message_id": "1", "receipt": "x"}]}),
        ("nack", {"items": [{"message_id": "1", "receipt": "x"}]}),
        ("redrive", {}),
        ("discard", {}),
    ):
        assert (await mine.call(what, body, queue=other.queue)).status_code == 403
    assert (await mine.call("dead-letters", method="GET", queue=other.queue)).status_code == 403


async def test_service_of_the_same_name_in_another_org_reaches_nothing(shared: System) -> None:
    mine = await target(shared)
    org_id = await shared.value("insert into interlock.orgs (name) values ('rival') returning org_id")
    rival = await target(shared, org_id=org_id)
    await shared.value("update interlock.bus_routes set queue = $1 where target = $2", mine.queue, rival.service)
    await mine.send("secret")
    rival.queue = mine.queue
    assert await rival.received() == []
    assert len(await mine.received()) == 1


async def test_key_without_a_service_receives_nothing(shared: System) -> None:
    bot = await target(shared)
    reply = await shared.user("POST", f"/v1/inbox/{bot.queue}/receive", json={})
    assert reply.status_code == 403


async def test_dead_letters_are_listed_redriven_and_discarded(shared: System) -> None:
    bot = await target(shared)
    await bot.send(*range(5))
    await shared.value(
        "update interlock.queue_messages set dead_at = interlock.clock(), receives = 9 where queue = $1",
        target_queue(bot.org_id, bot.queue),
    )
    page = (await bot.call("dead-letters?limit=2", method="GET")).json()
    rest = (await bot.call(f"dead-letters?cursor={page['next_cursor']}", method="GET")).json()
    dead = page["messages"] + rest["messages"]
    assert [each["body"]["command"]["payload"] for each in dead] == [0, 1, 2, 3, 4]
    ids = [each["message_id"] for each in dead]
    assert (await bot.call("redrive", {"message_ids": [ids[4]]})).json() == {"settled": 1}
    assert (await bot.call("discard", {"message_ids": [ids[0], ids[4], "9223372036854775808"]})).json() == {
        "settled": 1
    }
    assert (await bot.call("redrive", {"limit": 2})).json() == {"settled": 2}
    assert (await bot.call("discard", {})).json() == {"settled": 1}
    assert sorted(each["body"]["command"]["payload"] for each in await bot.received()) == [1, 2, 4]


async def test_telemetry_is_received_by_any_service_of_the_org(shared: System) -> None:
    bot = await target(shared)
    async with shared.kernel.stores.database.transaction() as connection:
        events = [(shared.org_id, LegacyKeyUsed(version_id=f"hmac-v{n}", source="default/bot")) for n in range(10)]
        await emit(connection, events)
    await TelemetryBatches(shared.kernel.stores.database, shared.kernel.settings).run_once()
    async with TelemetryConsumer(shared.gateway_url, bot.key) as consumer:
        (delivery,) = await consumer.receive(wait_seconds=0)
        assert delivery.body.events == [event for _, event in events]
        assert await delivery.ack()
    assert await shared.value("select last_received_at is not null from interlock.bus_telemetry_queues")
    assert await shared.kernel.tasks.queue.depth(telemetry_queue(shared.org_id)) == 0


# The SDK


async def test_consumer_handles_every_command_and_retries_failures(shared: System) -> None:
    bot = await target(shared)
    await bot.send(*range(20))
    done, failed, stop = [], [], asyncio.Event()

    async def handle(delivery: Delivery[DeliveredMessage]) -> None:
        number = delivery.body.command.payload
        if number == 7 and delivery.receives == 1:
            raise ValueError("not yet")
        done.append(number)
        if len(done) == 20:
            stop.set()

    async with Consumer(shared.gateway_url, bot.key, bot.queue) as consumer:
        await consumer.run(
            handle, concurrency=4, stop=stop, on_failure=lambda delivery, error: failed.append((delivery, error))
        )
        assert sorted(done) == list(range(20))
        assert [str(error) for _, error in failed] == ["not yet"]
        assert await consumer.receive(wait_seconds=0) == []


async def test_long_command_stays_with_its_consumer(shared: System) -> None:
    bot = await target(shared)
    await bot.send("slow")
    started, finish, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(_delivery: Delivery[DeliveredMessage]) -> None:
        started.set()
        await finish.wait()
        stop.set()

    async with Consumer(shared.gateway_url, bot.key, bot.queue, visibility_seconds=1.0) as consumer:
        running = asyncio.create_task(consumer.run(handle, stop=stop))
        await started.wait()
        first = await _visible_at(bot)
        while await _visible_at(bot) == first:
            await asyncio.wait({running}, timeout=0.05)
        assert await bot.received() == []
        finish.set()
        await running
    assert await shared.kernel.tasks.queue.depth(target_queue(bot.org_id, bot.queue)) == 0


async def _visible_at(bot: Target) -> object:
    return await bot.system.value(
        "select visible_at from interlock.queue_messages where queue = $1", target_queue(bot.org_id, bot.queue)
    )


# The examples of docs/bus-consuming.md


def _examples() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", read("docs/bus-consuming.md"), re.DOTALL):
        exec(compile(block, "docs/bus-consuming.md", "exec"), found)  # noqa: S102 - our own page
    return found


async def test_examples_of_the_documentation_receive_commands_and_telemetry(
    shared: System, capsys: pytest.CaptureFixture[str]
) -> None:
    bot = await target(shared)
    await shared.value("update interlock.bus_routes set queue = 'posts' where target = $1", bot.service)
    bot.queue = "posts"
    examples = _examples()
    await bot.send({"n": 1})
    assert await examples["one"](shared.gateway_url, bot.key) == {"n": 1}
    await bot.send({"n": 2})
    async with shared.kernel.stores.database.transaction() as connection:
        failure = CommandFailed(reason=FailureReason.ACL_DENY, command_id=uuid4())
        await emit(connection, [(shared.org_id, failure)] * 10)
    await TelemetryBatches(shared.kernel.stores.database, shared.kernel.settings).run_once()
    running = [asyncio.create_task(examples[name](shared.gateway_url, bot.key)) for name in ("main", "listen")]
    printed = ""

    async def all_is_printed() -> bool:
        nonlocal printed
        printed += capsys.readouterr().out
        return "default/billing post {'n': 2}" in printed and f"acl-deny {failure.command_id}" in printed

    await until(all_is_printed)
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)
