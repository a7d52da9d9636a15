"""Telemetry: delivery to the tenant's queue, and removal by age."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from interlock.bus.loops import TelemetryAgeOut, TelemetryBatches
from interlock.bus.telemetry import emit, telemetry_queue
from interlock.clock import ManualClock
from interlock.telemetry import SET_ASIDE
from interlock.wire.bus_events import LegacyKeyUsed
from tests.support.system import System


async def _tell(system: System, *versions: str, org_id: UUID | None = None) -> None:
    events = [(org_id or system.org_id, LegacyKeyUsed(version_id=each, source="acme/billing")) for each in versions]
    async with system.kernel.stores.database.transaction() as connection:
        await emit(connection, events)


async def _handed(system: System, org_id: UUID | None = None) -> list[list[dict[str, Any]]]:
    queue = system.kernel.tasks.queue
    found = await queue.receive(
        telemetry_queue(org_id or system.org_id), wait_seconds=0, limit=1000, visibility_seconds=30
    )
    return [json.loads(message.body)["events"] for message in found]


async def _another_org(system: System) -> UUID:
    org_id: UUID = await system.value("insert into interlock.orgs (name) values ('other') returning org_id")
    return org_id


def _batches(system: System) -> TelemetryBatches:
    return TelemetryBatches(system.kernel.stores.database, system.kernel.settings)


async def test_ten_events_are_sent_immediately_and_fewer_after_a_second(still: System, clock: ManualClock) -> None:
    await _tell(still, "a")
    assert await _batches(still).run_once() == 0
    await _tell(still, *"bcdefghijkl")
    assert await _batches(still).run_once() == 2
    ten, two = await _handed(still)
    assert [event["version_id"] for event in ten + two] == [*"abcdefghijkl"]
    assert len(ten) == 10
    await _tell(still, "m")
    clock.advance(1)
    assert await _batches(still).run_once() == 1
    assert await _handed(still) == [
        [{"event": "snavio.secret.legacy_key_used", "version_id": "m", "source": "acme/billing"}]
    ]
    assert await still.value("select count(*) from interlock.bus_telemetry") == 0


async def test_flood_of_one_tenant_does_not_delay_another(still: System, clock: ManualClock) -> None:
    other = await _another_org(still)
    for _ in range(300):
        await _tell(still, "flood", org_id=other)
    await _tell(still, "mine")
    clock.advance(1)
    batches = _batches(still)
    await batches.run_once()
    assert [[event["version_id"] for event in each] for each in await _handed(still)] == [["mine"]]
    assert await still.value("select count(*) from interlock.bus_telemetry where org_id = $1", other) == 100
    assert batches.batching_pause == 0  # more events are ready, so the loop does not wait for them
    await batches.run_once()
    assert batches.batching_pause > 0


async def test_stored_body_with_a_nul_does_not_stop_the_age_out(still: System, clock: ManualClock) -> None:
    """An event of an invalid message repeats its fields; a body that is not telemetry counts as one event."""
    await _tell(still, "a\x00", "b")
    other = await _another_org(still)
    clock.advance(1)
    await _batches(still).run_once()
    insert = "insert into interlock.queue_messages (queue, body) values ($1, $2)"
    for body in ('{"events_in": "x", "events": 5}', '["\\u0000", "\\ud800"]', '{"events_in": 4, "more": "\\u0000"}'):
        await still.value(insert, telemetry_queue(other), body)
    age_out = TelemetryAgeOut(still.kernel.stores.database, still.kernel.settings)
    clock.advance(15 * 86_400)
    assert await age_out.run_once() == 2
    dropped = "select (events -> 0 ->> 'dropped_events')::int from interlock.bus_telemetry where org_id = $1"
    assert await still.value(dropped, still.org_id) == 2
    assert await still.value(dropped, other) == 6
    assert await still.value("select count(*) from interlock.queue_messages") == 0


async def test_unreadable_telemetry_does_not_stop_other_tenants(still: System, clock: ManualClock) -> None:
    before = SET_ASIDE.labels(loop="telemetry")._value.get()
    await still.value(
        "insert into interlock.bus_telemetry (org_id, events, events_in) values ($1, '[7]', 1)",
        await _another_org(still),
    )
    await _tell(still, "a")
    clock.advance(1)
    assert await _batches(still).run_once() == 2
    assert len(await _handed(still)) == 1
    assert SET_ASIDE.labels(loop="telemetry")._value.get() == before + 1


async def test_unconsumed_telemetry_is_dropped_and_reported(still: System, clock: ManualClock) -> None:
    await _tell(still, *"abc")
    clock.advance(1)
    await _batches(still).run_once()
    age_out = TelemetryAgeOut(still.kernel.stores.database, still.kernel.settings)
    clock.advance(14 * 86_400 - 1)
    assert await age_out.run_once() == 0
    clock.advance(1)
    assert await age_out.run_once() == 1
    assert await age_out.run_once() == 0
    clock.advance(1)
    await _batches(still).run_once()
    tenant = await still.value("select name from interlock.orgs where org_id = $1", still.org_id)
    assert await _handed(still) == [
        [
            {
                "event": "snavio.telemetry.dropped",
                "tenant": tenant,
                "dropped_events": 3,
                "reason": "queue_unconsumed",
                "queue_age_seconds": 14.0 * 86_400,
            }
        ]
    ]
