"""Which partition of `tasks` a task lies in: shard 0, or its run's own.

A large run has a table of its own, loaded by COPY and dropped with the run. Nothing on the wire says so: the lease
token of an attempt carries the shard, a message names its run, and whoever has nothing but a task's id looks in shard 0
first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.adapters.shards import SMALL_SHARD, by_shard, shard_of

__all__ = ["SMALL_SHARD", "Rate", "Shards", "by_shard", "drop", "find_task", "new_shard", "shard_of", "shards_of_jobs"]

_sql = queries("shards")
_CACHED = 100_000


@dataclass(frozen=True)
class Rate:
    key: str
    per_second: float


@dataclass(frozen=True)
class _Facts:
    job_id: UUID
    shard: int
    most: int | None
    rate: Rate | None


class Shards:
    """What is known of runs, and never changes: their shard, and their limit. So it is asked once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._of_run: dict[UUID, _Facts] = {}

    async def of_runs(self, run_ids: Sequence[UUID]) -> dict[UUID, int]:
        """Runs that are not there are left out."""
        return {run_id: facts.shard for run_id, facts in (await self._known(run_ids)).items()}

    async def jobs_of(self, run_ids: Sequence[UUID]) -> dict[UUID, UUID]:
        return {run_id: facts.job_id for run_id, facts in (await self._known(run_ids)).items()}

    async def limited(self, run_ids: Iterable[UUID]) -> dict[UUID, int]:
        """Those of them that may have only so many tasks running at once, and how many."""
        known = await self._known(list(run_ids))
        return {run_id: facts.most for run_id, facts in known.items() if facts.most is not None}

    async def rates(self, run_ids: Iterable[UUID]) -> dict[UUID, Rate]:
        """Those of them whose tasks of one key begin only so often."""
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
            # A run whose list is still being read may yet get one.
            settled = {row["run_id"] for row in rows if row["shard"] or not row["ingesting"]}
            self._of_run |= {run_id: known[run_id] for run_id in settled}
        return known

    def forget(self, run_id: UUID) -> None:
        self._of_run.pop(run_id, None)

    async def live(self) -> list[int]:
        """Shards in which something may still happen."""
        async with self._database.connection() as connection:
            rows = await _sql.live_shards(connection)
        return [SMALL_SHARD, *(row["shard"] for row in rows)]

    async def alarmed(self) -> list[int]:
        """Shards of their own with alarms of leases, of runs that have ended, too."""
        async with self._database.connection() as connection:
            rows = await _sql.alarmed_shards(connection)
        return [row["shard"] for row in rows]


def _facts(row: Row) -> _Facts:
    rate = Rate(row["rate_key"], row["rate_per_second"]) if row["rate_key"] is not None else None
    return _Facts(row["job_id"], row["shard"], row["max_concurrency"], rate)


async def find_task(connection: Connection, task_id: UUID, org_id: UUID | None = None) -> int:
    """The shard of a task that somebody has nothing but the id of. Shard 0 where it is nowhere."""
    found: int | None = await _sql.shard_of_task(connection, task_id=task_id, org_id=org_id)
    return SMALL_SHARD if found is None else found


async def shards_of_jobs(connection: Connection, job_ids: Sequence[UUID]) -> list[int]:
    """Where tasks of these jobs may wait for a slot."""
    rows = await _sql.shards_of_jobs(connection, job_ids=list(job_ids))
    return [SMALL_SHARD, *(row["shard"] for row in rows)]


async def new_shard(connection: Connection) -> int:
    """A number that no run has had."""
    shard: int = await _sql.next_shard(connection)
    return shard


async def drop(database: Database, shard: int) -> bool:
    """Detaches and drops. False: somebody is in the way, and the caller tries again later; nobody waits for it."""
    try:
        async with database.connection() as connection:
            state = await _sql.attachment(connection, table=f"tasks_{shard}")
            if state is not None and state["attached"]:
                # Concurrently, so that no claim in another shard waits; one that was broken off is brought to its end.
                how = "finalize" if state["pending"] else "concurrently"
                await connection.execute(
                    f"alter table interlock.tasks detach partition interlock.tasks_{shard:d} {how}"
                )
            await _sql.drop_shard(connection, number=shard)
    except (asyncpg.LockNotAvailableError, asyncpg.ObjectNotInPrerequisiteStateError):
        return False
    return True
