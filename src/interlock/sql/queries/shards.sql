-- Shards: the tables that large runs have for themselves.

-- name: next_shard$
select nextval('interlock.shards')::int;

-- name: shards_of_runs
select run_id, shard, ingesting from interlock.runs where run_id = any(:run_ids::uuid[]);

-- name: live_shards
select shard from interlock.runs where shard <> 0 and ended_at is null order by shard;

-- name: shards_of_jobs
-- Of runs that go on; along the few that have a shard, whatever jobs there are.
select shard from interlock.runs
where shard <> 0 and ended_at is null and job_id::text = any(:job_ids::uuid[]::text[]) order by shard;

-- name: shard_of_task$
-- By the id alone: shard 0, then those of the org's runs, one after the other.
select coalesce(
    (select 0 from interlock.tasks t where t.shard = 0 and t.task_id = :task_id limit 1),
    (select r.shard from interlock.runs r
     where r.shard <> 0 and (:org_id::uuid is null or r.org_id = :org_id::uuid)
       and (select true from interlock.tasks t where t.shard = r.shard and t.task_id = :task_id limit 1)
     limit 1));

-- name: alarmed_shards
-- From one shard to the next along the index: runs that ended leave alarms that nobody has to hear.
with recursive shards as (
    select (select min(shard) from interlock.lease_alarms where shard > 0) as shard
    union all
    select (select min(a.shard) from interlock.lease_alarms a where a.shard > s.shard)
    from shards s where s.shard is not null
)
select shard from shards where shard is not null;

-- name: attachment^
-- A detach that was broken off is pending: it must be finished before anything else.
select c.relispartition as attached, coalesce(i.inhdetachpending, false) as pending
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
left join pg_inherits i on i.inhrelid = c.oid
where n.nspname = 'interlock' and c.relname = :table;

-- name: drop_shard
select interlock.drop_shard(:number::int);
