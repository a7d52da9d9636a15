"""What the fast stage has delivered of one request, as its targets get it.

It is written down as soon as it is decided, while the messages are in the processor's cache; they are not kept. By the
time of the write a dozen other requests have come, and each would be fetched from memory again, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET

from interlock.bus.decision import Decision, Outcome
from interlock.bus.delivered import body
from interlock.bus.deliveries import Deliveries
from interlock.bus.envelope import Metadata
from interlock.bus.model import Route


class Lane(NamedTuple):
    """Of one route."""

    route: Route
    bodies: list[str]
    ids: list[str]
    """Of those that are no replays, with the times below."""
    timestamps: list[str]
    replayed: list[Metadata]


class Dispatched(NamedTuple):
    source: str
    lanes: list[Lane]
    bodies: list[str]
    """Of all lanes, in the order in which they came."""

    def deliveries(self, latency: float) -> Iterator[Deliveries]:
        latency_ms = round(1000 * latency, 3)
        for lane in self.lanes:
            if lane.ids:
                named = self.source, lane.route.target, lane.route.name
                yield Deliveries(*named, latency_ms, lane.ids, lane.timestamps)


def dispatched(source: str, decisions: Sequence[Decision]) -> Dispatched:
    lanes: dict[int, Lane] = {}  # by identity: most of a batch goes by the very same route
    bodies = []
    for decision in decisions:
        envelope, route = decision.envelope, decision.route
        if decision.outcome is not Outcome.DELIVERED or envelope is None or route is None:
            continue
        lane = lanes.get(id(route))
        if lane is None:
            lane = lanes[id(route)] = Lane(route, [], [], [], [])
        text = body(envelope, source)
        bodies.append(text)
        lane.bodies.append(text)
        metadata = envelope.metadata
        if metadata.replayed is UNSET:
            lane.ids.append(metadata.id)
            lane.timestamps.append(metadata.timestamp)
        else:
            lane.replayed.append(metadata)
    return Dispatched(source, [*lanes.values()], bodies)
