"""Cutover from one version of a DAG to another, in one transaction, and the retirement of the old version.

Callers of `swap` hold the deploy lock. They are: a deploy with nothing to build, a rollback, a forced cutover, and the
loop in this module, which swaps in the version under construction once it is complete.
"""

from __future__ import annotations

import asyncio
from typing import Final
from uuid import UUID

import msgspec

from interlock.dags.definition import Dag, dag_of
from interlock.dags.generations import tuning
from interlock.dags.lineage import depth
from interlock.dags.partitioning import RANGES
from interlock.dags.routing import Scopes
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.actions import Actions
from interlock.wire.dags import DagState

_sql = queries(__name__, "dags")
_control_sql = queries(__name__, "control")
_VERSIONS: Final = 100
_APART_SECONDS: Final = 0.1
_FIRST: Final = UUID(int=0)


class Swaps:
    """Makes a version the current one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._scopes = Scopes(settings)

    async def swap(self, connection: Connection, dag: Row, old: Row | None, new: Row) -> Row:
        """Returns the row of the new version. Its jobs are those of `dag_version_jobs`, in whatever state."""
        definition = dag_of(new["document"])
        coming = await _ids(connection, new)
        going = set(await _ids(connection, old)) - set(coming) if old is not None else set()
        if old is not None:
            await _sql.set_state(connection, dag_version=old["dag_version"], state=DagState.RETIRED)
        version: Row = await _sql.set_state(connection, dag_version=new["dag_version"], state=DagState.CURRENT)
        # Retire first: two jobs of the same name cannot both be current.
        await _sql.retire_jobs(connection, job_ids=sorted(going))
        await _sql.activate_jobs(connection, job_ids=coming)
        await self._tune(connection, definition, coming)
        await self._point(connection, coming)
        await hold_paused(connection, dag)
        await publish(connection, dag, definition, move=True)
        await _sql.unpublish(connection, dag_id=dag["dag_id"], names=list(definition.publish))
        return version

    async def abandon(self, connection: Connection, dag: Row, building: Row, current: Row | None) -> None:
        """Gives up the version under construction. The retirement loop drops its data in small steps."""
        kept = set(await _ids(connection, current)) if current is not None else set()
        going = set(await _ids(connection, building)) - kept
        await _sql.set_state(connection, dag_version=building["dag_version"], state=DagState.ABANDONED)
        await _sql.retire_jobs(connection, job_ids=sorted(going))
        names = list(dag_of(current["document"]).publish) if current is not None else []
        await _sql.unpublish(connection, dag_id=dag["dag_id"], names=names)

    async def _tune(self, connection: Connection, definition: Dag, job_ids: list[UUID]) -> None:
        """Tunes all jobs: a restored version also restores its own tuning of the jobs it shares with others."""
        rows = [tuning(self._settings, job) for job in definition.jobs]
        await _sql.tune_jobs(connection, jobs=msgspec.json.encode(rows).decode(), job_ids=job_ids)

    async def _point(self, connection: Connection, job_ids: list[UUID]) -> None:
        changed = await _sql.point_datasets(connection, job_ids=job_ids)
        datasets = [row["dataset_uuid"] for row in changed]
        streams = await _sql.turn_edges(connection, datasets=datasets, job_ids=job_ids)
        # Lock order: rows of jobs before rows of tasks, as in claim_capped.
        await _sql.touch_readers(connection, datasets=datasets, job_ids=job_ids, range_operators=sorted(RANGES))
        for stream in streams:
            # The reconciler walks partitions. For a stream, the job rereads what it has read, in the same scopes.
            await self._scopes.give(connection, [stream], stream["job_id"])


async def hold_paused(connection: Connection, dag: Row) -> None:
    """Pauses the active jobs of a DAG if the DAG is paused. Called after every change of its jobs.

    A change of jobs needs no lock against the scope reconciler: new edges and their pause become visible together.
    """
    if dag["paused_at"] is None:
        return
    reason = f"paused by {dag['paused_by']}"
    if dag["pause_reason"]:
        reason = f"{reason}: {dag['pause_reason']}"
    await _control_sql.hold_jobs(connection, org_id=dag["org_id"], dag_name=dag["name"], reason=reason)


async def publish(connection: Connection, dag: Row, definition: Dag, *, move: bool) -> None:
    """Writes the DAG's published names. With `move`, an existing name may point to another dataset."""
    await _sql.publish(
        connection,
        org_id=dag["org_id"],
        dag_id=dag["dag_id"],
        dag_name=dag["name"],
        names=list(definition.publish),
        job_names=[publication.from_.job for publication in definition.publish.values()],
        output_names=[publication.from_.output for publication in definition.publish.values()],
        read_roles=[",".join(publication.read_roles) for publication in definition.publish.values()],
        move=move,
    )


async def complete(connection: Connection, version: Row) -> bool:
    """Reports whether the jobs under construction have processed all of their inputs.

    While changes keep arriving, they never have. In that case it is enough that everything present at a mark has passed
    through the whole DAG. Each round waits for the data present when the round began, and so carries it one job
    further: after as many rounds as the longest chain of jobs is deep, the data of the first mark has reached the end.
    """
    rows = await _sql.build_progress(connection, dag_version=version["dag_version"], limit=1)
    if all(row["complete"] for row in rows):
        return True
    if version["build_mark"] is not None and not all(row["caught_up"] for row in rows):
        return False
    building = frozenset(row["name"] for row in rows)
    if version["build_mark"] is not None and version["build_round"] >= depth(dag_of(version["document"]), building):
        return True
    await _sql.mark_build(connection, dag_version=version["dag_version"], round=version["build_round"])
    return False


async def _ids(connection: Connection, version: Row) -> list[UUID]:
    return [row["job_id"] for row in await _sql.jobs_of_version(connection, dag_version=version["dag_version"])]


class CutOver:
    """Swaps in complete versions. Each pass checks one page of the versions under construction, in rotation.

    Deploys, ended tasks of jobs that are being built and the scope reconciler wake it.
    """

    name = "cutover"

    def __init__(self, database: Database, settings: Settings, wakeups: Wakeups) -> None:
        self.seconds = settings.reconcile_seconds
        self._database = database
        self._wakeups = wakeups
        self._swaps = Swaps(settings)
        self._after = _FIRST

    async def idle(self, seconds: float) -> None:
        """Waits for a wake-up. A large build wakes it with every task, so passes have a minimum distance."""
        await asyncio.sleep(min(seconds, _APART_SECONDS))
        await self._wakeups.wait(self.name, seconds)

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            building = await _sql.building_versions(connection, after=self._after, limit=_VERSIONS)
            ready = [version for version in building if await complete(connection, version)]
        self._after = building[-1]["dag_version"] if len(building) == _VERSIONS else _FIRST
        return sum([await self._swap(version) for version in ready])

    async def _swap(self, ready: Row) -> int:
        async def work(connection: Connection) -> int:
            await _sql.lock_deploys(connection, org_id=ready["org_id"])
            dag = await _sql.lock_dag(connection, org_id=ready["org_id"], name=ready["name"])
            live = {
                row["state"]: row for row in await _sql.live_versions(connection, dag_id=dag["dag_id"], content_hash="")
            }
            building = live.get(DagState.BUILDING)
            # Another dispatcher or another deploy may have been faster.
            if building is None or building["dag_version"] != ready["dag_version"]:
                return 0
            if not await complete(connection, building):
                return 0
            await self._swaps.swap(connection, dag, live.get(DagState.CURRENT), building)
            await failpoint("cutover.before_commit")
            return 1

        return await self._database.run(work)


_JOBS: Final = 100
_TASKS: Final = 2_000
_SCOPES: Final = 1_000
_ROWS: Final = 5_000
_GRACE_SECONDS: Final = 60.0
"""A router that read the edges just before the swap may still write its tasks. No statement runs longer than this."""


class Retirement(Periodic):
    """Cleans up swapped generations, one page per pass, in rotation."""

    name = "retirement"

    def __init__(self, database: Database, settings: Settings, actions: Actions) -> None:
        self.seconds = settings.reconcile_seconds
        self._database = database
        self._actions = actions
        self._objects_root = settings.objects_root
        self._scopes = Scopes(settings)
        self._after = _FIRST

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            jobs = await _sql.swapped_jobs(connection, after=self._after, limit=_JOBS, grace=_GRACE_SECONDS)
        done = sum([await self._see_to(job) for job in jobs])
        self._after = jobs[-1]["job_id"] if len(jobs) == _JOBS else _FIRST
        return done

    async def _see_to(self, job: Row) -> int:
        done = await self._revive(job) if job["active"] else await self._wind_up(job)
        if not done and job["settled"] and not await self._unended(job):
            async with self._database.connection() as connection:
                await _sql.settled(connection, job_id=job["job_id"], active=job["active"], grace=_GRACE_SECONDS)
        return done

    async def _unended(self, job: Row) -> bool:
        """Returns True if a retired generation still has running tasks."""
        return not job["active"] and bool(await self._tasks(job, limit=1, asked=True))

    async def _tasks(self, job: Row, limit: int, *, asked: bool) -> list[UUID]:
        """Returns unfinished tasks. `asked` includes those with a pending cancel request."""
        async with self._database.connection() as connection:
            rows = await _sql.unended_tasks(
                connection, job_id=job["job_id"], org_id=job["org_id"], limit=limit, asked=asked
            )
        return [row["task_id"] for row in rows]

    async def _revive(self, job: Row) -> int:
        async def work(connection: Connection) -> int:
            scopes = await _sql.take_back_scopes(connection, job_id=job["job_id"], limit=_SCOPES)
            await self._scopes.give(connection, scopes, job["job_id"])
            await failpoint("retirement.before_commit")
            return len(scopes)

        # While the job is paused, its scopes would be taken back and then given to no job.
        return 0 if job["paused"] else await self._database.run(work)

    async def _wind_up(self, job: Row) -> int:
        await self._cancel_runs(job)
        tasks = await self._tasks(job, limit=_TASKS, asked=False)
        if tasks:
            async with self._database.connection() as connection:
                await _sql.hand_over_tasks(connection, job_id=job["job_id"], task_ids=tasks)
            return await self._actions.cancel_ids(tasks, job["org_id"])
        if not job["dropped"] or await self._unended(job):
            return 0
        return await self._drop(job)

    async def _cancel_runs(self, job: Row) -> None:
        async with self._database.connection() as connection:
            runs = await _sql.live_runs(connection, job_id=job["job_id"], org_id=job["org_id"], limit=_JOBS)
        for run in runs:
            await self._actions.cancel_run(run["run_id"], job["org_id"])

    async def _drop(self, job: Row) -> int:
        async def work(connection: Connection) -> int:
            row = await _sql.drop_rows(
                connection, job_id=job["job_id"], org_id=job["org_id"], root=self._objects_root, limit=_ROWS
            )
            await failpoint("retirement.before_commit")
            dropped: int = row["dropped"]
            return dropped

        return await self._database.run(work)
