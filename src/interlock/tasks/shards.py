"""Finds the partition of `tasks` that a task is in: shard 0, or the shard of its run. Computes ids of tasks in runs.

A large run has its own table, loaded by COPY and dropped with the run. Shards do not appear on the wire. The lease
token of an attempt carries the shard, and a message names its run. A caller that has only a task id looks in shard 0
first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from interlock.access.tokens import SMALL_SHARD, by_shard, shard_of
from interlock.stores.postgres import Connection, Database, Row, queries

__all__ = ["SMALL_SHARD", "Rate", "Shards", "by_shard", "drop", "find_task", "new_shard", "shard_of", "shards_of_jobs"]

_sql = queries(__name__, "shards")
_CACHED = 100_000


@dataclass(frozen=True)
class Rate:
    key: str
    per_second: float


@dataclass(frozen=True)
class _Facts:
    job_id: UUID
    shard: int
    limit: int | None
    rate: Rate | None


class Shards:
    """Caches facts of runs that never change: job, shard and limits."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._of_run: dict[UUID, _Facts] = {}

    async def of_runs(self, run_ids: Sequence[UUID]) -> dict[UUID, int]:
        """Returns the shards by run, without runs that do not exist."""
        return {run_id: facts.shard for run_id, facts in (await self._known(run_ids)).items()}

    async def jobs_of(self, run_ids: Sequence[UUID]) -> dict[UUID, UUID]:
        return {run_id: facts.job_id for run_id, facts in (await self._known(run_ids)).items()}

    async def limited(self, run_ids: Iterable[UUID]) -> dict[UUID, int]:
        """Returns the concurrency limits by run, for runs that have one."""
        known = await self._known(list(run_ids))
        return {run_id: facts.limit for run_id, facts in known.items() if facts.limit is not None}

    async def rates(self, run_ids: Iterable[UUID]) -> dict[UUID, Rate]:
        """Returns the rate limits by run, for runs that have one."""
        known = await self._known(list(run_ids))
        return {run_id: facts.rate for run_id, facts in known.items() if facts.rate is not None}

    async def _known(self, run_ids: Sequence[UUID]) -> dict[UUID, _Facts]:
        known = {run_id: self._of_run[run_id] for run_id in run_ids if run_id in self._of_run}
        missing = [run_id for run_id in run_ids if run_id not in known]
        if missing:
            async with self._database.connection() as connection:
                rows = await _sql.shards_of_runs(connection, run_ids=missing)
            if len(self._of_run) > _CACHED:
                self._of_run.clear()
            known |= {row["run_id"]: _facts(row) for row in rows}
            # A run whose list is still being ingested may still get a shard.
            settled = {row["run_id"] for row in rows if row["shard"] or not row["ingesting"]}
            self._of_run |= {run_id: known[run_id] for run_id in settled}
        return known

    def forget(self, run_id: UUID) -> None:
        self._of_run.pop(run_id, None)

    async def live(self) -> list[int]:
        """Returns shard 0 and the shards of live runs."""
        async with self._database.connection() as connection:
            rows = await _sql.live_shards(connection)
        return [SMALL_SHARD, *(row["shard"] for row in rows)]

    async def alarmed(self) -> list[int]:
        """Returns the shards, other than 0, that have lease alarms, including shards of ended runs."""
        async with self._database.connection() as connection:
            rows = await _sql.alarmed_shards(connection)
        return [row["shard"] for row in rows]


def _facts(row: Row) -> _Facts:
    rate = Rate(row["rate_key"], row["rate_per_second"]) if row["rate_key"] is not None else None
    return _Facts(row["job_id"], row["shard"], row["max_concurrency"], rate)


async def find_task(connection: Connection, task_id: UUID, org_id: UUID | None = None) -> int:
    """Returns the shard of a task, given only its id; shard 0 if the task does not exist."""
    found: int | None = await _sql.shard_of_task(connection, task_id=task_id, org_id=org_id)
    return SMALL_SHARD if found is None else found


async def shards_of_jobs(connection: Connection, job_ids: Sequence[UUID]) -> list[int]:
    """Returns the shards in which tasks of these jobs may wait for a slot."""
    rows = await _sql.shards_of_jobs(connection, job_ids=list(job_ids))
    return [SMALL_SHARD, *(row["shard"] for row in rows)]


async def new_shard(connection: Connection) -> int:
    """Returns a number that no run has had."""
    shard: int = await _sql.next_shard(connection)
    return shard


async def drop(database: Database, shard: int) -> bool:
    """Detaches and drops a shard without blocking. Returns False if a lock is held; the caller retries later."""
    try:
        async with database.connection() as connection:
            state = await _sql.attachment(connection, table=f"tasks_{shard}")
            if state is not None and state["attached"]:
                # Concurrently, so that no claim in another shard waits. An interrupted detach is finalized.
                how = "finalize" if state["pending"] else "concurrently"
                await connection.execute(
                    f"alter table interlock.tasks detach partition interlock.tasks_{shard:d} {how}"
                )
            await _sql.drop_shard(connection, number=shard)
    except (asyncpg.LockNotAvailableError, asyncpg.ObjectNotInPrerequisiteStateError):
        return False
    return True


def run_task_id(run_id: UUID, index: int) -> UUID:
    """Computes the same id as interlock.run_task_id in SQL."""
    return UUID(bytes=hashlib.sha256(f"{run_id}:{index}".encode()).digest()[:16])
