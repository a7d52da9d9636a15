-- Shards: separate tables of large runs.

-- name: next_shard$
select nextval('interlock.shards')::int;

-- name: shards_of_runs
select run_id, job_id, shard, ingesting, max_concurrency, rate_key, rate_per_second
from interlock.runs where run_id = any(:run_ids::uuid[]);

-- name: live_shards
select shard from interlock.runs where shard <> 0 and ended_at is null order by shard;

-- name: shards_of_jobs
-- Shards of live runs. Walks the few runs that have a shard, however many jobs there are.
select shard from interlock.runs
where shard <> 0 and ended_at is null and job_id::text = any(:job_ids::uuid[]::text[]) order by shard;

-- name: shard_of_task$
-- By id only: shard 0 first, then the shards of the org's runs, one after the other.
select coalesce(
    (select 0 from interlock.tasks t where t.shard = 0 and t.task_id = :task_id limit 1),
    (select r.shard from interlock.runs r
     where r.shard <> 0 and (:org_id::uuid is null or r.org_id = :org_id::uuid)
       and (select true from interlock.tasks t where t.shard = r.shard and t.task_id = :task_id limit 1)
     limit 1));

-- name: alarmed_shards
-- A loose index scan from shard to shard: ended runs leave alarms that need no action.
with recursive shards as (
    select (select min(shard) from interlock.lease_alarms where shard > 0) as shard
    union all
    select (select min(a.shard) from interlock.lease_alarms a where a.shard > s.shard)
    from shards s where s.shard is not null
)
select shard from shards where shard is not null;

-- name: attachment^
-- An interrupted detach is pending: it must be finished before anything else.
select c.relispartition as attached, coalesce(i.inhdetachpending, false) as pending
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
left join pg_inherits i on i.inhrelid = c.oid
where n.nspname = 'interlock' and c.relname = :table;

-- name: drop_shard
select interlock.drop_shard(:number::int);

-- name: queued_payloads
-- The first claimable tasks of a range, with the payloads that rate limits depend on.
select t.task_id, t.task_index, t.payload from interlock.tasks t
where t.shard = :shard and t.run_id = :run_id and t.task_index between :first::bigint and :last::bigint
  and t.status = 'Queued'
order by t.task_index limit :limit;

-- name: running_of$
-- The current number, including deltas that are not folded yet.
select r.running + coalesce((select sum(d.running) from interlock.run_deltas d where d.run_id = r.run_id), 0)::bigint
from interlock.runs r where r.run_id = :run_id;

-- name: limited_runs
-- Walks the live runs.
select r.run_id, r.max_concurrency, r.running + r.completed + r.failed + r.canceled > 0 as started,
       r.running + coalesce((select sum(d.running) from interlock.run_deltas d where d.run_id = r.run_id), 0)::bigint as running
from interlock.runs r where r.ended_at is null and r.max_concurrency is not null
order by r.run_id limit :limit;

-- name: run_address^
-- Where messages of a run go.
select r.org_id, r.job_id, r.shard, r.range_size, r.last_index, j.queue,
       coalesce(r.priority, case when r.shard = 0 then j.priority else 1 end) as priority
from interlock.runs r join interlock.jobs j on j.job_id = r.job_id
where r.run_id = :run_id;

-- name: send_again$
-- Then RunWakes sends a message for each range with a queued task. No range of a run waits before its first task has
-- started.
update interlock.runs r set wake_index = 0
where r.run_id = :run_id and r.ended_at is null and not r.paused and not r.delete_requested
  and r.running + r.completed + r.failed + r.canceled > 0
returning r.run_id;
