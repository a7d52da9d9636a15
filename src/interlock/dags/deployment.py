"""Deployment of DAGs: validates a file, builds a version next to the current one, cuts over, and rolls back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from interlock.access.secrets import check_references
from interlock.dags.checks import pinned_to, udf_configs
from interlock.dags.cutover import Swaps, complete, hold_paused, publish
from interlock.dags.definition import Dag, canonical, content_hash, dag_of
from interlock.dags.generations import Generations, columns
from interlock.dags.lineage import Change, compare, external_names
from interlock.dags.parser import Vocabulary, examine
from interlock.dags.versions import plan, require_dag, version_view
from interlock.dags.yaml_nodes import MAX_BYTES
from interlock.errors import BadRequest, Conflict, InvalidDag, NotFound, TooLarge
from interlock.failpoints import failpoint
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.operators import UNKNOWN, Operators
from interlock.untrusted.bundles import Bundle, bundles_named, hold
from interlock.wire.dags import DagDeployed, DagState, DagVersionView, PlannedJob

_sql = queries(__name__, "dags")
_control_sql = queries(__name__, "control")
_SUGGESTED: Final = 1_000
FILE: Final = "dag.yaml"
"""File name in problems of a DAG that came over HTTP without a name."""


@dataclass(frozen=True, slots=True)
class LockedDag:
    """A DAG and its live versions, read under the deploy lock."""

    dag: Row | None
    current: Row | None
    building: Row | None
    same: Row | None
    """The version with the same content as the deployed file, unless it was purged or abandoned."""

    @property
    def definition(self) -> Dag | None:
        return dag_of(self.current["document"]) if self.current is not None else None


class Deployments:
    def __init__(self, database: Database, settings: Settings, operators: Operators | None = None) -> None:
        self._database = database
        self._settings = settings
        self._operators = operators or Operators(database, settings)
        self._swaps = Swaps(settings)

    async def read(self, content: bytes, org_id: UUID, operators: list[str], file: str = FILE) -> Dag:
        """Parses a DAG file and checks it against this installation and the org's other DAGs.

        `file` is its name in problems.
        """
        if len(content) > MAX_BYTES:
            raise TooLarge(
                f"The file has {len(content)} bytes; the limit for a DAG is {MAX_BYTES}.", code="dag_too_large"
            )
        async with self._database.connection() as connection:
            declared = await self._operators.short_names(connection)
        vocabulary = Vocabulary.of(self._settings, *operators, *declared)
        dag, problems = await asyncio.to_thread(examine, content, file, vocabulary)
        bundles: dict[str, Bundle] = {}
        if dag is not None:
            vocabulary = await self._with_names(vocabulary, dag, org_id)
            bundles = await self._bundles(dag, org_id)
            vocabulary = replace(vocabulary, code=replace(vocabulary.code, bundles=bundles))
            dag, problems = await asyncio.to_thread(examine, content, file, vocabulary)
        if dag is None:
            raise InvalidDag(problems)
        return pinned_to(dag, bundles)

    async def _bundles(self, dag: Dag, org_id: UUID) -> dict[str, Bundle]:
        async with self._database.connection() as connection:
            return await bundles_named(connection, udf_configs(dag), org_id)

    async def _with_names(self, vocabulary: Vocabulary, dag: Dag, org_id: UUID) -> Vocabulary:
        """Adds the published names of other DAGs that this DAG uses; all of them only if one is misspelled."""
        wanted = external_names(dag)
        async with self._database.connection() as connection:
            rows = await _sql.published_by_others(
                connection, org_id=org_id, names=[*wanted, *dag.publish], dag_name=dag.name
            )
            calendars = {row["name"]: row["partition"] for row in rows}
            by_others = {row["name"]: row["dag_name"] for row in rows}
            known = set(by_others)
            if not known.issuperset(wanted):
                rows = await _sql.some_published(connection, org_id=org_id, dag_name=dag.name, limit=_SUGGESTED)
                known |= {row["name"] for row in rows}
        taken = {name: by_others[name] for name in dag.publish if name in by_others}
        return replace(vocabulary, datasets=frozenset(known), taken=taken, partitions=calendars)

    async def deploy(
        self, dag: Dag, org_id: UUID, by: str, *, dry_run: bool = False, force: bool = False
    ) -> DagDeployed:
        """Deploys a DAG. The content of the current version changes nothing; that of a retired one restores it."""
        for job in dag.jobs:
            columns(self._settings, job)

        async def work(connection: Connection) -> DagDeployed:
            locked = await self._lock(connection, org_id, dag.name, content_hash(dag))
            change = compare(locked.definition or Dag(name=dag.name, jobs=()), dag)
            planned = await plan(connection, org_id, dag, change, build=not _is_there(locked.same))
            await _check_publications(connection, locked, dag)
            await hold(connection, udf_configs(dag), org_id)
            await self._check_operators(connection, org_id, dag, force=force, live=True)
            kinds = [(self._settings.runtime(job.runtime).kind, dict(job.config)) for job in dag.jobs]
            await check_references(connection, org_id, kinds)
            version = None if dry_run else await self._deploy(connection, locked, dag, change, org_id, by)
            if not dry_run:
                await _sql.wake_loops(connection)
            await failpoint("deploy.before_commit")
            return _deployed(dag, version, planned)

        return await self._database.run(work)

    async def _check_operators(
        self, connection: Connection, org_id: UUID, dag: Dag, *, force: bool = False, live: bool = False
    ) -> None:
        """Checks every operator. With `force`, one that no worker has is accepted, but not one that the org lacks."""
        for job in dag.jobs:
            try:
                await self._operators.check(
                    connection, org_id, job.runtime, job.operator, job.config, of=job.name, live=live
                )
            except BadRequest as error:
                if not force or error.code != UNKNOWN:
                    raise

    async def _lock(self, connection: Connection, org_id: UUID, name: str, digest: str) -> LockedDag:
        await _sql.lock_deploys(connection, org_id=org_id)
        dag = await _sql.lock_dag(connection, org_id=org_id, name=name)
        if dag is None:
            return LockedDag(None, None, None, None)
        rows = await _sql.live_versions(connection, dag_id=dag["dag_id"], content_hash=digest)
        by_state = {row["state"]: row for row in rows}
        same = next((row for row in rows if row["content_hash"] == digest), None)
        return LockedDag(dag, by_state.get(DagState.CURRENT), by_state.get(DagState.BUILDING), same)

    async def _deploy(
        self, connection: Connection, locked: LockedDag, dag: Dag, change: Change, org_id: UUID, by: str
    ) -> Row:
        row = locked.dag or await _sql.insert_dag(connection, org_id=org_id, name=dag.name)
        await _control_sql.restore_dag(connection, dag_id=row["dag_id"])
        same = locked.same
        if same is not None and same["state"] == DagState.BUILDING:
            return same
        if locked.building is not None:
            await self._swaps.abandon(connection, row, locked.building, locked.current)
        if same is not None and same["state"] == DagState.CURRENT:
            return same
        if same is None:
            same = await self._build(connection, row, locked.current, dag, change, by)
            if locked.current is not None and not await complete(connection, same):
                await hold_paused(connection, row)
                await publish(connection, row, dag, move=False)
                return same
        return await self._swaps.swap(connection, row, locked.current, same)

    async def _build(
        self, connection: Connection, row: Row, current: Row | None, dag: Dag, change: Change, by: str
    ) -> Row:
        kept = []
        if current is not None:
            kept = await _sql.jobs_of_version(connection, dag_version=current["dag_version"])
        version: Row = await _sql.insert_version(
            connection,
            dag_id=row["dag_id"],
            org_id=row["org_id"],
            content_hash=content_hash(dag),
            document=canonical(dag).decode(),
            deployed_by=by,
        )
        generations = Generations(self._settings, row["org_id"], dag)
        job_ids = await generations.write(connection, change.rebuilt, {job["name"]: job for job in kept})
        await _sql.insert_version_jobs(connection, dag_version=version["dag_version"], job_ids=job_ids)
        return version

    async def rollback(self, name: str, org_id: UUID, to: str | None) -> DagVersionView:
        """Swaps back to a version that was current before. It then receives the changes that it missed."""

        async def work(connection: Connection) -> DagVersionView:
            dag, locked = await self.existing(connection, org_id, name)
            target = await _rollback_target(connection, dag, to)
            definition = dag_of(target["document"])
            await _check_publications(connection, locked, definition)
            if target["state"] == DagState.RETIRED:
                # Its workers or its org's limit may have changed since it was current.
                for job in definition.jobs:
                    columns(self._settings, job)
                await self._check_operators(connection, org_id, definition)
            if locked.building is not None:
                await self._swaps.abandon(connection, dag, locked.building, locked.current)
            if target["state"] == DagState.RETIRED:
                target = await self._swaps.swap(connection, dag, locked.current, target)
            await _sql.wake_loops(connection)
            await failpoint("deploy.before_commit")
            return version_view(target)

        return await self._database.run(work)

    async def cut_over(self, name: str, org_id: UUID) -> DagVersionView:
        """Cuts over now, complete or not. Readers see the data built so far; the rest follows."""

        async def work(connection: Connection) -> DagVersionView:
            dag, locked = await self.existing(connection, org_id, name)
            if locked.building is None:
                raise Conflict(f"DAG {name!r} has no version under construction.", code="nothing_building")
            version = await self._swaps.swap(connection, dag, locked.current, locked.building)
            await _sql.wake_loops(connection)
            await failpoint("cutover.before_commit")
            return version_view(version)

        return await self._database.run(work)

    async def purge(self, name: str, org_id: UUID, prefix: str) -> DagVersionView:
        """Gives up a retired version. The retirement loop drops the data that only this version has."""

        async def work(connection: Connection) -> DagVersionView:
            dag, _ = await self.existing(connection, org_id, name)
            found = await _by_prefix(connection, dag, prefix)
            if found["state"] in (DagState.CURRENT, DagState.BUILDING):
                raise Conflict(
                    f"Version {found['content_hash'][:12]} of DAG {name!r} is {found['state']}; only retired versions "
                    "can be purged.",
                    code="version_in_use",
                )
            if found["state"] == DagState.RETIRED:
                found = await _sql.set_state(connection, dag_version=found["dag_version"], state=DagState.PURGED)
            jobs = await _sql.jobs_of_version(connection, dag_version=found["dag_version"])
            await _sql.touch_jobs(connection, job_ids=[job["job_id"] for job in jobs])
            return version_view(found)

        return await self._database.run(work)

    async def existing(self, connection: Connection, org_id: UUID, name: str) -> tuple[Row, LockedDag]:
        """Locks a DAG and its live versions. A deleted DAG counts as missing."""
        locked = await self._lock(connection, org_id, name, "")
        return require_dag(locked.dag, name), locked


def _is_there(same: Row | None) -> bool:
    """Returns True if the version is or was complete, so that nothing needs to be built."""
    return same is not None and same["state"] != DagState.BUILDING


def _deployed(dag: Dag, version: Row | None, planned: list[PlannedJob]) -> DagDeployed:
    return DagDeployed(
        dag=dag.name,
        dag_version=version["dag_version"] if version else None,
        content_hash=content_hash(dag),
        state=DagState(version["state"]) if version else None,
        dry_run=version is None,
        plan=planned,
    )


async def _check_publications(connection: Connection, locked: LockedDag, dag: Dag) -> None:
    """Rejects a version that drops or redirects a published name which another DAG reads."""
    if locked.dag is None:
        return
    used = await _sql.publications_in_use(
        connection,
        dag_id=locked.dag["dag_id"],
        names=list(dag.publish),
        job_names=[publication.from_.job for publication in dag.publish.values()],
        output_names=[publication.from_.output for publication in dag.publish.values()],
    )
    if used:
        raise Conflict(
            f"DAG {used[0]['reader']!r} reads {used[0]['name']!r}, which this version no longer publishes or publishes "
            "from another output. Deploy that DAG without this input first.",
            code="publication_in_use",
        )


async def _rollback_target(connection: Connection, dag: Row, to: str | None) -> Row:
    if to is None:
        previous: Row | None = await _sql.previous_version(connection, dag_id=dag["dag_id"])
        if previous is None:
            raise Conflict(f"DAG {dag['name']!r} has no retired version to roll back to.", code="nothing_retired")
        return previous
    found = await _by_prefix(connection, dag, to)
    if found["state"] not in (DagState.RETIRED, DagState.CURRENT):
        raise Conflict(
            f"Version {found['content_hash'][:12]} of DAG {dag['name']!r} is {found['state']}; a rollback needs a "
            "version that was current before. Deploy its file instead.",
            code="not_retired",
        )
    return found


async def _by_prefix(connection: Connection, dag: Row, prefix: str) -> Row:
    rows = await _sql.version_by_prefix(connection, dag_id=dag["dag_id"], prefix=prefix)
    if not rows:
        raise NotFound(f"DAG {dag['name']!r} has no version whose content hash starts with {prefix!r}.")
    if len({row["content_hash"] for row in rows}) > 1:
        raise BadRequest(
            f"Several versions of DAG {dag['name']!r} start with {prefix!r}; write more characters of the hash.",
            code="ambiguous_version",
        )
    found: Row = rows[0]
    return found
