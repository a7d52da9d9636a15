"""Small runs in their own shard, for tests of the behaviour of large runs."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from interlock.stores.postgres import Connection
from interlock.tasks.shards import new_shard
from tests.support.system import System


async def submit_sharded(system: System, tasks: list[Any], **job: Any) -> dict[str, Any]:
    """Like `System.submit`, but the run's tasks are in their own shard, loaded as by an ingest."""
    accepted = await system.submit(tasks, **job)
    async with system.kernel.stores.database.transaction() as connection:
        await into_shard(connection, UUID(accepted["run_id"]))
    return accepted


async def into_shard(connection: Connection, run_id: UUID) -> int:
    """Moves a run to its own shard. Call it before the first claim: a run keeps its shard."""
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
