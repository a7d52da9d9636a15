"""Repairs: ends attempts whose lease has expired or whose hard timeout is reached, requeues failed and lost tasks.

A heartbeat never extends a lease past the timeout, so one statement handles both. Claims write lease alarms, which
determine the leases to check.

The reconciler finds queued tasks without a message, and parked tasks that no freed slot woke. Messages are only
wake-ups, so any of them may be lost; this loop makes the loss harmless.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime
from uuid import UUID

import structlog

from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.low_water import LowWater, low_water
from interlock.stores.postgres import Connection, Database, Row, queries, try_lock
from interlock.tasks.limits import RunSlots
from interlock.tasks.queue import enqueue, wake_parked
from interlock.tasks.shards import SMALL_SHARD, Shards, shards_of_jobs
from interlock.telemetry import TASKS_REAPED, TASKS_REQUEUED

_sql = queries(__name__, "tasks")
_BATCH = 500
_CLEARING = 60
"""Interval, in passes, at which alarms of ended runs are processed too. Nothing runs there, but they would pile up."""


class Reaper(Periodic):
    name = "reaper"

    def __init__(self, database: Database, settings: Settings, shards: Shards, turns: RunSlots) -> None:
        self.seconds = settings.reap_seconds
        self._database = database
        self._direct = settings.queue_direct
        self._shards = shards
        self._turns = turns
        self._waters: defaultdict[int, LowWater[datetime]] = defaultdict(low_water)
        self._passes = 0

    async def run_once(self) -> int:
        shards = set(await self._shards.live())
        if self._passes % _CLEARING == 0:
            shards |= set(await self._shards.alarmed())
            self._waters = defaultdict(low_water, {s: w for s, w in self._waters.items() if s in shards})
        self._passes += 1
        return sum([await self._of_shard(shard) for shard in sorted(shards)])

    async def _of_shard(self, shard: int) -> int:
        async def work(connection: Connection) -> list[Row]:
            rows: list[Row] = await _sql.reap(connection, shard=shard, limit=_BATCH, since=look.since)
            await failpoint("reap.before_commit")
            return rows

        with self._waters[shard].look(await self._database.oldest_begin()) as look:
            rows = await self._database.run(work)
            look.reached = rows[0]["reached"]
        await self._wake_parked(rows)
        reaped = [row for row in rows if row["task_id"] is not None]
        await self._turns.ended(Counter([row["run_id"] for row in reaped if row["run_id"]]))
        for row in reaped:
            TASKS_REAPED.labels(cause="timeout" if row["timed_out"] else "lease").inc()
        # Most alarms find their tasks ended. If more alarms are due there is more work, even when nothing was reaped.
        return len(reaped) or int(rows[0]["more"])

    async def _wake_parked(self, rows: list[Row]) -> None:
        """Wakes parked tasks after the commit: locking them while holding ended ones could deadlock with a cancel."""
        freed = sorted(rows[0]["freed_jobs"] or [])
        if freed:
            keys = rows[0]["freed_keys"]
            await self._database.run(lambda c: wake_parked(c, freed, keys, direct=self._direct))


_RETRY_BATCH = 1000


class Retries(Periodic):
    name = "retries"

    def __init__(self, database: Database, settings: Settings, shards: Shards) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._direct = settings.queue_direct
        self._shards = shards
        self._waters: dict[int, LowWater[datetime]] = {}

    async def run_once(self) -> int:
        live = await self._shards.live()
        known = self._waters
        self._waters = {shard: known.get(shard) or low_water() for shard in live}
        return sum([await self._of_shard(shard, water) for shard, water in self._waters.items()])

    async def _of_shard(self, shard: int, water: LowWater[datetime]) -> int:
        async def work(connection: Connection) -> int:
            rows = await _sql.requeue_due(connection, shard=shard, limit=_RETRY_BATCH, since=look.since)
            look.reached = rows[0]["reached"]
            ids = [row["task_id"] for row in rows if row["task_id"] is not None]
            if ids:
                await enqueue(connection, ids, shard=shard, direct=self._direct)
            await failpoint("retry.before_commit")
            return len(ids)

        with water.look(await self._database.oldest_begin()) as look:
            done = await self._database.run(work)
        TASKS_REQUEUED.inc(done)
        return done


log = structlog.get_logger()
_runs_sql = queries(__name__, "runs")
_LOST_BATCH = 1000
_JOBS = 100
_RUNS = 100
_WALKED = 20_000
"""Number of task indexes of runs that one pass covers."""
_ZERO = UUID(int=0)


class Reconciler(Periodic):
    name = "reconciler"

    def __init__(self, database: Database, settings: Settings, shards: Shards, turns: RunSlots) -> None:
        self.seconds = settings.reconcile_seconds
        self._database = database
        self._direct = settings.queue_direct
        self._shards = shards
        self._turns = turns
        self._grace = settings.reconcile_grace_seconds

    async def run_once(self) -> int:
        return await self._database.run(self._pass)

    async def _pass(self, connection: Connection) -> int:
        """Checks a part of the live runs, of the tasks without a run and of the jobs. Each walk stores its position."""
        if not await try_lock(connection, self.name):
            return 0
        lost = await self._of_runs(connection)
        lost[SMALL_SHARD] = lost.get(SMALL_SHARD, []) + await self._of_no_run(connection)
        found = sum(map(len, lost.values()))
        if found:
            log.warning("reconciler.messages_missing", tasks=found)
        for shard, ids in lost.items():
            if ids:
                await enqueue(connection, ids, shard=shard, direct=self._direct)
        woken = await self._wake_stranded(connection)
        await failpoint("reconcile.before_commit")
        return found + woken

    async def _of_runs(self, connection: Connection) -> dict[int, list[UUID]]:
        """Returns the tasks without a message, by shard."""
        place = await _runs_sql.sweep_place(connection, name="runs")
        cursor, position = (place["cursor"], place["position"] or 0) if place else (None, 0)
        runs = await _runs_sql.live_runs_from(connection, cursor=cursor, limit=_RUNS)
        stretches, end = _stretches(runs, cursor, position)
        await self._remember(connection, "runs", *end)
        shards = {run["run_id"]: run["shard"] for run in runs}
        lost: dict[int, list[UUID]] = {}
        for shard in sorted({shards[run_id] for run_id, _, _ in stretches}):
            here = [stretch for stretch in stretches if shards[stretch[0]] == shard]
            rows = await _runs_sql.lost_run_tasks(
                connection,
                shard=shard,
                run_ids=[run_id for run_id, _, _ in here],
                firsts=[first for _, first, _ in here],
                lasts=[last for _, _, last in here],
                grace=self._grace,
            )
            lost[shard] = [row["task_id"] for row in rows if not await self._waits(row["run_id"])]
        return lost

    async def _waits(self, run_id: UUID) -> bool:
        """Returns True if tasks of the run wait for a slot of its concurrency limit: they need no message."""
        return bool(await self._shards.limited([run_id])) and (await self._turns.counted(run_id)).waiting > 0

    async def _of_no_run(self, connection: Connection) -> list[UUID]:
        place = await _runs_sql.sweep_place(connection, name="tasks")
        job, after = (place["cursor"] or _ZERO, place["task_id"] or _ZERO) if place else (_ZERO, _ZERO)
        rows = await _runs_sql.lost_job_tasks(
            connection, from_job=job, after=after, grace=self._grace, limit=_LOST_BATCH
        )
        last = rows[-1] if len(rows) == _LOST_BATCH else None
        await self._remember(connection, "tasks", last and last["job_id"], None, last and last["task_id"])
        return [row["task_id"] for row in rows if row["lost"]]

    async def _remember(
        self,
        connection: Connection,
        name: str,
        cursor: UUID | None,
        position: int | None = None,
        task_id: UUID | None = None,
    ) -> None:
        await _runs_sql.set_sweep_place(connection, name=name, cursor=cursor, position=position, task_id=task_id)

    async def _wake_stranded(self, connection: Connection) -> int:
        place = await _runs_sql.sweep_place(connection, name="jobs")
        jobs = [
            row["job_id"]
            for row in await _runs_sql.jobs_after(connection, cursor=place and place["cursor"], limit=_JOBS)
        ]
        await self._remember(connection, "jobs", jobs[-1] if len(jobs) == _JOBS else None)
        stranded, keys = set[UUID](), set[str]()
        for shard in await shards_of_jobs(connection, jobs) if jobs else []:
            here = [row["job_id"] for row in await _runs_sql.stranded_jobs(connection, shard=shard, job_ids=jobs)]
            if here:
                rows = await _runs_sql.parked_keys(connection, shard=shard, job_ids=here, limit=_LOST_BATCH)
                stranded, keys = stranded | {*here}, keys | {row["slot_key"] for row in rows}
        if not stranded:
            return 0
        return await wake_parked(connection, sorted(stranded), sorted(keys), direct=self._direct)


Stretch = tuple[UUID, int, int]


def _stretches(runs: list[Row], cursor: UUID | None, position: int) -> tuple[list[Stretch], tuple[UUID | None, int]]:
    """Returns the parts of these runs to check now, and the position to continue from; None starts again."""
    left, found = _WALKED, list[Stretch]()
    for run in runs:
        first = position if run["run_id"] == cursor else 0
        last = min(run["last_index"], first + left - 1)
        if last >= first:
            found.append((run["run_id"], first, last))
            left -= last - first + 1
        if last < run["last_index"]:
            return found, (run["run_id"], last + 1)
    if len(runs) < _RUNS:
        return found, (None, 0)
    return found, (runs[-1]["run_id"], runs[-1]["last_index"] + 1)
