-- Remembered requests, jobs by name, and the wake-ups of tasks.

-- name: remember_request^
-- Waits for a concurrent request with the same key. No row means that the other one was first.
insert into interlock.idempotency_keys (org_id, endpoint, key, request_hash, expires_at)
values (:org_id, :endpoint, :key, :request_hash, interlock.clock() + make_interval(secs => :seconds::float8))
on conflict (org_id, endpoint, key) do update
    set request_hash = excluded.request_hash, status = null, response = null, expires_at = excluded.expires_at
    where interlock.idempotency_keys.expires_at <= interlock.clock()
returning key;

-- name: remembered_request^
select request_hash, status, response from interlock.idempotency_keys
where org_id = :org_id and endpoint = :endpoint and key = :key;

-- name: remember_response!
update interlock.idempotency_keys set status = :status, response = :response::text::json
where org_id = :org_id and endpoint = :endpoint and key = :key;

-- name: job_by_name^
-- `dag_name` is empty for a job without a DAG.
select * from interlock.jobs where org_id = :org_id and coalesce(dag_name, '') = :dag_name and name = :name and current;

-- name: enqueue_tasks
-- One wake-up per task: through the queue, the outbox or, for runtimes without a queue, an invocation. A task outside
-- shard 0 is named by its run and index, which determine the shard; so is a task of a run with a limit.
with tasks as (
    select t.task_id, j.queue, j.runtime, t.org_id, coalesce(t.run_id, t.job_id) as share_id,
           case when :shard = 0 then t.priority
                else coalesce((select r.priority from interlock.runs r where r.run_id = t.run_id), 1) end as priority,
           case when :shard = 0 and (t.run_id is null or (select r.max_concurrency is null and r.rate_key is null
                                                          from interlock.runs r where r.run_id = t.run_id))
                then json_build_object('task_id', t.task_id)
                else json_build_object('job_id', t.job_id, 'run_id', t.run_id, 'start', t.task_index, 'end', t.task_index)
                end as body
    from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id
    where t.shard = :shard and t.task_id = any(:task_ids::uuid[])
), direct as (
    insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key)
    select queue, priority, org_id, share_id, body, task_id::text from tasks where queue is not null and :direct::boolean
    order by task_id::text collate "C"  -- lock order of `send`
    on conflict (queue, dedupe_key) where dedupe_key is not null do update
        set visible_at = excluded.visible_at, receipt = null, receives = 0, dead_at = null
), owed as (
    insert into interlock.outbox (kind, target, body, priority, org_id, share_id, dedupe_key)
    select case when queue is null then 'invoke' else 'send' end, coalesce(queue, runtime), body, priority, org_id,
           share_id, task_id::text
    from tasks where queue is null or not :direct::boolean
)
select pg_notify(case when queue is not null and :direct::boolean then 'interlock_queue' else 'interlock_outbox' end,
                 coalesce(queue, ''))
from (select distinct queue from tasks) q;
