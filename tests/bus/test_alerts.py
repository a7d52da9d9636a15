"""Alerts: opened by telemetry, sent by e-mail and webhook, and flagged to operations if they have no channel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.policy import default
from pathlib import Path
from typing import Any

from interlock.bus.alerts import AlertMail
from interlock.bus.loops import TelemetryBatches
from interlock.bus.telemetry import emit
from interlock.clock import ManualClock
from interlock.wire.bus_events import AbuseDetected, BusEvent, CommandInvalid, LegacyKeyUsed
from tests.support.system import System, running
from tests.support.webhook_receiver import receiving

INVALID = "snavio.command.invalid"


async def _tell(system: System, clock: ManualClock, *events: BusEvent) -> None:
    async with system.kernel.stores.database.transaction() as connection:
        await emit(connection, [(system.org_id, event) for event in events])
    clock.advance(1)
    await TelemetryBatches(system.kernel.stores.database, system.kernel.settings).run_once()


async def _set(system: System, event: str, *channels: dict[str, str]) -> Any:
    return await system.user("PUT", f"/v1/alert-channels/{event}", json={"channels": list(channels)})


async def _feed(system: System) -> list[dict[str, Any]]:
    alerts: list[dict[str, Any]] = (await system.user("GET", "/v1/alerts")).json()["alerts"]
    return alerts


async def test_many_events_of_a_kind_open_one_alert(still: System, clock: ManualClock) -> None:
    clock.advance(300 - clock.now().timestamp() % 300)
    await _tell(still, clock, *[CommandInvalid(reason=f"bad-{n}") for n in range(30)])
    await _tell(still, clock, CommandInvalid(reason="later"), LegacyKeyUsed(version_id="hmac-v1", source="a/b"))
    (alert,) = await _feed(still)
    assert (alert["event"], alert["told"], alert["critical"]) == (INVALID, 31, True)
    assert alert["sample"] == {"event": INVALID, "reason": "bad-0"}
    clock.advance(300)
    await _tell(still, clock, CommandInvalid(reason="next"))
    assert [alert["told"] for alert in await _feed(still)] == [1, 31]


async def test_critical_alert_without_a_channel_is_flagged_to_operations(still: System, clock: ManualClock) -> None:
    abuse = AbuseDetected(source="a/b", affected_targets=["x"], total_violations=3, ban_applied_until=clock.now())
    await _tell(still, clock, CommandInvalid(reason="bad"), abuse)
    (flagged,) = (await still.user("GET", "/v1/operations/alerts")).json()["alerts"]
    assert (flagged["event"], flagged["unrouted"]) == (INVALID, True)
    done = await still.user("POST", f"/v1/operations/alerts/{flagged['alert_id']}/resolve")
    assert done.json()["resolved_by"] is not None
    assert (await still.user("GET", "/v1/operations/alerts")).json()["alerts"] == []


async def test_only_alerts_that_are_not_critical_can_be_turned_off(still: System, clock: ManualClock) -> None:
    refused = await _set(still, INVALID)
    assert (refused.status_code, refused.json()["code"]) == (400, "critical_alert")
    assert (await _set(still, "snavio.fairness.abuse_detected")).status_code == 200
    abuse = AbuseDetected(source="a/b", affected_targets=["x"], total_violations=3, ban_applied_until=clock.now())
    await _tell(still, clock, abuse)
    assert await _feed(still) == []
    assert (await _set(still, "snavio.command.delivered")).status_code == 404
    for wrong in (
        {"kind": "email", "to": "ops@example.org"},  # no mail server runs here
        {"kind": "webhook", "to": "no-such-webhook"},
        {"kind": "dashboard", "to": "somewhere"},
    ):
        reply = await _set(still, INVALID, wrong)
        assert (reply.status_code, reply.json()["code"]) == (400, "bad_channel")
    listed = (await still.user("GET", "/v1/alert-channels")).json()["events"]
    assert {each["event"]: len(each["channels"]) for each in listed}["snavio.fairness.abuse_detected"] == 0


async def test_alert_calls_its_webhook_once_with_a_signature(state_url: str, tmp_path: Path) -> None:
    clock = ManualClock()
    async with receiving() as receiver, running(state_url, tmp_path, clock, outbound_allow=["127.0.0.1"]) as system:
        made = await system.user("POST", "/v1/webhooks", json={"name": "oncall", "url": f"{receiver.url}/alerts"})
        assert (await _set(system, INVALID, {"kind": "webhook", "to": "oncall"})).status_code == 200
        await _tell(system, clock, CommandInvalid(reason="bad"), CommandInvalid(reason="bad"))
        await _tell(system, clock, CommandInvalid(reason="bad"))
        await system.pass_of("webhooks")
        (call,) = receiver.at("/alerts")
        event = call.verified(made.json()["secret"], clock.now().timestamp())
        assert event.alert is not None
        assert (event.type, event.alert.event, event.alert.told) == ("bus.alert", INVALID, 2)
        assert (await system.user("GET", "/v1/operations/alerts")).json()["alerts"] == []


# E-mail


@dataclass
class MailServer:
    port: int = 0
    mails: list[Any] = field(default_factory=list)
    refusals: int = 0
    said: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 here\r\n")
        while line := await reader.readline():
            words = line.split()
            self.said.append(line)
            if words[0].upper() == b"EHLO":
                writer.write(b"250-here\r\n250 AUTH PLAIN LOGIN\r\n")
            elif words[0].upper() == b"DATA":
                writer.write(b"354 go on\r\n")
                raw = await reader.readuntil(b"\r\n.\r\n")
                self.mails.append(message_from_bytes(raw[:-5], policy=default))
                writer.write(b"250 taken\r\n")
            elif words[0].upper() == b"RCPT" and self.refusals:
                self.refusals -= 1
                writer.write(b"451 not now\r\n")
            else:
                writer.write(b"221 bye\r\n" if words[0].upper() == b"QUIT" else b"250 well\r\n")
            await writer.drain()
        writer.close()


@asynccontextmanager
async def mail_server() -> AsyncIterator[MailServer]:
    mail = MailServer()
    server = await asyncio.start_server(mail.serve, "127.0.0.1", 0)
    mail.port = server.sockets[0].getsockname()[1]
    async with server:
        yield mail


async def test_alert_mail_has_a_readable_subject_and_a_json_body(state_url: str, tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        mail_server() as mail,
        running(state_url, tmp_path, clock, smtp_url=f"smtp://127.0.0.1:{mail.port}") as system,
    ):
        for wrong in ("no address", "a@b\nBcc: c@d", "@example.org"):
            assert (await _set(system, INVALID, {"kind": "email", "to": wrong})).status_code == 400
        assert (await _set(system, INVALID, {"kind": "email", "to": "ops@example.org"})).status_code == 200
        await _tell(system, clock, CommandInvalid(reason="bad"), CommandInvalid(reason="bad"))
        mail.refusals = 1
        sending = AlertMail(system.kernel.stores.database, system.kernel.settings)
        assert await sending.run_once() == 1
        assert mail.mails == []
        assert await sending.run_once() == 0
        clock.advance(10)
        assert await sending.run_once() == 1
        assert await sending.run_once() == 0
        (sent,) = mail.mails
        assert sent["To"] == "ops@example.org"
        assert sent["Subject"].endswith(f"{INVALID} (2 times)")
        assert json.loads(sent.get_content())["sample"] == {"event": INVALID, "reason": "bad"}


async def test_password_is_not_sent_to_a_mail_server_without_starttls(state_url: str, tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        mail_server() as mail,
        running(state_url, tmp_path, clock, smtp_url=f"smtp://ops:a-password@127.0.0.1:{mail.port}") as system,
    ):
        assert (await _set(system, INVALID, {"kind": "email", "to": "ops@example.org"})).status_code == 200
        await _tell(system, clock, CommandInvalid(reason="bad"))
        assert await AlertMail(system.kernel.stores.database, system.kernel.settings).run_once() == 1
        assert not mail.mails
        assert {line.split()[0].upper() for line in mail.said} == {b"EHLO"}
        assert "smtps://" in await system.value("select reason from interlock.bus_alert_emails")
