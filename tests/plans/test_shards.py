"""Statements about tasks in their own shard, among two hundred other shards: they read one table, and little of it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace

import asyncpg
import pytest

from interlock.stores.postgres import SHARD, Database, in_shard, queries
from tests.conftest import copied
from tests.plans.expectations import Bounded
from tests.plans.measurement import Statement, Touched, prepare, touched
from tests.plans.test_plans import CASES, HERE, LITTLE, STATEMENTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MASS = 100_000
OWN = 777
OTHERS = 200


def sharded() -> dict[str, Statement]:
    """Returns the statements that name a shard, with the test's shard in their text."""
    found = {}
    for key, statement in STATEMENTS.items():
        loaded = queries(f"interlock.{statement.room}", statement.area.removeprefix("bus_"))
        sql = getattr(loaded, statement.name).sql
        names = loaded.driver_adapter.var_sorted.get(statement.name, [])
        if SHARD in names:
            sql, names = in_shard(sql, names, OWN)
            found[key] = replace(statement, sql=sql, parameters=tuple(names))
    return found


SHARDED = sharded()
OWN_CASES = {
    name: (key, case)
    for name, (key, case) in CASES.items()
    # A run's own shard has no tasks without a run, and no attempts that read or mint for a DAG.
    if key in SHARDED and isinstance(case, Bounded) and "alone" not in str(case.arguments)
}

# Moves every task of a run to its own shard, as for large runs; then adds shards of others, each with some tasks.
_MOVED = f"""
update interlock.runs set shard = {OWN} where run_id = seed.id('run big');
select interlock.create_shard({OWN}, org_id, run_id, job_id, 3, 0) from interlock.runs where shard = {OWN};
with gone as (delete from interlock.tasks_0 where run_id is not null returning *)
insert into interlock.tasks_{OWN} (task_id, org_id, job_id, run_id, task_index, status, attempt, max_attempts, priority,
    parked, dead, lease_token, lease_expires_at, timeout_at, retry_at, queued_at, started_at, ended_at, worker_id,
    dedupe_key, slot_key, payload, result)
select task_id, org_id, job_id, run_id, task_index, status, attempt, max_attempts, priority,
    parked, dead, lease_token, lease_expires_at, timeout_at, retry_at, queued_at, started_at, ended_at, worker_id,
    dedupe_key, slot_key, payload, result from gone;
select interlock.finish_shard({OWN});
update interlock.lease_alarms set shard = {OWN} where run_id is not null;
update interlock.attempts a set shard = {OWN}
where exists (select 1 from interlock.tasks_{OWN} t where t.task_id = a.task_id);
"""
_ANOTHER = """
insert into interlock.runs (run_id, org_id, job_id, shard, state, total, last_index, range_size, latched)
select seed.id('run of shard {shard}'), org_id, job_id, {shard}, 'Running', 100, 99, 100, true
from interlock.jobs where job_id = seed.id('job 0');
select interlock.create_shard({shard}, org_id, run_id, job_id, 3, 0) from interlock.runs where shard = {shard};
insert into interlock.tasks_{shard} (task_id, task_index, payload)
select interlock.run_task_id(seed.id('run of shard {shard}'), i), i, '{{}}' from generate_series(0, 99) i;
select interlock.finish_shard({shard});
"""


@pytest.fixture(scope="module")
async def measured(postgres_url: str, template: str) -> AsyncIterator[dict[str, Touched | Exception]]:
    async with copied(postgres_url, template) as url:
        beside = await asyncpg.connect(url, server_settings={"seed.mass": str(MASS), "synchronous_commit": "off"})
        for name in ("seed_names.sql", "seed.sql"):
            await beside.execute((HERE / name).read_text())
        await beside.execute(_MOVED)
        for shard in range(OWN + 1, OWN + 1 + OTHERS):
            await beside.execute(_ANOTHER.format(shard=shard))
        await beside.execute("vacuum analyze")
        await beside.close()
        database = await Database.open(url, size=1)
        async with database.connection() as connection:
            await connection.execute(f"set seed.mass = {MASS}")
            for statement in SHARDED.values():
                await prepare(connection, statement)
            found: dict[str, Touched | Exception] = {}
            for name, (key, case) in OWN_CASES.items():
                try:
                    found[name] = await touched(connection, SHARDED[key], case.arguments)
                except Exception as error:
                    found[name] = error
        yield found
        await database.close()


def test_cases_cover_claims_reads_pages_retries_and_cancels() -> None:
    assert {"tasks.claim", "tasks.claim_ranges", "tasks.claim_range_start", "tasks.heartbeat", "tasks.release"} <= {
        key for key, _ in OWN_CASES.values()
    }
    assert {"reads.task_by_id", "reads.tasks_of_range", "reads.tasks_of_run_by_status", "receipts.receipt_block"} <= {
        key for key, _ in OWN_CASES.values()
    }
    assert {"tasks.requeue_due", "tasks.redrive", "tasks.cancel", "tasks.reap", "runs.cancelable_of_run"} <= {
        key for key, _ in OWN_CASES.values()
    }


@pytest.mark.parametrize("name", OWN_CASES)
def test_statement_reads_one_shard_and_little_of_it(measured: dict[str, Touched | Exception], name: str) -> None:
    found, (_, case) = measured[name], OWN_CASES[name]
    if isinstance(found, Exception):
        raise found
    assert set(re.findall(r"\btasks_(\d+)", found.plan)) <= {str(OWN)}, found.plan
    assert found.scanned <= LITTLE, found.plan
    assert found.rows <= case.rows * case.items + 20, found.plan
    # Rows of such a table are spread out, with space for later versions: a page or two more per item.
    assert found.pages <= (case.pages + 2) * case.items + 60, found.plan
