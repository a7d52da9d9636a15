"""Telemetry of deliveries: short in the queue, complete events for the consumer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.bus.inbox import TELEMETRY
from interlock.bus.loops import TelemetryAgeOut
from interlock.bus.metrics import TELEMETRY_EVENTS
from interlock.bus.model import Decision, Outcome, Route
from interlock.bus.path import reports
from interlock.bus.path.persistence import Dispatched, Effects
from interlock.bus.telemetry import FULL, MAX_EVENTS, Deliveries, expanded, messages, telemetry_queue
from interlock.client.bus import TelemetryConsumer
from interlock.clock import ManualClock
from interlock.wire.bus_events import CommandDelivered, decoded
from interlock.wire.commands import Metadata, read
from tests.conftest import copied
from tests.support.bus_services import Bus, fresh, opened
from tests.support.signed_commands import signed
from tests.support.system import System, running

DELIVERED = "snavio.command.delivered"
STAMP = "2026-11-16T22:00:00.123Z"
_lanes = st.builds(
    lambda name, latency, ids: Deliveries("acme/billing", "mailer", name, latency, ids, [STAMP] * len(ids)),
    st.sampled_from(["send-mail", "drop.mail"]),
    st.floats(0, 1e6).map(lambda latency: round(latency, 3)),
    st.lists(st.uuids().map(str), min_size=1, max_size=250),
)


def _events(body: str) -> list[CommandDelivered]:
    events = msgspec.json.decode(expanded(body), type=dict[str, list[msgspec.Raw]])["events"]
    found = [decoded(bytes(event)) for event in events]
    assert all(isinstance(event, CommandDelivered) for event in found)
    return found  # type: ignore[return-value]


@given(st.lists(_lanes, min_size=1, max_size=6))
def test_received_events_equal_deliveries_and_messages_stay_small(lanes: list[Deliveries]) -> None:
    bodies = [*messages(lanes)]
    expected = [
        reports.delivered(
            Metadata(id=command_id, timestamp=STAMP, type="", version_id="", hmac=""),
            *(lane.source, lane.target, lane.name),
            path="fast",
            latency_seconds=lane.latency_ms / 1000,
        )
        for lane in lanes
        for command_id in lane.ids
    ]
    assert [event for body in bodies for event in _events(body)] == expected
    assert [decoded(bytes(event)) for lane in lanes for event in lane.events()] == expected
    sizes = [json.loads(body)["events_in"] for body in bodies]
    assert sizes == [len(_events(body)) for body in bodies]
    assert max(sizes) <= MAX_EVENTS
    assert len(bodies) <= sum(-(-len(lane.ids) // MAX_EVENTS) for lane in lanes)


def test_message_of_events_is_received_unchanged() -> None:
    body = '{"events":[{"event":"snavio.telemetry.dropped","tenant":"acme"}]}'
    assert json.loads(bytes(expanded(body))) == json.loads(body)


@pytest.fixture
async def bus(postgres_url: str, template: str, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Bus]:
    """A system without a process that delivers telemetry."""
    async with copied(postgres_url, template) as url, running(url, tmp_path, clock) as system:
        yield await opened(system)


async def _waiting(bus: Bus) -> tuple[int, int]:
    """Returns the number of messages in the tenant's queue, and of rows that wait for it."""
    return (
        await bus.system.kernel.tasks.queue.depth(telemetry_queue(bus.system.org_id)),
        await bus.system.value("select count(*) from interlock.bus_telemetry"),
    )


async def _sent(bus: Bus, count: int) -> list[str]:
    ids = [fresh() for _ in range(count)]
    results = await bus.batch([bus.message(command_id=each) for each in ids])
    assert {result["outcome"] for result in results} == {"delivered"}
    return ids


async def test_ten_deliveries_make_a_message_and_fewer_wait(bus: Bus) -> None:
    bus.system.kernel.bus.ingress._shield._rng = lambda: 1.0
    few = await _sent(bus, FULL - 1)
    assert await _waiting(bus) == (0, 1)
    counted = TELEMETRY_EVENTS.labels(event=DELIVERED)._value.get()
    many = await _sent(bus, FULL)
    assert await _waiting(bus) == (1, 1)
    assert TELEMETRY_EVENTS.labels(event=DELIVERED)._value.get() == counted + FULL
    events = await bus.events()
    assert sorted(event["command_id"] for event in events) == sorted(few + many)
    assert {event["event"] for event in events} == {DELIVERED}


async def test_consumers_and_dead_letters_have_complete_events(bus: Bus) -> None:
    ids = await _sent(bus, 2 * MAX_EVENTS)
    async with TelemetryConsumer(bus.system.gateway_url, bus.key) as consumer:
        first, second = await consumer.receive(wait_seconds=0)
        told_of = [event for each in (first, second) for event in each.body.events]
        assert [str(event.command_id) for event in told_of if isinstance(event, CommandDelivered)] == ids
        assert await first.ack()
    await bus.execute("update interlock.queue_messages set dead_at = now() where queue like 'telemetry:%'")
    page = await bus.system.user("GET", f"/v1/inbox/{TELEMETRY}/dead-letters", key=bus.key)
    (dead,) = page.json()["messages"]
    assert [event["command_id"] for event in dead["body"]["events"]] == ids[MAX_EVENTS:]


async def test_last_receive_of_telemetry_is_known_to_within_seconds(bus: Bus, clock: ManualClock) -> None:
    moments = []
    async with TelemetryConsumer(bus.system.gateway_url, bus.key) as consumer:
        for seconds in (0, 9, 2):
            clock.advance(seconds)
            await consumer.receive(wait_seconds=0)
            moments.append(await bus.system.value("select last_received_at from interlock.bus_telemetry_queues"))
    first, again, later = moments
    assert (again - first, later - first) == (timedelta(0), timedelta(seconds=11))


async def test_dropped_messages_are_counted_by_their_events(bus: Bus, clock: ManualClock) -> None:
    await _sent(bus, 15)
    clock.advance(14 * 86_400)
    age_out = TelemetryAgeOut(bus.system.kernel.stores.database, bus.system.kernel.settings)
    assert await age_out.run_once() == 1
    (dropped,) = [event for event in await bus.events() if event["event"] == "snavio.telemetry.dropped"]
    assert dropped["dropped_events"] == 15


async def test_repeated_write_after_a_fault_reports_once(still: System) -> None:
    effects = _delivered(still.org_id, 12, still.kernel.stores.clock.now())
    database = still.kernel.stores.database
    async with database.connection() as connection:
        fault = connection.transaction()
        await fault.start()
        await effects.write(connection)
        await fault.rollback()
    async with database.transaction() as connection:
        await effects.write(connection)
    (row,) = await _bodies(still)
    assert len(_events(row)) == 12
    assert effects.queued_events == 12


async def test_each_tenant_of_a_shared_write_gets_its_own_telemetry(still: System) -> None:
    other: UUID = await still.value("insert into interlock.orgs (name) values ('other') returning org_id")
    now = still.kernel.stores.clock.now()
    effects = _delivered(still.org_id, 12, now)
    _deliver(effects, other, 11, now)
    async with still.kernel.stores.database.transaction() as connection:
        await effects.write(connection)
    found = {}
    for org_id in (still.org_id, other):
        (body,) = await _bodies(still, org_id)
        found[org_id] = {event.source for event in _events(body)}
    assert found == {still.org_id: {f"{still.org_id}/a"}, other: {f"{other}/a"}}


def _delivered(org_id: UUID, count: int, now: datetime) -> Effects:
    effects = Effects(now)
    _deliver(effects, org_id, count, now)
    return effects


def _deliver(effects: Effects, org_id: UUID, count: int, now: datetime) -> None:
    route = Route("mailer", "send-mail", queue="mail")
    envelopes = [read(signed(now.timestamp())) for _ in range(count)]
    decisions = [Decision(Outcome.DELIVERED, envelope, route=route) for envelope in envelopes]
    effects.dispatch(org_id, Dispatched.of(f"{org_id}/a", decisions), timedelta(milliseconds=3).total_seconds())


async def _bodies(system: System, org_id: UUID | None = None) -> list[Any]:
    async with system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch(
            "select body from interlock.queue_messages where queue = $1", telemetry_queue(org_id or system.org_id)
        )
    return [row["body"] for row in rows]
