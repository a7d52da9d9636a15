"""Gateways and slow stages that die in the middle of a decision, and the state of the commands that they had."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from interlock.bus.model import Ban, BanKind
from interlock.bus.path.fairness import report
from interlock.http.listener import bind
from tests.support.bus_services import NAME, PRODUCER, TARGET, Bus, fresh, opened
from tests.support.deployment import Process
from tests.support.polls import answered
from tests.support.system import System

CASES = {
    ("gateway", "command.before_commit"),
    ("bus", "slow.before_commit"),
    ("bus", "audit.before_commit"),
}

pytestmark = pytest.mark.crash


def _settings(system: System) -> dict[str, str]:
    settings = system.kernel.settings
    assert settings.state_url is not None
    return {
        "state_url": settings.state_url.get_secret_value(),
        "objects_url": settings.objects_root,
        "keys_dir": str(settings.signing_keys_dir),
    }


async def _delivered(bus: Bus, queue: str) -> list[str]:
    return sorted(message["metadata"]["id"] for message in await bus.queue(queue))


async def test_strict_command_is_delivered_once_if_slow_stage_dies_before_commit(
    system: System, tmp_path: Path
) -> None:
    bus = await opened(system)
    queue = await bus.lane("strict", dedupe_mode="strict")
    await bus.limit("strict", 30)
    ids = sorted(fresh() for _ in range(20))
    messages = [bus.message("strict", command_id=command_id) for command_id in ids]
    assert {r["outcome"] for r in await bus.batch(messages)} == {"pending"}
    process = Process(
        "bus", ["serve", "bus", "--dir", str(tmp_path / "bus")], _settings(system), tmp_path / "bus.stderr"
    )
    try:
        await process.start("slow.before_commit=kill")
        await process.killed_itself()
        assert await _delivered(bus, queue) == []
        await bus.batch(messages)
        await process.start()
        await answered(lambda: _all_decided(bus))
        assert await _delivered(bus, queue) == ids
        assert await system.value("select used from interlock.bus_windows where name = 'strict'") == 20
        outcomes = [await bus.outcomes(command_id) for command_id in ids]
        assert all(sorted(each) == ["delivered", "duplicate"] for each in outcomes)
        assert await process.stop() == 0
    finally:
        await process.give_up()


async def _all_decided(bus: Bus) -> bool:
    return bool(await bus.system.value("select not exists (select 1 from interlock.bus_handoffs)"))


async def test_batch_leaves_nothing_if_gateway_dies_before_commit(system: System, tmp_path: Path) -> None:
    bus = await opened(system)
    queue = await bus.lane("plain")
    door = bind("127.0.0.1:0", setting="gateway")
    folder = str(system.kernel.settings.dir)
    process = Process(
        "gateway", ["serve", "gateway", "--dir", folder], _settings(system), tmp_path / "gateway.stderr", door
    )
    ids = sorted(fresh() for _ in range(5))
    body = b'{"commands":[' + b",".join(bus.message("plain", command_id=command_id) for command_id in ids) + b"]}"
    try:
        await process.start("command.before_commit=kill")
        with suppress(httpx.TransportError):  # the reply is lost
            await system.http.post(
                f"{process.url}/v1/commands", content=body, headers={"Authorization": f"Bearer {bus.key}"}
            )
        await process.killed_itself()
        assert await _delivered(bus, queue) == []
        assert await bus.events() == []
        await process.start()
        await process.ready()
        reply = await system.http.post(
            f"{process.url}/v1/commands", content=body, headers={"Authorization": f"Bearer {bus.key}"}
        )
        assert [result["outcome"] for result in reply.json()["results"]] == ["delivered"] * 5
        assert await _delivered(bus, queue) == ids
        assert await process.stop() == 0
    finally:
        await process.give_up()


async def test_fate_of_a_pending_command_is_readable_after_its_gateway_was_killed(
    system: System, tmp_path: Path
) -> None:
    bus = await opened(system)
    await bus.lane("strict", dedupe_mode="strict")
    await bus.limit("strict", 1)
    door = bind("127.0.0.1:0", setting="gateway")
    folder = str(system.kernel.settings.dir)
    process = Process(
        "gateway", ["serve", "gateway", "--dir", folder], _settings(system), tmp_path / "gateway.stderr", door
    )
    ids, headers = [fresh(), fresh()], {"Authorization": f"Bearer {bus.key}"}
    body = b'{"commands":[' + b",".join(bus.message("strict", command_id=each) for each in ids) + b"]}"
    try:
        await process.start()
        await process.ready()
        waiting = asyncio.create_task(
            system.http.post(f"{process.url}/v1/commands", params={"wait": 30}, content=body, headers=headers)
        )
        await answered(lambda: _handed_over(bus))
        await process.kill()
        with pytest.raises(httpx.TransportError):
            await waiting
        await process.start()
        await process.ready()
        fates = asyncio.create_task(
            system.http.get(f"{process.url}/v1/commands", params={"id": ids, "wait": 30}, headers=headers)
        )
        await bus.settle()
        results = (await fates).json()["results"]
        assert [(each["outcome"], each.get("reason")) for each in results] == [
            ("delivered", None),
            ("failed", "rate-limit-exceeded"),
        ]
        assert await process.stop() == 0
    finally:
        await process.give_up()


async def _handed_over(bus: Bus) -> bool:
    return bool(await bus.system.value("select exists (select 1 from interlock.bus_handoffs)"))


async def test_abuse_is_reported_once_if_auditor_dies_before_commit(system: System, tmp_path: Path) -> None:
    bus = await opened(system)
    ban = Ban(f"test/{PRODUCER}", BanKind.WARM, 0.0, TARGET, NAME, 0.91, 0.12, 60)
    async with system.kernel.stores.database.transaction() as connection:
        await report(connection, [(system.org_id, ban)] * 3, {})
    settings = _settings(system) | {"audit_seconds": "0.1", "telemetry_seconds": "3600"}
    process = Process("bus", ["serve", "bus", "--dir", str(tmp_path / "bus")], settings, tmp_path / "bus.stderr")
    try:
        await process.start("audit.before_commit=kill")
        await process.killed_itself()
        assert await bus.events() == []
        assert await system.value("select count(*) from interlock.bus_bans") == 0
        await process.start("audit.before_commit=kill*3")
        await process.killed_itself()
        assert [event["event"] for event in await bus.events()] == ["snavio.fairness.abuse_detected"]
    finally:
        await process.give_up()


@pytest.mark.parametrize("on", ["lane", "source"])
async def test_eight_dispatchers_together_never_exceed_a_limit(system: System, tmp_path: Path, on: str) -> None:
    bus = await opened(system)
    queue = await bus.lane("narrow")
    await (bus.limit("narrow", 250) if on == "lane" else bus.source_limit(250))
    await bus.refreshed()
    ids = [fresh() for _ in range(400)]
    messages = [bus.message("narrow", command_id=command_id) for command_id in ids]
    for start in range(0, 400, 10):
        await bus.batch(messages[start : start + 10])
    await bus.looked_after()
    settings = _settings(system) | {"telemetry_seconds": "3600"}
    dispatchers = [
        Process(
            f"bus-{n}", ["serve", "bus", "--dir", str(tmp_path / f"bus-{n}")], settings, tmp_path / f"bus-{n}.stderr"
        )
        for n in range(8)
    ]
    try:
        for process in dispatchers:
            await process.start()
        await answered(lambda: _all_decided(bus))
        delivered = await _delivered(bus, queue)
        assert len(delivered) == len(set(delivered))
        # The rest are tokens that this gateway has prefetched and not used.
        assert 0.95 * 250 <= len(delivered) <= 250
        failed = [event for event in await bus.events() if event["event"] == "snavio.command.failed"]
        assert len(failed) == 400 - len(delivered)
        for process in dispatchers:
            assert await process.stop() == 0
    finally:
        for process in dispatchers:
            await process.give_up()
