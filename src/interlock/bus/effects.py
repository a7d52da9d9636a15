"""What a batch of decisions causes, written by one statement: all of it or nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.adapters.postgres import Connection, queries
from interlock.bus.decision import Decision, Outcome
from interlock.bus.delivered import body
from interlock.bus.model import Ban
from interlock.bus.packed import Part, packed
from interlock.bus.queues import target_queue
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
        self._accepted: defaultdict[UUID, list[Part]] = defaultdict(list)

    def dispatch(self, org_id: UUID, source: str, decisions: Sequence[Decision], latency: float) -> None:
        """Those that the fast stage has delivered: to a queue, unless a job has it already."""
        lanes: dict[str, list[str]] = {}
        bodies = []
        for decision in decisions:
            envelope, route = decision.envelope, decision.route
            if decision.outcome is not _DELIVERED or envelope is None or route is None:
                continue
            text = body(envelope, source)
            bodies.append(text)
            if route.queue is not None:
                lane = lanes.get(route.queue)
                if lane is None:
                    lane = lanes[route.queue] = self._messages[target_queue(org_id, route.queue)]
                lane.append(text)
        if bodies:
            self._accepted[org_id].append((round(1000 * latency, 3), bodies))

    def deliver(self, org_id: UUID, queue: str, text: str) -> None:
        self._messages[target_queue(org_id, queue)].append(text)

    def hand_on(self, org_id: UUID, source: str, reason: str, text: str, ban: Ban | None) -> None:
        """To the slow stage. It is accepted, whatever becomes of it."""
        known = "{}" if ban is None else _encoder.encode(Facts(ban)).decode()
        self._handoffs.append((org_id, source, reason, text, known, self.moment))
        self._accepted[org_id].append((None, [text]))

    def tell(self, org_id: UUID, event: BusEvent) -> None:
        self._events[org_id].append(encoded(event).decode())

    @property
    def woken(self) -> list[str]:
        """Who is to be woken once all of it can be seen."""
        return [*self._messages, *([HANDOFFS] if self._handoffs else [])]

    async def write(self, connection: Connection) -> None:
        """In the caller's transaction, or as one of its own."""
        delivered = {
            "queues": [*self._messages],
            # As lines: no JSON text has a break in it, and asyncpg takes its time over every element of an array.
            "bodies": ["\n".join(bodies) for bodies in self._messages.values()],
            "accepted_org_ids": [*self._accepted],
            "accepted": [packed(parts) for parts in self._accepted.values()],
            "accepted_in": [sum(len(bodies) for _, bodies in parts) for parts in self._accepted.values()],
            "accepted_at": self.moment,
        }
        if self._handoffs or self._events:
            await _sql.dispatch(connection, **delivered, **self._others())
        else:
            await _sql.deliver(connection, **delivered)
        await failpoint("command.before_commit")

    def _others(self) -> dict[str, list[Any]]:
        """What is told, and what is handed on; of those that were, nothing is told yet."""
        handoffs: list[list[Any]] = [list(column) for column in zip(*self._handoffs, strict=True)] or [[]] * 6
        return {
            "handoff_org_ids": handoffs[0],
            "handoff_sources": handoffs[1],
            "handoff_reasons": handoffs[2],
            "handoff_bodies": handoffs[3],
            "handoff_facts": handoffs[4],
            "handoff_received": handoffs[5],
            "event_org_ids": [*self._events],
            "events": [f"[{','.join(each)}]" for each in self._events.values()],
            "events_in": [len(each) for each in self._events.values()],
            "delivered_in": [
                sum(len(bodies) for latency, bodies in parts if latency is not None)
                for parts in self._accepted.values()
            ],
        }


async def wake(connection: Connection, queues: Collection[str]) -> None:
    """At once, or with the caller's transaction. A notice that is lost costs who waits a second, and no command."""
    if queues:
        await _sql.wake(connection, queues=[*queues])
