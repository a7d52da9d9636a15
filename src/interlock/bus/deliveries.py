"""What telemetry says of commands that the fast stage has delivered, from the decision to the tenant.

Most of telemetry is of these, and of a batch all but the id and the time is the same. Where ten or more come together
they are a message already, in a short form, written with the decision itself:

    {"events_in": 100, "delivered": [{"source": …, "target": …, "name": …, "latency_ms": …, "ids": …, "timestamps": …}]}

Ids and timestamps are texts with blanks between them. The events are made of it when somebody receives it. Fewer are
owed as events, like everything else that is told (telemetry.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from msgspec import Raw, Struct
from msgspec.json import Decoder, Encoder

from interlock.wire.bus_events import CommandDelivered, name_of

FULL: Final = 10
"""So many events are a message; fewer wait for others."""
MOST: Final = 100
"""In a message: it stays small enough to be kept beside its row."""

_EVENT: Final = name_of(CommandDelivered)


class Deliveries(NamedTuple):
    """Delivered by one request on one route."""

    source: str
    target: str
    name: str
    latency_ms: float
    ids: list[str]
    timestamps: list[str]

    def events(self) -> Iterator[str]:
        """As text: all that stands between quotes was let in by patterns that know no character which JSON escapes."""
        rest = (
            f'"source":"{self.source}","target":"{self.target}","command.name":"{self.name}","path":"fast",'
            f'"dispatch_latency_ms":{self.latency_ms}}}'
        )
        for command_id, timestamp in zip(self.ids, self.timestamps, strict=True):
            yield f'{{"event":"{_EVENT}","command_id":"{command_id}","timestamp":"{timestamp}",{rest}'

    def parts(self) -> Iterator[Deliveries]:
        """No longer than a message."""
        for at in range(0, len(self.ids), MOST):
            yield self._replace(ids=self.ids[at : at + MOST], timestamps=self.timestamps[at : at + MOST])

    def short(self) -> str:
        return (
            f'{{"source":"{self.source}","target":"{self.target}","name":"{self.name}","latency_ms":{self.latency_ms},'
            f'"ids":"{" ".join(self.ids)}","timestamps":"{" ".join(self.timestamps)}"}}'
        )


def messages(deliveries: Sequence[Deliveries]) -> Iterator[str]:
    """Bodies for the tenant's queue."""
    waiting: list[Deliveries] = []
    events_in = 0
    for part in (part for each in deliveries for part in each.parts()):
        if events_in + len(part.ids) > MOST:
            yield _message(waiting, events_in)
            waiting, events_in = [], 0
        waiting.append(part)
        events_in += len(part.ids)
    if waiting:
        yield _message(waiting, events_in)


def _message(parts: Sequence[Deliveries], events_in: int) -> str:
    return f'{{"events_in":{events_in},"delivered":[{",".join([part.short() for part in parts])}]}}'


class _Short(Struct, frozen=True, gc=False):
    source: str
    target: str
    name: str
    latency_ms: float
    ids: str
    timestamps: str


class _Message(Struct, gc=False):
    delivered: list[_Short] = []
    events: list[Raw] = []


_decoder: Final = Decoder(_Message)
_encoder: Final = Encoder()


def told(body: str) -> Raw:
    """A message of telemetry as its consumers know it: `{"events": [...]}`."""
    message = _decoder.decode(body)
    deliveries = [
        Deliveries(each.source, each.target, each.name, each.latency_ms, each.ids.split(), each.timestamps.split())
        for each in message.delivered
    ]
    events = [Raw(event) for each in deliveries for event in each.events()]
    return Raw(_encoder.encode({"events": [*message.events, *events]}))
