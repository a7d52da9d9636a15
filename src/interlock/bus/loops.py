"""The background loops of `interlock serve bus`.

Two of them deliver telemetry to the queues of tenants, and drop the events that no consumer receives:

decision ─┬─► bus_telemetry ─┬─ 10 events, or the oldest waits 1 s ────┐
          │                  └─ a pass takes a share of each tenant's events: no tenant delays another
          │                                                            ├─► a message in the tenant's queue
          └─ 10 deliveries at once, or more (telemetry.py) ────────────┘     ├─► its consumer
                                                                             └─ unconsumed for 14 days ─► dropped, and
                                                                                reported
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec
from msgspec import UNSET, Raw, Struct, field

from interlock.access.secrets import Seal
from interlock.bus.alerts import AlertMail, Monitor, Raised, count_alerts, count_misroutes, raise_alerts
from interlock.bus.metrics import TELEMETRY_DROPPED, TELEMETRY_EVENTS, TELEMETRY_OLDEST
from interlock.bus.model import Registry
from interlock.bus.path.fairness import Auditor
from interlock.bus.path.ingress import Ingress
from interlock.bus.path.slow_stage import BusSweep, SlowStage
from interlock.bus.registry.keys import KeyRotation, ServiceKeys
from interlock.bus.replay.archive import Archive, ArchiveRetention
from interlock.bus.replay.requests import ArchiveSelection
from interlock.bus.replay.sender import ReplaySender
from interlock.bus.telemetry import FULL, emit, telemetry_queue
from interlock.failpoints import failpoint
from interlock.processes.loop import Gathering, Periodic, Service
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.objects import Objects
from interlock.stores.postgres import CONTENT_ERRORS, Connection, Database, Row, queries, set_aside
from interlock.wire.bus_events import CommandFailed, FailureReason, TelemetryDropped, name_of

_sql = queries(__name__, "telemetry")

_TENANTS: Final = 500
_EACH: Final = 200
"""Maximum rows of one tenant in one pass."""
_AGED: Final = 500
_FIRST: Final = UUID(int=0)
_FAILED: Final = name_of(CommandFailed)


class _Kind(Struct, gc=False):
    """The fields of an event that alerts and route health need."""

    event: str
    reason: str = ""
    target: str = ""
    name: str = field(name="command.name", default="")

    @property
    def is_misroute(self) -> bool:
        return self.event == _FAILED and self.reason == FailureReason.ROUTE_MISSING and bool(self.target and self.name)


_events = msgspec.json.Decoder(list[Raw])
_kinds = msgspec.json.Decoder(list[_Kind])


class TelemetryBatches(Gathering):
    """Takes events, groups them into messages and enqueues these in one transaction: none is lost or duplicated here.

    On a busy bus, a pass for every ten events would take processor time from commands.
    """

    name = "telemetry"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.telemetry_seconds / 4
        self._database = database
        self._wait = settings.telemetry_seconds
        self._alert_seconds = settings.alert_seconds
        self._after = _FIRST

    async def run_once(self) -> int:
        async with self._database.transaction() as connection:
            found = await _sql.tenants_due(
                connection, after=self._after, wait_seconds=self._wait, full=FULL, limit=_TENANTS
            )
            self._after = found[-1]["org_id"] if len(found) == _TENANTS else _FIRST
            if not found:
                return 0
            rows = await _sql.take(connection, org_ids=[row["org_id"] for row in found], each=_EACH)
            more = max(Counter(row["org_id"] for row in rows).values(), default=0) == _EACH
            self.batching_pause = 0.0 if more or len(found) == _TENANTS else self._wait / 10
            taken = [*filter(None, map(self._decoded, sorted(rows, key=lambda row: row["batch_id"])))]
            await self._raise(connection, taken)
            await self._hand_over(connection, taken)
            await failpoint("telemetry.before_commit")
        for kind, count in sum((each.counts for each in taken), Counter[str]()).items():
            TELEMETRY_EVENTS.labels(event=kind).inc(count)
        return len(rows)

    def _decoded(self, row: Row) -> _Row | None:
        try:
            return _Row(row)
        except CONTENT_ERRORS as error:
            set_aside(self.name, error, org_id=str(row["org_id"]))
            return None

    async def _raise(self, connection: Connection, taken: Sequence[_Row]) -> None:
        raised: dict[tuple[UUID, str], Raised] = {}
        misroutes = Counter[tuple[UUID, str, str]]()
        for each in taken:
            for kind, event in zip(each.kinds, each.events, strict=True):
                count_alerts(raised, each.org_id, kind.event, event)
                if kind.is_misroute:
                    misroutes[each.org_id, kind.target, kind.name] += 1
        await count_misroutes(connection, misroutes)
        await raise_alerts(connection, raised, seconds=self._alert_seconds, now=self._database.clock.now())

    async def _hand_over(self, connection: Connection, taken: Sequence[_Row]) -> None:
        by_org: dict[UUID, list[Raw]] = {}
        for each in taken:
            by_org.setdefault(each.org_id, []).extend(each.events)
        messages = [
            (org_id, msgspec.json.encode({"events": events[at : at + FULL]}).decode())
            for org_id, events in by_org.items()
            for at in range(0, len(events), FULL)
        ]
        if messages:
            await _sql.hand_over(
                connection,
                queues=[telemetry_queue(org_id) for org_id, _ in messages],
                bodies=[body for _, body in messages],
            )


class _Row:
    """A decoded row of `bus_telemetry`."""

    def __init__(self, row: Row) -> None:
        self.org_id: UUID = row["org_id"]
        self.events = _events.decode(row["events"])
        self.kinds = _kinds.decode(row["events"])
        self.counts = Counter(kind.event for kind in self.kinds)


class TelemetryAgeOut(Periodic):
    """Drops old telemetry, and reports it: tenants need not consume it, and it must not grow without bound."""

    name = "telemetry_age_out"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.retention_seconds
        self._database = database
        self._age = settings.telemetry_days * 86_400
        self._after = _FIRST

    async def run_once(self) -> int:
        async with self._database.transaction() as connection:
            rows: list[Row] = await _sql.age_out(
                connection, after=self._after, tenants=_TENANTS, age_seconds=self._age, limit=_AGED
            )
            dropped = [(row["org_id"], _dropped(row)) for row in rows if row["events_in"]]
            await emit(connection, dropped)
            await failpoint("telemetry_age_out.before_commit")
        self._after = rows[-1]["org_id"] if len(rows) == _TENANTS else _FIRST
        TELEMETRY_OLDEST.set(max((row["waiting_seconds"] or 0.0 for row in rows), default=0.0))
        TELEMETRY_DROPPED.inc(sum(event.dropped_events for _, event in dropped))
        return len(dropped)


def _dropped(row: Row) -> TelemetryDropped:
    return TelemetryDropped(
        tenant=row["tenant"],
        dropped_events=row["events_in"],
        reason="queue_unconsumed",
        queue_age_seconds=round(row["age_seconds"], 3),
        last_received_at=row["last_received_at"] or UNSET,
    )


def services(
    settings: Settings, database: Database, objects: Objects, wakeups: Wakeups, ingress: Ingress, registry: Registry
) -> list[Service]:
    archive = Archive(database, settings, objects)
    return [
        SlowStage(database, settings, wakeups),
        BusSweep(database, settings),
        Auditor(database, settings),
        TelemetryBatches(database, settings),
        TelemetryAgeOut(database, settings),
        archive,
        ArchiveRetention(database, settings),
        AlertMail(database, settings),
        Monitor(database, settings),
        KeyRotation(ServiceKeys(database, settings, Seal(settings.signing_keys_dir))),
        ReplaySender(database, settings, ArchiveSelection(database, settings, objects, archive), registry, ingress),
    ]
