-- Credentials of attempts for objects: who may have them, and what they may see.

-- name: minting^
-- Holds the attempt while its prefixes are written down, so that they and the end of its lease cannot cross. One that
-- was asked to stop gets nothing new. Without a lease, the capability token alone names the attempt: one that
-- was issued before the attempt was given back and claimed again is another holder's.
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
-- Prefixes of attempts whose files do not count. As `condemn` in files.sql judges them: what has committed is kept, and
-- once its task was deleted nothing is left that would sweep it. A prefix does not tell its shard: all are asked.
select a.place
from unnest(:places::text[], :task_ids::uuid[], :attempts::int[]) as a(place, task_id, attempt)
left join interlock.tasks t on t.task_id = a.task_id and t.org_id = :org_id
left join interlock.file_sweeps s on s.place = a.place and s.task_id is not null
where case when t.task_id is null then s.place is not null
           else t.status <> 'Completed' or t.attempt <> a.attempt end;
