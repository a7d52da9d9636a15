"""Read access to datasets and their contents. Writes are in tasks/dataset_changes.py.

A dataset is named by its UUID, by a published name, or as `dag:job:output`. Names contain no colon, so all three forms
fit into one path segment and cannot be confused.

Lineage connects deployed datasets across the DAGs of an org. It covers current generations only, and runs one statement
per step and direction, whatever the size of the graph. Steps and items are limited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from msgspec import Raw

from interlock.access.principals import Principal
from interlock.calendars import dates_of
from interlock.errors import Forbidden, NotFound
from interlock.http.cursors import FIRST, HIGHEST, LOWEST, next_cursor, number_cursor, uuid_cursor
from interlock.http.ranges import Bound, range_of
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.access import Role
from interlock.wire.datasets import (
    DatasetEventPage,
    DatasetEventView,
    DatasetPage,
    DatasetSummary,
    DatasetVersionView,
    DatasetView,
    Direction,
    Lineage,
    LineageDataset,
    LineageEdge,
    LineageJob,
    PartitionPage,
    PartitionView,
    VersionState,
)

_sql = queries(__name__, "registry")

_VERSIONS: Final = 20
_COUNTED: Final = 1000
"""Partitions of a version are counted up to this limit: a count is a scan."""


class Registry:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, connection: Connection, name: str, caller: Principal) -> Row:
        """Returns the dataset of that name. Raises if it does not exist or the caller may not read it."""
        found = await _by_any_name(connection, name, caller.org_id)
        row: Row | None = None
        if found is not None:
            row = await _sql.dataset(connection, org_id=caller.org_id, dataset_uuid=found["dataset_uuid"])
        if row is None:
            raise NotFound(
                f"There is no dataset {name!r} in this org; use its UUID, its published name, or dag:job:output."
            )
        if caller.role not in row["read_roles"]:
            raise Forbidden(
                f"Dataset {name!r} is readable only by the roles {', '.join(row['read_roles'])}, and this key has the "
                f"role {caller.role}; its DAG sets this under `publish`, `read_roles`.",
                code="dataset_not_readable",
            )
        return row

    async def datasets(self, caller: Principal, cursor: str | None, limit: int) -> DatasetPage:
        after = uuid_cursor(cursor, FIRST)
        async with self._database.connection() as connection:
            rows = await _sql.list_datasets(
                connection, org_id=caller.org_id, role=caller.role.value, after=after, limit=limit
            )
        return DatasetPage(
            datasets=[_summary(row) for row in rows], next_cursor=next_cursor(rows, limit, "dataset_uuid")
        )

    async def dataset(self, name: str, caller: Principal) -> DatasetView:
        async with self._database.connection() as connection:
            row = await self.find(connection, name, caller)
            versions = await _sql.versions_of(
                connection,
                dataset_uuid=row["dataset_uuid"],
                current_version=row["current_version"],
                limit=_VERSIONS,
                bound=_COUNTED,
            )
        return DatasetView(
            **names_of(row),
            current_version=row["current_version"],
            read_roles=[role for role in Role if role in row["read_roles"]],
            versions=[_version(version) for version in versions],
        )

    async def partitions(
        self,
        name: str,
        caller: Principal,
        *,
        version: UUID | None,
        within: tuple[Bound | None, Bound | None],
        cursor: str | None,
        limit: int,
    ) -> PartitionPage:
        after = number_cursor(cursor, LOWEST, lowest=LOWEST)
        async with self._database.connection() as connection:
            dataset = await self.find(connection, name, caller)
            wanted = version or dataset["current_version"]
            if version is not None:
                await _require_version(connection, version, dataset["dataset_uuid"], name)
            partition = await _sql.partition_of(connection, dataset_version=wanted)
            from_, to = _within(partition, *within)
            rows = await _sql.partitions_of(
                connection, dataset_version=wanted, after=after, from_=from_, to=to, limit=limit
            )
        return PartitionPage(
            dataset_version=wanted,
            partitions=[_partition(row, partition) for row in rows],
            next_cursor=next_cursor(rows, limit, "range_start"),
        )

    async def events(self, name: str, caller: Principal, cursor: str | None, limit: int) -> DatasetEventPage:
        before = number_cursor(cursor, HIGHEST)
        async with self._database.connection() as connection:
            dataset = await self.find(connection, name, caller)
            rows = await _sql.events_of(connection, dataset_uuid=dataset["dataset_uuid"], before=before, limit=limit)
        return DatasetEventPage(events=[_event(row) for row in rows], next_cursor=next_cursor(rows, limit, "event_id"))


def _within(partition: str | None, start: Bound | None, end: Bound | None) -> tuple[int, int]:
    """Returns the bounds of a filter. A missing bound is open."""
    from_ = LOWEST if start is None else range_of(partition, start, start)[0]
    to = HIGHEST if end is None else range_of(partition, end, end)[1]
    return from_, to


async def _by_any_name(connection: Connection, name: str, org_id: UUID) -> Row | None:
    found: Row | None = None
    if "\x00" in name:
        return None
    parts = name.split(":")
    if len(parts) == 3:
        dag, job, output = parts
        named: Row | None = await _sql.dataset_by_output(connection, org_id=org_id, dag=dag, job=job, output=output)
        return named
    try:
        found = await _sql.dataset_by_uuid(connection, org_id=org_id, dataset_uuid=UUID(name))
    except ValueError:
        found = None
    return found or await _sql.dataset_by_name(connection, org_id=org_id, name=name)


async def _require_version(connection: Connection, version: UUID, dataset: UUID, name: str) -> None:
    if await _sql.version_of(connection, dataset_version=version, dataset_uuid=dataset) is None:
        raise NotFound(f"Dataset {name!r} has no version {version}; see the dataset's own page for its versions.")


# Views


def names_of(row: Row) -> dict[str, Any]:
    """Returns the names of a dataset. Any: fields of several views."""
    return {
        "dataset_uuid": row["dataset_uuid"],
        "names": list(row["names"]),
        "dag": row["dag_name"],
        "job": row["job_name"],
        "output": row["output_name"],
    }


def display_name(row: Row) -> str:
    """Names a dataset in a sentence."""
    if row["names"]:
        return str(row["names"][0])
    parts: Sequence[str | None] = (row["dag_name"], row["job_name"], row["output_name"])
    return ":".join(map(str, parts)) if all(parts) else str(row["dataset_uuid"])


def _summary(row: Row) -> DatasetSummary:
    return DatasetSummary(
        **names_of(row),
        storage=row["storage"] or "parquet",
        current_version=row["current_version"],
        partition=row["partition"],
        progress=row["progress"],
        cursor=row["cursor"],
    )


def _version(row: Row) -> DatasetVersionView:
    first, last = dates_of(row["partition"], row["range_start"], row["range_end"])
    return DatasetVersionView(
        dataset_version=row["dataset_version"],
        state=VersionState(row["state"]),
        job_id=row["job_id"],
        storage=row["storage"],
        unique_key=list(row["unique_key"]),
        schema_hash=row["schema_hash"],
        columns=Raw(row["schema"] or "null"),
        progress=row["progress"],
        cursor=row["cursor"],
        start=row["range_start"],
        end=row["range_end"],
        partition=row["partition"],
        start_date=first,
        end_date=last,
        partitions=min(row["partitions"], _COUNTED),
        more_partitions=row["partitions"] > _COUNTED,
        created_at=row["created_at"],
    )


def _partition(row: Row, partition: str | None) -> PartitionView:
    first, last = dates_of(partition, row["range_start"], row["range_end"])
    return PartitionView(
        partition_key=f"{row['range_start']}-{row['range_end']}",
        start=row["range_start"],
        end=row["range_end"],
        start_date=first,
        end_date=last,
        commit=row["commit_id"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        location=row["location"],
        row_count=row["row_count"],
        bytes=row["bytes"],
        schema_hash=row["schema_hash"],
        committed_at=row["committed_at"],
    )


def _event(row: Row) -> DatasetEventView:
    first, last = dates_of(row["partition"], row["range_start"], row["range_end"])
    return DatasetEventView(
        event_id=row["event_id"],
        dataset_version=row["dataset_version"],
        cursor=row["cursor"],
        partition_key=row["partition_key"],
        start=row["range_start"],
        end=row["range_end"],
        start_date=first,
        end_date=last,
        commit=row["commit_id"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        accepted_at=row["accepted_at"],
    )


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
