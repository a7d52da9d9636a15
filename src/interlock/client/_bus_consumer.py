"""Receiving from a queue of the command bus: commands that were sent to a service, and the telemetry of its org.

A message that was received is invisible to others for `visibility_seconds`, and comes again if nobody settles it. So a
command may come twice: its id is the same each time.
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
from interlock.wire.bus_inbox import (
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
from interlock.wire.queues import MessageRef, QueueMessage

T = TypeVar("T")

TELEMETRY: Final = "@telemetry"
_LONGEST_PAUSE_SECONDS: Final = 300.0
_EXTENDS: Final = 3
"""In the time for which a message is invisible."""

_messages = msgspec.json.Decoder(InboxMessages)
_settled = msgspec.json.Decoder(InboxSettled)
_dead = msgspec.json.Decoder(InboxDead)
_command = msgspec.json.Decoder(DeliveredMessage)


class TelemetryMessage(Struct, frozen=True):
    events: list[Telemetry]


_telemetry = msgspec.json.Decoder(TelemetryMessage)


class Delivery(Generic[T]):
    """A message that this consumer holds, until it is settled or too much time has passed."""

    def __init__(self, consumer: _Receiver[T], message: QueueMessage, body: T) -> None:
        self.body = body
        self.message_id = message.message_id
        self.receives = message.receives
        """How often it was delivered, this time included."""
        self.enqueued_at: datetime = message.enqueued_at
        self._consumer = consumer
        self._items = [MessageRef(message.message_id, message.receipt)]

    async def ack(self) -> bool:
        """It is done. False when it was no longer this consumer's: somebody else has it, or will."""
        return await self._settle("ack", InboxAck(items=self._items))

    async def nack(self, delay_seconds: float = 0.0) -> bool:
        """Somebody is to try again, after a while."""
        return await self._settle("nack", InboxNack(items=self._items, delay_seconds=delay_seconds))

    async def extend(self, visibility_seconds: float) -> bool:
        """It takes longer: nobody else gets it for so long from now."""
        return await self._settle("extend", InboxExtend(items=self._items, visibility_seconds=visibility_seconds))

    async def _settle(self, what: str, body: Any) -> bool:
        reply = await self._consumer.call("POST", what, _settled, body)
        return bool(reply.settled == 1)


class _Receiver(Generic[T]):
    def __init__(
        self,
        url: str,
        api_key: str,
        queue: str,
        decoder: msgspec.json.Decoder[T],
        *,
        visibility_seconds: float,
        patience: float,
        verify: ssl.SSLContext | bool,
    ) -> None:
        self.visibility_seconds = visibility_seconds
        self._decoder = decoder
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
        decoder: msgspec.json.Decoder[Any],
        body: Any = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        **parameters: object,
    ) -> Any:
        """Any: the decoder's own type."""
        target = query(path("v1", "inbox", self._queue, what), **parameters)
        return await self._caller.call(method, target, decoder, body, timeout=timeout)

    async def receive(self, most: int = 10, wait_seconds: float = 10.0) -> list[Delivery[T]]:
        """Waits for the first message; none after `wait_seconds`."""
        wanted = InboxReceive(max=most, wait_seconds=wait_seconds, visibility_seconds=self.visibility_seconds)
        reply: InboxMessages = await self.call(
            "POST", "receive", _messages, wanted, timeout=wait_seconds + TIMEOUT_SECONDS
        )
        return [Delivery(self, each, self._decoder.decode(each.body)) for each in reply.messages]

    async def run(
        self,
        handle: Callable[[Delivery[T]], Awaitable[None]],
        *,
        concurrency: int = 10,
        stop: asyncio.Event | None = None,
        on_failure: Callable[[Delivery[T], Exception], None] = lambda _delivery, _error: None,
    ) -> None:
        """Until `stop` is set: handles messages, up to `concurrency` at once, and settles them.

        One whose handler returns is done. One whose handler raises comes again, after a pause that grows with each
        delivery, and ends among the dead letters. While a handler runs, its message stays its own; should it be lost
        all the same, the handler is cancelled, since another consumer has the message by then.
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
        # What the server has already handed out comes again when its time is over.
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
        """Returns when the message is somebody else's."""
        while True:
            await asyncio.sleep(self.visibility_seconds / _EXTENDS)
            try:
                if not await delivery.extend(self.visibility_seconds):
                    return
            except InterlockError:
                # The next try may come in time; if none does, the message comes again.
                continue

    # Dead letters

    async def dead_letters(self, cursor: str | None = None, limit: int = 100) -> InboxDead:
        """Messages that were delivered too often without being settled, oldest first."""
        reply: InboxDead = await self.call("GET", "dead-letters", _dead, cursor=cursor, limit=limit)
        return reply

    async def redrive(self, message_ids: list[str] | None = None, limit: int = 1_000) -> int:
        """Dead letters, delivered again; without ids the oldest. How many there were."""
        reply = await self.call("POST", "redrive", _settled, DeadSelection(message_ids=message_ids, limit=limit))
        return int(reply.settled)

    async def discard(self, message_ids: list[str] | None = None, limit: int = 1_000) -> int:
        """Dead letters, gone for good."""
        reply = await self.call("POST", "discard", _settled, DeadSelection(message_ids=message_ids, limit=limit))
        return int(reply.settled)


class Consumer(_Receiver[DeliveredMessage]):
    """Receives commands with a key of the service that they are sent to.

        async with Consumer(url, key, "posts") as consumer:
            await consumer.run(post)

    where `post` is a coroutine function of one delivery, whose `body.command` is the command.
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
            url, api_key, queue, _command, visibility_seconds=visibility_seconds, patience=patience, verify=verify
        )


class TelemetryConsumer(_Receiver[TelemetryMessage]):
    """Receives what the org of the key's service is told: `body.events` of each delivery."""

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
            url, api_key, TELEMETRY, _telemetry, visibility_seconds=visibility_seconds, patience=patience, verify=verify
        )
