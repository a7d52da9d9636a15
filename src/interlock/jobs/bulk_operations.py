"""Bulk operations: one action on all tasks or runs that match a filter, executed in the background.

A request is a row. A loop takes the row, walks one stretch, acts on what matches, and moves the row's place, all in one
transaction: a crash repeats the stretch as if it had never begun, and no task is acted on twice. The row remains
as the record of the request: who, what, why, and the counts.
"""

from __future__ import annotations

from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from interlock.access.principals import Principal
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.http.cursors import FIRST, next_cursor, uuid_cursor
from interlock.jobs.bulk_walk import OF_RUNS, Place, Stretch, Walk, require_run
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.actions import Actions
from interlock.tasks.idempotency import Repeat, once
from interlock.tasks.reads import Reads
from interlock.wire.base import Priority, TaskStatus
from interlock.wire.bulk_operations import (
    BulkFilter,
    BulkKind,
    BulkPage,
    BulkPreview,
    BulkRequest,
    BulkSample,
    BulkState,
    BulkView,
)
from interlock.wire.tasks import JobRef

_sql = queries(__name__, "bulk_operations")

MAX_COUNTED: Final = 10_000
"""A dry run counts no further."""
_MAX_STEPS: Final = 300
"""Reads of one dry run."""
_SAMPLES: Final = 10
_MESSAGES: Final = 5_000
_PAUSE_SECONDS: Final = 1.0
_filter = msgspec.json.Decoder(BulkFilter)
_place = msgspec.json.Decoder(Place)


class BulkOperations:
    def __init__(self, database: Database, settings: Settings, reads: Reads) -> None:
        self._database = database
        self._settings = settings
        self._reads = reads

    async def preview(self, request: BulkRequest, org_id: UUID) -> BulkPreview:
        """Counts what matches, up to a limit, and returns the first of it. Changes nothing."""
        _check_priority(request)
        walk = await Walk.of(self._reads, request.kind, request.filter, org_id, self._database.clock.now())
        matched, steps, samples = 0, 0, list[Row]()
        place: Place | None = Place()
        async with self._database.connection() as connection:
            await require_run(connection, walk)
            while place is not None and matched < MAX_COUNTED and steps < _MAX_STEPS:
                found, steps = await walk.step(connection, place), steps + 1
                matched, place = matched + found.matches, found.next
                samples += [*found.tasks, *([found.run] if found.run else [])][: _SAMPLES - len(samples)]
        return BulkPreview(
            kind=request.kind,
            unit=_unit(request.kind),
            matched=min(matched, MAX_COUNTED),
            more=place is not None or matched > MAX_COUNTED,
            samples=[await self._sample(row, org_id) for row in samples],
        )

    async def _sample(self, row: Row, org_id: UUID) -> BulkSample:
        job = await self._reads.find_job(str(row["job_id"]), org_id)
        task: dict[str, Any] = dict(row)
        return BulkSample(
            task_id=task.get("task_id"),
            run_id=row["run_id"],
            job_id=row["job_id"],
            job=JobRef(dag_name=job["dag_name"], name=job["name"]),
            index=task.get("task_index"),
            status=TaskStatus(row["status"]) if "status" in task else None,
            error_class=task.get("error_class"),
        )

    async def start(self, request: BulkRequest, caller: Principal, repeat: Repeat) -> BulkView:
        _check_priority(request)
        now = self._database.clock.now()
        walk = await Walk.of(self._reads, request.kind, request.filter, caller.org_id, now)

        async def work(connection: Connection) -> BulkView:
            run = await require_run(connection, walk)
            row = await _sql.insert_operation(
                connection,
                org_id=caller.org_id,
                kind=request.kind.value,
                filter=msgspec.json.encode(request.filter).decode(),
                job_id=walk.job_id,
                priority=None if request.priority is None else int(request.priority is Priority.BULK),
                reason=request.reason,
                requested_by=caller.user,
                expected=_expected(request.kind, run),
            )
            return _view(row)

        return await once(
            self._database, self._settings, caller.org_id, "POST /v1/bulk-operations", repeat, BulkView, 202, work
        )

    async def operation(self, operation_id: UUID, org_id: UUID) -> BulkView:
        async with self._database.connection() as connection:
            row = await _sql.operation(connection, operation_id=operation_id, org_id=org_id)
        if row is None:
            raise NotFound(f"There is no bulk operation {operation_id} in this org.")
        return _view(row)

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> BulkPage:
        async with self._database.connection() as connection:
            rows = await _sql.operations(connection, org_id=org_id, cursor=uuid_cursor(cursor, None), limit=limit)
        return BulkPage(operations=[_view(row) for row in rows], next_cursor=next_cursor(rows, limit, "operation_id"))

    async def running(self, org_id: UUID, limit: int) -> list[BulkView]:
        async with self._database.connection() as connection:
            return [_view(row) for row in await _sql.running_operations(connection, org_id=org_id, limit=limit)]

    async def cancel(self, operation_id: UUID, org_id: UUID) -> BulkView:
        """Stops an operation after its current batch. What it has done stays done."""
        async with self._database.connection() as connection:
            row = await _sql.request_operation_cancel(connection, operation_id=operation_id, org_id=org_id)
        if row is not None:
            return _view(row)
        view = await self.operation(operation_id, org_id)
        raise Conflict(f"The bulk operation has ended: it is {view.state}.", code="operation_ended")


class BulkOperationLoop(Periodic):
    """Carries out bulk operations, one batch of one operation per pass."""

    name = "bulk_operations"
    seconds = _PAUSE_SECONDS

    def __init__(self, database: Database, actions: Actions) -> None:
        self._database = database
        self._actions = actions
        self._after = self._current = FIRST

    async def run_once(self) -> int:
        canceled: list[tuple[int, list[UUID]]] = []
        try:
            worked = await self._database.run(lambda connection: self._advance(connection, canceled))
        except Exception:
            self._after = self._current  # an operation that fails does not hold up the others
            raise
        for shard, ids in canceled:
            await self._actions.wake_next(ids, shard)
        if worked is None and self._after != FIRST:
            self._after = FIRST
            return 1  # the operations before it have their turn
        self._after = worked or FIRST
        return int(worked is not None)

    async def _advance(self, connection: Connection, canceled: list[tuple[int, list[UUID]]]) -> UUID | None:
        """Walks one stretch of the next operation. Returns the operation, or None if there is none."""
        canceled.clear()  # of a try that was rolled back
        row = await _sql.next_operation(connection, after=self._after)
        if row is None:
            return None
        self._current = operation_id = UUID(str(row["operation_id"]))
        if row["cancel_requested"]:
            await self._end(connection, row, BulkState.CANCELED)
            return operation_id
        given, created_at = _filter.decode(row["filter"]), row["created_at"]
        walk = Walk(BulkKind(row["kind"]), given, row["org_id"], created_at, row["job_id"])
        found = await walk.step(connection, Place() if row["place"] is None else _place.decode(row["place"]))
        following, changed, matched = await self._act(connection, row, found, canceled)
        await self._record(connection, row, following, matched=matched, changed=changed, walked=found.walked)
        await failpoint("bulk_operation.before_commit")
        return operation_id

    async def _record(self, connection: Connection, row: Row, following: Place | None, **counts: float | None) -> None:
        place = None if following is None else msgspec.json.encode(following).decode()
        await _sql.advance_operation(connection, operation_id=row["operation_id"], place=place, **counts)
        if following is None:
            await self._end(connection, row, BulkState.COMPLETED)

    async def _end(self, connection: Connection, row: Row, state: BulkState) -> None:
        await _sql.end_operation(connection, operation_id=row["operation_id"], state=state.value)

    async def _act(
        self, connection: Connection, row: Row, found: Stretch, canceled: list[tuple[int, list[UUID]]]
    ) -> tuple[Place | None, int, int]:
        """Acts on a stretch. Returns where to continue, and how much it changed and matched."""
        kind, org_id, ids = BulkKind(row["kind"]), row["org_id"], [task["task_id"] for task in found.tasks]
        if kind in OF_RUNS:
            return await self._act_on_run(connection, row, found)
        if not ids:
            return found.next, 0, 0
        if kind is BulkKind.CANCEL:
            ended = await self._actions.cancel_within(connection, ids, org_id, found.shard)
            canceled.append((found.shard, [task["task_id"] for task in ended if task["status"] == "Canceled"]))
            return found.next, len(ended), len(ids)
        return found.next, await self._actions.redrive_within(connection, ids, org_id, found.shard), len(ids)

    async def _act_on_run(self, connection: Connection, row: Row, found: Stretch) -> tuple[Place | None, int, int]:
        if found.run is None:
            return found.next, 0, 0
        which = {"run_id": found.run["run_id"], "org_id": row["org_id"]}
        if row["kind"] == BulkKind.PAUSE:
            return found.next, len(await _sql.pause_run(connection, **which)), 1
        if row["kind"] == BulkKind.RESUME:
            return found.next, len(await _sql.resume_run(connection, **which)), 1
        changed = len(await _sql.set_run_priority(connection, priority=row["priority"], **which))
        if found.run["queue"] is not None:
            moved = await _sql.move_messages(
                connection, priority=row["priority"], queue=found.run["queue"], limit=_MESSAGES, **which
            )
            if len(moved) == _MESSAGES:  # more of the same run in the next pass
                return Place() if row["place"] is None else _place.decode(row["place"]), 0, 0
        return found.next, changed, 1


def _check_priority(request: BulkRequest) -> None:
    if (request.priority is not None) != (request.kind is BulkKind.REPRIORITISE):
        raise BadRequest("Give `priority` with the kind `reprioritise`, and only with it.", code="bad_filter")


def _expected(kind: BulkKind, run: Row | None) -> int | None:
    if run is None:
        return None
    if kind in OF_RUNS:
        return 1
    return int(run["failed"]) if kind is not BulkKind.CANCEL else None


def _unit(kind: BulkKind) -> Literal["tasks", "runs"]:
    return "runs" if kind in OF_RUNS else "tasks"


def _view(row: Row) -> BulkView:
    kind, priority = BulkKind(row["kind"]), row["priority"]
    return BulkView(
        operation_id=row["operation_id"],
        kind=kind,
        unit=_unit(kind),
        state=BulkState(row["state"]),
        filter=_filter.decode(row["filter"]),
        priority=None if priority is None else Priority.BULK if priority else Priority.NORMAL,
        reason=row["reason"],
        requested_by=row["requested_by"],
        matched=row["matched"],
        changed=row["changed"],
        skipped=row["matched"] - row["changed"],
        expected=row["expected"],
        progress=row["walked"],
        cancel_requested=row["cancel_requested"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )
