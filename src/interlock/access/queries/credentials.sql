-- Attempts whose capability tokens may write objects, and the prefixes that they may still write.

-- name: lease_held$
-- The lease of an attempt that holds its task and was not asked to stop.
select t.lease_token from interlock.tasks t
where t.shard = :shard and t.task_id = :task_id and t.org_id = :org_id and t.attempt = :attempt and t.status = 'Running'
  and not t.cancel_requested and t.lease_expires_at > interlock.clock();

-- name: uncommitted_among
-- Prefixes of attempts whose files are not committed. Same rule as `condemn` in datasets/queries/files.sql: committed
-- files are kept, and after their task was deleted nothing is left that would sweep them. A prefix does not contain its
-- shard, so this searches all shards.
select a.place
from unnest(:places::text[], :task_ids::uuid[], :attempts::int[]) as a(place, task_id, attempt)
left join interlock.tasks t on t.task_id = a.task_id and t.org_id = :org_id
left join interlock.file_sweeps s on s.place = a.place and s.task_id is not null
where case when t.task_id is null then s.place is not null
           else t.status <> 'Completed' or t.attempt <> a.attempt end;
