"""Fates of commands that the slow stage decides: senders wait for them, or read them later."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from interlock.bus.path.slow_stage import BusSweep
from interlock.client.bus import Command, Producer
from interlock.clock import ManualClock
from interlock.errors import CommandPending, CommandRefused, NotFound
from tests.support.bus_services import NAME, PRODUCER, TARGET, Bus, fresh, opened, slow_stage
from tests.support.system import System


@pytest.fixture
async def bus(system: System) -> Bus:
    return await opened(system)


@pytest.fixture
async def deciding(bus: Bus) -> AsyncIterator[Bus]:
    """A bus with a running slow stage."""
    async with slow_stage(bus.system):
        yield bus


async def fate(bus: Bus, command_id: str, *, key: str | None = None, wait: float = 0) -> tuple[int, dict[str, Any]]:
    reply = await bus.system.user("GET", f"/v1/commands/{command_id}", key=key or bus.key, params={"wait": wait})
    return reply.status_code, reply.json()


async def asked(bus: Bus, *ids: str, wait: float = 0) -> list[dict[str, Any]]:
    reply = await bus.system.user("GET", "/v1/commands", key=bus.key, params={"id": ids, "wait": wait})
    assert reply.status_code == 200, reply.text
    results: list[dict[str, Any]] = reply.json()["results"]
    return results


async def test_pending_command_shows_its_fate_after_the_decision(bus: Bus) -> None:
    await bus.lane("strict", dedupe_mode="strict")
    await bus.limit("strict", 1)
    ids = [fresh(), fresh()]
    sent = await bus.batch([bus.message("strict", command_id=command_id) for command_id in ids])
    assert [each["outcome"] for each in sent] == ["pending"] * 2
    assert [each["reason"] for each in await asked(bus, *ids)] == ["dedupe_required"] * 2
    await bus.settle()
    delivered, refused, unknown = await asked(bus, *ids, fresh())
    assert (delivered["outcome"], unknown["outcome"]) == ("delivered", "unknown")
    assert (refused["outcome"], refused["reason"]) == ("failed", "rate-limit-exceeded")
    assert 0 < refused["retry_after_ms"] <= 3_600_000
    assert "mailer/strict" in refused["detail"]
    assert await fate(bus, ids[1]) == (
        200,
        {**refused, "retry_after_ms": pytest.approx(refused["retry_after_ms"], abs=5000)},
    )


async def test_request_with_wait_returns_the_decision_of_the_slow_stage(deciding: Bus) -> None:
    bus = deciding
    await bus.lane("strict", dedupe_mode="strict")
    message = bus.message("strict", command_id=(command_id := fresh()))
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, params={"wait": 20}, content=message)
    assert (reply.status_code, reply.json()["outcome"]) == (202, "delivered")
    body = b'{"commands":[' + b",".join([message, bus.message(), bus.message("strict")]) + b"]}"
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, params={"wait": 20}, content=body)
    assert [each["outcome"] for each in reply.json()["results"]] == ["delivered"] * 3
    assert (await fate(bus, command_id))[1]["outcome"] == "delivered"


async def test_request_with_wait_returns_pending_when_the_time_is_over(bus: Bus) -> None:
    await bus.lane("strict", dedupe_mode="strict")
    message = bus.message("strict", command_id=(command_id := fresh()))
    reply = await bus.system.user("POST", "/v1/commands", key=bus.key, params={"wait": 0.2}, content=message)
    assert reply.json()["outcome"] == "pending"
    waiting = asyncio.create_task(fate(bus, command_id, wait=20))
    await bus.settle()
    assert (await waiting)[1]["outcome"] == "delivered"


async def test_fate_is_shown_to_the_sender_alone(bus: Bus) -> None:
    other = await bus.service("audit")
    await bus.lane("strict", dedupe_mode="strict")
    await bus.send(bus.message("strict", command_id=(command_id := fresh())))
    await bus.settle()
    assert (await fate(bus, command_id))[0] == 200
    assert (await fate(bus, command_id, key=other))[0] == 404
    assert (await fate(bus, command_id, key=bus.system.admin_key))[0] == 403


async def test_fate_is_hidden_from_a_service_of_the_same_name_in_another_org(bus: Bus) -> None:
    await bus.lane("strict", dedupe_mode="strict")
    await bus.send(bus.message("strict", command_id=(command_id := fresh())))
    rival = await bus.system.kernel.access.principals.create_org("rival")
    elsewhere = Bus(System(**{**vars(bus.system), "org_id": rival.org_id}), "")
    elsewhere.key = await elsewhere.service(PRODUCER)
    assert (await fate(elsewhere, command_id))[0] == 404
    assert [each["outcome"] for each in await asked(elsewhere, command_id)] == ["unknown"]


async def test_command_that_is_sent_again_is_pending_until_it_is_decided_again(bus: Bus) -> None:
    await bus.route("strict", dedupe_mode="strict")
    await bus.refreshed()
    command_id = fresh()
    await bus.acl("strict")
    await bus.refreshed()
    await bus.send(bus.message("strict", command_id=command_id))
    await bus.revoke("strict")
    await bus.settle()
    assert (await fate(bus, command_id))[1]["reason"] == "acl-deny"
    await bus.acl("strict")
    await bus.refreshed()
    await bus.send(bus.message("strict", command_id=command_id))
    assert (await fate(bus, command_id))[1]["outcome"] == "pending"
    await bus.settle()
    assert (await fate(bus, command_id))[1]["outcome"] == "delivered"
    await bus.send(bus.message("strict", command_id=command_id))
    await bus.settle()
    assert (await fate(bus, command_id))[1]["outcome"] == "delivered"


async def test_old_fates_are_deleted(still: System, clock: ManualClock) -> None:
    bus = await opened(still)
    await bus.lane("strict", dedupe_mode="strict")
    await bus.send(bus.message("strict", command_id=(command_id := fresh())))
    await bus.settle()
    sweep = BusSweep(still.kernel.stores.database, still.kernel.settings)
    await sweep.run_once()
    assert (await fate(bus, command_id))[0] == 200
    clock.advance(still.kernel.settings.command_fate_seconds + 1)
    await sweep.run_once()
    assert (await fate(bus, command_id))[0] == 404


# The SDK


async def test_two_hundred_sends_beyond_a_limit_are_all_delivered_within_patience(deciding: Bus) -> None:
    bus = deciding
    queue = await bus.lane("busy")
    await bus.limit("busy", 50, 1.0)
    await bus.refreshed()
    async with Producer(bus.system.gateway_url, bus.key, patience=30) as producer:
        verdicts = await asyncio.gather(*(producer.send(TARGET, "busy", n) for n in range(200)))
    assert [verdict.outcome for verdict in verdicts] == ["delivered"] * 200
    assert sorted(message["command"]["payload"] for message in await bus.queue(queue)) == [*range(200)]


async def test_sends_without_patience_raise_for_every_command_beyond_the_limit(deciding: Bus) -> None:
    bus = deciding
    queue = await bus.lane("narrow")
    await bus.limit("narrow", 50)
    await bus.refreshed()
    async with Producer(bus.system.gateway_url, bus.key, patience=0) as producer:
        sends = (producer.send(TARGET, "narrow", n) for n in range(200))
        found = await asyncio.gather(*sends, return_exceptions=True)
    refused = [each for each in found if isinstance(each, CommandRefused)]
    assert (len(refused), len(await bus.queue(queue))) == (150, 50)
    assert Counter(each.verdict.reason for each in refused) == {"rate-limit-exceeded": 150}
    assert all(each.verdict.retry_after_ms > 0 and "retry_after_ms" in each.detail for each in refused)


async def test_send_to_an_unknown_target_is_refused_without_the_slow_stage(bus: Bus) -> None:
    async with Producer(bus.system.gateway_url, bus.key) as producer:
        with pytest.raises(CommandRefused, match="No route leads to the target 'mialer' for the command 'send-mail'"):
            await producer.send("mialer", NAME)


async def test_send_many_waits_for_the_fates_of_several_batches(deciding: Bus) -> None:
    bus = deciding
    queue = await bus.lane("strict", dedupe_mode="strict")
    commands = [Command(target=TARGET, name="strict", payload=n) for n in range(250)]
    async with Producer(bus.system.gateway_url, bus.key) as producer:
        assert {verdict.outcome for verdict in await producer.send_many(commands)} == {"delivered"}
    assert len(await bus.queue(queue)) == 250


async def test_send_says_that_nobody_decides(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.client.bus._FATE_SECONDS", 0.05)
    monkeypatch.setattr("interlock.client.bus._LEAST_FATE_SECONDS", 0.1)
    await bus.lane("strict", dedupe_mode="strict")
    async with Producer(bus.system.gateway_url, bus.key, patience=0) as producer:
        with pytest.raises(CommandPending, match="interlock serve bus") as pending:
            await producer.send(TARGET, "strict")
        command_id = pending.value.verdict.command_id
        assert (await producer.fate(command_id)).outcome == "pending"
        with pytest.raises(NotFound):
            await producer.fate(fresh())
        await bus.settle()
        assert (await producer.fate(command_id)).outcome == "delivered"
