"""Routing: turns changes of datasets into tasks.

The router follows accepted events through the outbox. The reconciler follows the registry: it walks the changes of
every input that a job reads, so it finds changes whose event was lost, changes held back by a pause, and changes that a
new generation of a job has yet to process. Both use the same statement to give scopes to jobs; see routing.sql.

`ScopeExplanations` explains the state of a scope: why it has no task, or how its task ended, and what to do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct, field

from interlock.calendars import dates_of, shown
from interlock.datasets.registry import display_name
from interlock.errors import NotFound
from interlock.failpoints import failpoint
from interlock.http.ranges import Bound, range_of
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.low_water import low_water
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Connection, Database, Row, database_time, queries, try_lock
from interlock.tasks.dataset_changes import CURSOR
from interlock.telemetry import TASKS_ROUTED
from interlock.wire.datasets import ScopeExplanation

_sql = queries(__name__, "routing")
_ROUTES: Final = 100
"""Accepted requests routed in one pass, each with any number of events."""
_AT_ONCE: Final = 2000
"""Changes per statement."""
_EDGES: Final = 1000
_CHANGES: Final = 1000
"""Changes of one input per pass. A backlog is processed in several passes."""
_CROWDED_SECONDS: Final = 1.0
_APART_SECONDS: Final = 0.1
"""A build wakes the reconciler with every routed change of its inputs, so passes have a minimum distance."""
_FIRST: Final = (UUID(int=0), -1)


class _Route(Struct):
    """The body of an outbox row: accepted events, or jobs that have advanced in their streams."""

    events: list[int] = field(default_factory=list)
    versions: list[UUID] = field(default_factory=list)
    jobs: list[UUID] = field(default_factory=list)


_route = msgspec.json.Decoder(_Route)


class Scopes:
    """Gives scopes to the jobs that read them."""

    def __init__(self, settings: Settings) -> None:
        self._direct = settings.queue_direct

    async def give(
        self, connection: Connection, changed: Sequence[Row | Mapping[str, Any]], job_id: UUID | None = None
    ) -> int:
        """Creates tasks for changed scopes and returns how many. With a `job_id`, only for that job.

        Each item of `changed` has dataset_version, range_start, range_end and commit_id.
        """
        made = 0
        for at in range(0, len(changed), _AT_ONCE):
            part = changed[at : at + _AT_ONCE]
            (row,) = await _sql.give_scopes(
                connection,
                versions=[row["dataset_version"] for row in part],
                starts=[row["range_start"] for row in part],
                ends=[row["range_end"] for row in part],
                commits=[row["commit_id"] for row in part],
                job_id=job_id,
                direct=self._direct,
            )
            made += int(row["tasks"])
        return made

    async def follow(self, connection: Connection, job_ids: Iterable[UUID]) -> int:
        """Creates tasks for jobs whose input streams have advanced, or that have finished their last stream task."""
        ids = sorted(set(job_ids))
        if not ids:
            return 0
        (row,) = await _sql.start_streams(connection, job_ids=ids, direct=self._direct)
        return int(row["tasks"]) + await self._open_gates(connection, ids)

    async def _open_gates(self, connection: Connection, job_ids: list[UUID]) -> int:
        """Gives a job the partitions that were waiting for a second input, a stream, to reach their end."""
        rows = await _sql.open_gates(connection, job_ids=job_ids, limit=_CHANGES)
        if not rows:
            return 0
        made = await self.give(connection, [row for row in rows if row["range_start"] is not None])
        found: defaultdict[tuple[UUID, int, UUID], list[Row]] = defaultdict(list)
        for row in rows:
            found[row["job_id"], row["input_index"], row["stream"]].append(row)
        await _sql.set_gates(
            connection,
            job_ids=[job_id for job_id, _, _ in found],
            input_indexes=[index for _, index, _ in found],
            streams=[stream for _, _, stream in found],
            positions=[_looked_to(gate) + 1 for gate in found.values()],
        )
        return made


class Router:
    name = "router"

    def __init__(self, database: Database, settings: Settings, wakeups: Wakeups) -> None:
        self.seconds = settings.relay_seconds
        self._database = database
        self._wakeups = wakeups
        self._scopes = Scopes(settings)
        self._water = low_water()

    async def idle(self, seconds: float) -> None:
        await self._wakeups.wait("route", seconds)

    async def run_once(self) -> int:
        async def work(connection: Connection) -> tuple[int, int]:
            rows = await _sql.take_routes(connection, limit=_ROUTES, since=look.since)
            look.reached = max((row["due_at"] for row in rows), default=None) or await database_time(connection)
            made = await self._route(connection, [_route.decode(row["body"]) for row in rows]) if rows else 0
            await failpoint("route.before_commit")
            return len(rows), made

        with self._water.look(await self._database.oldest_begin()) as look:
            taken, made = await self._database.run(work)
        if made:
            TASKS_ROUTED.labels(by=self.name).inc(made)
        return taken

    async def _route(self, connection: Connection, routes: Sequence[_Route]) -> int:
        events = [event for route in routes for event in route.events]
        versions = {version for route in routes for version in route.versions}
        jobs = {job for route in routes for job in route.jobs}
        changed = await _sql.changed_scopes(connection, event_ids=events) if events else []
        made = await self._scopes.give(connection, changed)
        if versions:
            jobs |= {row["job_id"] for row in await _sql.readers_of(connection, versions=list(versions))}
        await _sql.wake_builds(connection, event_ids=events, job_ids=list(jobs))
        return made + await self._scopes.follow(connection, jobs)


class ScopeReconciler(Periodic):
    """Checks one page of all inputs per pass, in rotation."""

    name = "scopes"

    def __init__(self, database: Database, settings: Settings, wakeups: Wakeups) -> None:
        self.seconds = settings.reconcile_seconds
        self._database = database
        self._wakeups = wakeups
        self._scopes = Scopes(settings)
        self._place = _FIRST
        self._crowded = False

    async def idle(self, seconds: float) -> None:
        """Waits. A release, a deploy or a change that a build reads wakes the loop.

        While a job is behind and its queue is full, the wait is short.
        """
        await asyncio.sleep(min(seconds, _APART_SECONDS))
        await self._wakeups.wait("scopes", min(seconds, _CROWDED_SECONDS) if self._crowded else seconds)

    async def run_once(self) -> int:
        made, walked, end = await self._database.run(self._pass)
        self._place = end
        if made:
            TASKS_ROUTED.labels(by=self.name).inc(made)
        if made + walked:
            # A version that is being built may have nothing left to do.
            self._wakeups.wake("cutover")
        return made + walked

    async def _pass(self, connection: Connection) -> tuple[int, int, tuple[UUID, int]]:
        """Returns tasks created, changes inspected, and the position for the next pass."""
        if not await try_lock(connection, self.name):
            return 0, 0, _FIRST
        await _sql.keep_pauses(connection)
        job_id, input_index = self._place
        edges = await _sql.edges_behind(connection, job_id=job_id, input_index=input_index, limit=_EDGES)
        behind = [edge for edge in edges if edge["behind"] and edge["progress"] == "partition" and not edge["paused"]]
        room = {row["job_id"]: row["room"] for row in await _sql.room_of(connection, job_ids=_limited(behind))}
        made = walked = 0
        for edge in behind:
            given, looked_at = await self._catch_up(connection, edge, room.get(edge["job_id"], _CHANGES))
            if edge["job_id"] in room:
                room[edge["job_id"]] -= given
            made, walked = made + given, walked + looked_at
        self._crowded = min(room.values(), default=1) <= 0
        streams = [edge["job_id"] for edge in edges if edge["progress"] == "cursor" and not edge["paused"]]
        made += await self._scopes.follow(connection, streams)
        await failpoint("scopes.before_commit")
        full = len(edges) == _EDGES
        return made, walked, (edges[-1]["job_id"], edges[-1]["input_index"]) if full else _FIRST

    async def _catch_up(self, connection: Connection, edge: Row, room: int) -> tuple[int, int]:
        """Returns tasks created and changes inspected."""
        version = edge["dataset_version"]
        changes = await _sql.changes_since(
            connection,
            job_id=edge["job_id"],
            input_index=edge["given_as"],
            dataset_version=version,
            since=edge["reconciled_to"],
            pointed_at=edge["pointed_at"],
            limit=_CHANGES,
        )
        changes = _fitting(changes, room)
        made = await self._scopes.give(connection, changes, edge["job_id"])
        if changes:
            await _sql.set_reconciled(
                connection,
                job_id=edge["job_id"],
                input_index=edge["input_index"],
                dataset_version=version,
                reconciled_to=changes[-1]["commit_id"],
            )
        return made, len(changes)


def _fitting(changes: Sequence[Row], room: int) -> list[Row]:
    """Returns the changes that fit into the queue, including those that already have a task.

    Changes of one commit stay together. A commit larger than the whole queue must get through eventually, so the first
    commit is taken if there is any room.
    """
    fitting: list[Row] = []
    taken = 0
    for _, group in itertools.groupby(changes, key=lambda change: change["commit_id"]):
        together = list(group)
        missing = sum(change["missing"] for change in together)
        if missing and taken + missing > room and (taken or room <= 0):
            break
        fitting += together
        taken += missing
    return fitting


def _looked_to(rows: Sequence[Row]) -> int:
    """Returns the stream's cursor, or less if an input had more partitions than one query returns."""
    reached: int = rows[0]["cursor"]
    for _, group in itertools.groupby(rows, key=lambda row: row["dataset_version"]):
        ends = [row["range_end"] for row in group]
        if len(ends) == _CHANGES:
            reached = min(reached, max(ends))
    return reached


def _limited(edges: Iterable[Row]) -> list[UUID]:
    """Returns the jobs that have a queue limit."""
    return sorted({edge["job_id"] for edge in edges if edge["limited"]})


_scopes_sql = queries(__name__, "scopes")
_invalidations_sql = queries(__name__, "invalidations")
_MAX_SCOPES = 100
"""Maximum number of scopes inspected in a range; the first unfinished one determines the answer."""


@dataclass(frozen=True)
class _Answer:
    reason: str
    detail: str
    task_id: UUID | None = None
    facts: dict[str, Any] | None = None


class ScopeExplanations:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def explain(self, dag: str, job: str, org_id: UUID, first: Bound, last: Bound | None) -> ScopeExplanation:
        async with self._database.connection() as connection:
            found: Row | None = None
            if "\x00" not in dag + job:
                found = await _scopes_sql.job_of_dag(connection, org_id=org_id, dag=dag, name=job)
            if found is None:
                raise NotFound(f"DAG {dag!r} has no job {job!r} in this org; `interlock dag show` lists its jobs.")
            start, end = range_of(found["partition"], first, last)
            answer = await self._answer(connection, found, start, end)
        start_date, end_date = dates_of(found["partition"], start, end)
        return ScopeExplanation(
            job_id=found["job_id"],
            start=start,
            end=end,
            start_date=start_date,
            end_date=end_date,
            reason=answer.reason,
            detail=answer.detail,
            task_id=answer.task_id,
            facts=answer.facts or {},
        )

    async def _answer(self, connection: Connection, job: Row, start: int, end: int) -> _Answer:
        if job["is_source"]:
            return _Answer("source", "The job is a source, which receives no scopes; see its tasks.")
        scope = {"job_id": job["job_id"], "start": start, "end": end}
        given = await _scopes_sql.scope_given(connection, inputs=job["inputs"], limit=_MAX_SCOPES, **scope)
        if given is not None:
            task = await _scopes_sql.task_given(connection, shard=given["task_shard"], task_id=given["task_id"])
            return _given(job, given, task)
        inputs = await _scopes_sql.inputs_in_range(connection, **scope)
        streams = bool(inputs) and all(row["progress"] == CURSOR for row in inputs)
        committed = (await _scopes_sql.streams_read(connection, job_id=job["job_id"]))["committed"] if streams else None
        if committed is not None and committed >= end:
            facts = {"committed": committed}
            return _Answer("done", f"The job has read its streams up to {committed}.", facts=facts)
        held = await _invalidations_sql.holding_back(connection, job_ids=[job["job_id"]])
        return _missing(job, inputs, start, end) or (_paused(held) if held else _not_given(committed))


def _given(job: Row, row: Row, task: Row | None) -> _Answer:
    key, task_id = f"{row['range_start']}-{row['range_end']}", row["task_id"]
    scope = shown(job["partition"], row["range_start"], row["range_end"])
    status = None if task is None else task["status"]
    facts = {"scope": key, "status": status}
    if row["done"]:
        return _Answer("done", f"Task {task_id} has completed {scope}.", task_id, facts)
    if task is not None and task["dead"]:
        what = f"Task {task_id} for {scope} failed permanently. Run it again with: interlock task retry {task_id}."
        return _Answer("dead_letter", what, task_id, facts)
    if status in (None, "Canceled"):
        became = "was canceled" if status else "no longer exists"
        what = f"Task {task_id} for {scope} {became}; invalidate this scope of the job's output to recompute it."
        return _Answer("canceled", what, task_id, facts)
    what = f"Task {task_id} for {scope} is {status}; for details run: interlock task explain {task_id}."
    return _Answer("in_progress", what, task_id, facts)


def _missing(job: Row, inputs: Sequence[Row], start: int, end: int) -> _Answer | None:
    """Returns an answer if an input of the job is missing or has different partition bounds."""
    wanted = shown(job["partition"], start, end)
    absent = [row for row in inputs if not _there(row, end)]
    if absent and (job["wait_for_all"] or len(absent) == len(inputs)):
        names = ", ".join(display_name(row) for row in absent)
        facts = {"missing": [_input_facts(row) for row in absent]}
        return _Answer("input_missing", f"{wanted} is not in {names} yet.", facts=facts)
    several = job["wait_for_all"] and len(inputs) > 1
    others = [row for row in inputs if row["progress"] != CURSOR and not row["exact"]]
    if several and others:
        bounds = ", ".join(f"{display_name(row)} has {row['nearest']}" for row in others)
        what = f"Not all inputs have a partition with exactly the bounds {wanted}: {bounds}."
        return _Answer("bounds_differ", what, facts={"inputs": [_input_facts(row) for row in others]})
    return None


def _there(row: Row, end: int) -> bool:
    if row["progress"] == CURSOR:
        return bool(row["cursor"] >= end)
    return bool(row["overlapping"])


def _input_facts(row: Row) -> dict[str, Any]:
    return {
        "input_index": row["input_index"],
        "dataset": display_name(row),
        "cursor": row["cursor"],
        "nearest": row["nearest"],
    }


def _paused(row: Row) -> _Answer:
    path = " <- ".join(row["path"])
    what = f"The job has been paused since {row['since']:%Y-%m-%d %H:%M:%SZ}: {row['reason']} ({path})."
    return _Answer("paused", what, facts={"since": row["since"], "path": row["path"], "cause": row["reason"]})


def _not_given(committed: int | None) -> _Answer:
    what = "All inputs are present; the router, or one of the reconciler's next passes, will create the task."
    return _Answer("not_given_yet", what, facts={} if committed is None else {"committed": committed})
