"""From one version of a DAG to another, in one transaction: what its names mean, who gets tasks, who reads what.

`swap` is used by whoever has the lock on deploys: a deploy with nothing to wait for, a rollback, somebody who does not
want to wait, and the loop here, which swaps when the version that is being built is complete.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.dags.definition import Dag, dag_of
from interlock.dags.generations import tuning
from interlock.dags.lineage import depth
from interlock.dags.operators import RANGES
from interlock.dags.routing import Scopes
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.settings import Settings
from interlock.wire import DagState

_sql = queries("dags")
_VERSIONS: Final = 100
_FIRST: Final = UUID(int=0)


class Swaps:
    """Makes a version the current one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._scopes = Scopes(settings)

    async def swap(self, connection: Connection, dag: Row, old: Row | None, new: Row) -> Row:
        """The row of the new version. Its jobs are those of `dag_version_jobs`, whatever their state was."""
        definition = dag_of(new["document"])
        coming = await _ids(connection, new)
        going = set(await _ids(connection, old)) - set(coming) if old is not None else set()
        if old is not None:
            await _sql.set_state(connection, dag_version=old["dag_version"], state=DagState.RETIRED)
        version: Row = await _sql.set_state(connection, dag_version=new["dag_version"], state=DagState.CURRENT)
        # Before the others come: two jobs of one name cannot both be current.
        await _sql.retire_jobs(connection, job_ids=sorted(going))
        await _sql.activate_jobs(connection, job_ids=coming)
        await self._tune(connection, definition, coming)
        await self._point(connection, coming)
        await publish(connection, dag, definition, move=True)
        await _sql.unpublish(connection, dag_id=dag["dag_id"], names=list(definition.publish))
        return version

    async def abandon(self, connection: Connection, dag: Row, building: Row, current: Row | None) -> None:
        """What it built is dropped bit by bit, by the loop that sees to retired generations."""
        kept = set(await _ids(connection, current)) if current is not None else set()
        going = set(await _ids(connection, building)) - kept
        await _sql.set_state(connection, dag_version=building["dag_version"], state=DagState.ABANDONED)
        await _sql.retire_jobs(connection, job_ids=sorted(going))
        names = list(dag_of(current["document"]).publish) if current is not None else []
        await _sql.unpublish(connection, dag_id=dag["dag_id"], names=names)

    async def _tune(self, connection: Connection, definition: Dag, job_ids: list[UUID]) -> None:
        """All of them: a version that comes back brings its own tuning back to jobs that it shares."""
        rows = [tuning(self._settings, job) for job in definition.jobs]
        await _sql.tune_jobs(connection, jobs=msgspec.json.encode(rows).decode(), job_ids=job_ids)

    async def _point(self, connection: Connection, job_ids: list[UUID]) -> None:
        changed = await _sql.point_datasets(connection, job_ids=job_ids)
        datasets = [row["dataset_uuid"] for row in changed]
        streams = await _sql.turn_edges(connection, datasets=datasets, job_ids=job_ids)
        # Rows of jobs are locked before rows of tasks, as in claim_capped.
        await _sql.touch_readers(connection, datasets=datasets, job_ids=job_ids, range_operators=sorted(RANGES))
        for stream in streams:
            # Partitions are walked by the reconciler; of a stream, what was read is read again by the same scopes.
            await self._scopes.give(connection, [stream], stream["job_id"])


async def publish(connection: Connection, dag: Row, definition: Dag, *, move: bool) -> None:
    """`move`: names that are there may come to mean another dataset."""
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
    """Whether the jobs that it builds have made all that is there to make of their inputs.

    While changes keep coming they never have. Then it counts that all which was there at a mark has gone through the
    whole DAG. Each round waits for what was there when it began, and so takes that one job further: after as many
    rounds as jobs stand behind each other, the first mark has come out at the end.
    """
    rows = await _sql.build_progress(connection, dag_version=version["dag_version"], most=1)
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


class CutOver(Periodic):
    """Swaps versions that are complete. A page of all that are being built in a pass; it goes round."""

    name = "cutover"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.reconcile_seconds
        self._database = database
        self._swaps = Swaps(settings)
        self._after = _FIRST

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            building = await _sql.building_versions(connection, after=self._after, most=_VERSIONS)
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
            # Another dispatcher, or another deploy, may have been here first.
            if building is None or building["dag_version"] != ready["dag_version"]:
                return 0
            if not await complete(connection, building):
                return 0
            await self._swaps.swap(connection, dag, live.get(DagState.CURRENT), building)
            await failpoint("cutover.before_commit")
            return 1

        return await self._database.run(work)
