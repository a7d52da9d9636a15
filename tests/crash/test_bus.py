"""Bus processes that kill themselves in the middle of an operation, and others that continue after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from interlock.bus.path.delivery import target_queue
from interlock.bus.registry.snapshot import LATEST
from interlock.bus.telemetry import emit, telemetry_queue
from interlock.wire.bus_events import CommandInvalid, LegacyKeyUsed
from tests.bus.test_alerts import mail_server
from tests.support.accepted_commands import archived_payloads, owe_commands
from tests.support.bus_services import NAME, opened
from tests.support.bus_targets import target
from tests.support.bus_tenants import tenant
from tests.support.deployment import Process
from tests.support.polls import answered
from tests.support.system import System

CASES = {
    ("bus", "replay.selected"),
    ("bus", "replay.sent"),
    ("bus", "alert_mail.sent"),
    ("bus", "monitor.before_commit"),
    ("bus", "archive.written"),
    ("bus", "archive.before_commit"),
    ("bus", "snapshot.written"),
    ("bus", "telemetry.before_commit"),
    ("bus", "telemetry_age_out.before_commit"),
}

pytestmark = pytest.mark.crash


def _bus(system: System, folder: Path, **settings: str) -> Process:
    own = system.kernel.settings
    assert own.state_url is not None
    known = {
        "state_url": own.state_url.get_secret_value(),
        "objects_url": own.objects_root,
        "keys_dir": str(own.signing_keys_dir),
        "retention_seconds": "0.1",
    }
    return Process("bus", ["serve", "bus", "--dir", str(folder)], known | settings, folder / "bus.stderr")


async def _messages(system: System) -> list[dict[str, Any]]:
    async with system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch(
            "select body from interlock.queue_messages where queue = $1 order by message_id",
            telemetry_queue(system.org_id),
        )
    return [event for row in rows for event in json.loads(row["body"])["events"]]


async def test_events_are_delivered_once_if_process_dies_before_commit(system: System, tmp_path: Path) -> None:
    versions = [f"hmac-v{n}" for n in range(25)]
    async with system.kernel.stores.database.transaction() as connection:
        await emit(
            connection, [(system.org_id, LegacyKeyUsed(version_id=each, source="acme/billing")) for each in versions]
        )
    bus = _bus(system, tmp_path)
    try:
        await bus.start("telemetry.before_commit=kill")
        await bus.killed_itself()
        assert await _messages(system) == []
        await bus.start()
        events = await answered(lambda: _messages(system))
        assert [event["version_id"] for event in events] == versions
        assert await bus.stop() == 0
    finally:
        await bus.give_up()


async def test_dropped_events_are_reported_if_process_dies_before_commit(system: System, tmp_path: Path) -> None:
    async with system.kernel.stores.database.transaction() as connection:
        await emit(connection, [(system.org_id, LegacyKeyUsed(version_id="hmac-v1", source="acme/billing"))])
    bus = _bus(system, tmp_path)
    try:
        await bus.start()
        await answered(lambda: _messages(system))
        assert await bus.stop() == 0
        await system.value("update interlock.queue_messages set visible_at = visible_at - interval '15 days'")
        await bus.start("telemetry_age_out.before_commit=kill")
        await bus.killed_itself()
        assert [event["event"] for event in await _messages(system)] == ["snavio.secret.legacy_key_used"]
        await bus.start()
        await answered(lambda: _dropped(system))
        (event,) = await _messages(system)
        assert event["dropped_events"] == 1
        assert await bus.stop() == 0
    finally:
        await bus.give_up()


async def _dropped(system: System) -> bool:
    return any(event["event"] == "snavio.telemetry.dropped" for event in await _messages(system))


async def test_commands_are_archived_once_wherever_the_process_dies(system: System, tmp_path: Path) -> None:
    bus = _bus(system, tmp_path, archive_seconds="0.2")
    try:
        for point in ("archive.written", "archive.before_commit"):
            await owe_commands(system, [point], seconds_ago=10)
            await bus.start(f"{point}=kill")
            await bus.killed_itself()
            await system.value("update interlock.bus_archives set taken_until = interlock.clock()")
        await bus.start()
        await answered(lambda: _nothing_is_owed(system))
        assert await archived_payloads(system) == ["archive.written", "archive.before_commit"]
        assert await bus.stop() == 0
    finally:
        await bus.give_up()


async def _nothing_is_owed(system: System) -> bool:
    return bool(await system.value("select not exists (select 1 from interlock.bus_archive)"))


async def test_alert_is_mailed_and_route_health_recorded_if_process_dies_in_between(
    system: System, tmp_path: Path
) -> None:
    bot = await target(system)
    await system.value(
        "insert into interlock.bus_alert_settings (org_id, event, channels, changed_by) values"
        """ ($1, 'snavio.command.invalid', '[{"kind": "email", "to": "ops@example.org"}]', 'test')""",
        system.org_id,
    )
    async with mail_server() as mail:
        bus = _bus(system, tmp_path, smtp_url=f"smtp://127.0.0.1:{mail.port}", alert_mail_seconds="0.1")
        try:
            await bus.start("monitor.before_commit=kill")
            await bus.killed_itself()
            assert await system.value("select count(*) from interlock.bus_route_health") == 0
            # Not earlier: a process that is killed while it mails keeps the mail for longer than a test waits.
            async with system.kernel.stores.database.transaction() as connection:
                await emit(connection, [(system.org_id, CommandInvalid(reason="bad"))])
            await bus.start("alert_mail.sent=kill")
            await bus.killed_itself()
            assert await system.value("select status from interlock.bus_alert_emails") == "Pending"
            await system.value("update interlock.bus_alert_emails set due_at = interlock.clock()")
            await bus.start()
            await answered(lambda: _delivered(system))
            assert [each["To"] for each in mail.mails] == ["ops@example.org"] * 2
            assert await system.value("select status from interlock.bus_route_health where target = $1", bot.service)
            assert await bus.stop() == 0
        finally:
            await bus.give_up()


async def _delivered(system: System) -> bool:
    return bool(await system.value("select bool_and(status = 'Delivered') from interlock.bus_alert_emails"))


async def test_snapshot_is_used_only_once_complete_if_process_dies_before(system: System, tmp_path: Path) -> None:
    await (await tenant(system)).services("billing")
    objects = system.kernel.access.objects

    async def latest() -> bytes | None:
        return await objects.read(objects.uri(LATEST))

    bus = _bus(system, tmp_path, keys_dir=str(system.kernel.settings.signing_keys_dir), bus_snapshot_seconds="1")
    try:
        await bus.start("snapshot.written=kill")
        await bus.killed_itself()
        assert await latest() is None
        await bus.start()
        assert await answered(latest)
        assert await bus.stop() == 0
    finally:
        await bus.give_up()


async def test_replay_continues_where_a_process_died(system: System, tmp_path: Path) -> None:
    site = await opened(system)
    await site.batch([site.message(payload={"n": n}) for n in range(5)])
    queue = target_queue(system.org_id, NAME)
    await system.value("update interlock.queue_messages set dead_at = interlock.clock() where queue = $1", queue)
    wanted = {"origin": "dead-letters", "reason": "a crash", "filters": {"queue": NAME}, "rate": 1000}
    asked = (await system.user("POST", "/v1/replays", json=wanted)).json()
    keys_dir = str(system.kernel.settings.signing_keys_dir)
    bus = _bus(system, tmp_path, keys_dir=keys_dir)
    try:
        for point in ("replay.selected", "replay.sent"):
            await bus.start(f"{point}=kill")
            await bus.killed_itself()
            await system.value("update interlock.bus_replays set due_at = interlock.clock()")
        await bus.start()
        await answered(lambda: _replayed(system, asked["replay_id"]))
        found = await site.queue(NAME)
        # Sent by the surviving process: the transactions of the others were rolled back.
        assert sorted(message["command"]["payload"]["n"] for message in found) == [*range(5)]
        assert await bus.stop() == 0
    finally:
        await bus.give_up()


async def _replayed(system: System, replay_id: str) -> bool:
    found = (await system.user("GET", f"/v1/replays/{replay_id}")).json()
    return (found["state"], found["sent"]) == ("Completed", 5)
