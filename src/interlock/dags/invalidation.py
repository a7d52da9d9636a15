"""Invalidation: recomputes the scopes of a dataset that a range touches, and everything that depends on them.

Dependent jobs need no extra step. A recomputed scope is a newer change of its dataset, and routing gives it to the
readers; see routing.sql.

    output of a reactive job        the job receives again the scopes it had received for the range
    partitions of other writers     count as changed: their readers receive them again
    a stream of other writers       counts as rewritten there: its readers receive that part again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from interlock.access.principals import Principal
from interlock.calendars import Range
from interlock.dags.routing import Scopes
from interlock.datasets.registry import Registry
from interlock.errors import Conflict, TooLarge
from interlock.failpoints import failpoint
from interlock.http.ranges import check_form, range_of
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.dataset_changes import CURSOR, lock_versions
from interlock.wire.datasets import Invalidated, InvalidateRequest

_sql = queries(__name__, "invalidations")

MAX_SCOPES: Final = 10_000
"""Limit for one call, which is one transaction."""


class Invalidations:
    def __init__(self, database: Database, settings: Settings, registry: Registry) -> None:
        self._database = database
        self._registry = registry
        self._scopes = Scopes(settings)

    async def invalidate(self, name: str, request: InvalidateRequest, caller: Principal) -> Invalidated:
        check_form(request.start, request.end)
        return await self._database.run(lambda connection: self._invalidate(connection, name, request, caller))

    async def _invalidate(
        self, connection: Connection, name: str, request: InvalidateRequest, caller: Principal
    ) -> Invalidated:
        dataset = await self._registry.find(connection, name, caller)
        producer = await _sql.producer_of(connection, dataset_version=dataset["current_version"], org_id=caller.org_id)
        span = range_of(producer["partition"] if producer else None, request.start, request.end)
        if producer is None:
            return Invalidated(scopes=0, dry_run=request.dry_run, invalidation_id=None)
        by_job = producer["reactive"] and producer["active"]
        # A concurrent change of these versions waits for this lock and then gets a higher commit number.
        held = sorted(producer["inputs"]) if by_job else [producer["dataset_version"]]
        if not request.dry_run:
            await lock_versions(connection, held)
        change = _Change(self._scopes, producer, span, dry_run=request.dry_run)
        scopes, commit_id = await (change.by_job(connection) if by_job else change.by_hand(connection))
        if commit_id is None:
            return Invalidated(scopes=scopes, dry_run=request.dry_run, invalidation_id=None)
        invalidation_id: UUID = await _sql.insert_invalidation(
            connection,
            org_id=caller.org_id,
            dataset_uuid=dataset["dataset_uuid"],
            dataset_version=producer["dataset_version"],
            start=span[0],
            end=span[1],
            reason=request.reason,
            asked_by=caller.user,
            scopes=scopes,
            commit_id=commit_id,
        )
        await failpoint("invalidate.before_commit")
        return Invalidated(scopes=scopes, dry_run=False, invalidation_id=invalidation_id)


class _Change:
    """One invalidation. Both ways return the number of scopes, and the commit number if anything was written."""

    def __init__(self, scopes: Scopes, producer: Row, span: Range, *, dry_run: bool) -> None:
        self._scopes = scopes
        self._version: UUID = producer["dataset_version"]
        self._producer = producer
        self._start, self._end = span
        self._dry_run = dry_run

    async def by_job(self, connection: Connection) -> tuple[int, int | None]:
        job_id: UUID = self._producer["job_id"]
        scopes = await self._given(connection, [job_id], self._end)
        if not scopes or self._dry_run:
            return len(scopes), None
        await _require_free(connection, [job_id])
        commit_id: int = await _sql.next_commit(connection)
        # To routing, this looks like a change of the inputs in these scopes.
        changed = [dict(row) | {"commit_id": commit_id} for row in scopes]
        await self._scopes.give(connection, changed, job_id)
        return len(scopes), commit_id

    async def by_hand(self, connection: Connection) -> tuple[int, int | None]:
        state = await _sql.version_for_change(connection, dataset_version=self._version)
        if state["progress"] == CURSOR:
            return await self._stream(connection, min(self._end, state["cursor"]))
        return await self._partitions(connection)

    async def _partitions(self, connection: Connection) -> tuple[int, int | None]:
        rows = await _sql.partitions_within(
            connection,
            dataset_version=self._version,
            start=self._start,
            end=self._end,
            limit=MAX_SCOPES + 1,
        )
        _require_few(rows)
        if not rows or self._dry_run:
            return len(rows), None
        commit_id: int = await _sql.next_commit(connection)
        changed = await _sql.renew_partitions(
            connection,
            dataset_version=self._version,
            starts=[row["range_start"] for row in rows],
            commit_id=commit_id,
        )
        await _sql.set_commit(connection, dataset_version=self._version, commit_id=commit_id)
        await self._scopes.give(connection, changed)
        return len(rows), commit_id

    async def _stream(self, connection: Connection, end: int) -> tuple[int, int | None]:
        readers = [row["job_id"] for row in await _sql.active_readers(connection, dataset_version=self._version)]
        scopes = await self._given(connection, readers, end)
        if not scopes or self._dry_run:
            return len(scopes), None
        await _require_free(connection, sorted({row["job_id"] for row in scopes}))
        commit_id: int = await _sql.next_commit(connection)
        await _sql.set_commit(connection, dataset_version=self._version, commit_id=commit_id)
        changed = {
            "dataset_version": self._version,
            "range_start": self._start,
            "range_end": end,
            "commit_id": commit_id,
        }
        await self._scopes.give(connection, [changed])
        return len(scopes), commit_id

    async def _given(self, connection: Connection, jobs: Sequence[UUID], end: int) -> list[Row]:
        if not jobs or end < self._start:
            return []
        rows: list[Row] = await _sql.scopes_within(
            connection, job_ids=list(jobs), start=self._start, end=end, limit=MAX_SCOPES + 1
        )
        _require_few(rows)
        return rows


def _require_few(rows: Sequence[Row]) -> None:
    if len(rows) > MAX_SCOPES:
        raise TooLarge(
            f"The range touches more than {MAX_SCOPES} scopes; invalidate it in smaller pieces.",
            code="too_many_scopes",
        )


async def _require_free(connection: Connection, jobs: Sequence[UUID]) -> None:
    """Rejects paused jobs. They receive no tasks, and nothing else would record the invalidation."""
    row = await _sql.holding_back(connection, job_ids=list(jobs))
    if row is not None:
        raise Conflict(
            f"Job {row['name']!r} of DAG {row['dag_name']!r} has been paused since "
            f"{row['since']:%Y-%m-%d %H:%M:%SZ}: {row['reason']}. Invalidate the range after the pause ends.",
            code="job_paused",
        )
