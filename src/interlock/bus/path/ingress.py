"""The path of a command through the gateway: verify, decide, persist.

    messages ─► Shield.verify ─► Fast.decide ─► Persistence.persist ─► verdicts, durable

A request that gets a reply has its commands delivered, handed to the slow stage, or reported in telemetry. A request
that gets an error has no effect, except that its commands may have used up tokens of limits.

No command waits for the rest of the work in the gateway: cache refreshes, tokens of limits, reports, delivered ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import structlog
from msgspec import Raw

from interlock.bus import metrics
from interlock.bus.model import Decision, Escalation, Kind
from interlock.bus.path import fairness, persistence, reports
from interlock.bus.path.caches import ABSENT_SECONDS, Caches, Revoked, Tenant
from interlock.bus.path.fast_stage import Fast, Memory
from interlock.bus.path.limits import Limits
from interlock.bus.path.persistence import Batch, Persistence, Written
from interlock.bus.path.verification import UNKNOWN_KEY, Notice, Shield
from interlock.bus.telemetry import emit
from interlock.errors import InterlockError
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Connection, Database, queries
from interlock.wire.bus_events import BusEvent, ExecutedAfterAclRevoked
from interlock.wire.commands import CommandVerdict

log = structlog.get_logger()
_sql = queries(__name__, "path")

_MAX_CONFIRMED: Final = 500
_CONFIRM_SECONDS: Final = 1.0
_NOTICE_SECONDS: Final = 60.0
CHANGED: Final = "bus-registry"
"""The notification of a change of the registry."""


class Maintenance:
    """Holds the memory of each org, and looks after the orgs of recent requests; one pass at a time."""

    def __init__(
        self, database: Database, caches: Caches, limits: Limits, wakeups: Wakeups, *, report_seconds: float
    ) -> None:
        self._database = database
        self._caches = caches
        self._limits = limits
        self._wakeups = wakeups
        self._report_seconds = report_seconds
        self._memories: dict[UUID, Memory] = {}
        self._due: set[UUID] = set()
        self._reported_at = caches.now()
        self._confirmed_at = 0.0
        self._passes: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    def memory(self, tenant: Tenant) -> Memory:
        memory = self._memories.get(tenant.org_id)
        if memory is None:
            memory = self._memories[tenant.org_id] = Memory(tenant)
        return memory

    def schedule(self, org_id: UUID) -> None:
        """Schedules a pass for an org, which starts once the reply is on its way."""
        self._due.add(org_id)
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name="bus-changes")
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run_all(), name="bus-maintenance")

    async def settled(self) -> None:
        """Returns once no pass is under way."""
        if self._passes is not None:
            await self._passes

    async def _listen(self) -> None:
        """Follows changes of the registry. If a notification is lost, the times to live apply."""
        while not self._wakeups.closed:
            if await self._wakeups.wait(CHANGED, _NOTICE_SECONDS):
                self._caches.expire()

    async def _run_all(self) -> None:
        while self._due:
            try:
                await self.run_once()
            except InterlockError as error:
                log.warning("bus.maintenance_failed", reason=str(error))

    async def run_once(self) -> None:
        due, self._due = self._due, set()
        memories = [self._memories[org_id] for org_id in due if org_id in self._memories]
        await self._caches.refresh_due([memory.tenant for memory in memories])
        await self._report_revoked()
        await self._report_shares(memories)
        await self._limits.settle([memory.tokens for memory in memories], self._caches.now())
        now = self._caches.now()
        if now - self._confirmed_at >= _CONFIRM_SECONDS:
            self._confirmed_at = now
            for memory in memories:
                await self._confirm_ids(memory, now)

    async def _report_shares(self, memories: Sequence[Memory]) -> None:
        """Reports bans immediately and shares periodically; the auditor adds up both."""
        bans = [(memory.tenant.org_id, ban) for memory in memories for ban in memory.shares.take_imposed()]
        now = self._caches.now()
        totals: dict[fairness.Entry, int] = {}
        if now - self._reported_at >= self._report_seconds:
            self._reported_at = now
            for org_id, memory in self._memories.items():
                totals |= {(org_id, *entry): count for entry, count in memory.shares.take_totals(now).items()}
        if not bans and not totals:
            return
        metrics.WARM_PATH_BANS.inc(len(bans))
        async with self._database.transaction() as connection:
            await fairness.report(connection, bans, totals)
            await emit(connection, [(org_id, reports.banned(ban, now)) for org_id, ban in bans])

    async def _report_revoked(self) -> None:
        revoked, self._caches.revoked = self._caches.revoked, []
        if revoked:
            async with self._database.transaction() as connection:
                await emit(connection, await _revocations(connection, revoked))

    async def _confirm_ids(self, memory: Memory, now: float) -> None:
        pending = memory.delivered_ids.pending(_MAX_CONFIRMED, now)
        if not pending:
            return
        async with self._database.connection() as connection:
            rows = await _sql.delivered_ids(
                connection,
                org_id=memory.tenant.org_id,
                sources=[source for source, _ in pending],
                command_ids=[UUID(command_id) for _, command_id in pending],
            )
        for row in rows:
            memory.delivered_ids.confirm(row["source"], str(row["command_id"]), row["until"])

    async def close(self) -> None:
        running = [task for task in (self._passes, self._listening) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _revocations(connection: Connection, revoked: Sequence[tuple[UUID, Revoked]]) -> list[tuple[UUID, BusEvent]]:
    """Returns an event for each ACL that was used after its revocation, by the registry's record of that time."""
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
            event = ExecutedAfterAclRevoked(
                source=use.source,
                target=use.target,
                name=use.name,
                stale_duration_seconds=round(use.stale_seconds, 3),
                acl_revocation_timestamp=moment,
            )
            events.append((org_id, event))
    return events


_LARGE: Final = 20
"""A batch of this size takes longer to decide than a pass of the event loop over its connections."""


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
        self._caches = caches
        self._shield = shield
        self._fast = fast
        self._persistence = Persistence(database)
        self.maintenance = Maintenance(database, caches, limits, wakeups, report_seconds=report_seconds)
        self._large_batches = asyncio.Lock()

    async def accept(self, org_id: UUID, source: str, messages: Sequence[bytes | Raw]) -> list[CommandVerdict]:
        """Decides about each message by itself. Returns the verdicts once the decisions are durable."""
        verdicts = await self._persistence.persist(await self.decide(org_id, source, messages))
        self.maintenance.schedule(org_id)
        return verdicts

    async def decide(
        self, org_id: UUID, source: str, messages: Sequence[bytes | Raw], *, replays: bool = False
    ) -> Batch:
        """Decides without any durable effect. Only the platform's own replay passes `replays=True`."""
        received_at = self._caches.now()
        memory = self.maintenance.memory(await self._caches.ready(org_id))
        decisions, notices = await self._decide_fairly(memory, source, messages, replays)
        if await self._refreshed_keys(memory.tenant, decisions):
            unknown = [n for n, decision in enumerate(decisions) if decision.reason == UNKNOWN_KEY]
            again, more = self._decide(memory, source, [messages[n] for n in unknown], replays)
            notices += more
            for n, decision in zip(unknown, again, strict=True):
                decisions[n] = decision
        await self._decide_missing(memory, source, decisions)
        return Batch(org_id, source, messages, decisions, notices, received_at)

    async def write(self, connection: Connection, batch: Batch) -> Written:
        """Writes a batch in the caller's transaction. The caller calls `committed` after the commit."""
        return await self._persistence.write(connection, batch)

    def committed(self, written: Written) -> None:
        persistence.count(written)
        self.maintenance.schedule(written.prepared.org_id)

    async def _decide_fairly(
        self, memory: Memory, source: str, messages: Sequence[bytes | Raw], replays: bool
    ) -> tuple[list[Decision], list[Notice]]:
        """Decides about large batches one after the other, with a pass of the event loop in between. Otherwise the
        gateway would decide about all of them first, and only then start to write and to reply."""
        if len(messages) < _LARGE:
            return self._decide(memory, source, messages, replays)
        async with self._large_batches:
            decided = self._decide(memory, source, messages, replays)
            await asyncio.sleep(0)
            return decided

    def _decide(
        self, memory: Memory, source: str, messages: Sequence[bytes | Raw], replays: bool
    ) -> tuple[list[Decision], list[Notice]]:
        now = self._caches.now()
        verified = self._shield.verify(messages, source, memory.tenant, now, replays=replays)
        return self._fast.decide(memory, source, verified.results, now), verified.notices

    async def _refreshed_keys(self, tenant: Tenant, decisions: Sequence[Decision]) -> bool:
        """Refreshes the caches if a message names an unknown version of a key: it may be a newer one. It does not if
        the keys were loaded a moment ago."""
        if tenant.age(Kind.KEYS, self._caches.now()) < ABSENT_SECONDS:
            return False
        if all(decision.reason != UNKNOWN_KEY for decision in decisions):
            return False
        await self._caches.refresh(tenant)
        return True

    async def _decide_missing(self, memory: Memory, source: str, decisions: list[Decision]) -> None:
        """Decides again, with refreshed caches, about commands without a cached route or ACL: the sender learns at
        once of a target that does not exist, and a new one is known at its first use. It costs one refresh within
        ABSENT_SECONDS; if that fails, the slow stage decides."""
        missing = [n for n, decision in enumerate(decisions) if decision.reason == Escalation.CACHE_MISS]
        if not missing or not await self._caches.refresh_if_possible(memory.tenant):
            return
        envelopes = [found for n in missing if (found := decisions[n].envelope) is not None]
        for n, decision in zip(missing, self._fast.decide(memory, source, envelopes, self._caches.now()), strict=True):
            decisions[n] = decision

    async def close(self) -> None:
        await self.maintenance.close()
        await self._persistence.close()
