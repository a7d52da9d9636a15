"""Sources of DAGs: always-on tasks, manual events, and their status.

Webhook calls, scheduled times and manual payloads are all triggers. An accepted trigger is durable: it waits while its
job is paused, and it moves to the next generation of a job of the same name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID, uuid4

import asyncpg
import msgspec
import structlog
from msgspec import Raw, Struct

from interlock.calendars import dates_of, shown
from interlock.dags.definition import SourceKind
from interlock.dags.schedules import next_interval
from interlock.errors import BadRequest, Conflict, NotFound, TooLarge
from interlock.failpoints import failpoint
from interlock.http.ranges import range_of
from interlock.settings import Settings
from interlock.stores.low_water import low_water
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import UNSTORABLE, Connection, Database, Row, database_time, queries, try_lock
from interlock.strict_json import NotStrict, require_strict
from interlock.tasks import dataset_changes
from interlock.tasks.dataset_changes import Change
from interlock.tasks.idempotency import Repeat, once
from interlock.tasks.queue import enqueue
from interlock.tasks.triggers import accept_triggers
from interlock.telemetry import SOURCE_RESTARTS, TASKS_ROUTED
from interlock.wire.attempts import Event
from interlock.wire.dags import (
    SourceEvent,
    SourceEvents,
    SourceEventsAccepted,
    SourceList,
    SourceOutput,
    SourceState,
    SourceView,
)
from interlock.wire.jobs import DatasetRef

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


_INSTEAD: Final = {
    SourceKind.ALWAYS_ON: "it runs all the time; see `interlock source list`",
    SourceKind.CRON: "its schedule starts it",
    SourceKind.WEBHOOK: "call its webhook",
    SourceKind.COMMAND: "send it a command",
}


class _Named(Struct, frozen=True):
    """An output of a generation."""

    name: str | None
    dataset_uuid: UUID
    dataset_version: UUID

    @property
    def granted(self) -> DatasetRef:
        return DatasetRef(dataset_uuid=self.dataset_uuid, dataset_version=self.dataset_version)


_outputs = msgspec.json.Decoder(list[_Named])


@dataclass(frozen=True)
class _Request:
    """One call and its retries."""

    dag: str
    job: str
    org_id: UUID
    key: str
    events: Sequence[SourceEvent]

    @property
    def sequence(self) -> int:
        """Distinguishes calls: a second correction of the same range is another change."""
        return int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:7])


class ManualEvents:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def take(self, dag: str, job: str, org_id: UUID, sent: SourceEvents, repeat: Repeat) -> SourceEventsAccepted:
        """Accepts all events or none."""
        request = _Request(dag, job, org_id, repeat.key or str(uuid4()), sent.events)
        self._check(request)

        async def work(connection: Connection) -> SourceEventsAccepted:
            return await self._write(connection, request)

        endpoint = f"POST /v1/dags/{dag}/jobs/{job}/events"
        return await once(self._database, self._settings, org_id, endpoint, repeat, SourceEventsAccepted, 200, work)

    def _check(self, request: _Request) -> None:
        for event in request.events:
            scoped = event.cursor is not None or event.start is not None or event.end is not None
            if scoped == isinstance(event.payload, Raw):
                raise BadRequest(
                    "An event needs either `payload`, or `output` with `cursor` or with `start` and `end`.",
                    code="bad_event_scope",
                )
            if isinstance(event.payload, Raw):
                check_payload(bytes(event.payload), self._settings)

    async def _write(self, connection: Connection, request: _Request) -> SourceEventsAccepted:
        rows = await _sql.source_generations(connection, org_id=request.org_id, dag_name=request.dag, name=request.job)
        _require_manual(request, rows)
        rows = [row for row in rows if row["kind"] == SourceKind.MANUAL]
        scopes = [event for event in request.events if not isinstance(event.payload, Raw)]
        payloads = [event.payload for event in request.events if isinstance(event.payload, Raw)]
        if scopes:
            await self._write_scopes(connection, [_change(request, row, scopes) for row in rows])
        if payloads:
            fired = [Trigger(f"manual:{request.key}:{n}", bytes(payload)) for n, payload in enumerate(payloads)]
            await accept(connection, [row["job_id"] for row in rows], fired)
        return SourceEventsAccepted(events=len(scopes), triggers=len(payloads))

    async def _write_scopes(self, connection: Connection, written: list[Change]) -> None:
        admitted = await dataset_changes.admit(connection, written)
        for error in admitted.refused.values():
            raise error
        await dataset_changes.write(connection, written, admitted)


def _require_manual(request: _Request, rows: Sequence[Row]) -> None:
    if not rows:
        raise NotFound(f"There is no job {request.job!r} of DAG {request.dag!r} in this org.")
    kind = rows[0]["kind"]
    if kind != SourceKind.MANUAL:
        instead = _INSTEAD[SourceKind(kind)] if kind else "it runs when one of its inputs changes"
        raise Conflict(
            f"Job {request.job!r} accepts no manual events: {instead}. Only a source of `kind: manual` does.",
            code="not_manual",
        )


def _change(request: _Request, row: Row, scopes: Sequence[SourceEvent]) -> Change:
    named: list[_Named] = _outputs.decode(row["outputs"])
    events = [_event(scope, named, request.sequence, row["partition"]) for scope in scopes]
    dataset_changes.check(events, [], [one.granted for one in named])
    return Change(row["producer"], 1, request.org_id, events)


def _event(scope: SourceEvent, outputs: Sequence[_Named], sequence: int, partition: str | None) -> Event:
    found = [one for one in outputs if scope.output in (None, one.name)]
    if len(found) != 1:
        names = ", ".join(str(one.name) for one in outputs) or "none"
        raise BadRequest(f"Set `output` to one of the job's outputs: {names}.", code="unknown_output")
    start, end = _span(scope, partition)
    return Event(
        dataset_uuid=found[0].dataset_uuid,
        dataset_version=found[0].dataset_version,
        cursor=scope.cursor,
        start=start,
        end=end,
        sequence=sequence if scope.cursor is None else None,
    )


def _span(scope: SourceEvent, partition: str | None) -> tuple[int | None, int | None]:
    """Returns the range of an event. Integers are checked with all other events; only a date implies its end."""
    if scope.start is None or (isinstance(scope.start, int) and scope.end is None):
        if isinstance(scope.end, str) or isinstance(scope.start, str):
            raise BadRequest("An event with an `end` needs a `start`.", code="bad_event_scope")
        return scope.start, scope.end
    if scope.cursor is not None:
        raise BadRequest("A scope must be either `cursor`, or `start` and `end`.", code="bad_event_scope")
    return range_of(partition, scope.start, scope.end, aligned=True)


log = structlog.get_logger()


STEADY_SECONDS: Final = 300.0
"""A source that ran this long counts as healthy: it is restarted without delay."""
LONGEST_WAIT_SECONDS: Final = 300.0
_KEPT_ATTEMPTS: Final = 100
"""A source never ends, so its attempt history is limited."""
_MAX_SOURCES: Final = 1000
_CAUSES: Final = {"Completed": "returned", "Canceled": "canceled", "Failed": "failed"}


class AlwaysOn:
    """Keeps one unfinished task for each active always_on source, always under the same task id."""

    name = "sources"

    def __init__(self, database: Database, settings: Settings, wakeups: Wakeups) -> None:
        self.seconds = settings.source_seconds
        self._database = database
        self._wakeups = wakeups
        self._direct = settings.queue_direct

    async def idle(self, seconds: float) -> None:
        """Waits. A deploy or a resume wakes the loop."""
        await self._wakeups.wait(self.name, seconds)

    async def run_once(self) -> int:
        started, restarted, stopped = await self._database.run(self._pass)
        for row in restarted:
            cause = _CAUSES[row["was"]]
            SOURCE_RESTARTS.labels(cause=cause).inc()
            log.warning(
                "source.restarted",
                dag=row["dag_name"],
                job=row["name"],
                task_id=str(row["task_id"]),
                cause=cause,
                restarts_in_a_row=row["restarts"],
            )
        return started + len(restarted) + stopped

    async def _pass(self, connection: Connection) -> tuple[int, list[Row], int]:
        if not await try_lock(connection, self.name):
            return 0, [], 0
        stopped = await _sql.stop_sources(connection, limit=_MAX_SOURCES)
        await _sql.forget_sources(connection)
        started = await _sql.start_sources(connection, limit=_MAX_SOURCES)
        restarted = await _sql.restart_sources(
            connection,
            limit=_MAX_SOURCES,
            steady_seconds=STEADY_SECONDS,
            most_seconds=LONGEST_WAIT_SECONDS,
            kept=_KEPT_ATTEMPTS,
        )
        ids = [row["task_id"] for row in (*started, *restarted)]
        if ids:
            await enqueue(connection, ids, direct=self._direct)
        await failpoint("sources.before_commit")
        return len(started), restarted, len(stopped)


class Sources:
    """Lists the sources of a DAG with their state."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_dag(self, dag: str, org_id: UUID) -> SourceList:
        async with self._database.connection() as connection:
            rows = await _sql.list_sources(connection, org_id=org_id, dag_name=dag, limit=_MAX_SOURCES)
            if not rows and not await _sql.dag_exists(connection, org_id=org_id, dag_name=dag):
                raise NotFound(f"There is no DAG {dag!r} in this org.")
        return SourceList(sources=[_view(row) for row in rows])


def _view(row: Row) -> SourceView:
    first, last = _next_dates(row)
    return SourceView(
        job=row["name"],
        job_id=row["job_id"],
        current=row["current"],
        kind=row["kind"],
        state=_state(row),
        since=_since(row),
        paused=row["pause_reason"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        restarts=row["restarts"] or 0,
        worker_id=row["worker_id"],
        last_error=_error(row),
        last_error_at=row["failed_at"],
        next_at=row["next_at"],
        partition=row["partition"],
        next_start_date=first,
        next_end_date=last,
        catch_up=msgspec.json.decode(row["source"]).get("catch_up"),
        waiting=row["waiting"],
        hook=None if row["hook_id"] is None else f"/v1/hooks/{row['hook_id']}",
        outputs=[_output(one, row["partition"]) for one in _source_outputs.decode(row["outputs"])],
    )


_source_outputs = msgspec.json.Decoder(list[SourceOutput])


def _output(one: SourceOutput, partition: str | None) -> SourceOutput:
    start, dash, end = (one.last_scope or "").rpartition("-")
    if partition is None or not (dash and start):
        return one
    return msgspec.structs.replace(one, last_dates=shown(partition, int(start), int(end)))


def _next_dates(row: Row) -> tuple[str | None, str | None]:
    """Returns the partitions that the next start of a schedule stands for."""
    source = msgspec.json.decode(row["source"])
    span = next_interval(source, row["partition"], row["covered_to"], row["next_at"])
    return (None, None) if span is None else dates_of(row["partition"], *span)


def _state(row: Row) -> SourceState:
    if row["pause_reason"] is not None:
        return SourceState.PAUSED
    if row["kind"] != SourceKind.ALWAYS_ON:
        return SourceState.READY
    match row["status"]:
        case "Running":
            return SourceState.RUNNING
        case "Queued":
            return SourceState.QUEUED
        case None:
            return SourceState.STARTING
        case _:
            return SourceState.RESTARTING


def _since(row: Row) -> datetime | None:
    """Returns the time since which the source has been in its state."""
    column = {"Running": "started_at", "Queued": "queued_at"}.get(row["status"], "ended_at")
    if row["kind"] != SourceKind.ALWAYS_ON:
        column = "paused_since"
    since: datetime | None = row["paused_since" if row["pause_reason"] is not None else column]
    return since


def _error(row: Row) -> str | None:
    return None if row["error_class"] is None else f"{row['error_class']}: {row['error_message'] or ''}".rstrip(": ")
