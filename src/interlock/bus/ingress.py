"""Where commands come in: shield and fast stage for a batch, then one write that makes the outcome durable.

A caller that is answered has its commands delivered, handed on, or told of. One that gets an error has nothing but the
tokens lost that its commands would have used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

import structlog
from msgspec import Raw

from interlock.adapters.notifications import Wakeups
from interlock.adapters.postgres import Connection, Database, queries
from interlock.bus import auditor, delivered, jobs, metrics, telling
from interlock.bus.caches import ABSENT_SECONDS, Caches, Revoked, Tenant
from interlock.bus.decision import Decision, Outcome
from interlock.bus.dispatched import Dispatched, dispatched
from interlock.bus.effects import Effects, wake
from interlock.bus.events import tell
from interlock.bus.fast import Fast, Memory
from interlock.bus.limits import Limits
from interlock.bus.model import Kind
from interlock.bus.shield import UNKNOWN_KEY, Shield
from interlock.bus.waking import GatheredWakes
from interlock.bus.writing import GroupedWrites
from interlock.errors import InterlockError
from interlock.failpoints import armed
from interlock.wire.bus_events import BusEvent, CommandDelivered, ExecutedAfterAclRevoked, FailureReason, name_of

log = structlog.get_logger()
_sql = queries("bus_path")

_BATCH: Final = 20
"""From so many commands on, deciding about them takes longer than a look at the connections."""
_ASKED_AT_ONCE: Final = 500
_CONFIRM_SECONDS: Final = 1.0
_NOTICE_SECONDS: Final = 60.0
CHANGED: Final = "bus-registry"
"""What a change of the registry is announced as."""
_DELIVERED: Final = Outcome.DELIVERED
_DELIVERED_EVENT: Final = name_of(CommandDelivered)
T = TypeVar("T")
Message = bytes | Raw
Record = Callable[[Connection, Sequence[Decision]], Awaitable[None]]


class Request(NamedTuple):
    org_id: UUID
    source: str
    messages: Sequence[Message]
    notices: Sequence[tuple[UUID, BusEvent]]
    """Beside the decisions."""
    received_at: float


class Accepted(NamedTuple):
    """What one request has caused, to be written."""

    request: Request
    dispatched: Dispatched
    others: list[tuple[Message, Decision]]
    """All that was not delivered."""

    @classmethod
    def of(cls, request: Request, decisions: Sequence[Decision]) -> Accepted:
        pairs = zip(request.messages, decisions, strict=True)
        others = [pair for pair in pairs if pair[1].outcome is not _DELIVERED]
        return cls(request, dispatched(request.source, decisions), others)


class Ingress:
    def __init__(
        self,
        database: Database,
        caches: Caches,
        shield: Shield,
        fast: Fast,
        limits: Limits,
        wakeups: Wakeups,
        *,
        report_seconds: float = 60.0,
    ) -> None:
        self._database = database
        self._caches = caches
        self._shield = shield
        self._fast = fast
        self._limits = limits
        self._memories: dict[UUID, Memory] = {}
        self._touched: set[UUID] = set()
        self._wakeups = wakeups
        self._wakes = GatheredWakes(database)
        self._writes = GroupedWrites(self._write, weight=lambda accepted: len(accepted.request.messages))
        self._turn = asyncio.Lock()
        self._report_seconds = report_seconds
        self._reported_at = caches.now()
        self._confirmed_at = 0.0
        self._upkeep: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    async def accept(
        self,
        org_id: UUID,
        source: str,
        messages: Sequence[Message],
        answer: Callable[[list[Decision]], T],
        *,
        replays: Record | None = None,
    ) -> T:
        """Each message is decided by itself. Returns what `answer` makes of the decisions, once they are durable.
        `replays`: the caller is the platform's own replay, and writes down what became of them in the same
        transaction."""
        received_at = self._caches.now()
        memory = self._memory(await self._caches.ready(org_id))
        decisions = await self._decide_and_learn(memory, source, messages, replays=replays is not None)
        notices, self._shield.notices = self._shield.notices, []
        request = Request(org_id, source, messages, notices, received_at)
        if replays is not None or _triggers(decisions) or armed("command.before_commit"):
            accepted = await self._keep_whole(request, decisions, replays)
            reply = answer(decisions)
        else:
            accepted, reply = Accepted.of(request, decisions), answer(decisions)
            del decisions  # what is needed of them is written down: see dispatched.py
            await self._writes.put(accepted)
        self._count(accepted)
        self._look_after(org_id)
        return reply

    async def _decide_and_learn(
        self, memory: Memory, source: str, messages: Sequence[Message], *, replays: bool
    ) -> list[Decision]:
        decisions = await self._decide_in_turn(memory, source, messages, replays=replays)
        if await self._learnt_a_key(memory.tenant, decisions):
            unknown = [place for place, decision in enumerate(decisions) if decision.reason == UNKNOWN_KEY]
            again = self._decide(memory, source, [messages[place] for place in unknown], replays=replays)
            for place, decision in zip(unknown, again, strict=True):
                decisions[place] = decision
        return decisions

    def _memory(self, tenant: Tenant) -> Memory:
        memory = self._memories.get(tenant.org_id)
        if memory is None:
            memory = self._memories[tenant.org_id] = Memory(tenant)
        return memory

    async def _decide_in_turn(
        self, memory: Memory, source: str, messages: Sequence[Message], *, replays: bool
    ) -> list[Decision]:
        """Of batches that come together, one after the other with a look at the connections in between: otherwise all
        would be decided first, then all written while nobody decides anything, then all answered."""
        if len(messages) < _BATCH:
            return self._decide(memory, source, messages, replays=replays)
        async with self._turn:
            decisions = self._decide(memory, source, messages, replays=replays)
            await asyncio.sleep(0)
            return decisions

    def _decide(self, memory: Memory, source: str, messages: Sequence[Message], *, replays: bool) -> list[Decision]:
        now = self._caches.now()
        checked = self._shield.check_all(messages, source, memory.tenant, now, replays=replays)
        return self._fast.decide_all(memory, source, checked, now)

    async def _learnt_a_key(self, tenant: Tenant, decisions: Sequence[Decision]) -> bool:
        """A version that is not known may be newer than what is: worth a look, unless one has just been taken."""
        if tenant.age(Kind.KEYS, self._caches.now()) < ABSENT_SECONDS:
            return False
        if all(decision.reason != UNKNOWN_KEY for decision in decisions):
            return False
        await self._caches.refresh(tenant)
        return True

    async def _write(self, group: list[Accepted]) -> None:
        effects = self._effects(group)
        await self._database.run(effects.write, transaction=False)
        self._wakes.add(effects.woken)
        _count_events(effects)

    async def _keep_whole(self, request: Request, decisions: list[Decision], also: Record | None) -> Accepted:
        """In a transaction of its own; most share writes. Commands for jobs are decided once the job has them."""

        async def write(connection: Connection) -> tuple[Accepted, Effects]:
            for place, decision in enumerate(decisions):
                decisions[place] = await _triggered(connection, request.org_id, request.source, decision)
            accepted = Accepted.of(request, decisions)
            effects = self._effects([accepted])
            await effects.write(connection)
            await wake(connection, effects.woken)
            if also is not None:
                await also(connection, decisions)
            return accepted, effects

        accepted, effects = await self._database.run(write)
        _count_events(effects)
        return accepted

    def _effects(self, group: Iterable[Accepted]) -> Effects:
        now = self._caches.now()
        moment = datetime.fromtimestamp(now, UTC)
        effects = Effects(moment)
        for request, sent, others in group:
            effects.dispatch(request.org_id, sent, now - request.received_at)
            for message, decision in others:
                _note(effects, request.org_id, request.source, message, decision)
            for tenant, event in request.notices:
                effects.tell(tenant, event)
        return effects

    def _count(self, accepted: Accepted) -> None:
        for lane in accepted.dispatched.lanes:
            metrics.delivered(lane.route.target, lane.route.name, "fast", len(lane.bodies))
        for _, decision in accepted.others:
            if decision.outcome is Outcome.ESCALATED:
                metrics.COMMANDS_ESCALATED.labels(decision.reason).inc()
            elif decision.outcome is Outcome.FAILED:
                metrics.COMMANDS_FAILED.labels(decision.reason).inc()
                metrics.MISROUTES.inc(decision.reason == FailureReason.ROUTE_MISSING)
            elif decision.outcome is Outcome.INVALID:
                metrics.COMMANDS_INVALID.labels(decision.reason).inc()
        fast = self._fast
        metrics.CACHE_FRESH.inc(fast.fresh)
        metrics.CACHE_STALE.inc(fast.stale)
        metrics.CACHE_EXPIRED.inc(fast.expired)
        fast.fresh = fast.stale = fast.expired = 0

    def _look_after(self, org_id: UUID) -> None:
        """Refreshes and fetches begin once the answer is on its way; one pass at a time."""
        self._touched.add(org_id)
        if self._following is None:
            self._following = asyncio.create_task(self._follow_changes(), name="bus-changes")
        if self._upkeep is None or self._upkeep.done():
            self._upkeep = asyncio.create_task(self._look_after_all(), name="bus-upkeep")

    async def _follow_changes(self) -> None:
        """Notices of the registry. One that is lost costs what the times to live allow."""
        while not self._wakeups.closed:
            if await self._wakeups.wait(CHANGED, _NOTICE_SECONDS):
                self._caches.expire()

    async def _look_after_all(self) -> None:
        while self._touched:
            try:
                await self.look_after()
            except InterlockError as error:
                log.warning("bus.upkeep_failed", reason=str(error))

    async def look_after(self) -> None:
        """Everything that the fast stage may not do while a command waits."""
        touched, self._touched = self._touched, set()
        memories = [self._memories[org_id] for org_id in touched if org_id in self._memories]
        await self._caches.refresh_due([memory.tenant for memory in memories])
        await self._tell_revoked()
        await self._report(memories)
        await self._limits.settle([memory.tokens for memory in memories], self._caches.now())
        now = self._caches.now()
        if now - self._confirmed_at >= _CONFIRM_SECONDS:
            self._confirmed_at = now
            for memory in memories:
                await self._confirm(memory, now)

    async def _report(self, memories: Sequence[Memory]) -> None:
        """Bans at once, shares now and then: the auditor adds both up."""
        bans = [(memory.tenant.org_id, ban) for memory in memories for ban in memory.shares.take_imposed()]
        now = self._caches.now()
        totals: dict[auditor.Entry, int] = {}
        if now - self._reported_at >= self._report_seconds:
            self._reported_at = now
            for org_id, memory in self._memories.items():
                totals |= {(org_id, *entry): count for entry, count in memory.shares.take_totals(now).items()}
        if not bans and not totals:
            return
        metrics.WARM_PATH_BANS.inc(len(bans))
        async with self._database.transaction() as connection:
            await auditor.report(connection, bans, totals)
            await tell(connection, [(org_id, telling.banned(ban, now)) for org_id, ban in bans])

    async def _tell_revoked(self) -> None:
        revoked, self._caches.revoked = self._caches.revoked, []
        if revoked:
            async with self._database.transaction() as connection:
                await tell(connection, await _revocations(connection, revoked))

    async def _confirm(self, memory: Memory, now: float) -> None:
        asked = memory.seen.open(_ASKED_AT_ONCE, now)
        if not asked:
            return
        async with self._database.connection() as connection:
            rows = await _sql.delivered_ids(
                connection,
                org_id=memory.tenant.org_id,
                sources=[source for source, _ in asked],
                command_ids=[UUID(command_id) for _, command_id in asked],
            )
        for row in rows:
            memory.seen.confirmed(row["source"], str(row["command_id"]), row["until"])

    async def close(self) -> None:
        running = [task for task in (self._upkeep, self._following) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._writes.close()
        await self._wakes.close()


def _triggers(decisions: Sequence[Decision]) -> bool:
    return any(d.outcome is _DELIVERED and d.route is not None and d.route.job for d in decisions)


def _count_events(effects: Effects) -> None:
    if effects.handed_over:
        metrics.TELEMETRY_EVENTS.labels(event=_DELIVERED_EVENT).inc(effects.handed_over)


async def _triggered(connection: Connection, org_id: UUID, source: str, decision: Decision) -> Decision:
    """A command for a job is delivered once the job has it."""
    route, envelope = decision.route, decision.envelope
    if decision.outcome is not _DELIVERED or route is None or envelope is None or route.job is None:
        return decision
    told = await jobs.trigger(
        connection,
        org_id,
        route.dag or "",
        route.job,
        source=source,
        command_id=envelope.metadata.id,
        body=delivered.body(envelope, source),
    )
    return decision if told else Decision(Outcome.FAILED, envelope, FailureReason.DELIVERY_FAILURE.value)


def _note(effects: Effects, org_id: UUID, source: str, message: Message, decision: Decision) -> None:
    """What is to be said of one that was not delivered."""
    envelope, outcome = decision.envelope, decision.outcome
    if outcome is Outcome.INVALID or envelope is None:
        effects.tell(org_id, telling.invalid(bytes(message), source, decision, effects.moment))
    elif outcome is Outcome.ESCALATED:
        effects.hand_on(org_id, source, decision.reason, delivered.body(envelope, source), decision.ban)
    else:
        said = envelope.metadata, source, envelope.command.target, envelope.command.name
        if outcome is Outcome.DUPLICATE:
            effects.tell(org_id, telling.duplicate(*said))
        else:
            effects.tell(org_id, telling.failed(*said, decision, effects.moment))


async def _revocations(connection: Connection, revoked: Sequence[tuple[UUID, Revoked]]) -> list[tuple[UUID, BusEvent]]:
    """Those that were used after they had been revoked, by the registry's own record of when that was."""
    rows = await _sql.revoked_at(
        connection,
        org_ids=[org_id for org_id, _ in revoked],
        subjects=[f"{use.target}/{use.name}/{use.source.partition('/')[2]}" for _, use in revoked],
    )
    moments = {row["n"]: row["changed_at"] for row in rows}
    events: list[tuple[UUID, BusEvent]] = []
    for n, (org_id, use) in enumerate(revoked, 1):
        moment = moments.get(n)
        if moment is not None and use.used_at > moment.timestamp():
            told = ExecutedAfterAclRevoked(
                source=use.source,
                target=use.target,
                name=use.name,
                stale_duration_seconds=round(use.stale_seconds, 3),
                acl_revocation_timestamp=moment,
            )
            events.append((org_id, told))
    return events
