"""The path of a command through the gateway: verify, decide, persist.

    messages ─► Shield.verify ─► Fast.decide ─► Persistence.persist ─► verdicts, durable

A request that gets a reply has its commands delivered, handed to the slow stage, or reported in telemetry. A request
that gets an error has no effect, except that its commands may have used up tokens of limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from msgspec import Raw

from interlock.bus.model import Decision, Kind
from interlock.bus.path import persistence
from interlock.bus.path.caches import ABSENT_SECONDS, Caches, Tenant
from interlock.bus.path.fast_stage import Fast, Memory
from interlock.bus.path.limits import Limits
from interlock.bus.path.maintenance import Maintenance
from interlock.bus.path.persistence import Batch, Persistence, Written
from interlock.bus.path.verification import UNKNOWN_KEY, Notice, Shield
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Connection, Database
from interlock.wire.commands import CommandVerdict

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

    async def close(self) -> None:
        await self.maintenance.close()
        await self._persistence.close()
