"""Invariants that hold after every race. Each statement selects the rows that violate it."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import asyncpg

_RULES: Final = {
    "a task has a lease exactly while it runs": """
        select task_id, status from interlock.tasks where (status = 'Running') <> (lease_expires_at is not null)""",
    "a running task has an alarm that rings when its lease ends, or at once": """
        select t.task_id, t.lease_expires_at from interlock.tasks t
        where t.status = 'Running' and not exists (
            select 1 from interlock.lease_alarms a where a.due_at <= greatest(t.lease_expires_at, interlock.clock())
            and (t.task_id = any(a.task_ids)
                 or a.run_id = t.run_id and t.task_index between a.first_index and a.last_index))""",
    "a task has a retry to come exactly while it failed and waits": """
        select task_id, status from interlock.tasks
        where (status = 'Failed' and not dead) <> (retry_at is not null)""",
    "only a failed task is dead, only a queued one is parked": """
        select task_id, status from interlock.tasks
        where (dead and status <> 'Failed') or (parked and status <> 'Queued')""",
    "a task says when it ended exactly if it has": """
        select task_id, status from interlock.tasks
        where (status in ('Completed', 'Failed', 'Canceled')) <> (ended_at is not null)""",
    "attempts are counted without gaps, and never past their number": """
        select t.task_id, t.attempt, h.attempts from interlock.tasks t
        cross join lateral (select array_agg(distinct h.attempt order by h.attempt) as attempts
                            from interlock.attempt_history h where h.task_id = t.task_id) h
        where t.attempt > t.max_attempts
           or h.attempts is distinct from array(select generate_series(1, t.attempt))
              and coalesce(h.attempts, '{}') is distinct from array(select generate_series(1, t.attempt - 1))""",
    "an attempt ends once": """
        select task_id, attempt from interlock.attempt_history where outcome is distinct from 'Released'
        group by task_id, attempt having count(*) > 1""",
    "a task that ran to its end has that attempt in its history": """
        select task_id, status, attempt from interlock.tasks t
        where status in ('Running', 'Completed', 'Failed')
          and not exists (select 1 from interlock.attempt_history h
                          where h.task_id = t.task_id and h.attempt = t.attempt and h.lease_token = t.lease_token)""",
    "a running task of a capped job has a slot, and nothing else has": """
        select t.task_id, t.status, s.task_id from
            (select t.task_id, t.status from interlock.tasks t join interlock.jobs j using (job_id)
             where t.status = 'Running' and (j.max_concurrency is not null or j.max_concurrency_per_key is not null)) t
        full join interlock.slots s on s.task_id = t.task_id
        where t.task_id is null or s.task_id is null""",
    "no job is above its cap": """
        select j.job_id, count(*) from interlock.jobs j join interlock.tasks t using (job_id)
        where t.status = 'Running' group by j.job_id having count(*) > j.max_concurrency""",
    "no key of a job is above its cap": """
        select j.job_id, t.slot_key, count(*) from interlock.jobs j join interlock.tasks t using (job_id)
        where t.status = 'Running' group by j.job_id, t.slot_key having count(*) > j.max_concurrency_per_key""",
    "no task is parked beside a free slot that nobody was woken for": """
        select t.task_id from interlock.tasks t join interlock.jobs j using (job_id)
        where t.parked
          and (select count(*) from interlock.tasks o
               where o.job_id = j.job_id and (o.status = 'Running' or o.status = 'Queued' and not o.parked)
              ) < j.max_concurrency""",
    "a queued task that is not parked has a wake-up on its way": """
        select t.task_id from interlock.tasks t
        where t.status = 'Queued' and not t.parked
          and not exists (select 1 from interlock.outbox o where o.dedupe_key like t.run_id || ':%'
                                                              or o.dedupe_key = t.task_id::text)
          and not exists (select 1 from interlock.queue_messages m
                          where m.dedupe_key = t.task_id::text
                             or m.body ->> 'run_id' = t.run_id::text
                                and t.task_index >= (m.body ->> 'start')::bigint
                                and t.task_index <= (m.body ->> 'end')::bigint)""",
    "only completed tasks have committed outputs": """
        select o.task_id from interlock.output_commits o left join interlock.tasks t using (task_id)
        where t.status is distinct from 'Completed' or o.attempt <> t.attempt""",
    "the counters of a run count its tasks": """
        select r.run_id, r.queued, r.running, r.completed, r.failed, r.dead, r.canceled from interlock.runs r
        cross join lateral (
            select count(*) filter (where status = 'Queued') as queued,
                   count(*) filter (where status = 'Running') as running,
                   count(*) filter (where status = 'Completed') as completed,
                   count(*) filter (where status = 'Failed') as failed, count(*) filter (where dead) as dead,
                   count(*) filter (where status = 'Canceled') as canceled, count(*) as total
            from interlock.tasks t where t.run_id = r.run_id) c
        where r.swept_index = 0
          and (r.queued, r.running, r.completed, r.failed, r.dead, r.canceled, r.total)
              is distinct from (c.queued, c.running, c.completed, c.failed, c.dead, c.canceled, c.total)""",
    "a run has ended exactly if all its tasks have": """
        select r.run_id, r.state from interlock.runs r
        where (r.ended_at is not null) = exists (
            select 1 from interlock.tasks t where t.run_id = r.run_id
            and (t.status in ('Queued', 'Running') or t.status = 'Failed' and not t.dead))""",
    "every change of a counter was folded in": "select * from interlock.run_deltas",
    "one key signs": """
        select count(*) from interlock.signing_keys where retired_at is null having count(*) <> 1""",
    "nobody is left in a transaction": """
        select application_name, query from pg_stat_activity
        where datname = current_database() and state like 'idle in transaction%'""",
}


_ALL: Final = " union all ".join(
    f"select '{rule}' as rule, to_json(offender)::text as offender from ({offenders}) offender"
    for rule, offenders in _RULES.items()
)


async def require(connection: asyncpg.Connection[Any], now: datetime) -> None:
    await connection.execute("select set_config('interlock.now', $1, false)", now.isoformat())
    found = await connection.fetch(_ALL)
    assert not found, "; ".join(f"{row['rule']}, but: {row['offender']}" for row in found)
