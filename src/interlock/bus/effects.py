"""What a batch of decisions causes, written by one statement: all of it or nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.adapters.postgres import Connection, queries
from interlock.bus import telling
from interlock.bus.deliveries import FULL, Deliveries, messages
from interlock.bus.dispatched import Dispatched
from interlock.bus.model import Ban
from interlock.bus.packed import packed
from interlock.bus.queues import target_queue, telemetry_queue
from interlock.failpoints import failpoint
from interlock.wire.bus_events import BusEvent, encoded

_sql = queries("bus_path")

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

    def dispatch(self, org_id: UUID, dispatched: Dispatched, latency: float) -> None:
        """What the fast stage has delivered: to queues, unless a job has it already."""
        for lane in dispatched.lanes:
            if lane.route.queue is not None:
                self._messages[target_queue(org_id, lane.route.queue)] += lane.bodies
            for metadata in lane.replayed:
                said = metadata, dispatched.source, lane.route.target, lane.route.name
                self.tell(org_id, telling.delivered(*said, path="fast", latency_seconds=latency))
        if dispatched.bodies:
            self._accepted[org_id] += dispatched.bodies
            self._deliveries[org_id] += dispatched.deliveries(latency)

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
