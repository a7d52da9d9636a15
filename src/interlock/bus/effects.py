"""What a batch of decisions causes, written by one statement: all of it or nothing."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from interlock.adapters.postgres import Connection, queries
from interlock.bus.archived import ArchivedCommand, owed_archive
from interlock.bus.envelope import Envelope
from interlock.bus.events import owed
from interlock.bus.model import Ban
from interlock.bus.queues import target_queue
from interlock.failpoints import failpoint
from interlock.wire.bus_events import BusEvent

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
    def __init__(self) -> None:
        self._queues: list[str] = []
        self._bodies: list[str] = []
        self._handoffs: list[tuple[UUID, str, str, str, str, datetime]] = []
        self._events: list[tuple[UUID, BusEvent]] = []
        self._archived: list[tuple[UUID, ArchivedCommand]] = []

    def deliver(self, org_id: UUID, queue: str, body: str) -> None:
        self._queues.append(target_queue(org_id, queue))
        self._bodies.append(body)

    def hand_on(self, org_id: UUID, source: str, reason: str, body: str, ban: Ban | None, received: datetime) -> None:
        known = "{}" if ban is None else _encoder.encode(Facts(ban)).decode()
        self._handoffs.append((org_id, source, reason, body, known, received))

    def tell(self, org_id: UUID, event: BusEvent) -> None:
        self._events.append((org_id, event))

    def keep(self, org_id: UUID, source: str, envelope: Envelope, accepted_at: datetime) -> None:
        metadata, command = envelope.metadata, envelope.command
        replay_id = metadata.replay_id
        archived = ArchivedCommand(
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
        self._archived.append((org_id, archived))

    async def write(self, connection: Connection) -> None:
        """In the caller's transaction, or as one of its own."""
        events, archive = owed(self._events), owed_archive(self._archived)
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
            event_org_ids=events.org_ids,
            events=events.events,
            events_in=events.events_in,
            archive_org_ids=archive.org_ids,
            commands=archive.commands,
            commands_in=archive.commands_in,
            woken=[*set(self._queues), *([HANDOFFS] if self._handoffs else [])],
        )
        await failpoint("command.before_commit")
