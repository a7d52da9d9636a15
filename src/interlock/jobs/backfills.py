"""Backfills: recompute a job's scopes in a range. Ingested like a list, as a run that can be watched and stopped.

Tasks of a backfill are forced: they are created whether or not their scope is done. They do not record which input
changes the job has received, so that a canceled backfill leaves no scope behind that no task will compute.

The tasks of a held run exist but have no queue message yet. They are handed out as their job's queue has room.
A held run, such as a backfill, fills at most a share of the queue. The rest is for current work, so that a held run
never causes backpressure upstream. Nothing is handed out while backpressure or a user pauses the run. Waiting tasks are
not lost: any ingest process finds them on its next pass.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import structlog

from interlock.calendars import calendar_of, dates_of, interval_payload
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.http.cursors import next_cursor, uuid_cursor
from interlock.http.ranges import range_of
from interlock.jobs.run_sources import START, Batch, Place, ScopePlace, ScopesSource, announce
from interlock.jobs.task_rows import table_of
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.actions import Actions, request_run_cancel
from interlock.tasks.queue import enqueue
from interlock.wire.base import Priority, RunState
from interlock.wire.dags import (
    BackfillAnswer,
    BackfillPage,
    BackfillRequest,
    BackfillScope,
    BackfillState,
    BackfillView,
)
from interlock.wire.jobs import Counts
from interlock.wire.tasks import JobRef

log = structlog.get_logger()
_sql = queries(__name__, "backfills")
_control_sql = queries(__name__, "run_control")

_HELD_PAGE: Final = 100
_MAX_TASKS: Final = 5_000
"""Tasks handed out in one transaction."""
_MAX_WAITING: Final = 10_000
"""Limit for a job without max_queue_depth."""
_SHARE: Final = 0.5
_RANGES: Final = 4
"""The share holds at least this many ranges, so that it is refilled long before it is empty."""
_ZERO: Final = UUID(int=0)


def range_size_of(max_queue_depth: int | None, settings: Settings) -> int:
    """Returns the range size of a held run. Messages cover whole ranges, which must fit into its queue share."""
    return max(1, min(settings.range_size, _share(max_queue_depth) // _RANGES))


class HeldRuns(Periodic):
    name = "held_runs"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.backfill_seconds
        self._database = database
        self._direct = settings.queue_direct

    async def run_once(self) -> int:
        """Returns the number of tasks handed out."""
        done, after = 0, {"after_job": _ZERO, "after_run": _ZERO}
        while True:
            async with self._database.connection() as connection:
                page = await _sql.held_runs(connection, limit=_HELD_PAGE, **after)
            for row in page:
                done += await self.hand_out(row["run_id"])
            if len(page) < _HELD_PAGE:
                return done
            after = {"after_job": page[-1]["job_id"], "after_run": page[-1]["run_id"]}

    async def hand_out(self, run_id: UUID) -> int:
        """Hands out the next tasks of one run. A crash before the commit changes nothing."""
        return await self._database.run(functools.partial(self._hand_out, run_id=run_id))

    async def _hand_out(self, connection: Connection, *, run_id: UUID) -> int:
        run: Row | None = await _sql.take_held(connection, run_id=run_id, most_waiting=_MAX_WAITING)
        if run is None:
            return 0
        if not run["active"]:
            # Another version of the DAG has taken over; nothing reads the output of this one.
            await request_run_cancel(connection, run_id, run["org_id"])
            log.info("run.superseded", run_id=str(run_id), effect="its tasks are canceled")
            return 0
        first, last = run["held_from"], _last(run)
        if last < first:
            return 0
        await _take_over(connection, run, first, last)
        await self._send(connection, run, first, last)
        await _sql.hold_from(connection, run_id=run_id, held_from=last + 1)
        await failpoint("ingest.before_hand_out_commit")
        return int(last - first + 1)

    async def _send(self, connection: Connection, run: Row, first: int, last: int) -> None:
        if run["queue"] is not None:
            named = {name: run[name] for name in ("org_id", "run_id", "job_id", "range_size", "queue", "lane")}
            await _sql.send_ranges(connection, first=first, last=last, direct=self._direct, **named)
            return
        rows = await _control_sql.queued_of_range(
            connection, shard=run["shard"], run_id=run["run_id"], first=first, last=last
        )
        if rows:
            await enqueue(connection, [row["task_id"] for row in rows], shard=run["shard"], direct=self._direct)


async def _take_over(connection: Connection, run: Row, first: int, last: int) -> None:
    """Reassigns abandoned scopes to the tasks handed out now. A scope is abandoned if its own task is dead, canceled or
    deleted and so will never complete it. Every other scope keeps its task."""
    span = {"shard": run["shard"], "run_id": run["run_id"], "first": first, "last": last}
    undone = await _sql.undone_scopes(connection, job_id=run["job_id"], **span)
    alive = set[UUID]()
    for shard in {scope["task_shard"] for scope in undone}:
        waited_for = [scope["waits_for"] for scope in undone if scope["task_shard"] == shard]
        rows = await _sql.may_end(connection, shard=shard, task_ids=waited_for)
        alive |= {row["task_id"] for row in rows}
    abandoned = [scope for scope in undone if scope["waits_for"] not in alive]
    if abandoned:
        await _sql.take_over_scopes(
            connection,
            job_id=run["job_id"],
            task_shard=run["shard"],
            inputs=[scope["input_index"] for scope in abandoned],
            starts=[scope["range_start"] for scope in abandoned],
            ends=[scope["range_end"] for scope in abandoned],
            left_by=[scope["waits_for"] for scope in abandoned],
            task_ids=[scope["task_id"] for scope in abandoned],
        )


def _share(max_queue_depth: int | None) -> int:
    return _MAX_WAITING if max_queue_depth is None else max(1, int(max_queue_depth * _SHARE))


def _last(run: Row) -> int:
    """Returns the last index to hand out: whole ranges that fit, or the rest of the run."""
    size, left, share = run["range_size"], run["last_index"] + 1 - run["held_from"], _share(run["max_queue_depth"])
    room = max(0, min(_MAX_TASKS, share - run["waiting"]))
    fitting = left if left <= room else room // size * size
    if room and size > share:  # the limit was lowered since, and no range would ever fit
        fitting = size
    return int(run["held_from"] + min(fitting, left) - 1)


Scope = Row | Mapping[str, Any]
"""A scope by the column names of scopes_after. Any: values of a row."""

_COUNTED: Final = 100_000
"""Limit for counting scopes before a backfill starts; beyond it, the answer has only `more`."""
_PAGE: Final = 5000
_SHOWN: Final = 10
_ENDED: Final = (BackfillState.DONE, BackfillState.CANCELED, BackfillState.FAILED)


class Backfills:
    """Operations on backfills for users."""

    def __init__(self, database: Database, settings: Settings, actions: Actions) -> None:
        self._database = database
        self._settings = settings
        self._actions = actions

    async def start(self, dag: str, job: str, request: BackfillRequest, org_id: UUID, user: str) -> BackfillAnswer:
        async with self._database.transaction() as connection:
            row = await self._job(connection, dag, job, org_id)
            source = _source(row, request)
            count, first = await _count(connection, row, source)
            more = count > _COUNTED
            upstream = [] if count else await _sql.sources_upstream(connection, job_id=row["job_id"])
            answer = BackfillAnswer(
                scopes=min(count, _COUNTED),
                more=more,
                first=first,
                upstream=[f"{one['dag_name']}/{one['name']}" for one in upstream],
                dry_run=request.dry_run,
            )
            if request.dry_run:
                return answer
            started = await self._write(connection, row, request, source, user, None if more else count)
            await failpoint("submit.before_commit")
        return msgspec.structs.replace(answer, backfill=started)

    async def _write(
        self,
        connection: Connection,
        job: Row,
        request: BackfillRequest,
        source: ScopesSource,
        user: str,
        total: int | None,
    ) -> BackfillView:
        """Records the backfill; the ingest creates its tasks."""
        org_id = job["org_id"]
        run = await _sql.start_backfill(
            connection,
            org_id=org_id,
            job_id=job["job_id"],
            range_size=range_size_of(job["max_queue_depth"], self._settings),
            source=msgspec.json.encode(source).decode(),
            range_start=source.start,
            range_end=source.end,
            priority=1 if request.priority is Priority.BULK else 0,
            reason=request.reason,
            requested_by=user,
            total=total,
        )
        await announce(connection, self._settings, [run["run_id"]])
        return _view(await _sql.backfill_by_id(connection, run_id=run["run_id"], org_id=org_id))

    async def _job(self, connection: Connection, dag: str, job: str, org_id: UUID) -> Row:
        row: Row | None = None
        if "\x00" not in dag + job:
            row = await _sql.job_of_dag(connection, org_id=org_id, dag_name=dag, name=job)
        if row is None:
            raise NotFound(f"There is no job {job!r} of DAG {dag!r} in this org.")
        if not row["inputs"] and (row["partition"] is None or row["kind"] == "always_on"):
            raise Conflict(
                f"Job {job!r} is a source without inputs to recompute. Backfill a job that reads from it, or give the "
                "source time partitions, such as `partition: daily`.",
                code="no_inputs",
            )
        return row

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> BackfillPage:
        async with self._database.connection() as connection:
            rows = await _sql.list_backfills(connection, org_id=org_id, cursor=uuid_cursor(cursor, None), limit=limit)
        return BackfillPage(backfills=[_view(row) for row in rows], next_cursor=next_cursor(rows, limit, "run_id"))

    async def one(self, run_id: UUID, org_id: UUID) -> BackfillView:
        async with self._database.connection() as connection:
            row = await _sql.backfill_by_id(connection, run_id=run_id, org_id=org_id)
        if row is None:
            raise NotFound(f"There is no backfill {run_id} in this org.")
        return _view(row)

    async def pause(self, run_id: UUID, org_id: UUID) -> BackfillView:
        """Stops handing out tasks. Those already handed out continue."""
        await self.one(run_id, org_id)
        async with self._database.connection() as connection:
            await _sql.pause_backfill(connection, run_id=run_id, org_id=org_id)
        return await self._unless_ended(run_id, org_id)

    async def resume(self, run_id: UUID, org_id: UUID) -> BackfillView:
        await self.one(run_id, org_id)
        async with self._database.connection() as connection:
            await _sql.resume_backfill(connection, run_id=run_id, org_id=org_id)
        return await self._unless_ended(run_id, org_id)

    async def _unless_ended(self, run_id: UUID, org_id: UUID) -> BackfillView:
        found = await self.one(run_id, org_id)
        if found.state in _ENDED:
            raise Conflict(
                f"The backfill is {found.state}: it has no tasks left to hold back. Its run can still be canceled.",
                code="backfill_ended",
            )
        return found

    async def cancel(self, run_id: UUID, org_id: UUID) -> BackfillView:
        """Stops handing out tasks, and cancels all that have not ended."""
        await self.one(run_id, org_id)
        await self._actions.cancel_run(run_id, org_id)
        return await self.one(run_id, org_id)


def _source(job: Row, request: BackfillRequest) -> ScopesSource:
    """Returns the scopes of a backfill. Those of a source are the partitions of its calendar that have begun."""
    partition = job["partition"]
    start, end = range_of(partition, request.start, request.end, aligned=not job["inputs"], code="bad_range")
    if job["inputs"]:
        return ScopesSource(start=start, end=end)
    calendar = calendar_of(partition)
    now: int = job["now"]
    if end > (last := calendar.partition(now))[1]:
        raise BadRequest(
            f"The range ends with {calendar.dates(start, end).last}, which has not begun: end it with "
            f"{calendar.dates(*last).last} or earlier.",
            code="range_in_future",
        )
    return ScopesSource(start=start, end=end, calendar=partition)


async def _count(connection: Connection, job: Row, source: ScopesSource) -> tuple[int, list[BackfillScope]]:
    """Counts scopes, up to one more than the limit, and returns the first few."""
    place, count, looked_at, first = START, 0, 0, list[BackfillScope]()
    while looked_at <= _COUNTED:
        page = await scopes_after(connection, job["job_id"], source, place, _PAGE)
        ready = [scope for scope in page if scope["commit_id"] is not None]
        first += [_scope(scope, job["partition"]) for scope in ready[: _SHOWN - len(first)]]
        count, looked_at = count + len(ready), looked_at + len(page)
        if len(page) < _PAGE:
            return count, first
        place = place_of(page[-1])
    return _COUNTED + 1, first


async def scopes_after(
    connection: Connection, job_id: UUID, source: ScopesSource, place: ScopePlace, limit: int
) -> Sequence[Scope]:
    """Returns scopes in order. Scopes that some input lacks are included, without a commit."""
    if source.calendar is not None:
        return _intervals_after(source, source.calendar, place, limit)
    rows: Sequence[Scope] = await _sql.scopes_after(
        connection,
        job_id=job_id,
        range_start=source.start,
        range_end=source.end,
        place_input=place.input_index,
        place_start=place.start,
        place_end=place.end,
        limit=limit,
    )
    return rows


def _intervals_after(source: ScopesSource, partition: str, place: ScopePlace, limit: int) -> list[Scope]:
    calendar = calendar_of(partition)
    start = source.start if place == START else place.end + 1
    return [
        {
            "input_index": 0,
            "range_start": first,
            "range_end": last,
            "of_stream": False,
            "commit_id": 0,
            "payload": interval_payload(calendar, (first, last)),
        }
        for first, last in islice(calendar.partitions(start, source.end), limit)
    ]


def place_of(scope: Scope) -> ScopePlace:
    return ScopePlace(input_index=scope["input_index"], start=scope["range_start"], end=scope["range_end"])


def _scope(row: Scope, partition: str | None) -> BackfillScope:
    start, end = row["range_start"], row["range_end"]
    first, last = dates_of(partition, start, end)
    return BackfillScope(input_index=row["input_index"], start=start, end=end, start_date=first, end_date=last)


def _view(row: Row) -> BackfillView:
    first, last = dates_of(row["partition"], row["range_start"], row["range_end"])
    return BackfillView(
        run_id=row["run_id"],
        job_id=row["job_id"],
        job=JobRef(dag_name=row["dag_name"], name=row["name"]),
        start=row["range_start"],
        end=row["range_end"],
        partition=row["partition"],
        start_date=first,
        end_date=last,
        priority=Priority.BULK if row["priority"] else Priority.NORMAL,
        reason=row["reason"],
        requested_by=row["requested_by"],
        state=_state(row),
        made=_made(row),
        total=row["total"] if row["run_total"] is None else row["run_total"],
        counts=_counts(row),
        run_state=RunState(row["run_state"]),
        run_reason=row["run_reason"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )


def _state(row: Row) -> BackfillState:
    """Derives the state from the run and its ingest, so that no separate state can get out of step."""
    if row["not_ingested"]:
        return BackfillState.FAILED
    if row["cancel_requested"] or row["run_state"] == RunState.CANCELED:
        return BackfillState.CANCELED
    if row["ended_at"] is not None or (row["latched"] and row["held_from"] is None):
        return BackfillState.DONE
    return BackfillState.PAUSED if row["paused"] else BackfillState.RUNNING


def _made(row: Row) -> int:
    total: int = row["run_total"] or 0
    return total if row["held_from"] is None else min(row["held_from"], total)


def _counts(row: Row) -> Counts:
    counted: dict[str, Any] = {
        status: row[status.lower()] for status in ("Queued", "Running", "Completed", "Failed", "Canceled")
    }
    return Counts(**counted, dead=row["dead"])


"""Scopes inspected per statement."""
_LARGEST: Final = 50_000
"""Maximum rows per batch: two batches are in memory."""
_place = msgspec.json.Decoder(ScopePlace)


class Scopes:
    def __init__(
        self,
        database: Database,
        source: ScopesSource,
        run_id: UUID,
        job_id: UUID,
        slot_pointer: str | None,
        *,
        batch_rows: int,
    ) -> None:
        self._database = database
        self._source = source
        self._run_id = run_id
        self._job_id = job_id
        self._slot_pointer = slot_pointer
        self._rows = min(batch_rows, _LARGEST)

    async def batches(self, place: Place) -> AsyncGenerator[Batch]:
        """Yields batches of at least one task. Trailing scopes without a task are in no batch."""
        at = self._source.after if place.reached is None else _place.decode(place.reached)
        line, more = place.line, True
        while more:
            ready, at, more = await self._next(at)
            if ready:
                yield self._batch(ready, at, line)
                line += len(ready)

    async def verify(self) -> None:
        """Does nothing: scopes have no checksum to verify against."""

    async def _next(self, at: ScopePlace) -> tuple[list[Scope], ScopePlace, bool]:
        """Returns scopes that every input has, the last scope inspected, and whether more may follow."""
        ready: list[Scope] = []
        while len(ready) < self._rows:
            limit = min(_PAGE, self._rows - len(ready))
            async with self._database.connection() as connection:
                page = await scopes_after(connection, self._job_id, self._source, at, limit)
            ready += [scope for scope in page if scope["commit_id"] is not None]
            at = place_of(page[-1]) if page else at
            if len(page) < limit:
                return ready, at, False
        return ready, at, True

    def _batch(self, scopes: list[Scope], reached: ScopePlace, line: int) -> Batch:
        count = len(scopes)
        payloads = pa.array([_payload(scope) for scope in scopes], pa.string())
        indexes = np.arange(line, line + count, dtype=np.int64)
        return Batch(
            part=1,
            first_byte=line,
            end_byte=line + count,
            first_line=line,
            lines=count,
            table=table_of(self._run_id, indexes, payloads, self._slot_pointer),
            reached=msgspec.json.encode(reached).decode(),
        )


def _payload(scope: Scope) -> str:
    """Builds the same payload as a task created by an event or a schedule. Stream ranges count as changed."""
    if "payload" in scope:
        return msgspec.json.encode(scope["payload"]).decode()
    start, end = scope["range_start"], scope["range_end"]
    changed = (start, end) if scope["of_stream"] else (None, None)
    return msgspec.json.encode(
        {
            "input_index": scope["input_index"],
            "partition_key": f"{start}-{end}",
            "start": start,
            "end": end,
            "changed_start": changed[0],
            "changed_end": changed[1],
            "commit": scope["commit_id"],
        }
    ).decode()
