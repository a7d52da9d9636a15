-- Attempts that may get object-store credentials.

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
