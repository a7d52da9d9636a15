"""Runs with a shard of their own, for tests: small ones, so that what holds for large runs is seen at once."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from interlock.adapters.postgres import Connection
from interlock.kernel.shards import new_shard
from tests.system import System


async def submit_sharded(system: System, tasks: list[Any], **job: Any) -> dict[str, Any]:
    """As `System.submit`, but the run's tasks lie in a shard of their own, loaded as an ingest loads it."""
    accepted = await system.submit(tasks, **job)
    async with system.kernel.database.transaction() as connection:
        await into_shard(connection, UUID(accepted["run_id"]))
    return accepted


async def into_shard(connection: Connection, run_id: UUID) -> int:
    """Before anybody has claimed of it: a run keeps its shard."""
    shard = await new_shard(connection)
    await connection.execute("update interlock.runs set shard = $2 where run_id = $1", run_id, shard)
    await connection.fetchval(
        "select interlock.create_shard(r.shard, r.org_id, r.run_id, r.job_id, j.max_attempts, j.priority)"
        " from interlock.runs r join interlock.jobs j on j.job_id = r.job_id where r.run_id = $1",
        run_id,
    )
    await connection.execute(
        "with moved as (delete from interlock.tasks where shard = 0 and run_id = $1 returning *)"
        f" insert into interlock.tasks_{shard:d} (task_id, task_index, payload, slot_key)"
        " select task_id, task_index, payload, slot_key from moved",
        run_id,
    )
    await connection.execute("select interlock.finish_shard($1)", shard)
    return shard
