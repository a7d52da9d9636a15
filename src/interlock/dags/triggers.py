"""Triggers of sources, from acceptance to task.

Webhook calls, scheduled times and manual payloads are all triggers. An accepted trigger is durable: it waits while its
job is paused, and it moves to the next generation of a job of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import asyncpg
import msgspec
from msgspec import Struct

from interlock.errors import BadRequest, TooLarge
from interlock.failpoints import failpoint
from interlock.settings import Settings
from interlock.stores.low_water import low_water
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import UNSTORABLE, Connection, Database, database_time, queries, try_lock
from interlock.strict_json import NotStrict, require_strict
from interlock.tasks.triggers import accept_triggers
from interlock.telemetry import TASKS_ROUTED

_sql = queries(__name__, "sources")

_NOTES: Final = 100
_JOBS: Final = 1000
_MAX_TASKS: Final = 1000
"""Tasks per pass. A backlog is processed in several passes."""
_EACH: Final = 200
"""Tasks of one job per pass, so that no job waits for the backlog of another."""
_FIRST: Final = UUID(int=0)


@dataclass(frozen=True, slots=True)
class Trigger:
    """A request to start a source. A trigger with a known `dedupe_key` is a duplicate."""

    dedupe_key: str
    payload: bytes


async def accept(connection: Connection, job_ids: Sequence[UUID], triggers: Sequence[Trigger]) -> int:
    """Stores triggers for each of these jobs in the caller's transaction. Returns the number of new ones."""
    pairs = [(job_id, trigger) for trigger in triggers for job_id in job_ids]
    try:
        accepted = await accept_triggers(
            connection,
            job_ids=[job_id for job_id, _ in pairs],
            dedupe_keys=[trigger.dedupe_key for _, trigger in pairs],
            payloads=[trigger.payload.decode() for _, trigger in pairs],
        )
    except (*UNSTORABLE, UnicodeDecodeError) as error:
        raise BadRequest(f"A payload cannot be stored: {str(error).splitlines()[0]}.", code="bad_payload") from None
    await failpoint("trigger.before_commit")
    return accepted


def check_payload(payload: bytes, settings: Settings) -> None:
    limit = settings.payload_limit_bytes
    if len(payload) > limit:
        raise TooLarge(f"The payload has {len(payload)} bytes; the limit is {limit}.", code="payload_too_large")
    try:
        require_strict(payload)
    except NotStrict as error:
        raise BadRequest(f"The payload cannot be stored: {error}.", code="bad_payload") from None


class _Note(Struct):
    """The body of an outbox row: jobs that have new triggers."""

    jobs: list[UUID]


_note = msgspec.json.Decoder(_Note)


class Triggers:
    """Creates tasks from triggers, the oldest of each job first. Only one dispatcher at a time does, to keep the order.

    A pass follows the notes of new triggers. If there are none, it looks for remaining triggers: of jobs that were
    paused, or beyond the limit of earlier passes.
    """

    name = "triggers"

    def __init__(self, database: Database, settings: Settings, wakeups: Wakeups) -> None:
        self.seconds = settings.relay_seconds
        self._database = database
        self._wakeups = wakeups
        self._direct = settings.queue_direct
        self._age_seconds = settings.retention_days * 86_400
        self._place = _FIRST
        self._water = low_water()

    async def idle(self, seconds: float) -> None:
        await self._wakeups.wait("trigger", seconds)

    async def run_once(self) -> int:
        async def work(connection: Connection) -> tuple[int, int, UUID]:
            if not await try_lock(connection, self.name):
                look.skipped = True
                return 0, 0, self._place
            rows = await _sql.take_trigger_notes(connection, limit=_NOTES, since=look.since)
            look.reached = max((row["due_at"] for row in rows), default=None) or await database_time(connection)
            noted = {job for row in rows for job in _note.decode(row["body"]).jobs}
            done, made, place = await self._make(connection, noted)
            await failpoint("triggers.before_commit")
            return len(rows) + done, made, place

        with self._water.look(await self._database.oldest_begin()) as look:
            done, made, self._place = await self._database.run(work)
        if made:
            TASKS_ROUTED.labels(by=self.name).inc(made)
        return done

    async def _make(self, connection: Connection, noted: Iterable[UUID]) -> tuple[int, int, UUID]:
        jobs = sorted(noted)
        if jobs:
            row = await self._fire(connection, jobs)
            return row["triggers"], row["tasks"], self._place
        found = await _sql.jobs_with_triggers(connection, after=self._place, limit=_JOBS)
        jobs = [row["job_id"] for row in found]
        if not jobs:
            return 0, 0, _FIRST
        handed = len(await _sql.hand_on_triggers(connection, job_ids=jobs, each=_MAX_TASKS))
        handed += len(
            await _sql.forget_triggers(connection, job_ids=jobs, each=_MAX_TASKS, age_seconds=self._age_seconds)
        )
        row = await self._fire(connection, jobs)
        return handed + row["triggers"], row["tasks"], jobs[-1] if len(jobs) == _JOBS else _FIRST

    async def _fire(self, connection: Connection, jobs: Sequence[UUID]) -> asyncpg.Record:
        row: asyncpg.Record = await _sql.fire_triggers(
            connection, job_ids=list(jobs), each=_EACH, limit=_MAX_TASKS, direct=self._direct
        )
        return row
