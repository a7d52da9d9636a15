"""Consumers of the command bus: commands sent to a service, and the telemetry of its org.

A received message is invisible to other consumers for `visibility_seconds`. If it is not settled by then, it is
delivered again. So a command may arrive twice; its id is the same each time.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Final, Generic, Self, TypeVar

import msgspec
from msgspec import Struct

from interlock.client._caller import TIMEOUT_SECONDS, Caller, bearer, path, query
from interlock.errors import InterlockError
from interlock.wire.bus_events import Telemetry
from interlock.wire.bus_messages import (
    DeadSelection,
    DeliveredMessage,
    InboxAck,
    InboxDead,
    InboxExtend,
    InboxMessages,
    InboxNack,
    InboxReceive,
    InboxSettled,
)
from interlock.wire.tasks import MessageRef, QueueMessage

T = TypeVar("T")
R = TypeVar("R")

TELEMETRY: Final = "@telemetry"
_LONGEST_PAUSE_SECONDS: Final = 300.0
_EXTENDS: Final = 3
"""How often the visibility timeout is extended per `visibility_seconds`."""


class TelemetryMessage(Struct, frozen=True):
    events: list[Telemetry]


class Delivery(Generic[T]):
    """A message that this consumer holds until it is settled or its visibility timeout expires."""

    def __init__(self, consumer: _Receiver[T], message: QueueMessage, body: T) -> None:
        self.body = body
        self.message_id = message.message_id
        self.receives = message.receives
        """Number of deliveries, this one included."""
        self.enqueued_at: datetime = message.enqueued_at
        self._consumer = consumer
        self._items = [MessageRef(message.message_id, message.receipt)]

    async def ack(self) -> bool:
        """Acknowledges the message. Returns False if this consumer no longer held it; it is then delivered again."""
        return await self._settle("ack", InboxAck(items=self._items))

    async def nack(self, delay_seconds: float = 0.0) -> bool:
        """Returns the message to the queue, to be delivered again after `delay_seconds`."""
        return await self._settle("nack", InboxNack(items=self._items, delay_seconds=delay_seconds))

    async def extend(self, visibility_seconds: float) -> bool:
        """Hides the message from other consumers for another `visibility_seconds` from now."""
        return await self._settle("extend", InboxExtend(items=self._items, visibility_seconds=visibility_seconds))

    async def _settle(self, what: str, body: Any) -> bool:
        reply = await self._consumer.call("POST", what, InboxSettled, body)
        return bool(reply.settled == 1)


class _Receiver(Generic[T]):
    def __init__(
        self,
        url: str,
        api_key: str,
        queue: str,
        kind: type[T],
        *,
        visibility_seconds: float,
        patience: float,
        verify: ssl.SSLContext | bool,
    ) -> None:
        self.visibility_seconds = visibility_seconds
        self._kind = kind
        self._queue = queue
        self._caller = Caller(url, bearer(api_key, None), verify=verify, patience=patience)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._caller.close()

    async def call(
        self,
        method: str,
        what: str,
        kind: type[R],
        body: Any = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        **parameters: object,
    ) -> R:
        target = query(path("v1", "inbox", self._queue, what), **parameters)
        return await self._caller.call(method, target, kind, body, timeout=timeout)

    async def receive(self, limit: int = 10, wait_seconds: float = 10.0) -> list[Delivery[T]]:
        """Waits for the first message. Returns an empty list after `wait_seconds`."""
        wanted = InboxReceive(max=limit, wait_seconds=wait_seconds, visibility_seconds=self.visibility_seconds)
        reply = await self.call("POST", "receive", InboxMessages, wanted, timeout=wait_seconds + TIMEOUT_SECONDS)
        return [Delivery(self, each, msgspec.json.decode(each.body, type=self._kind)) for each in reply.messages]

    async def run(
        self,
        handle: Callable[[Delivery[T]], Awaitable[None]],
        *,
        concurrency: int = 10,
        stop: asyncio.Event | None = None,
        on_failure: Callable[[Delivery[T], Exception], None] = lambda _delivery, _error: None,
    ) -> None:
        """Handles and settles messages until `stop` is set, up to `concurrency` at a time.

        A message is acknowledged when its handler returns. When the handler raises, the message is delivered again
        after a backoff that grows with each delivery, and finally becomes a dead letter. While a handler runs, its
        visibility timeout is extended. If the message is lost all the same, the handler is cancelled, since another
        consumer has it by then.
        """
        stop = stop or asyncio.Event()
        stopping = asyncio.create_task(stop.wait())
        active: set[asyncio.Task[None]] = set()
        try:
            while not stop.is_set():
                if len(active) >= concurrency:
                    await asyncio.wait({*active, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    active = {task for task in active if not task.done()}
                    continue
                for delivery in await self._next(concurrency - len(active), stopping):
                    active.add(asyncio.create_task(self._handle(delivery, handle, on_failure)))
            await asyncio.gather(*active)
        finally:
            for task in (*active, stopping):
                task.cancel()
            await asyncio.gather(*active, stopping, return_exceptions=True)

    async def _next(self, room: int, stopping: asyncio.Task[Any]) -> list[Delivery[T]]:
        receiving = asyncio.create_task(self.receive(min(room, 100)))
        await asyncio.wait({receiving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            return receiving.result()
        # Messages that the server has already handed out are delivered again after their visibility timeout.
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        return []

    async def _handle(
        self,
        delivery: Delivery[T],
        handle: Callable[[Delivery[T]], Awaitable[None]],
        on_failure: Callable[[Delivery[T], Exception], None],
    ) -> None:
        working = asyncio.ensure_future(handle(delivery))
        keeping = asyncio.create_task(self._keep(delivery))
        try:
            await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return
            working.result()
            await delivery.ack()
        except Exception as error:
            on_failure(delivery, error)
            await delivery.nack(min(2.0 ** (delivery.receives - 1), _LONGEST_PAUSE_SECONDS))
        finally:
            for task in (working, keeping):
                task.cancel()
            await asyncio.gather(working, keeping, return_exceptions=True)

    async def _keep(self, delivery: Delivery[T]) -> None:
        """Extends the visibility timeout; returns when another consumer has the message."""
        while True:
            await asyncio.sleep(self.visibility_seconds / _EXTENDS)
            try:
                if not await delivery.extend(self.visibility_seconds):
                    return
            except InterlockError:
                # A later extension may still be in time. Otherwise the message is delivered again.
                continue

    # Dead letters

    async def dead_letters(self, cursor: str | None = None, limit: int = 100) -> InboxDead:
        """Returns messages that were delivered too often without being settled, oldest first."""
        reply: InboxDead = await self.call("GET", "dead-letters", InboxDead, cursor=cursor, limit=limit)
        return reply

    async def redrive(self, message_ids: list[str] | None = None, limit: int = 1_000) -> int:
        """Redelivers the given dead letters, or the oldest ones, and returns their number."""
        reply = await self.call("POST", "redrive", InboxSettled, DeadSelection(message_ids=message_ids, limit=limit))
        return int(reply.settled)

    async def discard(self, message_ids: list[str] | None = None, limit: int = 1_000) -> int:
        """Deletes the given dead letters, or the oldest ones, and returns their number."""
        reply = await self.call("POST", "discard", InboxSettled, DeadSelection(message_ids=message_ids, limit=limit))
        return int(reply.settled)


class Consumer(_Receiver[DeliveredMessage]):
    """Receives commands with a key of the service that they are sent to.

        async with Consumer(url, key, "posts") as consumer:
            await consumer.run(post)

    `post` is a coroutine function that takes one delivery; the command is `delivery.body.command`.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        queue: str,
        *,
        visibility_seconds: float = 30.0,
        patience: float = float("inf"),
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        super().__init__(
            url,
            api_key,
            queue,
            DeliveredMessage,
            visibility_seconds=visibility_seconds,
            patience=patience,
            verify=verify,
        )


class TelemetryConsumer(_Receiver[TelemetryMessage]):
    """Receives the telemetry events of the org of the key's service, as `body.events` of each delivery."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        visibility_seconds: float = 30.0,
        patience: float = float("inf"),
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        super().__init__(
            url,
            api_key,
            TELEMETRY,
            TelemetryMessage,
            visibility_seconds=visibility_seconds,
            patience=patience,
            verify=verify,
        )
