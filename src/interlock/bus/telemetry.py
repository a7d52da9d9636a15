"""Telemetry on its way to the tenant: written in the transaction of the decision that it reports.

Most events report a delivery by the fast stage, and in a batch they differ only in id and time. Ten or more of these
go straight into the tenant's queue as one message in a short form, written with the decision itself:

    {"events_in": 100, "delivered": [{"source": …, "target": …, "name": …, "latency_ms": …, "ids": …, "timestamps": …}]}

Ids and timestamps are separated by spaces. `expanded` makes the events of it when a consumer receives the message.
All other events become rows of `bus_telemetry`, which loops.py groups into messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from msgspec import Raw, Struct, field
from msgspec.json import Decoder, Encoder

from interlock.stores.postgres import Connection, queries
from interlock.wire.bus_events import BusEvent, CommandDelivered, encoded, name_of

_sql = queries(__name__, "telemetry")

FULL: Final = 10
"""Number of events that make a message immediately; fewer wait for more."""
MAX_EVENTS: Final = 100
"""Events in one message, so that PostgreSQL can keep it inside its row."""


def telemetry_queue(org_id: UUID) -> str:
    return f"telemetry:{org_id}"


# Rows of `bus_telemetry`


class Rows(NamedTuple):
    """Columns of `bus_telemetry`, one row per org."""

    org_ids: list[UUID]
    events: list[str]
    """JSON arrays."""
    events_in: list[int]


def rows_of(events: Iterable[tuple[UUID, BusEvent]]) -> Rows:
    """Groups events by org: the one whose service sent the command."""
    by_org: dict[UUID, list[Raw]] = {}
    for org_id, event in events:
        by_org.setdefault(org_id, []).append(Raw(encoded(event)))
    return Rows(list(by_org), [array(each) for each in by_org.values()], [len(each) for each in by_org.values()])


def array(events: Sequence[Raw]) -> str:
    return _encoder.encode(events).decode()


async def emit(connection: Connection, events: Iterable[tuple[UUID, BusEvent]]) -> None:
    """Writes events in the caller's transaction."""
    rows = rows_of(events)
    if rows.org_ids:
        await _sql.emit(connection, org_ids=rows.org_ids, events=rows.events, events_in=rows.events_in)


# Deliveries in short form


class Deliveries(NamedTuple):
    """Commands that one request delivered on one route."""

    source: str
    target: str
    name: str
    latency_ms: float
    ids: list[str]
    timestamps: list[str]

    def events(self) -> Iterator[Raw]:
        for command_id, timestamp in zip(self.ids, self.timestamps, strict=True):
            event = _DeliveredEvent(command_id, timestamp, self.source, self.target, self.name, "fast", self.latency_ms)
            yield Raw(_encoder.encode(event))

    def parts(self) -> Iterator[Deliveries]:
        """Splits into parts of at most one message each."""
        for at in range(0, len(self.ids), MAX_EVENTS):
            yield self._replace(ids=self.ids[at : at + MAX_EVENTS], timestamps=self.timestamps[at : at + MAX_EVENTS])


class _DeliveredEvent(Struct, frozen=True, gc=False, tag_field="event", tag=name_of(CommandDelivered)):
    """`CommandDelivered` with its id and time as the texts of the message."""

    command_id: str
    timestamp: str
    source: str
    target: str
    name: str = field(name="command.name")
    path: str
    dispatch_latency_ms: float


class _Short(Struct, frozen=True, gc=False):
    source: str
    target: str
    name: str
    latency_ms: float
    ids: str
    timestamps: str


class _Message(Struct, gc=False, omit_defaults=True):
    events_in: int = 0
    delivered: list[_Short] = []
    events: list[Raw] = []


_decoder: Final = Decoder(_Message)
_encoder: Final = Encoder()


def messages(deliveries: Sequence[Deliveries]) -> Iterator[str]:
    """Yields bodies for the tenant's queue."""
    waiting: list[Deliveries] = []
    events_in = 0
    for part in (part for each in deliveries for part in each.parts()):
        if events_in + len(part.ids) > MAX_EVENTS:
            yield _message(waiting, events_in)
            waiting, events_in = [], 0
        waiting.append(part)
        events_in += len(part.ids)
    if waiting:
        yield _message(waiting, events_in)


def _message(parts: Sequence[Deliveries], events_in: int) -> str:
    short = [_Short(*part[:4], " ".join(part.ids), " ".join(part.timestamps)) for part in parts]
    return _encoder.encode(_Message(events_in, short)).decode()


def expanded(body: str) -> Raw:
    """Returns a telemetry message in the form that consumers know: `{"events": [...]}`."""
    message = _decoder.decode(body)
    deliveries = [
        Deliveries(each.source, each.target, each.name, each.latency_ms, each.ids.split(), each.timestamps.split())
        for each in message.delivered
    ]
    events = [event for each in deliveries for event in each.events()]
    return Raw(_encoder.encode({"events": [*message.events, *events]}))
