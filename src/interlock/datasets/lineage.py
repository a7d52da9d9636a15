"""Lineage of deployed datasets across the DAGs of an org. Covers current generations only.

Runs one statement per step and direction, whatever the size of the graph. Steps and items are limited.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from interlock.access.principals import Principal
from interlock.datasets.registry import Registry, names_of
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.datasets import Direction, Lineage, LineageDataset, LineageEdge, LineageJob

_sql = queries(__name__, "registry")

MAX_DEPTH: Final = 50
_MAX_ITEMS: Final = 1000
"""Limit of jobs in one answer, and of datasets."""


@dataclass
class _Found:
    """Jobs, datasets and edges found so far, by id."""

    jobs: dict[UUID, LineageJob] = field(default_factory=dict)
    datasets: dict[UUID, int] = field(default_factory=dict)
    edges: dict[tuple[UUID, UUID, str], LineageEdge] = field(default_factory=dict)
    truncated: bool = False

    def add_job(self, row: Row, depth: int) -> bool:
        """Returns True if the job is new and within the limit."""
        if row["job_id"] in self.jobs:
            return False
        if len(self.jobs) >= _MAX_ITEMS:
            self.truncated = True
            return False
        self.jobs[row["job_id"]] = LineageJob(job_id=row["job_id"], dag=row["dag_name"], job=row["name"], depth=depth)
        return True

    def add_dataset(self, dataset: UUID, depth: int) -> bool:
        if dataset in self.datasets:
            return False
        if len(self.datasets) >= _MAX_ITEMS:
            self.truncated = True
            return False
        self.datasets[dataset] = depth
        return True

    def reads(self, row: Row) -> None:
        key = (row["job_id"], row["dataset_uuid"], "reads")
        self.edges[key] = LineageEdge(
            job_id=row["job_id"], dataset_uuid=row["dataset_uuid"], kind="reads", where=row["condition"]
        )

    def writes(self, row: Row) -> None:
        key = (row["job_id"], row["dataset_uuid"], "writes")
        self.edges[key] = LineageEdge(job_id=row["job_id"], dataset_uuid=row["dataset_uuid"], kind="writes")


class DatasetLineage:
    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry

    async def lineage(self, name: str, caller: Principal, direction: Direction, depth: int) -> Lineage:
        async with self._database.connection() as connection:
            start: UUID = (await self._registry.find(connection, name, caller))["dataset_uuid"]
            found = _Found(datasets={start: 0})
            if direction is not Direction.DOWN:
                await self._up(connection, caller.org_id, found, [start], depth)
            if direction is not Direction.UP:
                await self._down(connection, caller.org_id, found, [start], depth)
            rows = await _sql.names_of_datasets(connection, org_id=caller.org_id, dataset_uuids=list(found.datasets))
        named = {row["dataset_uuid"]: row for row in rows}
        shown = found.jobs.keys() | found.datasets.keys()
        return Lineage(
            dataset_uuid=start,
            jobs=list(found.jobs.values()),
            datasets=[
                LineageDataset(**names_of(named[uuid]), depth=at)
                for uuid, at in found.datasets.items()
                if uuid in named
            ],
            edges=[edge for edge in found.edges.values() if {edge.job_id, edge.dataset_uuid} <= shown],
            truncated=found.truncated,
        )

    async def _down(
        self, connection: Connection, org_id: UUID, found: _Found, frontier: list[UUID], depth: int
    ) -> None:
        for step in range(1, depth + 2):
            if not frontier:
                return
            readers = await _sql.readers_of_datasets(
                connection, org_id=org_id, dataset_uuids=frontier, limit=_MAX_ITEMS + 1
            )
            if step > depth:
                found.truncated = found.truncated or any(row["job_id"] not in found.jobs for row in readers)
                return
            fresh = [row["job_id"] for row in readers if found.add_job(row, step)]
            for row in readers:
                found.reads(row)
            written = await _sql.written_by(connection, org_id=org_id, job_ids=fresh, limit=_MAX_ITEMS + 1)
            frontier = [row["dataset_uuid"] for row in written if found.add_dataset(row["dataset_uuid"], step)]
            for row in written:
                found.writes(row)

    async def _up(self, connection: Connection, org_id: UUID, found: _Found, frontier: list[UUID], depth: int) -> None:
        for step in range(1, depth + 2):
            if not frontier:
                return
            writers = await _sql.writers_of_datasets(
                connection, org_id=org_id, dataset_uuids=frontier, limit=_MAX_ITEMS + 1
            )
            if step > depth:
                found.truncated = found.truncated or any(row["job_id"] not in found.jobs for row in writers)
                return
            fresh = [row["job_id"] for row in writers if found.add_job(row, -step)]
            for row in writers:
                found.writes(row)
            read = await _sql.read_by(connection, org_id=org_id, job_ids=fresh, limit=_MAX_ITEMS + 1)
            frontier = [row["dataset_uuid"] for row in read if found.add_dataset(row["dataset_uuid"], -step)]
            for row in read:
                found.reads(row)
