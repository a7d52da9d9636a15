"""What a batch of decisions causes, written by one statement: all of it or nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import UNSET, Struct

from interlock.adapters.postgres import Connection, queries
from interlock.bus import telling
from interlock.bus.decision import Decision, Outcome
from interlock.bus.delivered import body
from interlock.bus.deliveries import FULL, Deliveries, messages
from interlock.bus.model import Ban
from interlock.bus.packed import packed
from interlock.bus.queues import target_queue, telemetry_queue
from interlock.failpoints import failpoint
from interlock.wire.bus_events import BusEvent, encoded

_sql = queries("bus_path")

_DELIVERED: Final = Outcome.DELIVERED
HANDOFFS: Final = "bus:handoffs"
"""What waiting slow stages are told under; no queue of a tenant has that name."""


class Facts(Struct, frozen=True, omit_defaults=True):
    """What the fast stage knew and the slow one cannot see."""

    ban: Ban | None = None


_encoder: Final = msgspec.json.Encoder()
_facts: Final = msgspec.json.Decoder(Facts)


def facts(text: str) -> Facts:
    return _facts.decode(text)


class Effects:
    def __init__(self, moment: datetime) -> None:
        self.moment = moment
        """When all of it was accepted."""
        self._messages: defaultdict[str, list[str]] = defaultdict(list)
        """Bodies, by the queue that they go to."""
        self._handoffs: list[tuple[UUID, str, str, str, str, datetime]] = []
        self._events: defaultdict[UUID, list[str]] = defaultdict(list)
        self._deliveries: defaultdict[UUID, list[Deliveries]] = defaultdict(list)
        """What is to be told of those that the fast stage has delivered."""
        self._accepted: defaultdict[UUID, list[str]] = defaultdict(list)
        self.handed_over = 0
        """Events that are in their tenants' queues already."""

    def dispatch(self, org_id: UUID, source: str, decisions: Sequence[Decision], latency: float) -> None:
        """Those that the fast stage has delivered: to a queue, unless a job has it already."""
        lanes: dict[int, tuple[Deliveries, list[str]]] = {}  # by identity: most of a batch goes by the very same route
        accepted: list[str] = []
        latency_ms = round(1000 * latency, 3)
        for decision in decisions:
            envelope, route = decision.envelope, decision.route
            if decision.outcome is not _DELIVERED or envelope is None or route is None:
                continue
            lane = lanes.get(id(route))
            if lane is None:
                bodies = [] if route.queue is None else self._messages[target_queue(org_id, route.queue)]
                lane = (Deliveries(source, route.target, route.name, latency_ms, [], []), bodies)
                lanes[id(route)] = lane
            text = body(envelope, source)
            accepted.append(text)
            lane[1].append(text)
            metadata = envelope.metadata
            if metadata.replayed is UNSET:
                lane[0].ids.append(metadata.id)
                lane[0].timestamps.append(metadata.timestamp)
            else:
                said = metadata, source, route.target, route.name
                self.tell(org_id, telling.delivered(*said, path="fast", latency_seconds=latency))
        if accepted:
            self._accepted[org_id] += accepted
            self._deliveries[org_id] += [deliveries for deliveries, _ in lanes.values()]

    def deliver(self, org_id: UUID, queue: str, text: str) -> None:
        self._messages[target_queue(org_id, queue)].append(text)

    def hand_on(self, org_id: UUID, source: str, reason: str, text: str, ban: Ban | None) -> None:
        """To the slow stage. It is accepted, whatever becomes of it."""
        known = "{}" if ban is None else _encoder.encode(Facts(ban)).decode()
        self._handoffs.append((org_id, source, reason, text, known, self.moment))
        self._accepted[org_id].append(text)

    def tell(self, org_id: UUID, event: BusEvent) -> None:
        self._events[org_id].append(encoded(event).decode())

    @property
    def woken(self) -> list[str]:
        """Who is to be woken once all of it can be seen."""
        return [*self._messages, *([HANDOFFS] if self._handoffs else [])]

    async def write(self, connection: Connection) -> None:
        """In the caller's transaction, or as one of its own."""
        self._hand_over()
        delivered = {
            "queues": [*self._messages],
            # As lines: no JSON text has a break in it, and asyncpg takes its time over every element of an array.
            "bodies": ["\n".join(bodies) for bodies in self._messages.values()],
            "accepted_org_ids": [*self._accepted],
            "accepted": [packed(bodies) for bodies in self._accepted.values()],
            "accepted_in": [len(bodies) for bodies in self._accepted.values()],
            "accepted_at": self.moment,
            "event_org_ids": [*self._events],
            "events": [f"[{','.join(each)}]" for each in self._events.values()],
            "events_in": [len(each) for each in self._events.values()],
        }
        if self._handoffs:
            await _sql.dispatch(connection, **delivered, **self._handed_on())
        else:
            await _sql.deliver(connection, **delivered)
        await failpoint("command.before_commit")

    def _hand_over(self) -> None:
        """Deliveries that fill a message are one. Once: what is written again after a fault is written as it was."""
        waiting, self._deliveries = self._deliveries, defaultdict(list)
        for org_id, found in waiting.items():
            amount = sum(len(each.ids) for each in found)
            if amount < FULL:
                self._events[org_id] += [event for each in found for event in each.events()]
            else:
                self._messages[telemetry_queue(org_id)] += messages(found)
                self.handed_over += amount

    def _handed_on(self) -> dict[str, list[Any]]:
        """Of these nothing is told yet."""
        handoffs = [list(column) for column in zip(*self._handoffs, strict=True)]
        return {
            "handoff_org_ids": handoffs[0],
            "handoff_sources": handoffs[1],
            "handoff_reasons": handoffs[2],
            "handoff_bodies": handoffs[3],
            "handoff_facts": handoffs[4],
            "handoff_received": handoffs[5],
        }


async def wake(connection: Connection, queues: Collection[str]) -> None:
    """At once, or with the caller's transaction. A notice that is lost costs who waits a second, and no command."""
    if queues:
        await _sql.wake(connection, queues=[*queues])
