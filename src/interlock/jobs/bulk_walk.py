"""The walk of a bulk operation over the jobs, runs and tasks that its filter may match, one bounded stretch at a time.

Job by job in the order of their ids: first the runs of a job, each by task index, then its tasks without a run. The
place of the walk names everything that follows, so the walk continues after a crash, and in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from interlock.errors import BadRequest, NotFound
from interlock.http.cursors import FIRST
from interlock.stores.postgres import Connection, Row, queries
from interlock.tasks.reads import Reads
from interlock.tasks.shards import SMALL_SHARD
from interlock.wire.base import TaskStatus
from interlock.wire.bulk_operations import BulkFilter, BulkKind

_sql = queries(__name__, "bulk_operations")

OF_RUNS: Final = frozenset({BulkKind.PAUSE, BulkKind.RESUME, BulkKind.REPRIORITISE})
OF_FAILED: Final = frozenset({BulkKind.RETRY, BulkKind.REDRIVE})
BATCH: Final = 1_000
STRETCH: Final = 5_000
"""Number of task indexes of a run that one read covers."""
_JOBS: Final = 100
_LIVE: Final = (TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.FAILED)


class Place(msgspec.Struct, frozen=True):
    """How far the walk has come: everything up to here was walked."""

    job: UUID = FIRST
    """The job that is walked, or the last one that was."""
    in_job: bool = False
    run: UUID = FIRST
    in_run: bool = False
    index: int = -1
    status: int = -1
    """Position in the statuses of tasks without a run; -1 while in the runs."""
    task: UUID = FIRST


@dataclass(frozen=True)
class Stretch:
    """The result of one read. `next` is None at the end of the walk."""

    next: Place | None
    tasks: Sequence[Row] = ()
    shard: int = SMALL_SHARD
    run: Row | None = None
    """The run to act on, for operations on runs."""
    walked: float | None = None
    """Share of the run that was walked, if the filter names one."""

    @property
    def matches(self) -> int:
        return len(self.tasks) + (self.run is not None)


@dataclass(frozen=True)
class Walk:
    kind: BulkKind
    filter: BulkFilter
    org_id: UUID
    requested_at: datetime
    job_id: UUID | None
    """The job that the filter names."""

    @staticmethod
    async def of(reads: Reads, kind: BulkKind, given: BulkFilter, org_id: UUID, requested_at: datetime) -> Walk:
        """Checks the filter. Raises NotFound if it names a job that does not exist."""
        check(kind, given)
        job_id = (await reads.find_job(given.job, org_id))["job_id"] if given.job is not None else None
        return Walk(kind, given, org_id, requested_at, job_id)

    async def step(self, connection: Connection, place: Place) -> Stretch:
        if self.filter.run is not None:
            return await self._only_run(connection, place)
        if not place.in_job:
            return await self._next_job(connection, place)
        if place.in_run:
            return await self._in_run(connection, place)
        if place.status < 0:
            return await self._next_run(connection, place)
        return await self._without_run(connection, place)

    async def _only_run(self, connection: Connection, place: Place) -> Stretch:
        run = await _sql.run_to_walk(connection, org_id=self.org_id, run_id=self.filter.run)
        if run is None or (self.job_id is not None and run["job_id"] != self.job_id):
            return Stretch(None)
        return await self._stretch(connection, run, place, after=None)

    async def _next_job(self, connection: Connection, place: Place) -> Stretch:
        if self.job_id is not None:
            return Stretch(Place(job=self.job_id, in_job=True) if place.job == FIRST else None)
        given = self.filter
        rows = await _sql.jobs_to_walk(
            connection, org_id=self.org_id, dag=given.dag, operator=given.operator, after=place.job, limit=_JOBS
        )
        for row in rows:
            if row["wanted"]:
                return Stretch(Place(job=row["job_id"], in_job=True))
        return Stretch(Place(job=rows[-1]["job_id"]) if len(rows) == _JOBS else None)

    async def _next_run(self, connection: Connection, place: Place) -> Stretch:
        rows = await self._runs(connection, place.job, place.run, _JOBS)
        for row in rows:
            if self._may_match(row):
                before = msgspec.structs.replace(place, run=row["run_id"], in_run=True, index=-1)
                return Stretch(before)
        if len(rows) == _JOBS:
            return Stretch(msgspec.structs.replace(place, run=rows[-1]["run_id"]))
        if self.kind in OF_RUNS:
            return Stretch(Place(job=place.job))
        return Stretch(Place(job=place.job, in_job=True, status=0))

    async def _runs(self, connection: Connection, job_id: UUID, after: UUID, limit: int) -> list[Row]:
        between: dict[str, Any] = {"created_after": None, "created_before": None}
        if self.kind in OF_RUNS:
            between = {"created_after": self.filter.created_after, "created_before": self.filter.created_before}
        rows: list[Row] = await _sql.runs_to_walk(
            connection, org_id=self.org_id, job_id=job_id, after=after, limit=limit, **between
        )
        return rows

    def _may_match(self, run: Row) -> bool:
        if self.kind in OF_RUNS:
            return bool(run["in_time"]) and not run["ended"]
        # Counters lag a little, so a live run is walked even if it has no failed task yet.
        return run["failed"] > 0 or not run["ended"] if self.kind in OF_FAILED else not run["ended"]

    async def _in_run(self, connection: Connection, place: Place) -> Stretch:
        run = await _sql.run_to_walk(connection, org_id=self.org_id, run_id=place.run)
        after = msgspec.structs.replace(place, in_run=False, index=-1)
        return Stretch(after) if run is None else await self._stretch(connection, run, place, after=after)

    async def _stretch(self, connection: Connection, run: Row, place: Place, *, after: Place | None) -> Stretch:
        if self.kind in OF_RUNS:
            return Stretch(after, run=None if run["ended"] else run, shard=run["shard"])
        find = self._failed if self.kind in OF_FAILED else self._live
        rows, index = await find(connection, run, place.index)
        ended = index >= run["last_index"]
        following = after if ended else msgspec.structs.replace(place, index=index)
        share = 1.0 if ended else (index + 1) / (run["last_index"] + 1)
        return Stretch(following, rows, shard=run["shard"], walked=share if self.filter.run is not None else None)

    async def _failed(self, connection: Connection, run: Row, index: int) -> tuple[list[Row], int]:
        rows = await _sql.failed_in_run(
            connection,
            shard=run["shard"],
            run_id=run["run_id"],
            org_id=self.org_id,
            dead=self.kind is BulkKind.REDRIVE,
            requested_at=self.requested_at,
            after=index,
            limit=BATCH,
            **self._narrowed(),
        )
        reached = rows[-1]["task_index"] if len(rows) == BATCH else run["last_index"]
        return [row for row in rows if row["matches"]], reached

    async def _live(self, connection: Connection, run: Row, index: int) -> tuple[list[Row], int]:
        if run["ended"]:
            return [], run["last_index"]
        last = min(index + STRETCH, run["last_index"])
        rows = await _sql.live_in_run(
            connection,
            shard=run["shard"],
            run_id=run["run_id"],
            org_id=self.org_id,
            first=index + 1,
            last=last,
            statuses=[status.value for status in self._statuses()],
            **self._narrowed(),
        )
        return rows, last

    async def _without_run(self, connection: Connection, place: Place) -> Stretch:
        statuses = self._statuses()
        if place.status >= len(statuses):
            return Stretch(Place(job=place.job))
        rows = await _sql.without_run(
            connection,
            job_id=place.job,
            org_id=self.org_id,
            status=statuses[place.status].value,
            dead={BulkKind.REDRIVE: True, BulkKind.CANCEL: False}.get(self.kind),
            requested_at=self.requested_at,
            after=place.task,
            limit=BATCH,
            **self._narrowed(),
        )
        matching = [row for row in rows if row["matches"]]
        if len(rows) == BATCH:
            return Stretch(msgspec.structs.replace(place, task=rows[-1]["task_id"]), matching)
        return Stretch(msgspec.structs.replace(place, status=place.status + 1, task=FIRST), matching)

    def _statuses(self) -> Sequence[TaskStatus]:
        if self.kind in OF_FAILED:
            return [TaskStatus.FAILED]
        return _LIVE if self.filter.status is None else [self.filter.status]

    def _narrowed(self) -> dict[str, Any]:
        return {
            "error_class": self.filter.error_class,
            "worker": self.filter.worker,
            "created_after": self.filter.created_after,
            "created_before": self.filter.created_before,
        }


def check(kind: BulkKind, given: BulkFilter) -> None:
    """Refuses a filter that would match everything, or with fields that mean nothing for this kind."""
    if given.run is None and given.job is None and given.dag is None and given.operator is None:
        raise BadRequest("The filter is empty: give `job`, `dag`, `run` or `operator`.", code="filter_missing")
    if given.run is not None and (given.dag is not None or given.operator is not None):
        raise BadRequest("Give `run` without `dag` and `operator`: it is one run already.", code="bad_filter")
    if given.job is not None and (given.dag is not None or given.operator is not None):
        raise BadRequest("Give `job` without `dag` and `operator`: it is one job already.", code="bad_filter")
    for text in (given.job, given.dag, given.operator, given.error_class, given.worker):
        if text is not None and "\x00" in text:
            raise BadRequest("The filter has a NUL character, which no name contains.", code="bad_filter")
    if kind in OF_RUNS and (given.status or given.error_class or given.worker):
        raise BadRequest(
            f"`{kind}` acts on runs: `status`, `error_class` and `worker` select tasks; omit them.", code="bad_filter"
        )
    allowed = (TaskStatus.FAILED,) if kind in OF_FAILED else _LIVE
    if given.status is not None and given.status not in allowed:
        raise BadRequest(
            f"`{kind}` does not apply to {given.status} tasks; filter by {', '.join(allowed)}.", code="bad_filter"
        )


async def require_run(connection: Connection, walk: Walk) -> Row | None:
    """Returns the run that the filter names, if it names one."""
    if walk.filter.run is None:
        return None
    run: Row | None = await _sql.run_to_walk(connection, org_id=walk.org_id, run_id=walk.filter.run)
    if run is None or (walk.job_id is not None and run["job_id"] != walk.job_id):
        raise NotFound(f"There is no run {walk.filter.run} in this org.")
    return run
