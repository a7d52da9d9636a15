"""Work of the gateway that no command waits for: cache refreshes, tokens of limits, reports, delivered ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import structlog

from interlock.bus import metrics
from interlock.bus.path import fairness, reports
from interlock.bus.path.caches import Caches, Revoked, Tenant
from interlock.bus.path.fast_stage import Memory
from interlock.bus.path.limits import Limits
from interlock.bus.telemetry import emit
from interlock.errors import InterlockError
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Connection, Database, queries
from interlock.wire.bus_events import BusEvent, ExecutedAfterAclRevoked

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
