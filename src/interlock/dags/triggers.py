"""What tells a source to start, from its acceptance to its task.

A webhook's call, a time of a schedule and a payload that is sent by hand are all triggers. One that was accepted is
durable: it waits while its job is held back, and it moves to the next generation of its job with the job's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import asyncpg
import msgspec
from msgspec import Struct

from interlock.adapters.lowwater import low_water
from interlock.adapters.notifications import Wakeups
from interlock.adapters.postgres import Connection, Database, queries
from interlock.errors import BadRequest, TooLarge
from interlock.failpoints import failpoint
from interlock.kernel.isolation import UNSTORABLE
from interlock.settings import Settings
from interlock.strict_json import NotStrict, require_strict
from interlock.telemetry import TASKS_ROUTED

_sql = queries("sources")
_runs_sql = queries("runs")
_effects_sql = queries("effects")

_NOTES: Final = 100
_JOBS: Final = 1000
_MOST: Final = 1000
"""Tasks of one pass: what was held back comes bit by bit."""
_EACH: Final = 200
"""Of one job in one pass, so that none waits for the long list of another."""
_FIRST: Final = UUID(int=0)


@dataclass(frozen=True, slots=True)
class Trigger:
    """`dedupe_key` tells whether a trigger is another one, or the same told again."""

    dedupe_key: str
    payload: bytes


async def accept(connection: Connection, job_ids: Sequence[UUID], triggers: Sequence[Trigger]) -> int:
    """In the caller's transaction, for each of these generations of a job. How many were new, of all of them."""
    pairs = [(job_id, trigger) for trigger in triggers for job_id in job_ids]
    try:
        row = await _sql.accept_triggers(
            connection,
            job_ids=[job_id for job_id, _ in pairs],
            dedupe_keys=[trigger.dedupe_key for _, trigger in pairs],
            payloads=[trigger.payload.decode() for _, trigger in pairs],
        )
    except (*UNSTORABLE, UnicodeDecodeError) as error:
        raise BadRequest(f"A payload cannot be stored: {str(error).splitlines()[0]}.", code="bad_payload") from None
    await failpoint("trigger.before_commit")
    return int(row["accepted"])


def check_payload(payload: bytes, settings: Settings) -> None:
    limit = settings.payload_limit_bytes
    if len(payload) > limit:
        raise TooLarge(f"The payload has {len(payload)} bytes; it may have {limit}.", code="payload_too_large")
    try:
        require_strict(payload)
    except NotStrict as error:
        raise BadRequest(f"The payload cannot be stored: {error}.", code="bad_payload") from None


class _Note(Struct):
    """What an outbox row says: jobs that have new triggers."""

    jobs: list[UUID]


_note = msgspec.json.Decoder(_Note)


class Triggers:
    """Makes tasks of triggers, the oldest of each job first. One dispatcher at a time does, so that they stay in order.

    A pass follows the notes of new triggers; one that finds no note looks for triggers that are left: of jobs that were
    held back, or that had more than a pass makes.
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
            if not await _runs_sql.only_one(connection, name=self.name):
                look.skipped = True
                return 0, 0, self._place
            rows = await _sql.take_trigger_notes(connection, most=_NOTES, since=look.since)
            look.reached = max((row["due_at"] for row in rows), default=None) or await _effects_sql.clock(connection)
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
        found = await _sql.jobs_with_triggers(connection, after=self._place, most=_JOBS)
        jobs = [row["job_id"] for row in found]
        if not jobs:
            return 0, 0, _FIRST
        handed = len(await _sql.hand_on_triggers(connection, job_ids=jobs, each=_MOST))
        handed += len(await _sql.forget_triggers(connection, job_ids=jobs, each=_MOST, age_seconds=self._age_seconds))
        row = await self._fire(connection, jobs)
        return handed + row["triggers"], row["tasks"], jobs[-1] if len(jobs) == _JOBS else _FIRST

    async def _fire(self, connection: Connection, jobs: Sequence[UUID]) -> asyncpg.Record:
        row: asyncpg.Record = await _sql.fire_triggers(
            connection, job_ids=list(jobs), each=_EACH, most=_MOST, direct=self._direct
        )
        return row
