"""Database rows of a DAG's jobs: a generation for each rebuilt job, with its dataset versions and edges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec

from interlock.dags.checks import PARTITION
from interlock.dags.definition import (
    Dag,
    ExecutionStrategy,
    Job,
    JobOutput,
    OnConflict,
    Output,
    SourceKind,
    Storage,
    WaitFor,
    job_hash,
    source_document,
)
from interlock.dags.lineage import external_names, producer
from interlock.dags.partitioning import RANGES, Partitions
from interlock.errors import BadRequest
from interlock.jobs.definitions import policy_columns, runtime_of, work_columns
from interlock.schemas import BATCH_COLUMN, Column, DatasetSchema, hash_of
from interlock.settings import Runtime, Settings
from interlock.stores.postgres import Connection, Row, queries
from interlock.wire.jobs import DatasetRef

_sql = queries(__name__, "dags")
_refs = msgspec.json.Decoder(list[DatasetRef])
_NOT_NULL: Final = " not null"
_ENDLESS_SECONDS: Final = 100.0 * 366 * 86_400

OutputName = tuple[str, str]
"""Names of a job and of its output."""


def tuning(settings: Settings, job: Job) -> dict[str, Any]:
    """Returns the columns that change in place. Any: values of a row."""
    return {
        "name": job.name,
        **policy_columns(
            _runtime(settings, job), job.policy, job.scaling, job.priority, operator=job.operator, config=job.config
        ),
        "max_queue_depth": job.max_queue_depth,
        "max_queue_age": job.max_queue_age,
        "source": source_document(job.source) if job.source else None,
        "definition_hash": job_hash(job),
    }


def _runtime(settings: Settings, job: Job) -> Runtime:
    """Returns the job's runtime. An always-on source has no hard timeout unless it sets one."""
    runtime = runtime_of(settings, job.runtime)
    endless = job.source is not None and job.source.kind is SourceKind.ALWAYS_ON
    return runtime.model_copy(update={"timeout_seconds": _ENDLESS_SECONDS}) if endless else runtime


def columns(settings: Settings, job: Job, partition: str | None = None) -> dict[str, Any]:
    """Returns all columns that follow from the job's own definition, and from the calendar of its partitions."""
    runtime = runtime_of(settings, job.runtime)
    cuts = {PARTITION: partition} if partition is not None and job.operator in RANGES else {}
    return {
        **work_columns(runtime, name=job.runtime, operator=job.operator, config=job.config | cuts),
        "partition": partition,
        **tuning(settings, job),
        "wait_for_all": job.wait_for is WaitFor.ALL,
        "per_update": job.execution_strategy is ExecutionStrategy.PER_UPDATE,
    }


@dataclass(frozen=True, slots=True)
class _Made:
    """An output of a generation under construction."""

    job: Job
    job_id: UUID
    output: Output
    index: int
    dataset_uuid: UUID
    dataset_version: UUID

    @property
    def name(self) -> OutputName:
        return self.job.name, self.output.name


class Generations:
    """Writes the new rows of a DAG version, next to those it shares with the previous version."""

    def __init__(self, settings: Settings, org_id: UUID, dag: Dag) -> None:
        self._settings = settings
        self._org_id = org_id
        self._dag = dag

    async def write(self, connection: Connection, rebuilt: frozenset[str], kept: Mapping[str, Row]) -> list[UUID]:
        """Returns the ids of all jobs of the version. `kept` has the rows shared with the previous version."""
        jobs = [job for job in self._dag.jobs if job.name in rebuilt]
        job_ids, made = await self._name(connection, jobs)
        known = {made.name: DatasetRef(**_reference(made)) for made in made} | dict(self._kept_outputs(rebuilt, kept))
        foreign, calendars = await self._foreign(connection)
        partitions = Partitions(self._dag, calendars)
        edges = {job.name: list(self._edges(job, job_ids[job.name], known, foreign)) for job in jobs}
        await _sql.insert_jobs(
            connection,
            org_id=self._org_id,
            dag_name=self._dag.name,
            jobs=_text([self._row(job, job_ids[job.name], known, edges[job.name], partitions) for job in jobs]),
        )
        await _sql.insert_versions(connection, org_id=self._org_id, outputs=_text([_version(each) for each in made]))
        written = _text([edge for of_job in edges.values() for edge in of_job])
        await _sql.insert_edges(connection, org_id=self._org_id, edges=written)
        shared = [kept[job.name]["job_id"] for job in self._dag.jobs if job.name not in rebuilt]
        return [*job_ids.values(), *shared]

    async def _name(self, connection: Connection, jobs: Sequence[Job]) -> tuple[dict[str, UUID], list[_Made]]:
        """Assigns ids. An output that existed before keeps its dataset_uuid."""
        outputs = [(job, index, output) for job in jobs for index, output in enumerate(job.outputs)]
        rows = await _sql.make_ids(connection, count=len(jobs) + 2 * len(outputs))
        ids: Iterator[UUID] = iter([row["id"] for row in rows])
        job_ids = {job.name: next(ids) for job in jobs}
        made = [_Made(job, job_ids[job.name], output, index, next(ids), next(ids)) for job, index, output in outputs]
        asked = [_reference(each) | {"job_name": each.job.name, "output_name": each.output.name} for each in made]
        datasets = await _sql.insert_datasets(
            connection, org_id=self._org_id, dag_name=self._dag.name, outputs=_text(asked)
        )
        uuids = {(row["job_name"], row["output_name"]): row["dataset_uuid"] for row in datasets}
        return job_ids, [
            _Made(each.job, each.job_id, each.output, each.index, uuids[each.name], each.dataset_version)
            for each in made
        ]

    def _kept_outputs(
        self, rebuilt: frozenset[str], kept: Mapping[str, Row]
    ) -> Iterator[tuple[OutputName, DatasetRef]]:
        for job in self._dag.jobs:
            if job.name not in rebuilt:
                for output, ref in zip(job.outputs, _refs.decode(kept[job.name]["outputs"]), strict=True):
                    yield (job.name, output.name), ref

    async def _foreign(self, connection: Connection) -> tuple[dict[str, DatasetRef], dict[str, str | None]]:
        """Returns the datasets of other DAGs, and their calendars."""
        names = external_names(self._dag)
        rows = await _sql.published_by_others(connection, org_id=self._org_id, names=names, dag_name=self._dag.name)
        found = {row["name"]: DatasetRef(**_reference_of(row)) for row in rows}
        for name in names:
            if name not in found:
                raise BadRequest(f"No DAG publishes {name!r}; deploy the DAG that does first.", code="invalid_dag")
        return found, {row["name"]: row["partition"] for row in rows}

    def _edges(
        self,
        job: Job,
        job_id: UUID,
        known: Mapping[OutputName, DatasetRef],
        foreign: Mapping[str, DatasetRef],
    ) -> Iterator[dict[str, Any]]:
        for index, edge in enumerate(job.inputs):
            source = producer(self._dag, edge) or edge.from_
            own = isinstance(source, JobOutput)
            ref = known[source.job, source.output] if isinstance(source, JobOutput) else foreign[source.dataset]
            yield {
                "job_id": job_id,
                "input_index": index,
                "dataset_uuid": ref.dataset_uuid,
                "dataset_version": ref.dataset_version,
                "floating": not own,
                "where": edge.where,
            }

    def _row(
        self,
        job: Job,
        job_id: UUID,
        known: Mapping[OutputName, DatasetRef],
        edges: Sequence[dict[str, Any]],
        partitions: Partitions,
    ) -> dict[str, Any]:
        read = ("dataset_uuid", "dataset_version", "where")
        calendar = partitions.calendar(job.name)
        return {
            "job_id": job_id,
            **columns(self._settings, job, None if calendar is None else str(calendar)),
            "outputs": [known[job.name, output.name] for output in job.outputs],
            "inputs": [{name: edge[name] for name in read} for edge in edges],
        }


def _reference(made: _Made) -> dict[str, UUID]:
    return {"dataset_uuid": made.dataset_uuid, "dataset_version": made.dataset_version}


def _reference_of(row: Row) -> dict[str, UUID]:
    return {"dataset_uuid": row["dataset_uuid"], "dataset_version": row["dataset_version"]}


def _version(made: _Made) -> dict[str, Any]:
    return (
        _reference(made)
        | {
            "job_id": made.job_id,
            "output_index": made.index,
            "storage": made.output.storage,
            "unique_key": made.output.unique_key or made.job.unique_key,
        }
        | _declared(made)
    )


def _declared(made: _Made) -> dict[str, Any]:
    """Returns the schema for the sink. Key columns are never null: rows without a key could not be distinguished."""
    if made.output.storage is not Storage.BUFFERED:
        return {}
    key = made.output.unique_key or made.job.unique_key
    columns = [
        Column(name, kind.removesuffix(_NOT_NULL), nullable=not (kind.endswith(_NOT_NULL) or name in key))
        for name, kind in made.output.columns.items()
    ]
    schema = DatasetSchema(columns, BATCH_COLUMN)
    return {
        "schema": _text(schema),
        "schema_hash": hash_of(schema),
        "replace_rows": made.output.on_conflict is OnConflict.UPDATE,
    }


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
