"""Fates of commands that the slow stage decides: recorded with the decision, awaited or read by their senders.

    gateway ──► hand-off: pending ──► slow stage: fate ──NOTIFY──► gateways with waiting senders

A fate is kept for `command_fate_seconds`. A lost notification delays a sender by half a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

import structlog

from interlock.bus.path import reports
from interlock.errors import InterlockError
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.commands import PENDING, CommandVerdict

log = structlog.get_logger()
_sql = queries(__name__, "path")

DECIDED: Final = "bus:fates"
"""The notification for gateways with waiting senders; no queue of a tenant has this name."""
_POLL_SECONDS: Final = 0.5
_MAX_LOOKED_UP: Final = 1_000
"""Ids that one statement looks up, however many senders wait."""
_DELIVERED: Final = "delivered"


class Fate(NamedTuple):
    org_id: UUID
    source: str
    command_id: str
    outcome: str
    reason: str
    target: str
    name: str
    throttle_until: datetime | None


async def record(connection: Connection, decided: Sequence[Fate]) -> None:
    """Records fates in the caller's transaction, which deletes the hand-offs."""
    org_ids, sources, command_ids, outcomes, reasons, targets, names, throttled = zip(*decided, strict=True)
    await _sql.record_fates(
        connection,
        org_ids=org_ids,
        sources=sources,
        command_ids=[UUID(each) for each in command_ids],
        outcomes=outcomes,
        reasons=reasons,
        targets=targets,
        names=names,
        throttled=throttled,
    )


class _Waiting:
    """One request that waits for the fates of its commands."""

    def __init__(self, org_id: UUID, source: str, ids: Sequence[str]) -> None:
        self.org_id = org_id
        self.source = source
        self.open = list(dict.fromkeys(ids))
        self.found: dict[str, CommandVerdict] = {}
        self.done = asyncio.Event()


class Fates:
    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups
        self._waiting: deque[_Waiting] = deque()
        self._watching: asyncio.Task[None] | None = None

    async def settled(
        self, org_id: UUID, source: str, verdicts: list[CommandVerdict], seconds: float
    ) -> list[CommandVerdict]:
        """Replaces `pending` by the fates that become known within `seconds`."""
        ids = [each.command_id for each in verdicts if each.outcome == PENDING and each.command_id is not None]
        if not ids or not seconds:
            return verdicts
        found = await self._wait(org_id, source, ids, seconds)
        return [found.get(each.command_id or "", each) for each in verdicts]

    async def of(
        self, org_id: UUID, source: str, ids: Sequence[str], seconds: float = 0.0
    ) -> dict[str, CommandVerdict]:
        """Returns the verdicts of commands that were handed to the slow stage, by id; without those that are unknown.
        Waits up to `seconds` for those that are pending."""
        verdicts = await self._read([(org_id, source, each) for each in ids])
        known = {command_id: found for command_id, found in zip(ids, verdicts, strict=True) if found is not None}
        waits = [command_id for command_id, found in known.items() if found.outcome == PENDING]
        return known | await self._wait(org_id, source, waits, seconds) if waits and seconds else known

    async def _wait(self, org_id: UUID, source: str, ids: Sequence[str], seconds: float) -> dict[str, CommandVerdict]:
        request = _Waiting(org_id, source, ids)
        self._waiting.append(request)
        self._wakeups.wake(f"queue:{DECIDED}")
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="bus-fates")
        try:
            async with asyncio.timeout(seconds):
                await request.done.wait()
        except TimeoutError:
            pass
        finally:
            if request in self._waiting:
                self._waiting.remove(request)
        return request.found

    async def _watch(self) -> None:
        """Looks up what waits, after each notification; one task for all requests of this process."""
        while self._waiting and not self._wakeups.closed:
            try:
                await self._look()
            except InterlockError as error:  # the requests end with `pending`, unless a later pass succeeds
                log.warning("bus.fates_not_read", reason=str(error))
            if self._waiting:
                await self._wakeups.wait(f"queue:{DECIDED}", _POLL_SECONDS)
        for request in self._waiting:
            request.done.set()

    async def _look(self) -> None:
        """Looks up the requests that have waited longest for a look, and moves them to the end of the line."""
        batch: list[tuple[_Waiting, str]] = []
        for _ in range(len(self._waiting)):
            if len(batch) >= _MAX_LOOKED_UP:
                break
            request = self._waiting[0]
            self._waiting.rotate(-1)
            batch += [(request, command_id) for command_id in request.open]
        verdicts = await self._read([(request.org_id, request.source, command_id) for request, command_id in batch])
        for (request, command_id), found in zip(batch, verdicts, strict=True):
            if found is None or found.outcome != PENDING:
                request.open.remove(command_id)
                request.found |= {} if found is None else {command_id: found}
                if not request.open:
                    request.done.set()
        self._waiting = deque(request for request in self._waiting if request.open)

    async def _read(self, entries: Sequence[tuple[UUID, str, str]]) -> list[CommandVerdict | None]:
        async with self._database.connection() as connection:
            rows = await _sql.find_fates(
                connection,
                org_ids=[org_id for org_id, _, _ in entries],
                sources=[source for _, source, _ in entries],
                command_ids=[UUID(command_id) for _, _, command_id in entries],
            )
        return [self._verdict(command_id, row) for (_, _, command_id), row in zip(entries, rows, strict=True)]

    def _verdict(self, command_id: str, row: Row) -> CommandVerdict | None:
        outcome, waits_for, until = row["outcome"], row["waits_for"], row["throttle_until"]
        if waits_for is not None and outcome != _DELIVERED:
            return reports.pending(command_id, waits_for)
        if outcome is None:
            return None
        left = None if until is None else (until - self._database.clock.now()).total_seconds()
        return CommandVerdict(
            command_id=command_id,
            outcome=outcome,
            reason=row["reason"] or None,
            detail=reports.advice(row["reason"], row["target"], row["name"]),
            retry_after_ms=None if left is None else max(1, round(1000 * left)),
            throttle_until=until,
        )
