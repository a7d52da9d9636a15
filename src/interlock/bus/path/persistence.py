"""Makes decisions durable: one statement writes everything that a group of requests causes, or nothing.

Requests share a write, except those that trigger jobs and those of replays: these have a transaction
of their own.

This is group commit: requests that arrive while a write is under way share the next one.

request ─┐                 ┌─ statement ─► committed ─► every request gets its reply
request ─┼─► waiting ──────┤ one write at a time, two under load; then one commit serves many requests
request ─┘                 └─ if a write fails, but the database is there: again, each request by itself
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, Generic, NamedTuple, TypeVar
from uuid import UUID

import msgspec
import structlog
from msgspec import UNSET, Raw, Struct

from interlock.bus import metrics
from interlock.bus.model import Ban, Decision, Outcome, Route
from interlock.bus.path import delivery, reports
from interlock.bus.path.verification import Notice
from interlock.bus.telemetry import FULL, Deliveries, array, messages, telemetry_queue
from interlock.errors import InterlockError, Unavailable
from interlock.failpoints import armed, failpoint
from interlock.stores.postgres import Connection, Database, queries
from interlock.wire.bus_events import BusEvent, CommandDelivered, FailureReason, encoded, name_of
from interlock.wire.commands import CommandVerdict, Envelope, Metadata

T = TypeVar("T")

_MAX_WEIGHT, _BUSY_WEIGHT = 500, 100


class GroupCommit(Generic[T]):
    """Writes requests in groups.

    `write` makes a group durable, or raises without any effect; `weight` returns the size of a request. A group has a
    weight of about `max_weight`. When requests of `busy_weight` wait, a second write starts while the first is with the
    database. Below that, one larger write is faster: each write has a fixed cost on both sides.
    """

    def __init__(
        self,
        write: Callable[[list[T]], Awaitable[None]],
        *,
        weight: Callable[[T], int],
        max_weight: int = _MAX_WEIGHT,
        busy_weight: int = _BUSY_WEIGHT,
    ) -> None:
        self._write = write
        self._weight = weight
        self._max_weight = max_weight
        self._busy_weight = busy_weight
        self._waiting: deque[tuple[T, asyncio.Future[None]]] = deque()
        self._waiting_weight = 0
        self._writers: set[asyncio.Task[None]] = set()

    async def put(self, request: T) -> None:
        """Returns once the request is durable. A caller that is cancelled does not know whether it is."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, done))
        self._waiting_weight += self._weight(request)
        if not self._writers or (len(self._writers) == 1 and self._waiting_weight >= self._busy_weight):
            self._writers.add(asyncio.create_task(self._write_all(), name="bus-writes"))
        await done

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                await self._write_next()
        finally:
            # Here, not in a callback of the task: a request that arrives in between would wait for no writer.
            self._writers = {writer for writer in self._writers if writer is not asyncio.current_task()}

    async def _write_next(self) -> None:
        group = list(self._next())
        try:
            await self._write([request for request, _ in group])
        except Exception as error:  # every caller gets it, or the result of its own request alone
            if len(group) == 1 or isinstance(error, Unavailable):
                _settle(group, error)
            else:
                await self._write_one_by_one(group)
        else:
            _settle(group, None)

    def _next(self) -> Iterator[tuple[T, asyncio.Future[None]]]:
        room = self._max_weight
        while self._waiting and room > 0:
            entry = self._waiting.popleft()
            weight = self._weight(entry[0])
            room -= weight
            self._waiting_weight -= weight
            yield entry

    async def _write_one_by_one(self, group: list[tuple[T, asyncio.Future[None]]]) -> None:
        """Writes each request by itself, so that one that cannot be written does not fail the others."""
        for entry in group:
            try:
                await self._write([entry[0]])
            except Exception as error:  # only its own caller gets it
                _settle([entry], error)
            else:
                _settle([entry], None)

    async def close(self) -> None:
        """Waits for writes that are under way."""
        await asyncio.gather(*self._writers)


def _settle(group: list[tuple[T, asyncio.Future[None]]], error: Exception | None) -> None:
    for _, done in group:
        if done.done():  # the caller was cancelled
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


log = structlog.get_logger()
_sql = queries(__name__, "path")

HANDOFFS: Final = "bus:handoffs"
"""The notification for waiting slow stages; no queue of a tenant has this name."""
_PAUSE_SECONDS: Final = 0.005
"""A NOTIFY for every write would take as long as the writes."""
_DELIVERED: Final = Outcome.DELIVERED
_DELIVERED_EVENT: Final = name_of(CommandDelivered)


class Batch(NamedTuple):
    """The messages of one request and the decisions about them."""

    org_id: UUID
    source: str
    messages: Sequence[bytes | Raw]
    decisions: list[Decision]
    notices: Sequence[Notice]
    received_at: float


class Prepared(NamedTuple):
    """A batch as it is written and replied to: delivered commands are encoded for their targets."""

    org_id: UUID
    source: str
    received_at: float
    dispatched: Dispatched
    others: list[tuple[bytes | Raw, Decision]]
    """The messages that were not delivered."""
    notices: Sequence[Notice]
    verdicts: list[CommandVerdict]

    @classmethod
    def of(cls, batch: Batch, now: datetime) -> Prepared:
        dispatched = Dispatched.of(batch.source, batch.decisions)
        pairs = zip(batch.messages, batch.decisions, strict=True)
        others = [pair for pair in pairs if pair[1].outcome is not _DELIVERED]
        verdicts = [reports.verdict(decision, now) for decision in batch.decisions]
        return cls(batch.org_id, batch.source, batch.received_at, dispatched, others, batch.notices, verdicts)


class Written(NamedTuple):
    """A batch in a transaction, as it is once the transaction commits."""

    prepared: Prepared
    decisions: list[Decision]
    queued_events: int
    """Telemetry events that the write put into queues of tenants."""


class Persistence:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._commits = GroupCommit(self._write_group, weight=lambda prepared: len(prepared.verdicts))
        self._notifier = QueueNotifier(database)

    def persist(self, batch: Batch) -> Awaitable[list[CommandVerdict]]:
        """Makes a batch durable, by a shared write unless it needs a transaction of its own.

        It is no coroutine function: its frame would keep the batch alive during the write. Measured, that costs 7 % of
        the gateway's CPU per command in batches of 100, and 5 % for single commands.
        """
        if _triggers_jobs(batch.decisions) or armed("command.before_commit"):
            return self._write_alone(batch)
        return self._write_with_others(Prepared.of(batch, self._database.clock.now()))

    async def _write_alone(self, batch: Batch) -> list[CommandVerdict]:
        """Decides about commands for jobs in the transaction that writes: the job must take them."""
        written = await self._database.run(lambda connection: self.write(connection, batch))
        count(written)
        return written.prepared.verdicts

    async def _write_with_others(self, prepared: Prepared) -> list[CommandVerdict]:
        await self._commits.put(prepared)
        _count_decisions(prepared)
        return prepared.verdicts

    async def write(self, connection: Connection, batch: Batch) -> Written:
        """Writes one batch in the caller's transaction. The caller passes the result to `count` after the commit."""
        decisions = [await _triggered(connection, batch, decision) for decision in batch.decisions]
        prepared = Prepared.of(batch._replace(decisions=decisions), self._database.clock.now())
        effects = self._effects([prepared])
        await effects.write(connection)
        await notify(connection, effects.notified)
        return Written(prepared, decisions, effects.queued_events)

    async def _write_group(self, group: list[Prepared]) -> None:
        effects = self._effects(group)
        await self._database.run(effects.write, transaction=False)
        self._notifier.add(effects.notified)
        _count_events(effects.queued_events)

    def _effects(self, group: Iterable[Prepared]) -> Effects:
        effects = Effects(self._database.clock.now())
        for prepared in group:
            effects.add(prepared)
        return effects

    async def close(self) -> None:
        await self._commits.close()
        await self._notifier.close()


def _triggers_jobs(decisions: Sequence[Decision]) -> bool:
    return any(d.outcome is _DELIVERED and d.route is not None and d.route.job for d in decisions)


async def _triggered(connection: Connection, batch: Batch, decision: Decision) -> Decision:
    """Triggers the job of the route, if it has one; the command fails if there is no such job."""
    route, envelope = decision.route, decision.envelope
    if decision.outcome is not _DELIVERED or route is None or envelope is None or route.job is None:
        return decision
    triggered = await delivery.trigger(
        connection,
        batch.org_id,
        route.dag or "",
        route.job,
        source=batch.source,
        command_id=envelope.metadata.id,
        body=delivery.body(envelope, batch.source),
    )
    return decision if triggered else Decision(Outcome.FAILED, envelope, FailureReason.DELIVERY_FAILURE.value)


# Effects of a group of decisions


class RouteCommands(NamedTuple):
    """The commands of one request that were delivered on one route."""

    route: Route
    bodies: list[str]
    ids: list[str]
    """Ids of commands that are not replays; `timestamps` has their times."""
    timestamps: list[str]
    replayed: list[Metadata]


class Dispatched(NamedTuple):
    """The commands of one request that the fast stage delivered, encoded for their targets."""

    source: str
    routes: list[RouteCommands]
    bodies: list[str]
    """The bodies of all routes, in the order of the request."""

    @classmethod
    def of(cls, source: str, decisions: Iterable[Decision]) -> Dispatched:
        routes: dict[int, RouteCommands] = {}  # by identity: hashing a route would hash all its fields
        bodies = []
        for decision in decisions:
            envelope, route = decision.envelope, decision.route
            if decision.outcome is not _DELIVERED or envelope is None or route is None:
                continue
            delivered = routes.get(id(route))
            if delivered is None:
                delivered = routes[id(route)] = RouteCommands(route, [], [], [], [])
            body, metadata = delivery.body(envelope, source), envelope.metadata
            bodies.append(body)
            delivered.bodies.append(body)
            if metadata.replayed is UNSET:
                delivered.ids.append(metadata.id)
                delivered.timestamps.append(metadata.timestamp)
            else:
                delivered.replayed.append(metadata)
        return cls(source, [*routes.values()], bodies)


class Facts(Struct, frozen=True, omit_defaults=True):
    """Facts that the fast stage knows and the slow stage cannot look up."""

    ban: Ban | None = None


_encoder: Final = msgspec.json.Encoder()
_facts: Final = msgspec.json.Decoder(Facts)


def facts(text: str) -> Facts:
    return _facts.decode(text)


class Effects:
    """Queue messages, hand-offs to the slow stage, telemetry and archive rows, collected for one statement."""

    def __init__(self, moment: datetime) -> None:
        self.moment = moment
        """When all of it was accepted."""
        self._messages: defaultdict[str, list[str]] = defaultdict(list)
        """Bodies, by queue."""
        self._handoffs: list[tuple[UUID, str, UUID, str, str, str, datetime]] = []
        self._events: defaultdict[UUID, list[Raw]] = defaultdict(list)
        self._deliveries: defaultdict[UUID, list[Deliveries]] = defaultdict(list)
        """Deliveries of the fast stage, for telemetry."""
        self._accepted: defaultdict[UUID, list[str]] = defaultdict(list)
        self.queued_events = 0
        """Telemetry events that go straight into queues of tenants."""

    def add(self, prepared: Prepared) -> None:
        """Adds everything that one request causes."""
        self.dispatch(prepared.org_id, prepared.dispatched, self.moment.timestamp() - prepared.received_at)
        for message, decision in prepared.others:
            self._add_undelivered(prepared.org_id, prepared.source, message, decision)
        for org_id, event in prepared.notices:
            self.emit(org_id, event)

    def dispatch(self, org_id: UUID, dispatched: Dispatched, latency: float) -> None:
        """Adds the commands that the fast stage delivered: to queues, unless a job has taken them."""
        for delivered in dispatched.routes:
            if delivered.route.queue is not None:
                self._messages[delivery.target_queue(org_id, delivered.route.queue)] += delivered.bodies
            about = dispatched.source, delivered.route.target, delivered.route.name
            if delivered.ids:
                latency_ms = round(1000 * latency, 3)
                self._deliveries[org_id].append(Deliveries(*about, latency_ms, delivered.ids, delivered.timestamps))
            for metadata in delivered.replayed:
                self.emit(org_id, reports.delivered(metadata, *about, path="fast", latency_seconds=latency))
        if dispatched.bodies:
            self._accepted[org_id] += dispatched.bodies

    def _add_undelivered(self, org_id: UUID, source: str, message: bytes | Raw, decision: Decision) -> None:
        envelope, outcome = decision.envelope, decision.outcome
        if outcome is Outcome.INVALID or envelope is None:
            self.emit(org_id, reports.invalid(bytes(message), source, decision, self.moment))
        elif outcome is Outcome.ESCALATED:
            self._hand_off(org_id, source, decision, envelope)
        else:
            about = envelope.metadata, source, envelope.command.target, envelope.command.name
            if outcome is Outcome.DUPLICATE:
                self.emit(org_id, reports.duplicate(*about))
            else:
                self.emit(org_id, reports.failed(*about, decision, self.moment))

    def deliver(self, org_id: UUID, queue: str, body: str) -> None:
        self._messages[delivery.target_queue(org_id, queue)].append(body)

    def _hand_off(self, org_id: UUID, source: str, decision: Decision, envelope: Envelope) -> None:
        """Hands a command to the slow stage. It counts as accepted, whatever the slow stage decides."""
        body, known = delivery.body(envelope, source), _encoder.encode(Facts(decision.ban)).decode()
        command_id = UUID(envelope.metadata.id)
        self._handoffs.append((org_id, source, command_id, decision.reason, body, known, self.moment))
        self._accepted[org_id].append(body)

    def emit(self, org_id: UUID, event: BusEvent) -> None:
        self._events[org_id].append(Raw(encoded(event)))

    @property
    def notified(self) -> list[str]:
        """Queues to notify once everything is visible."""
        return [*self._messages, *([HANDOFFS] if self._handoffs else [])]

    async def write(self, connection: Connection) -> None:
        """Writes everything in the caller's transaction, or as a transaction of its own."""
        self._queue_deliveries()
        columns = {
            "queues": [*self._messages],
            # One text per queue, a line per body: asyncpg encodes the elements of an array one by one. The bodies
            # contain no line breaks.
            "bodies": ["\n".join(bodies) for bodies in self._messages.values()],
            "accepted_org_ids": [*self._accepted],
            "accepted": [delivery.packed(bodies) for bodies in self._accepted.values()],
            "accepted_in": [len(bodies) for bodies in self._accepted.values()],
            "accepted_at": self.moment,
            "event_org_ids": [*self._events],
            "events": [array(each) for each in self._events.values()],
            "events_in": [len(each) for each in self._events.values()],
        }
        await _sql.write_effects(connection, **columns, **self._handoff_columns())
        await failpoint("command.before_commit")

    def _queue_deliveries(self) -> None:
        """Puts deliveries that fill a message into queues of tenants. It runs once: a write that is repeated after a
        fault writes the same again."""
        waiting, self._deliveries = self._deliveries, defaultdict(list)
        for org_id, found in waiting.items():
            amount = sum(len(each.ids) for each in found)
            if amount < FULL:
                self._events[org_id] += [event for each in found for event in each.events()]
            else:
                self._messages[telemetry_queue(org_id)] += messages(found)
                self.queued_events += amount

    def _handoff_columns(self) -> dict[str, list[Any]]:
        names = ("org_ids", "sources", "command_ids", "reasons", "bodies", "facts", "received")
        columns = zip(*self._handoffs, strict=True) if self._handoffs else [()] * len(names)
        return {f"handoff_{name}": list(column) for name, column in zip(names, columns, strict=True)}


# Metrics, after the commit


def count(written: Written) -> None:
    _count_events(written.queued_events)
    _count_decisions(written.prepared)


def _count_events(queued: int) -> None:
    if queued:
        metrics.TELEMETRY_EVENTS.labels(event=_DELIVERED_EVENT).inc(queued)


def _count_decisions(prepared: Prepared) -> None:
    for delivered in prepared.dispatched.routes:
        metrics.delivered(delivered.route.target, delivered.route.name, "fast", len(delivered.bodies))
    others = Counter((decision.outcome, decision.reason) for _, decision in prepared.others)
    for (outcome, reason), amount in others.items():
        if outcome is Outcome.ESCALATED:
            metrics.COMMANDS_ESCALATED.labels(reason).inc(amount)
        elif outcome is Outcome.FAILED:
            metrics.COMMANDS_FAILED.labels(reason).inc(amount)
            metrics.MISROUTES.inc(amount if reason == FailureReason.ROUTE_MISSING else 0)
        elif outcome is Outcome.INVALID:
            metrics.COMMANDS_INVALID.labels(reason).inc(amount)


# Notifications


async def notify(connection: Connection, queues: Collection[str]) -> None:
    """Notifies consumers immediately, or when the caller's transaction commits.

    A lost NOTIFY delays a consumer by up to one second; no command is lost.
    """
    if queues:
        await _sql.wake(connection, queues=[*queues])


class QueueNotifier:
    """Notifies consumers after the commit: immediately, and on a busy bus once every 5 ms for all queues."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: set[str] = set()
        self._notifying: asyncio.Task[None] | None = None

    def add(self, queues: Iterable[str]) -> None:
        self._waiting.update(queues)
        if self._waiting and (self._notifying is None or self._notifying.done()):
            self._notifying = asyncio.create_task(self._notify_all(), name="bus-notify")

    async def _notify_all(self) -> None:
        while self._waiting:
            queues, self._waiting = self._waiting, set()
            try:
                async with self._database.connection() as connection:
                    await notify(connection, queues)
            except InterlockError as error:  # consumers poll as well
                log.warning("bus.notify_failed", reason=str(error))
            await asyncio.sleep(_PAUSE_SECONDS)

    async def close(self) -> None:
        """Returns once every queue has been notified."""
        if self._notifying is not None:
            await self._notifying
