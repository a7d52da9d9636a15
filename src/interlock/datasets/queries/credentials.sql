-- Object-store credentials of attempts: the attempts that may get them, and the prefixes they may read.

-- name: minting^
-- Locks the attempt while its prefixes are recorded, so that it cannot lose its lease in between. An attempt that was
-- asked to stop gets no new credentials. Without a lease token, only the capability token identifies the attempt: a
-- token issued before the attempt was released and claimed again belongs to another holder.
select t.task_id, t.attempt, t.timeout_at, t.lease_token, t.lease_expires_at, t.lease_expires_at > interlock.clock() as alive,
       t.cancel_requested, j.outputs
from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
where t.shard = :shard and t.task_id = :task_id and t.org_id = :org_id and t.attempt = :attempt
  and (t.lease_token = :lease_token::uuid
       or :lease_token::uuid is null and t.started_at <= to_timestamp(:issued_at::float8))
  and t.status = 'Running'
for no key update of t;

-- name: lease_held$
-- The lease of an attempt that holds its task and was not asked to stop.
select t.lease_token from interlock.tasks t
where t.shard = :shard and t.task_id = :task_id and t.org_id = :org_id and t.attempt = :attempt and t.status = 'Running'
  and not t.cancel_requested and t.lease_expires_at > interlock.clock();

-- name: uncommitted_among
-- Prefixes of attempts whose files are not committed. Same rule as `condemn` in files.sql: committed files are kept,
-- and after their task was deleted nothing is left that would sweep them. A prefix does not contain its shard, so this
-- searches all shards.
select a.place
from unnest(:places::text[], :task_ids::uuid[], :attempts::int[]) as a(place, task_id, attempt)
left join interlock.tasks t on t.task_id = a.task_id and t.org_id = :org_id
left join interlock.file_sweeps s on s.place = a.place and s.task_id is not null
where case when t.task_id is null then s.place is not null
           else t.status <> 'Completed' or t.attempt <> a.attempt end;
