"""A row that cannot be processed holds up no other row of a loop that all orgs share."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest

from interlock.bus.alerts import AlertMail
from interlock.bus.path import slow_stage
from interlock.bus.replay.archive import Archive
from interlock.clock import ManualClock
from interlock.telemetry import SET_ASIDE
from tests.bus.test_alerts import mail_server
from tests.support.accepted_commands import archived_payloads, owe_commands
from tests.support.bus_services import opened
from tests.support.system import System, running


def set_aside(loop: str) -> float:
    return float(SET_ASIDE.labels(loop=loop)._value.get())


async def other_org(system: System) -> UUID:
    """Creates an org whose id sorts before the system's own."""
    org_id: UUID = await system.value(
        "insert into interlock.orgs (org_id, name) values ('00000000-0000-0000-0000-000000000001', 'other')"
        " returning org_id"
    )
    return org_id


@pytest.mark.parametrize("accepted", [b"no json", b"[7]", b"\x28\xb5\x2f\xfd damaged"])
async def test_accepted_commands_that_cannot_be_read_stop_no_other_archive(
    still: System, clock: ManualClock, accepted: bytes
) -> None:
    before = set_aside("archive")
    await still.value(
        "insert into interlock.bus_archive (org_id, accepted, commands_in) values ($1, $2, 1) returning 1",
        await other_org(still),
        accepted,
    )
    await owe_commands(still, ["good"])
    clock.advance(300)
    archive = Archive(still.kernel.stores.database, still.kernel.settings, still.kernel.access.objects)
    assert await archive.run_once() == 1
    assert await archived_payloads(still) == ["good"]
    assert set_aside("archive") == before + 1


async def test_hand_off_that_cannot_be_read_is_given_up_after_its_tries(still: System, clock: ManualClock) -> None:
    bus = await opened(still)
    queue = await bus.lane("sound", dedupe_mode="strict")
    before = set_aside("bus_slow")
    await bus.execute(
        "insert into interlock.bus_handoffs (org_id, source, command_id, reason, body, facts, received_at)"
        " values ($1, 'test/billing', gen_random_uuid(), 'cache_miss', 'no message at all', '{}', interlock.clock())",
        still.org_id,
    )
    for passes in range(1, slow_stage._MAX_TRIES + 1):
        clock.advance(3600)
        await bus.refreshed()
        await bus.send(bus.message("sound"))
        await bus.slow().run_once()
        assert len(await bus.queue(queue)) == passes
    assert set_aside("bus_slow") == before + 1
    assert await still.value("select count(*) from interlock.bus_handoffs") == 0


async def test_alert_mail_that_cannot_be_written_stops_no_other(state_url: str, tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        mail_server() as mail,
        running(state_url, tmp_path, clock, smtp_url=f"smtp://127.0.0.1:{mail.port}") as system,
    ):
        before = set_aside("alert_mail")
        bad = ["a@b\nBcc: c@d", "\u00fc@example.org", '"', "@", "a@[", ",", "a" * 10_000]
        for place, address in enumerate([*bad, "ops@example.org"]):
            await system.value(
                "with alert as (insert into interlock.bus_alerts"
                " (org_id, event, critical, opened_at, last_at, told, sample) values ($1, $2, false, $4, $4, 1, '{}')"
                " returning alert_id)"
                " insert into interlock.bus_alert_emails (alert_id, org_id, address, due_at)"
                " select alert_id, $1, $3, $5 from alert returning 1",
                system.org_id,
                f"event-{place}",
                address,
                clock.now(),
                clock.now() + timedelta(milliseconds=place),
            )
        clock.advance(1)
        sending = AlertMail(system.kernel.stores.database, system.kernel.settings)
        assert await sending.run_once() == len(bad) + 1
        assert "ops@example.org" in [sent["To"] for sent in mail.mails]
        assert set_aside("alert_mail") > before
        delivered = "select status = 'Delivered' from interlock.bus_alert_emails where address = 'ops@example.org'"
        assert await system.value(delivered)
        assert await system.value("select reason from interlock.bus_alert_emails where address like 'a@b%'")
