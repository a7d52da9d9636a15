"""The command bus for services: send commands, receive commands, and receive your org's telemetry.

A producer signs commands with the newest key of its service, sends them in batches, and retries after the delay that
the bus returns. A command keeps its id across retries, so a route with strict deduplication accepts it once. Each retry
has a fresh timestamp and signature, because a signed message is valid for one minute and a key may be rotated.

A received message is invisible to other consumers for `visibility_seconds`. If it is not settled by then, it is
delivered again. So a command may arrive twice; its id is the same each time.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Any, Final, Generic, Self, TypeVar
from uuid import uuid4

import msgspec
from msgspec import Raw, Struct

from interlock.client._caller import TIMEOUT_SECONDS, Caller, bearer, path, query
from interlock.errors import BadRequest, CommandPending, CommandRefused, InterlockError, ServerUnreachable, Unavailable
from interlock.wire.bus_events import Telemetry
from interlock.wire.bus_messages import (
    DeadSelection,
    DeliveredCommand,
    DeliveredMessage,
    InboxAck,
    InboxDead,
    InboxExtend,
    InboxMessages,
    InboxNack,
    InboxReceive,
    InboxSettled,
)
from interlock.wire.bus_registry import TenantConfig
from interlock.wire.commands import MAX_FATES, PENDING, CommandVerdict, CommandVerdicts, NotCanonical, compose
from interlock.wire.tasks import MessageRef, QueueMessage

__all__ = [
    "Command",
    "CommandVerdict",
    "Consumer",
    "DeliveredCommand",
    "DeliveredMessage",
    "Delivery",
    "Producer",
    "TelemetryConsumer",
    "TelemetryMessage",
    "TenantConfig",
    "delivered",
]

BATCH: Final = 100
_PATIENCE_SECONDS: Final = 20.0
"""Retry limit of one request. Shorter than the window in which the message signed for it is valid."""
_LONGEST_WAIT_SECONDS: Final = 60.0
_UNHINTED_SECONDS: Final = 1.0
_STALE_KEY: Final = frozenset({"unknown_key", "expired_key", "invalid_hmac"})
_PASSING: Final = frozenset(
    {"rate-limit-exceeded", "rate-limit-exceeded: source-quota", "fairness-violation", "delivery-failure"}
)
"""Transient failures."""
_FATE_SECONDS: Final = 5.0
"""How long one request waits for pending commands."""
_LEAST_FATE_SECONDS: Final = 10.0
"""How long pending commands are awaited even with less `patience`: it limits retries, and waiting is none."""
_SPREAD: Final = 0.1
_MAX_SPREAD_SECONDS: Final = 5.0
"""Retries spread over a longer time with each attempt, so that many senders do not all return with the next window."""

_json = msgspec.json.Encoder()


def _new_id() -> str:
    return str(uuid4())


class Command(Struct, frozen=True, kw_only=True):
    """A command to a target service. Two commands with the same `command_id` are the same command."""

    target: str
    name: str
    payload: Any = None
    """Any JSON value; `msgspec.Raw` is sent unchanged."""
    command_id: str = msgspec.field(default_factory=_new_id)


class Producer:
    """Sends commands as the service of the API key. Share one instance among the tasks of a process."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        patience: float = 60.0,
        verify: ssl.SSLContext | bool = True,
        now: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        rng: Callable[[], float] = random.random,
    ) -> None:
        """`patience`: for how many seconds a command with a transient failure is retried."""
        self._caller = Caller(url, bearer(api_key, None), verify=verify, patience=min(patience, _PATIENCE_SECONDS))
        self._patience = patience
        self._now = now
        self._pause = pause
        self._random = rng
        self._known: TenantConfig | None = None
        self._poll_at = 0.0
        self._polling = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._caller.close()

    async def send(
        self, target: str, name: str, payload: Any = None, *, command_id: str | None = None
    ) -> CommandVerdict:
        """Sends one command and returns once its fate is known: `delivered`, or `duplicate` of a delivered one.

        Raises CommandRefused, with the verdict, for any other fate; a transient one only after retries for `patience`
        seconds. Raises CommandPending if the bus has not decided in that time.
        """
        command = Command(target=target, name=name, payload=payload, command_id=command_id or _new_id())
        (verdict,) = await self.send_many([command])
        return delivered(verdict)

    async def send_many(self, commands: Iterable[Command]) -> list[CommandVerdict]:
        """Returns the fate of each command, in order. Retries transient failures while `patience` lasts."""
        waiting = list(commands)
        verdicts: dict[int, CommandVerdict] = {}
        deadline = self._now() + self._patience
        open_places = list(range(len(waiting)))
        attempt = 0
        while open_places:
            verdicts |= await self._round(waiting, open_places, deadline)
            open_places = [place for place in open_places if _again(verdicts[place])]
            if open_places:
                attempt += 1
                wait = max(_hint(verdicts[place]) for place in open_places) + self._spread(attempt)
                if self._now() + wait > deadline:
                    break
                await self._pause(wait)
        return [verdicts[place] for place in range(len(waiting))]

    async def fate(self, command_id: str, *, wait: float = 0.0) -> CommandVerdict:
        """Returns the verdict of a command that was pending, after up to `wait` seconds. Raises NotFound."""
        return await self._caller.call("GET", f"/v1/commands{path(command_id)}?wait={wait:g}", CommandVerdict)

    def _spread(self, attempt: int) -> float:
        return self._random() * min(attempt * _SPREAD, _MAX_SPREAD_SECONDS)

    async def _round(
        self, commands: Sequence[Command], places: Sequence[int], deadline: float
    ) -> dict[int, CommandVerdict]:
        """Sends commands in batches, and waits for the fates of those that are pending."""
        verdicts: dict[int, CommandVerdict] = {}
        wait = _FATE_SECONDS if len(places) <= BATCH else 0.0  # several batches are sent before any is awaited
        for start in range(0, len(places), BATCH):
            batch = places[start : start + BATCH]
            sent = await self._send([commands[place] for place in batch], wait)
            verdicts |= dict(zip(batch, sent, strict=True))
        pending = [place for place in places if verdicts[place].outcome == PENDING]
        patience = max(deadline - self._now(), _LEAST_FATE_SECONDS)
        for _ in range(ceil(patience / _FATE_SECONDS)):
            if not pending:
                break
            for start in range(0, len(pending), MAX_FATES):
                batch = pending[start : start + MAX_FATES]
                fates = await self._fates([commands[place].command_id for place in batch])
                verdicts |= dict(zip(batch, fates, strict=True))
            pending = [place for place in pending if verdicts[place].outcome == PENDING]
        return verdicts

    async def _fates(self, ids: Sequence[str]) -> list[CommandVerdict]:
        listed = "&".join(f"id={command_id}" for command_id in ids)
        reply = await self._caller.call("GET", f"/v1/commands?{listed}&wait={_FATE_SECONDS:g}", CommandVerdicts)
        return list(reply.results)

    async def _send(self, commands: Sequence[Command], wait: float) -> list[CommandVerdict]:
        """Sends one request, and a second one for commands whose signing key was outdated."""
        config = await self.config()
        verdicts = await self._post(commands, config, wait)
        stale = [place for place, verdict in enumerate(verdicts) if verdict.reason in _STALE_KEY]
        if not stale:
            return verdicts
        newer = await self.config(newer_than=config)
        if newer.active.version_id == config.active.version_id:
            return verdicts
        again = await self._post([commands[place] for place in stale], newer, wait)
        for place, verdict in zip(stale, again, strict=True):
            verdicts[place] = verdict
        return verdicts

    async def _post(self, commands: Sequence[Command], config: TenantConfig, wait: float) -> list[CommandVerdict]:
        messages = [Raw(self._signed(command, config)) for command in commands]
        target = f"/v1/commands?wait={wait:g}" if wait else "/v1/commands"
        reply = await self._caller.call("POST", target, CommandVerdicts, {"commands": messages})
        return list(reply.results)

    def _signed(self, command: Command, config: TenantConfig) -> bytes:
        payload = command.payload if isinstance(command.payload, Raw) else _json.encode(command.payload)
        moment = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        try:
            return compose(
                bytes.fromhex(config.active.secret),
                command_id=command.command_id,
                timestamp=moment.replace("+00:00", "Z"),
                version_id=config.active.version_id,
                target=command.target,
                name=command.name,
                payload=bytes(payload),
            )
        except NotCanonical as error:
            raise BadRequest(f"The payload cannot be signed: {error}.", code="not_canonical") from None

    async def config(self, *, newer_than: TenantConfig | None = None) -> TenantConfig:
        """Returns the service's keys, and refreshes them when the poll interval has passed."""
        async with self._polling:
            known = self._known
            if known is not None and known is not newer_than and self._now() < self._poll_at:
                return known
            try:
                fresh = await self._caller.call("GET", "/v1/tenant-config", TenantConfig)
            except (ServerUnreachable, Unavailable):
                # The cached keys are valid for days: use them. If they are not, sending fails with a reason.
                if known is None or newer_than is not None:
                    raise
                self._poll_at = self._now() + _LONGEST_WAIT_SECONDS
                return known
            self._known, self._poll_at = fresh, self._now() + fresh.poll_seconds
            return fresh


def delivered(verdict: CommandVerdict) -> CommandVerdict:
    """Returns the verdict of a delivered command. Raises CommandRefused or CommandPending for another one."""
    if verdict.outcome in ("delivered", "duplicate"):
        return verdict
    if verdict.outcome in ("failed", "invalid"):
        raise CommandRefused(f"The command was refused: {verdict.reason}. {verdict.detail or ''}".strip(), verdict)
    raise CommandPending(
        f"The bus has accepted command {verdict.command_id} and has not decided about it yet: it may still be "
        "delivered. Read its fate with Producer.fate, and check that `interlock serve bus` is running.",
        verdict,
    )


def _again(verdict: CommandVerdict) -> bool:
    return verdict.outcome == "failed" and verdict.reason in _PASSING


def _hint(verdict: CommandVerdict) -> float:
    if verdict.retry_after_ms is None:
        return _UNHINTED_SECONDS
    return min(verdict.retry_after_ms / 1000, _LONGEST_WAIT_SECONDS)


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
