"""The search box: anything of an org by its id, or by the beginning of its name."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from interlock.access.principals import Principal
from interlock.errors import NotFound
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.reads import Reads
from interlock.wire.overview import HitKind, SearchHit, SearchHits

_sql = queries(__name__, "search")

MAX_HITS: Final = 20
_PER_KIND: Final = 8


class Search:
    def __init__(self, database: Database, reads: Reads) -> None:
        self._database = database
        self._reads = reads

    async def find(self, text: str, caller: Principal) -> SearchHits:
        """Returns up to twenty hits, those by id first. A kind that the caller may not read is left out."""
        text = text.strip()
        if not text or "\x00" in text:
            return SearchHits(hits=[])
        found = _uuid(text)
        hits = await (self._by_name(text, caller) if found is None else self._by_id(found, caller))
        return SearchHits(hits=hits[:MAX_HITS])

    async def _by_id(self, wanted: UUID, caller: Principal) -> list[SearchHit]:
        which = {"org_id": caller.org_id, "id": wanted}
        hits: list[SearchHit] = []
        async with self._database.connection() as connection:
            if "jobs:read" in caller.scopes:
                for row in await _sql.run_by_id(connection, **which):
                    kind = HitKind.BACKFILL if row["is_backfill"] else HitKind.RUN
                    hits.append(_hit(kind, row, _job_name(row)))
                hits += [_hit(HitKind.JOB, row, _job_name(row)) for row in await _sql.job_of_id(connection, **which)]
                for row in await _sql.dataset_by_id(connection, **which):
                    name = ":".join((row["dag_name"] or "", row["job_name"] or "", row["output_name"] or ""))
                    hits.append(_hit(HitKind.DATASET, row, name))
            if "query:read" in caller.scopes:
                hits += [_hit(HitKind.QUERY, row, None) for row in await _sql.query_by_id(connection, **which)]
            if "tasks:read" in caller.scopes:
                found = await _sql.operation_by_id(connection, **which)
                hits += [_hit(HitKind.OPERATION, row, row["kind"]) for row in found]
        return hits if hits or "tasks:read" not in caller.scopes else await self._task(wanted, caller)

    async def _task(self, wanted: UUID, caller: Principal) -> list[SearchHit]:
        try:
            task = await self._reads.task(wanted, caller.org_id)
        except NotFound:
            return []
        return [SearchHit(kind=HitKind.TASK, id=str(task.task_id), name=task.job.name, detail=task.status.value)]

    async def _by_name(self, prefix: str, caller: Principal) -> list[SearchHit]:
        which = {"org_id": caller.org_id, "prefix": prefix, "limit": _PER_KIND}
        hits: list[SearchHit] = []
        async with self._database.connection() as connection:
            if "jobs:read" in caller.scopes:
                hits += await self._named(connection, which, caller)
            if "queues:read" in caller.scopes:
                found = await _sql.workers_by_name(connection, prefix=prefix, limit=_PER_KIND)
                hits += [_hit(HitKind.WORKER, row, row["id"]) for row in found]
        return hits

    async def _named(self, connection: Connection, which: dict[str, Any], caller: Principal) -> list[SearchHit]:
        dags = await _sql.dags_by_name(connection, **which)
        datasets = await _sql.publications_by_name(connection, role=caller.role.value, **which)
        jobs = await _sql.jobs_by_name(connection, **which)
        return [
            *(_hit(HitKind.DAG, row, row["name"]) for row in dags),
            *(_hit(HitKind.DATASET, row, row["name"]) for row in datasets),
            *(_hit(HitKind.JOB, row, _job_name(row)) for row in jobs),
        ]


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _job_name(row: Row) -> str | None:
    return f"{row['dag_name']}/{row['name']}" if row["dag_name"] else row["name"]


def _hit(kind: HitKind, row: Row, name: str | None) -> SearchHit:
    return SearchHit(kind=kind, id=str(row["id"]), name=name, detail=dict(row).get("detail"))
