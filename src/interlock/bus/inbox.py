"""The inbox of a service: the queues of its routes, and the telemetry of its org."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from msgspec import Raw

from interlock.access.principals import Principal
from interlock.bus.path.delivery import target_queue
from interlock.bus.telemetry import expanded, telemetry_queue
from interlock.errors import Forbidden
from interlock.http.cursors import next_cursor, number_cursor
from interlock.stores.postgres import Database, queries
from interlock.tasks.queue import Handle, Queue, Received
from interlock.wire.bus_messages import (
    DeadSelection,
    InboxAck,
    InboxDead,
    InboxExtend,
    InboxMessages,
    InboxNack,
    InboxReceive,
    InboxSettled,
)
from interlock.wire.tasks import DeadMessage, MessageRef, QueueMessage

_sql = queries(__name__, "inbox")
_telemetry_sql = queries(__name__, "telemetry")

TELEMETRY: Final = "@telemetry"
"""The telemetry queue, which every service of the org may read. No queue of a route can have this name."""
_LARGEST: Final = 2**63


class Inbox:
    def __init__(self, database: Database, queue: Queue) -> None:
        self._database = database
        self._queue = queue

    async def receive(self, queue: str, request: InboxReceive, caller: Principal) -> InboxMessages:
        name = await self._reached(queue, caller)
        if queue == TELEMETRY:
            async with self._database.connection() as connection:
                await _telemetry_sql.received(connection, org_id=caller.org_id)
        found = await self._queue.receive(
            name,
            wait_seconds=request.wait_seconds,
            limit=request.max,
            visibility_seconds=request.visibility_seconds,
        )
        return InboxMessages(messages=[_message(each, _body(queue, each.body)) for each in found])

    async def extend(self, queue: str, request: InboxExtend, caller: Principal) -> InboxSettled:
        name = await self._reached(queue, caller)
        return InboxSettled(settled=await self._queue.extend(name, _handles(request.items), request.visibility_seconds))

    async def ack(self, queue: str, request: InboxAck, caller: Principal) -> InboxSettled:
        name = await self._reached(queue, caller)
        return InboxSettled(settled=await self._queue.ack(name, _handles(request.items)))

    async def nack(self, queue: str, request: InboxNack, caller: Principal) -> InboxSettled:
        name = await self._reached(queue, caller)
        return InboxSettled(settled=await self._queue.nack(name, _handles(request.items), request.delay_seconds))

    # Dead letters

    async def dead(self, queue: str, caller: Principal, cursor: str | None, limit: int) -> InboxDead:
        name = await self._reached(queue, caller)
        async with self._database.connection() as connection:
            rows = await _sql.dead(connection, queue=name, after=number_cursor(cursor, 0), limit=limit)
        return InboxDead(
            messages=[
                DeadMessage(
                    message_id=str(row["message_id"]),
                    body=_body(queue, row["body"]),
                    receives=row["receives"],
                    enqueued_at=row["enqueued_at"],
                    dead_at=row["dead_at"],
                )
                for row in rows
            ],
            next_cursor=next_cursor(rows, limit, "message_id"),
        )

    async def redrive(self, queue: str, which: DeadSelection, caller: Principal) -> InboxSettled:
        return await self._of_dead(_sql.redrive, _sql.redrive_named, queue, which, caller)

    async def discard(self, queue: str, which: DeadSelection, caller: Principal) -> InboxSettled:
        return await self._of_dead(_sql.discard, _sql.discard_named, queue, which, caller)

    async def _of_dead(
        self, oldest: Any, named: Any, queue: str, which: DeadSelection, caller: Principal
    ) -> InboxSettled:
        """Runs one of two statements, typed Any by aiosql: on the oldest messages, or on those named."""
        name = await self._reached(queue, caller)
        async with self._database.transaction() as connection:
            if which.message_ids is None:
                rows = await oldest(connection, queue=name, limit=which.limit)
            else:
                ids = [number for each in which.message_ids if (number := int(each)) < _LARGEST]
                rows = await named(connection, queue=name, ids=ids)
        return InboxSettled(settled=len(rows))

    async def _reached(self, queue: str, caller: Principal) -> str:
        """Returns the full name of the queue. A queue of another service and a queue that does not exist give the same
        error, which prevents probing for queues."""
        if caller.service is None:
            raise Forbidden(
                "This API key belongs to no service: create a key with `service` set, and receive with it.",
                code="no_service",
            )
        if queue == TELEMETRY:
            return telemetry_queue(caller.org_id)
        if not await self._is_its_own(caller.org_id, queue, caller.service):
            raise Forbidden(
                f"No route to {caller.service} leads to a queue {queue[:100]!r}; a service receives only from its own "
                f"queues and from {TELEMETRY}.",
                code="queue_not_yours",
            )
        return target_queue(caller.org_id, queue)

    async def _is_its_own(self, org_id: UUID, queue: str, service: str) -> bool:
        async with self._database.connection() as connection:
            return bool(await _sql.receives_from(connection, org_id=org_id, queue=queue, service=service))


def _body(queue: str, stored: str) -> Raw:
    return expanded(stored) if queue == TELEMETRY else Raw(stored)


def _message(found: Received, body: Raw) -> QueueMessage:
    return QueueMessage(found.message_id, found.receipt, body, found.receives, found.enqueued_at)


def _handles(items: Sequence[MessageRef]) -> list[Handle]:
    return [Handle(item.message_id, item.receipt) for item in items]
