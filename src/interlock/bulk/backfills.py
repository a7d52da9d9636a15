"""A job's scopes in a range, computed again: asked for by hand, made bit by bit, with a run to follow and to stop.

Tasks of a backfill are forced: they are made whether their scope is done or not. They say nothing about what changes of
inputs the job has been given, so that a backfill that is canceled leaves nothing behind that nobody will do.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import structlog

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.kernel.actions import Actions
from interlock.kernel.loop import Periodic
from interlock.kernel.tasks import enqueue
from interlock.settings import Settings
from interlock.telemetry import TASKS_CREATED
from interlock.wire import (
    BackfillAnswer,
    BackfillPage,
    BackfillRequest,
    BackfillScope,
    BackfillState,
    BackfillView,
    Counts,
    JobRef,
    Priority,
    RunState,
)

log = structlog.get_logger()
_sql = queries("backfills")

_CHUNK: Final = 1000
_IN_WORK: Final = 100
_COUNTED: Final = 100_000
"""Scopes that are counted before a backfill begins; of more it is only known that there are more."""
_PAGE: Final = 5000
_SHOWN: Final = 10
_MOST_WAITING: Final = 10_000
"""Of a job without max_queue_depth."""
_SHARE: Final = 0.5
"""Of a job's max_queue_depth. The rest is for what happens now: a backfill must not hold back those upstream."""
_ZERO: Final = UUID(int=0)


class Backfills:
    """What users do with them."""

    def __init__(self, database: Database, settings: Settings, actions: Actions) -> None:
        self._database = database
        self._range_size = settings.range_size
        self._actions = actions

    async def start(self, dag: str, job: str, request: BackfillRequest, org_id: UUID, user: str) -> BackfillAnswer:
        if request.start > request.end:
            raise BadRequest("`start` must not lie behind `end`; both belong to the range.", code="bad_range")
        async with self._database.transaction() as connection:
            row = await self._job(connection, dag, job, org_id)
            count, first = await _count(connection, row["job_id"], request)
            more = count > _COUNTED
            answer = BackfillAnswer(scopes=min(count, _COUNTED), more=more, first=first, dry_run=request.dry_run)
            if request.dry_run:
                return answer
            run = await _sql.start_backfill(
                connection,
                org_id=org_id,
                job_id=row["job_id"],
                range_size=self._range_size,
                range_start=request.start,
                range_end=request.end,
                priority=1 if request.priority is Priority.BULK else 0,
                reason=request.reason,
                requested_by=user,
                total=None if more else count,
            )
            started = await _sql.backfill_by_id(connection, run_id=run["run_id"], org_id=org_id)
        return BackfillAnswer(scopes=answer.scopes, more=more, first=first, dry_run=False, backfill=_view(started))

    async def _job(self, connection: Connection, dag: str, job: str, org_id: UUID) -> Row:
        row: Row | None = None
        if "\x00" not in dag + job:
            row = await _sql.job_of_dag(connection, org_id=org_id, dag_name=dag, name=job)
        if row is None:
            raise NotFound(f"There is no job {job!r} of DAG {dag!r} in this org.")
        if not row["inputs"]:
            raise Conflict(
                f"Job {job!r} is a source: it has no inputs to go over again. Backfill a job that reads from it.",
                code="no_inputs",
            )
        return row

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> BackfillPage:
        async with self._database.connection() as connection:
            rows = await _sql.list_backfills(connection, org_id=org_id, cursor=_cursor(cursor), most=limit)
        following = str(rows[-1]["run_id"]) if len(rows) == limit else None
        return BackfillPage(backfills=[_view(row) for row in rows], next_cursor=following)

    async def one(self, run_id: UUID, org_id: UUID) -> BackfillView:
        async with self._database.connection() as connection:
            row = await _sql.backfill_by_id(connection, run_id=run_id, org_id=org_id)
        if row is None:
            raise NotFound(f"There is no backfill {run_id} in this org.")
        return _view(row)

    async def pause(self, run_id: UUID, org_id: UUID) -> BackfillView:
        """No more tasks are made; those that are there go on."""
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
        if found.state in (BackfillState.DONE, BackfillState.CANCELED):
            raise Conflict(
                f"The backfill is {found.state}: all of its tasks are made. Its run may still be canceled.",
                code="backfill_ended",
            )
        return found

    async def cancel(self, run_id: UUID, org_id: UUID) -> BackfillView:
        """No more tasks are made, and those that have not ended are canceled."""
        await self.one(run_id, org_id)
        async with self._database.connection() as connection:
            await _sql.end_backfill(connection, run_id=run_id, state=BackfillState.CANCELED)
        await self._actions.cancel_run(run_id, org_id)
        return await self.one(run_id, org_id)


class BackfillTasks(Periodic):
    """Makes their tasks, one chunk of each in a pass."""

    name = "backfills"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.backfill_seconds
        self._database = database
        self._direct = settings.queue_direct

    async def run_once(self) -> int:
        done, after = 0, _ZERO
        while True:
            async with self._database.connection() as connection:
                page = await _sql.backfills_in_work(connection, after=after, most=_IN_WORK)
            for row in page:
                done += await self._advance(row["run_id"])
            if len(page) < _IN_WORK:
                return done
            after = page[-1]["run_id"]

    async def _advance(self, run_id: UUID) -> int:
        """Scopes that were looked at. A chunk is one transaction: a crash leaves the place where it was."""

        async def work(connection: Connection) -> tuple[int, int, str]:
            row = await _sql.take_backfill(connection, run_id=run_id, most_waiting=_MOST_WAITING)
            if row is None:
                return 0, 0, ""
            looked_at, made = await self._chunk(connection, row)
            await failpoint("backfill.before_commit")
            return looked_at, made, row["runtime"]

        looked_at, made, runtime = await self._database.run(work)
        if made:
            TASKS_CREATED.labels(runtime=runtime).inc(made)
        return looked_at

    async def _chunk(self, connection: Connection, row: Row) -> tuple[int, int]:
        if row["cancel_requested"] or not row["active"]:
            await _end(connection, row, BackfillState.CANCELED)
            return 0, 0
        most = min(_CHUNK, _room(row))
        if row["held_back"] or most <= 0:
            return 0, 0
        place = {name: row[name] for name in ("place_input", "place_start", "place_end")}
        scopes = await _sql.scopes_after(
            connection,
            job_id=row["job_id"],
            range_start=row["range_start"],
            range_end=row["range_end"],
            most=most,
            **place,
        )
        ready = [scope for scope in scopes if scope["commit_id"] is not None]
        if scopes:
            made = await _sql.make_tasks(connection, **_task_arrays(row, scopes[-1], ready))
            if made:
                await enqueue(connection, [task["task_id"] for task in made], direct=self._direct)
        if len(scopes) < most:
            await _end(connection, row, BackfillState.DONE)
        return len(scopes), len(ready)


def _room(row: Row) -> int:
    """How many tasks more may wait."""
    depth = row["max_queue_depth"]
    share = _MOST_WAITING if depth is None else max(1, int(depth * _SHARE))
    return int(share - row["waiting"])


def _task_arrays(row: Row, last: Row, ready: list[Row]) -> dict[str, Any]:
    return {
        "run_id": row["run_id"],
        "org_id": row["org_id"],
        "job_id": row["job_id"],
        "first_index": row["last_index"] + 1,
        "max_attempts": row["max_attempts"],
        "priority": row["priority"],
        "concurrency_key": row["concurrency_key"],
        "inputs": [scope["input_index"] for scope in ready],
        "starts": [scope["range_start"] for scope in ready],
        "ends": [scope["range_end"] for scope in ready],
        "streams": [scope["of_stream"] for scope in ready],
        "commits": [scope["commit_id"] for scope in ready],
        "place_input": last["input_index"],
        "place_start": last["range_start"],
        "place_end": last["range_end"],
    }


async def _end(connection: Connection, row: Row, state: BackfillState) -> None:
    await _sql.end_backfill(connection, run_id=row["run_id"], state=state)
    log.info("backfill.ended", run_id=str(row["run_id"]), state=state, job_is_current=row["active"])


async def _count(connection: Connection, job_id: UUID, request: BackfillRequest) -> tuple[int, list[BackfillScope]]:
    """How many scopes there are, up to one more than are counted, and the first of them."""
    place = {"place_input": -1, "place_start": 0, "place_end": 0}
    count, looked_at, first = 0, 0, list[BackfillScope]()
    while looked_at <= _COUNTED:
        page = await _sql.scopes_after(
            connection, job_id=job_id, range_start=request.start, range_end=request.end, most=_PAGE, **place
        )
        ready = [scope for scope in page if scope["commit_id"] is not None]
        first += [_scope(scope) for scope in ready[: _SHOWN - len(first)]]
        count, looked_at = count + len(ready), looked_at + len(page)
        if len(page) < _PAGE:
            return count, first
        last = page[-1]
        place = {
            "place_input": last["input_index"],
            "place_start": last["range_start"],
            "place_end": last["range_end"],
        }
    return _COUNTED + 1, first


def _scope(row: Row) -> BackfillScope:
    return BackfillScope(input_index=row["input_index"], start=row["range_start"], end=row["range_end"])


def _cursor(cursor: str | None) -> UUID | None:
    if cursor is None:
        return None
    try:
        return UUID(cursor)
    except ValueError:
        sentence = "`cursor` is not one this server gave out; start again without it."
        raise BadRequest(sentence, code="bad_cursor") from None


def _view(row: Row) -> BackfillView:
    return BackfillView(
        run_id=row["run_id"],
        job_id=row["job_id"],
        job=JobRef(dag_name=row["dag_name"], name=row["name"]),
        start=row["range_start"],
        end=row["range_end"],
        priority=Priority.BULK if row["priority"] else Priority.NORMAL,
        reason=row["reason"],
        requested_by=row["requested_by"],
        state=BackfillState(row["state"]),
        made=row["made"],
        total=row["made"] if row["ended_at"] else row["total"],
        counts=Counts(
            Queued=row["queued"],
            Running=row["running"],
            Completed=row["completed"],
            Failed=row["failed"],
            Canceled=row["canceled"],
            dead=row["dead"],
        ),
        run_state=RunState(row["run_state"]),
        created_at=row["created_at"],
        ended_at=row["run_ended_at"],
    )
