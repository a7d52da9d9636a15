"""Read models of deployed DAGs and their versions, and the plan of a deploy: its effect before it happens."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.calendars import dates_of
from interlock.dags.definition import Dag, Input, Job, JobOutput, Published, dag_of
from interlock.dags.lineage import Change, external_names, producer
from interlock.dags.partitioning import Partitions
from interlock.errors import NotFound
from interlock.http.cursors import next_cursor, uuid_cursor
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.dags import (
    BuildProgress,
    DagDocument,
    DagJobView,
    DagOutput,
    DagPage,
    DagPause,
    DagState,
    DagSummary,
    DagVersionPage,
    DagVersionView,
    DagView,
    FailingJob,
    FailingJobs,
    JobChange,
    PlannedInput,
    PlannedJob,
)
from interlock.wire.jobs import DatasetRef

_sql = queries(__name__, "dags")
_failures_sql = queries(__name__, "failures")

MAX_COUNTED: Final = 10_000


async def plan(connection: Connection, org_id: UUID, dag: Dag, change: Change, *, build: bool) -> list[PlannedJob]:
    """Returns the plan, sorted by job name. Without `build`, the version exists already and is only swapped in."""
    built = [job for job in dag.jobs if build and job.name in change.rebuilt]
    names = {job.name for job in built}
    read = await _existing(connection, org_id, dag, built)
    calendars = await _calendars(connection, org_id, dag)
    jobs = [
        PlannedJob(
            name=job.name,
            change=_kind(job.name, change),
            partition=calendars[job.name],
            new_versions=[output.name for output in job.outputs] if job.name in names else [],
            inputs=[read[_title(dag, edge)] for edge in job.inputs] if job.name in names else [],
        )
        for job in dag.jobs
    ]
    gone = [PlannedJob(name=name, change=JobChange.REMOVED, new_versions=[], inputs=[]) for name in change.removed]
    return sorted([*jobs, *gone], key=lambda job: job.name)


async def _calendars(connection: Connection, org_id: UUID, dag: Dag) -> dict[str, str | None]:
    names = external_names(dag)
    rows = await _sql.published_by_others(connection, org_id=org_id, names=names, dag_name=dag.name) if names else []
    partitions = Partitions(dag, {row["name"]: row["partition"] for row in rows})
    found = {job.name: partitions.calendar(job.name) for job in dag.jobs}
    return {name: None if calendar is None else str(calendar) for name, calendar in found.items()}


def _kind(name: str, change: Change) -> JobChange:
    for kind, names in (
        (JobChange.ADDED, change.added),
        (JobChange.CHANGED, change.changed),
        (JobChange.DOWNSTREAM, change.downstream),
        (JobChange.TUNED, change.tuned),
    ):
        if name in names:
            return kind
    return JobChange.KEPT


def _title(dag: Dag, edge: Input) -> str:
    source = producer(dag, edge) or edge.from_
    return f"{source.job}.{source.output}" if isinstance(source, JobOutput) else source.dataset


async def _existing(connection: Connection, org_id: UUID, dag: Dag, built: list[Job]) -> dict[str, PlannedInput]:
    """Returns the inputs by title. If the producer is rebuilt too, counts the data of its current version."""
    edges = [edge for job in built for edge in job.inputs]
    own = {found for edge in edges if (found := producer(dag, edge))}
    names = {edge.from_.dataset for edge in edges if isinstance(edge.from_, Published) and not producer(dag, edge)}
    inside = await _sql.existing_inputs(
        connection,
        org_id=org_id,
        dag_names=[dag.name] * len(own),
        job_names=[found.job for found in own],
        output_names=[found.output for found in own],
        limit=MAX_COUNTED + 1,
    )
    outside = await _sql.existing_published(connection, org_id=org_id, names=list(names), limit=MAX_COUNTED + 1)
    rows = {f"{row['job_name']}.{row['output_name']}": row for row in inside}
    rows |= {row["name"]: row for row in outside}
    titles = {_title(dag, edge) for edge in edges}
    return {title: _input(title, rows.get(title)) for title in titles}


def _input(title: str, row: Row | None) -> PlannedInput:
    if row is None:
        return PlannedInput(input=title, partitions=0, more=False, cursor=None)
    partitions = row["partitions"] if row["progress"] == "partition" else 0
    first, last = dates_of(row["partition"], row["range_start"], row["range_end"])
    return PlannedInput(
        input=title,
        partitions=min(partitions, MAX_COUNTED),
        more=partitions > MAX_COUNTED,
        cursor=row["cursor"],
        start_date=first,
        end_date=last,
    )


_refs = msgspec.json.Decoder(list[DatasetRef])


_MOST_FAILED: Final = 100
_FIRST_LINE: Final = 300


def _failure(row: Row) -> FailingJob:
    message = (row["error_message"] or "").strip().partition("\n")[0]
    return FailingJob(
        dag=row["dag_name"],
        job=row["name"],
        job_id=row["job_id"],
        runtime=row["runtime"],
        failing=row["failing"],
        more=row["failing"] == _MOST_FAILED,
        dead=row["dead"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        error_class=row["error_class"],
        error_message=message[:_FIRST_LINE] or None,
        failed_at=row["ended_at"],
    )


class DagReads:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def dags(self, org_id: UUID, cursor: str | None, limit: int) -> DagPage:
        async with self._database.connection() as connection:
            rows = await _sql.list_dags(connection, org_id=org_id, after=cursor or "", limit=limit)
        found: dict[str, dict[str, Row]] = {}
        dag_rows = {}
        for row in rows:
            dag_rows[row["name"]] = row
            versions = found.setdefault(row["name"], {})
            if row["dag_version"] is not None:
                versions[row["state"]] = row
        dags = [
            DagSummary(
                name=name,
                created_at=dag_rows[name]["created_at"],
                paused=pause_view(dag_rows[name]),
                current=_optional(versions.get(DagState.CURRENT)),
                building=_optional(versions.get(DagState.BUILDING)),
            )
            for name, versions in found.items()
        ]
        return DagPage(dags=dags, next_cursor=dags[-1].name if len(dags) == limit else None)

    async def failures(self, org_id: UUID, dag: str | None, limit: int) -> FailingJobs:
        async with self._database.connection() as connection:
            rows = await _failures_sql.failures(connection, org_id=org_id, dag=dag, most=_MOST_FAILED, limit=limit)
        return FailingJobs(failures=[_failure(row) for row in rows])

    async def dag(self, name: str, org_id: UUID) -> DagView:
        async with self._database.connection() as connection:
            dag = await _found(connection, name, org_id)
            live = {
                row["state"]: row for row in await _sql.live_versions(connection, dag_id=dag["dag_id"], content_hash="")
            }
            current, building = live.get(DagState.CURRENT), live.get(DagState.BUILDING)
            published = await _sql.publications_of(connection, dag_id=dag["dag_id"])
            return DagView(
                name=dag["name"],
                created_at=dag["created_at"],
                paused=pause_view(dag),
                current=_optional(current),
                building=_optional(building),
                jobs=await _jobs(connection, current) if current else [],
                publish=[row["name"] for row in published],
                progress=await _progress(connection, building) if building else [],
            )

    async def versions(self, name: str, org_id: UUID, cursor: str | None, limit: int) -> DagVersionPage:
        after = uuid_cursor(cursor, None)
        async with self._database.connection() as connection:
            dag = await _found(connection, name, org_id)
            rows = await _sql.list_versions(connection, dag_id=dag["dag_id"], cursor=after, limit=limit)
        following = next_cursor(rows, limit, "dag_version")
        return DagVersionPage(versions=[version_view(row) for row in rows], next_cursor=following)

    async def document(self, name: str, org_id: UUID) -> DagDocument:
        """Returns the document of the current version."""
        async with self._database.connection() as connection:
            dag = await _found(connection, name, org_id)
            rows = await _sql.live_versions(connection, dag_id=dag["dag_id"], content_hash="")
        current = next((row for row in rows if row["state"] == DagState.CURRENT), None)
        if current is None:
            raise NotFound(f"DAG {name!r} has no current version.")
        return DagDocument(
            dag_version=current["dag_version"],
            content_hash=current["content_hash"],
            document=Raw(current["document"].encode()),
        )


async def _found(connection: Connection, name: str, org_id: UUID) -> Row:
    row: Row | None = None
    if "\x00" not in name:
        row = await _sql.dag_by_name(connection, org_id=org_id, name=name)
    return require_dag(row, name)


def require_dag(row: Row | None, name: str) -> Row:
    """Returns the row of a DAG that exists and is not deleted."""
    if row is None:
        raise NotFound(f"There is no DAG {name!r} in this org.")
    if row["deleted_at"] is not None:
        raise NotFound(
            f"DAG {name!r} was deleted by {row['deleted_by']} at {row['deleted_at']:%Y-%m-%d %H:%M:%S}Z. Deploy its "
            "file to restore it."
        )
    return row


def pause_view(row: Row) -> DagPause | None:
    if row["paused_at"] is None:
        return None
    return DagPause(since=row["paused_at"], by=row["paused_by"], reason=row["pause_reason"])


def version_view(row: Row) -> DagVersionView:
    return DagVersionView(
        dag_version=row["dag_version"],
        content_hash=row["content_hash"],
        state=DagState(row["state"]),
        deployed_by=row["deployed_by"],
        deployed_at=row["deployed_at"],
        current_at=row["current_at"],
        retired_at=row["retired_at"],
    )


def _optional(row: Row | None) -> DagVersionView | None:
    return version_view(row) if row is not None else None


async def _jobs(connection: Connection, version: Row) -> list[DagJobView]:
    jobs = {job.name: job for job in dag_of(version["document"]).jobs}
    rows = await _sql.dag_jobs(connection, dag_version=version["dag_version"])
    return [_job(jobs[row["name"]], row) for row in rows]


def _job(job: Job, row: Row) -> DagJobView:
    names = [output.name for output in job.outputs]
    return DagJobView(
        job_id=row["job_id"],
        name=row["name"],
        operator=row["operator"],
        runtime=row["runtime"],
        source=row["source"],
        partition=row["partition"],
        paused=row["paused"],
        outputs=[
            DagOutput(name=name, dataset_uuid=ref.dataset_uuid, dataset_version=ref.dataset_version)
            for name, ref in zip(names, _refs.decode(row["outputs"]), strict=True)
        ],
    )


async def _progress(connection: Connection, version: Row) -> list[BuildProgress]:
    rows = await _sql.build_progress(connection, dag_version=version["dag_version"], limit=MAX_COUNTED)
    names = BuildProgress.__struct_fields__
    return [BuildProgress(**{name: row[name] for name in names}) for row in rows]
