"""Invariants of a large state after a fuzz run. Each statement takes few passes and selects violations."""

from __future__ import annotations

from typing import Any, Final

import asyncpg

_COVERED = """
    select (body ->> 'task_id')::uuid as task_id, (body ->> 'run_id')::uuid as run_id,
           (body ->> 'start')::bigint as first, (body ->> 'end')::bigint as last
    from (select body from interlock.queue_messages union all select body from interlock.outbox) m"""

RULES: Final = {
    "a task has a lease exactly while it runs, and a retry to come exactly while it failed and waits": """
        select task_id, status from interlock.tasks
        where (status = 'Running') <> (lease_expires_at is not null)
           or (status = 'Failed' and not dead) <> (retry_at is not null)
           or (status in ('Completed', 'Failed', 'Canceled')) <> (ended_at is not null)
           or (dead and status <> 'Failed') or (parked and status <> 'Queued') or attempt > max_attempts""",
    "a running task of a capped job has a slot, and nothing else has": """
        select t.task_id, s.task_id from
            (select t.task_id from interlock.tasks t join interlock.jobs j using (job_id)
             where t.status = 'Running' and (j.max_concurrency is not null or j.max_concurrency_per_key is not null)) t
        full join interlock.slots s on s.task_id = t.task_id
        where t.task_id is null or s.task_id is null""",
    "no job is above its cap": """
        select j.job_id, count(*) from interlock.jobs j join interlock.tasks t using (job_id)
        where t.status = 'Running' group by j.job_id having count(*) > j.max_concurrency""",
    "an attempt ends once": """
        select task_id, attempt from interlock.attempt_history where outcome is distinct from 'Released'
        group by task_id, attempt having count(*) > 1""",
    "only completed tasks have committed outputs": """
        select o.task_id from interlock.output_commits o left join interlock.tasks t using (task_id)
        where t.status is distinct from 'Completed' or o.attempt <> t.attempt""",
    "the counters of a run count its tasks": """
        select r.run_id from interlock.runs r left join (
            select run_id, count(*) filter (where status = 'Queued') as queued,
                   count(*) filter (where status = 'Running') as running,
                   count(*) filter (where status = 'Completed') as completed,
                   count(*) filter (where status = 'Failed') as failed, count(*) filter (where dead) as dead,
                   count(*) filter (where status = 'Canceled') as canceled
            from interlock.tasks where run_id is not null group by run_id) c using (run_id)
        where (r.queued, r.running, r.completed, r.failed, r.dead, r.canceled) is distinct from
              (coalesce(c.queued, 0), coalesce(c.running, 0), coalesce(c.completed, 0), coalesce(c.failed, 0),
               coalesce(c.dead, 0), coalesce(c.canceled, 0))""",
    "a queued task that is not parked has a wake-up on its way": f"""
        with covered as ({_COVERED})
        select task_id from interlock.tasks where status = 'Queued' and not parked
        except select task_id from covered where task_id is not null
        except select interlock.run_task_id(run_id, n) from covered cross join generate_series(first, last) n
               where run_id is not null""",
    "no side effect is owed for long": "select * from interlock.outbox where due_at < now() - interval '10 seconds'",
    "one key signs": "select count(*) from interlock.signing_keys where retired_at is null having count(*) <> 1",
    "nobody is left in a transaction": """
        select application_name, query from pg_stat_activity
        where datname = current_database() and state like 'idle in transaction%'""",
}


async def broken(connection: asyncpg.Connection[Any]) -> dict[str, list[asyncpg.Record]]:
    """Returns the violated invariants, each with a few violating rows."""
    found = {rule: await connection.fetch(f"{offenders} limit 5") for rule, offenders in RULES.items()}
    return {rule: rows for rule, rows in found.items() if rows}
