"""What a batch of decisions causes, written by one statement: all of it or nothing."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from interlock.adapters.postgres import Connection, queries
from interlock.bus import telling
from interlock.bus.archived import ArchivedCommand
from interlock.bus.delivered import archived_text, body, kept, told
from interlock.bus.envelope import Envelope
from interlock.bus.model import Ban
from interlock.bus.queues import target_queue
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
        self._accepted_at = moment.isoformat()
        self._queues: list[str] = []
        self._named: dict[tuple[UUID, str], str] = {}
        self._bodies: list[str] = []
        self._handoffs: list[tuple[UUID, str, str, str, str, datetime]] = []
        self._events: defaultdict[UUID, list[bytes]] = defaultdict(list)
        self._archived: defaultdict[UUID, list[str]] = defaultdict(list)

    def dispatch(self, org_id: UUID, source: str, queue: str | None, envelope: Envelope, latency: float) -> None:
        """By the fast stage; to a queue, unless a job has it already."""
        if queue is not None:
            self.deliver(org_id, queue, body(envelope, source))
        metadata, command = envelope.metadata, envelope.command
        if metadata.speaks_of_replay:
            said = metadata, source, command.target, command.name
            self.tell(org_id, telling.delivered(*said, path="fast", latency_seconds=latency))
        else:
            self._events[org_id].append(told(envelope, source, round(1000 * latency, 3)))
        self.keep(org_id, source, envelope)

    def deliver(self, org_id: UUID, queue: str, text: str) -> None:
        name = self._named.get((org_id, queue))
        if name is None:
            name = self._named[org_id, queue] = target_queue(org_id, queue)
        self._queues.append(name)
        self._bodies.append(text)

    def hand_on(self, org_id: UUID, source: str, reason: str, text: str, ban: Ban | None) -> None:
        known = "{}" if ban is None else _encoder.encode(Facts(ban)).decode()
        self._handoffs.append((org_id, source, reason, text, known, self.moment))

    def tell(self, org_id: UUID, event: BusEvent) -> None:
        self._events[org_id].append(encoded(event))

    def keep(self, org_id: UUID, source: str, envelope: Envelope) -> None:
        if envelope.metadata.speaks_of_replay:
            text = archived_text(_replayed(source, envelope, self.moment))
        else:
            text = kept(envelope, source, self._accepted_at)
        self._archived[org_id].append(text)

    async def write(self, connection: Connection) -> None:
        """In the caller's transaction, or as one of its own."""
        handoffs: list[list[Any]] = [list(column) for column in zip(*self._handoffs, strict=True)] or [[]] * 6
        await _sql.dispatch(
            connection,
            queues=self._queues,
            bodies=self._bodies,
            handoff_org_ids=handoffs[0],
            handoff_sources=handoffs[1],
            handoff_reasons=handoffs[2],
            handoff_bodies=handoffs[3],
            handoff_facts=handoffs[4],
            handoff_received=handoffs[5],
            event_org_ids=list(self._events),
            events=[f"[{b','.join(each).decode()}]" for each in self._events.values()],
            events_in=[len(each) for each in self._events.values()],
            archive_org_ids=list(self._archived),
            commands=[f"[{','.join(each)}]" for each in self._archived.values()],
            commands_in=[len(each) for each in self._archived.values()],
            woken=[*self._named.values(), *([HANDOFFS] if self._handoffs else [])],
        )
        await failpoint("command.before_commit")


def _replayed(source: str, envelope: Envelope, accepted_at: datetime) -> ArchivedCommand:
    metadata, command = envelope.metadata, envelope.command
    replay_id = metadata.replay_id
    return ArchivedCommand(
        command_id=UUID(metadata.id),
        source=source,
        target=command.target,
        name=command.name,
        timestamp=datetime.fromisoformat(metadata.timestamp),
        version_id=metadata.version_id,
        accepted_at=accepted_at,
        payload=Raw(envelope.payload),
        replay_id=UNSET if isinstance(replay_id, UnsetType) else UUID(replay_id),
        replay_reason=metadata.replay_reason,
    )
