-- Logs of attempts, in chunks.

-- name: keep_logs$
-- Only of attempts that hold or held their lease. A repeated chunk changes nothing. Chunks beyond the first half of the
-- limit replace older ones, so that the end of a long log is kept. The key share lock makes the deletion of a task wait,
-- which then finds the chunk.
with input as materialized (
    select i.* from unnest(:task_ids::uuid[], :run_ids::uuid[], :attempts::int[], :leases::uuid[], :starts::bigint[],
                           :sizes::int[], :texts::text[], :packs::uuid[], :offsets::int[])
        as i(task_id, run_id, attempt, lease_token, start, size, text, pack, pack_offset)
), known as materialized (
    select i.*, t.org_id, t.job_id from input i
    join interlock.tasks t on t.shard = :shard and t.task_id = i.task_id and t.run_id is not distinct from i.run_id
    where (t.lease_token = i.lease_token and t.attempt >= i.attempt)
       or exists (select 1 from interlock.attempts a where a.task_id = i.task_id and a.attempt = i.attempt
                  and a.lease_token = i.lease_token)
    order by t.run_id, t.task_index, t.task_id
    for key share of t
), replaced as (
    delete from interlock.task_logs l using known k
    where k.start >= :half::bigint and l.task_id = k.task_id and l.attempt = k.attempt and l.lease_token = k.lease_token
      and l.start >= :half::bigint and l.start < k.start + k.size - :half::bigint
), kept as (
    insert into interlock.task_logs (task_id, run_id, attempt, lease_token, start, size, text, pack, pack_offset, org_id, job_id)
    select task_id, run_id, attempt, lease_token, start, size, text, pack, pack_offset, org_id, job_id from known
    on conflict do nothing
    returning 1
)
select count(*) from kept;

-- name: logs_of_attempt
-- `shown` is the end of the previous chunk: output between it and `start` was left out.
select l.*, coalesce((select p.start + p.size from interlock.task_logs p
                      where p.task_id = l.task_id and p.attempt = l.attempt and p.lease_token = l.lease_token
                        and p.start < l.start order by p.start desc limit 1), 0) as shown
from interlock.task_logs l
where l.org_id = :org_id and l.task_id = :task_id and l.attempt = :attempt and l.log_id > :after::bigint
order by l.log_id limit :limit;

-- name: newest_logs_of_run
select l.*, coalesce((select p.start + p.size from interlock.task_logs p
                      where p.task_id = l.task_id and p.attempt = l.attempt and p.lease_token = l.lease_token
                        and p.start < l.start order by p.start desc limit 1), 0) as shown
from interlock.task_logs l where l.org_id = :org_id and l.run_id = :scope_id order by l.log_id desc limit :limit;

-- name: next_logs_of_run
-- Rows of the last second are left for the next page: one with a smaller id may not be committed yet.
select l.*, coalesce((select p.start + p.size from interlock.task_logs p
                      where p.task_id = l.task_id and p.attempt = l.attempt and p.lease_token = l.lease_token
                        and p.start < l.start order by p.start desc limit 1), 0) as shown
from interlock.task_logs l
where l.org_id = :org_id and l.run_id = :scope_id and l.log_id > :after::bigint
  and l.written_at < interlock.clock() - interval '1 second'
order by l.log_id limit :limit;

-- name: newest_logs_of_job
select l.*, coalesce((select p.start + p.size from interlock.task_logs p
                      where p.task_id = l.task_id and p.attempt = l.attempt and p.lease_token = l.lease_token
                        and p.start < l.start order by p.start desc limit 1), 0) as shown
from interlock.task_logs l
where l.org_id = :org_id and l.job_id = :scope_id and l.run_id is null order by l.log_id desc limit :limit;

-- name: next_logs_of_job
select l.*, coalesce((select p.start + p.size from interlock.task_logs p
                      where p.task_id = l.task_id and p.attempt = l.attempt and p.lease_token = l.lease_token
                        and p.start < l.start order by p.start desc limit 1), 0) as shown
from interlock.task_logs l
where l.org_id = :org_id and l.job_id = :scope_id and l.run_id is null and l.log_id > :after::bigint
  and l.written_at < interlock.clock() - interval '1 second'
order by l.log_id limit :limit;

-- name: delete_logs_of_run
-- Of a run whose tasks are gone.
delete from interlock.task_logs where ctid = any(array(
    select ctid from interlock.task_logs where run_id = :run_id limit :limit))
returning log_id;
