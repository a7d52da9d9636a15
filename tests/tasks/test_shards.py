"""Dedicated shards of runs: how they are created, found and dropped, without delaying other work."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import pytest

from interlock.stores.postgres import Database
from interlock.tasks import shards
from interlock.tasks.shards import shard_of
from tests.support.polls import answered
from tests.support.sharded_runs import submit_sharded
from tests.support.system import System


async def shard_of_run(system: System, run_id: str) -> int:
    shard: int = await system.value("select shard from interlock.runs where run_id = $1", UUID(run_id))
    return shard


async def attached(system: System) -> set[str]:
    async with system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch(
            "select c.relname as name from pg_inherits join pg_class c on c.oid = inhrelid"
            " where inhparent = 'interlock.tasks'::regclass"
        )
    return {row["name"] for row in rows}


@pytest.mark.parametrize("shard", [0, 1, 17, 2**31 - 1])
async def test_shard_of_a_lease_token_is_equal_in_python_and_sql(shared: System, shard: int) -> None:
    tokens = {await shared.value("select interlock.lease_token($1)", shard) for _ in range(20)}
    assert len(tokens) == 20
    for token in tokens:
        assert shard_of(UUID(str(token))) == shard
        assert await shared.value("select interlock.shard_of($1)", token) == shard


def test_other_tokens_belong_to_shard_0() -> None:
    assert shard_of(uuid4()) == 0
    assert shard_of(UUID("ffffffff-0000-8000-8000-000000000000")) == 0


async def test_shard_operations_are_idempotent(shared: System) -> None:
    run_id = (await submit_sharded(shared, [{"n": n} for n in range(5)]))["run_id"]
    shard = await shard_of_run(shared, run_id)
    assert f"tasks_{shard}" in await attached(shared)
    made = "select interlock.create_shard($1, $2, $3, job_id, 3, 0) from interlock.runs where run_id = $3"
    assert await shared.value(made, shard, shared.org_id, UUID(run_id))
    assert await shared.value("select interlock.finish_shard($1)", shard)
    assert await shared.value("select count(*) from interlock.tasks where shard = $1", shard) == 5
    database = shared.kernel.stores.database
    assert await shards.drop(database, shard)
    assert await shards.drop(database, shard)
    assert f"tasks_{shard}" not in await attached(shared)
    assert not await shared.value("select interlock.finish_shard($1)", shard)


async def test_run_marked_for_deletion_gets_no_shard(shared: System) -> None:
    accepted = await shared.submit([{"n": 1}])
    made = "select interlock.create_shard($1, $2, $3, $4, 3, 0)"
    run, job = UUID(accepted["run_id"]), UUID(accepted["job_id"])
    assert not await shared.value(made, 999_999, shared.org_id, run, job)
    await shared.value("update interlock.runs set shard = 999999, delete_requested = true where run_id = $1", run)
    assert not await shared.value(made, 999_999, shared.org_id, run, job)
    assert await shared.value("select to_regclass('interlock.tasks_999999')") is None


async def test_shard_has_the_keys_that_tasks_of_runs_have_in_shard_0(shared: System) -> None:
    run_id = (await submit_sharded(shared, [{"n": 1}]))["run_id"]
    shard = await shard_of_run(shared, run_id)
    indexes = (
        "select array_agg(replace(pg_get_indexdef(indexrelid), $1, 'tasks_0') order by 1) from pg_index"
        " where indrelid = ('interlock.' || $1)::regclass"
    )
    own = set(await shared.value(indexes, f"tasks_{shard}"))
    small = set(await shared.value(indexes, "tasks_0"))
    assert own < small
    only_of_no_run = {index for index in small - own if "(run_id IS NULL)" in index or "dedupe" in index}
    assert small - own == only_of_no_run
    options = "select reloptions from pg_class where oid = ('interlock.' || $1)::regclass"
    assert sorted(await shared.value(options, f"tasks_{shard}")) == sorted(await shared.value(options, "tasks_0"))


async def test_claims_continue_while_a_drop_waits_for_a_lock(shared: System) -> None:
    """The drop of a shard that a reader has locked gives up, and blocks no other work while it waits."""
    held = (await submit_sharded(shared, [{"n": 1}]))["run_id"]
    shard = await shard_of_run(shared, held)
    database = shared.kernel.stores.database
    async with database.transaction() as reader:
        await reader.fetch(f"select * from interlock.tasks_{shard}")
        waiting = asyncio.create_task(shards.drop(database, shard))
        await answered(lambda: reader.fetchval(_IS_WAITED_FOR, f"interlock.tasks_{shard}"))
        task_id = await shared.one()
        assert (await shared.claim(task_id))["status"] == "Claimed"
        await _looks_at_sizes(shared)
    await asyncio.wait_for(waiting, 20)
    assert await shards.drop(database, shard)


_IS_WAITED_FOR = "select exists (select from pg_locks where relation = $1::text::regclass and not granted)"


async def _looks_at_sizes(system: System) -> None:
    """Reads the table sizes, as each process does with its first connection and then every second."""
    state_url = system.kernel.settings.state_url
    assert state_url is not None
    newcomer = await Database.open(state_url.get_secret_value(), size=1, timeout=5)
    async with newcomer.connection() as connection:
        assert await connection.fetchval("select true")
    await newcomer.close()
