"""Pauses, resumes and deletes DAGs, each in one transaction under the deploy lock. Loops do the rest.

A paused DAG hands out no tasks and creates none. Running tasks end as usual. Events, triggers and dataset changes are
stored and are processed after the resume. A version that is being built is paused as well.

A deleted DAG is hidden and its jobs are retired: the retirement loop cancels their tasks. Its data stays readable, and
a deploy under the same name restores it, unless the data is purged.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import structlog

from interlock.dags.cutover import Swaps, hold_paused
from interlock.dags.definition import dag_of
from interlock.dags.deployment import Deployments, LockedDag
from interlock.dags.versions import MAX_COUNTED, DagReads
from interlock.errors import Conflict
from interlock.failpoints import failpoint
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.queue import enqueue, wake_parked
from interlock.wire.dags import DagDeleted, DagState, DagView, DeletedOutput

_sql = queries(__name__, "control")
_dags_sql = queries(__name__, "dags")
_pressure_sql = queries(__name__, "pressure")
_JOBS: Final = 20
_TASKS: Final = 2_000

log = structlog.get_logger()


class DagControl:
    def __init__(self, database: Database, settings: Settings, deployments: Deployments, reads: DagReads) -> None:
        self._database = database
        self._deployments = deployments
        self._reads = reads
        self._swaps = Swaps(settings)

    async def pause(self, name: str, org_id: UUID, by: str, reason: str | None) -> DagView:
        """Pauses a DAG with its sources. Pausing a paused DAG changes nothing."""

        async def work(connection: Connection) -> None:
            dag, _ = await self._deployments.existing(connection, org_id, name)
            paused = await _sql.pause_dag(connection, dag_id=dag["dag_id"], by=by, reason=reason)
            await _pressure_sql.lock_pauses(connection)
            await hold_paused(connection, paused)
            await failpoint("dag_control.before_commit")

        await self._database.run(work)
        log.info("dag.paused", dag=name, org_id=str(org_id), by=by)
        return await self._reads.dag(name, org_id)

    async def resume(self, name: str, org_id: UUID, by: str) -> DagView:
        """Resumes a DAG. It then processes what has accumulated."""

        async def work(connection: Connection) -> None:
            dag, _ = await self._deployments.existing(connection, org_id, name)
            await _sql.resume_dag(connection, dag_id=dag["dag_id"])
            await _pressure_sql.lock_pauses(connection)
            await _sql.release_jobs(connection, org_id=org_id, dag_name=name)
            await failpoint("dag_control.before_commit")

        await self._database.run(work)
        log.info("dag.resumed", dag=name, org_id=str(org_id), by=by)
        return await self._reads.dag(name, org_id)

    async def delete(self, name: str, org_id: UUID, by: str, *, purge: bool, dry_run: bool) -> DagDeleted:
        """Deletes a DAG, with its data if `purge` is set. A dry run changes nothing."""

        async def work(connection: Connection) -> DagDeleted:
            dag, locked = await self._deployments.existing(connection, org_id, name)
            answer = await self._effects(connection, dag, locked, purge=purge, dry_run=dry_run)
            if purge and answer.readers:
                raise Conflict(
                    f"DAG {answer.readers[0]!r} reads data that {name!r} publishes, so it cannot be purged. Delete the "
                    "data's readers first, or keep the data: leave out `purge`.",
                    code="publication_in_use",
                )
            if not dry_run:
                await self._delete(connection, dag, locked, by, purge=purge)
            await failpoint("dag_control.before_commit")
            return answer

        answer = await self._database.run(work)
        if not dry_run:
            log.warning("dag.deleted", dag=name, org_id=str(org_id), by=by, purge=purge)
        return answer

    async def _delete(self, connection: Connection, dag: Row, locked: LockedDag, by: str, *, purge: bool) -> None:
        job_ids = [row["job_id"] for row in await _jobs(connection, locked)]
        if locked.building is not None:
            await self._swaps.abandon(connection, dag, locked.building, locked.current)
        if locked.current is not None:
            version = locked.current["dag_version"]
            await _dags_sql.set_state(connection, dag_version=version, state=DagState.RETIRED)
        await _dags_sql.retire_jobs(connection, job_ids=job_ids)
        await _sql.hide_jobs(connection, job_ids=job_ids)
        await _sql.delete_dag(connection, dag_id=dag["dag_id"], by=by)
        if purge:
            await _dags_sql.unpublish(connection, dag_id=dag["dag_id"], names=[])
            await _sql.purge_versions(connection, dag_id=dag["dag_id"])

    async def _effects(
        self, connection: Connection, dag: Row, locked: LockedDag, *, purge: bool, dry_run: bool
    ) -> DagDeleted:
        jobs = await _jobs(connection, locked)
        definitions = [dag_of(row["document"]) for row in (locked.current, locked.building) if row is not None]
        outputs = sorted({(job.name, output.name) for one in definitions for job in one.jobs for output in job.outputs})
        rows = await _dags_sql.existing_inputs(
            connection,
            org_id=dag["org_id"],
            dag_names=[dag["name"]] * len(outputs),
            job_names=[job for job, _ in outputs],
            output_names=[output for _, output in outputs],
            limit=MAX_COUNTED + 1,
        )
        used = await _dags_sql.publications_in_use(
            connection, dag_id=dag["dag_id"], names=[], job_names=[], output_names=[]
        )
        return DagDeleted(
            dag=dag["name"],
            dry_run=dry_run,
            purge=purge,
            jobs=sorted({row["name"] for row in jobs}),
            outputs=[_output(row) for row in rows],
            readers=sorted({row["reader"] for row in used} - {dag["name"]}),
        )


async def _jobs(connection: Connection, locked: LockedDag) -> list[Row]:
    versions = [row["dag_version"] for row in (locked.current, locked.building) if row is not None]
    found = {}
    for version in versions:
        for row in await _dags_sql.jobs_of_version(connection, dag_version=version):
            found[row["job_id"]] = row
    return [found[job_id] for job_id in sorted(found)]


def _output(row: Row) -> DeletedOutput:
    partitions = row["partitions"] if row["progress"] == "partition" else 0
    return DeletedOutput(
        job=row["job_name"],
        output=row["output_name"],
        partitions=min(partitions, MAX_COUNTED),
        more=partitions > MAX_COUNTED,
        cursor=row["cursor"],
    )


class JobWakes:
    """Sends the messages of queued tasks of resumed DAGs, one stretch per job and pass."""

    name = "job-wakes"

    def __init__(self, database: Database, settings: Settings, wakeups: Wakeups) -> None:
        self.seconds = settings.relay_seconds
        self._database = database
        self._wakeups = wakeups
        self._direct = settings.queue_direct

    async def idle(self, seconds: float) -> None:
        await self._wakeups.wait(self.name, seconds)

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            jobs = await _sql.waking_jobs(connection, limit=_JOBS)
        for job in jobs:
            await self._database.run(lambda connection, job=job: self._wake(connection, job))  # type: ignore[misc]
        return len(jobs)

    async def _wake(self, connection: Connection, job: Row) -> None:
        """Sends the next stretch. A crash before the commit repeats it."""
        job_id, after = job["job_id"], job["wake_from"]
        rows = await _sql.queued_after(connection, job_id=job_id, org_id=job["org_id"], after=after, limit=_TASKS)
        ids = [row["task_id"] for row in rows]
        if ids:
            await enqueue(connection, ids, direct=self._direct)
        full = len(ids) == _TASKS
        if not full:
            await wake_parked(connection, [job_id], [], direct=self._direct)
        await _sql.job_woken_to(connection, job_id=job_id, walked_from=after, walked_to=ids[-1] if full else None)
        await failpoint("job_wakes.before_commit")
