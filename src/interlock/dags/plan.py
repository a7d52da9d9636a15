"""The plan of a deploy: its effect on each job, for display before anything changes."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from interlock.dags.definition import Dag, Input, Job, JobOutput, Published
from interlock.dags.lineage import Change, producer
from interlock.stores.postgres import Connection, Row, queries
from interlock.wire.dags import JobChange, PlannedInput, PlannedJob

_sql = queries(__name__, "dags")

MAX_COUNTED: Final = 10_000


async def plan(connection: Connection, org_id: UUID, dag: Dag, change: Change, *, build: bool) -> list[PlannedJob]:
    """Returns the plan, sorted by job name. Without `build`, the version exists already and is only swapped in."""
    built = [job for job in dag.jobs if build and job.name in change.rebuilt]
    names = {job.name for job in built}
    read = await _existing(connection, org_id, dag, built)
    jobs = [
        PlannedJob(
            name=job.name,
            change=_kind(job.name, change),
            new_versions=[output.name for output in job.outputs] if job.name in names else [],
            inputs=[read[_title(dag, edge)] for edge in job.inputs] if job.name in names else [],
        )
        for job in dag.jobs
    ]
    gone = [PlannedJob(name=name, change=JobChange.REMOVED, new_versions=[], inputs=[]) for name in change.removed]
    return sorted([*jobs, *gone], key=lambda job: job.name)


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
    return PlannedInput(
        input=title,
        partitions=min(partitions, MAX_COUNTED),
        more=partitions > MAX_COUNTED,
        cursor=row["cursor"],
    )
