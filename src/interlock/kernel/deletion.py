"""Deletes runs: a part at a time in shard 0, whole where a run has a shard of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.failpoints import failpoint
from interlock.kernel import shards
from interlock.kernel.loop import Periodic
from interlock.kernel.packs import forget_results
from interlock.kernel.shards import SMALL_SHARD, Shards
from interlock.settings import Settings

_sql = queries("runs")
_BATCH = 5000
_RUNS = 10


async def delete_part(connection: Connection, settings: Settings, run: Row) -> int:
    """The next tasks of a run, with their traces, and the run itself after the last of them. How much is gone."""
    first, last = run["swept_index"], min(run["swept_index"] + _BATCH - 1, run["last_index"])
    tasks = await _sql.delete_run_tasks(connection, run_id=run["run_id"], first=first, last=last)
    await _sql.delete_task_traces(connection, task_ids=[row["task_id"] for row in tasks])
    if last < run["last_index"]:
        await _sql.set_swept(connection, run_id=run["run_id"], swept=last + 1)
    else:
        await _delete_run(connection, settings, run)
    return len(tasks) + 1


async def _delete_run(connection: Connection, settings: Settings, run: Row) -> None:
    await _sql.delete_run(connection, run_id=run["run_id"])
    await forget_results(connection, settings, run["run_id"])
    await _sql.delete_nameless_job(connection, job_id=run["job_id"])


class RunDeletions(Periodic):
    name = "run-deletions"

    def __init__(self, database: Database, settings: Settings, known: Shards) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._settings = settings
        self._shards = known

    async def run_once(self) -> int:
        async with self._alone() as guard:
            runs = await _sql.deleting_runs(guard, most=_RUNS) if guard is not None else []
            return sum([await self._delete(run) for run in runs])

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[Connection | None]:
        """One at a time, over several transactions: a table cannot be detached in one. None where another is at it."""
        async with self._database.connection() as guard:
            if not await _sql.take_turn(guard, name=self.name):
                yield None
                return
            try:
                yield guard
            finally:
                await _sql.end_turn(guard, name=self.name)

    async def _delete(self, run: Row) -> int:
        if run["shard"] == SMALL_SHARD:
            done = await self._database.run(lambda connection: self._part(connection, run))
        else:
            done = await self._whole(run)
        self._shards.forget(run["run_id"])
        return done

    async def _part(self, connection: Connection, run: Row) -> int:
        done = await delete_part(connection, self._settings, run)
        await failpoint("deletion.before_commit")
        return done

    async def _whole(self, run: Row) -> int:
        """A crash between any two of these steps leaves a run that is still to be deleted."""
        async with self._database.connection() as connection:
            gone = len(await _sql.delete_shard_attempts(connection, number=run["shard"], most=_BATCH))
        if gone == _BATCH:
            return gone
        if run["with_outputs"] and run["swept_index"] <= run["last_index"]:
            return await self._database.run(lambda connection: self._traces(connection, run))
        if not await shards.drop(self._database, run["shard"]):
            return 0
        await failpoint("deletion.dropped")
        await self._database.run(lambda connection: _delete_run(connection, self._settings, run))
        return 1

    async def _traces(self, connection: Connection, run: Row) -> int:
        """What its tasks have left beside them: only jobs with outputs leave anything."""
        last = min(run["swept_index"] + _BATCH - 1, run["last_index"])
        ids = await _sql.ids_of_range(connection, run_id=run["run_id"], first=run["swept_index"], last=last)
        await _sql.delete_task_traces(connection, task_ids=[row["task_id"] for row in ids])
        await _sql.set_swept(connection, run_id=run["run_id"], swept=last + 1)
        return len(ids)
