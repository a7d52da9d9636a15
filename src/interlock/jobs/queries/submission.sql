-- Submission: writes and enqueues a job, its run and the run's tasks in one transaction.

-- name: insert_job^
-- Returns no row if the name is taken; the caller then compares definitions.
insert into interlock.jobs (org_id, name, operator, runtime, queue, config, priority, max_attempts, backoff_seconds,
                            backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds, timeout_seconds,
                            max_concurrency, concurrency_key, max_concurrency_per_key, outputs, definition_hash)
values (:org_id, :name, :operator, :runtime, :queue, :config::text::json, :priority, :max_attempts, :backoff_seconds,
        :backoff_factor, :backoff_cap_seconds, :jitter, :non_retryable, :lease_seconds, :timeout_seconds,
        :max_concurrency, :concurrency_key, :max_concurrency_per_key, :outputs::text::jsonb, :definition_hash)
on conflict (org_id, coalesce(dag_name, ''), name) where name is not null and current do nothing
returning *;

-- name: replace_job^
-- Completions free slots of capped jobs only. A job that loses its cap must keep no slots, or they would never be
-- freed.
with replaced as (
    update interlock.jobs
    set operator = :operator, runtime = :runtime, queue = :queue, config = :config::text::json, priority = :priority,
        max_attempts = :max_attempts, backoff_seconds = :backoff_seconds, backoff_factor = :backoff_factor,
        backoff_cap_seconds = :backoff_cap_seconds, jitter = :jitter, non_retryable = :non_retryable,
        lease_seconds = :lease_seconds, timeout_seconds = :timeout_seconds, max_concurrency = :max_concurrency,
        concurrency_key = :concurrency_key, max_concurrency_per_key = :max_concurrency_per_key,
        outputs = :outputs::text::jsonb, definition_hash = :definition_hash
    where org_id = :org_id and coalesce(dag_name, '') = '' and name = :name and current
    returning *
), freed as (
    delete from interlock.slots where job_id = any(array(
        select job_id from replaced where max_concurrency is null and max_concurrency_per_key is null))
)
select * from replaced;

-- name: register_datasets!
-- Registers datasets that no org owns yet. In one order, so that two submissions cannot deadlock.
insert into interlock.datasets (dataset_uuid, org_id, current_version)
select distinct on (d.dataset_uuid) d.dataset_uuid, :org_id, d.dataset_version
from unnest(:uuids::uuid[], :versions::uuid[]) as d(dataset_uuid, dataset_version)
order by d.dataset_uuid
on conflict (dataset_uuid) do nothing;

-- name: register_versions!
insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id)
select distinct on (d.dataset_version) d.dataset_version, d.dataset_uuid, :org_id
from unnest(:uuids::uuid[], :versions::uuid[]) as d(dataset_uuid, dataset_version)
order by d.dataset_version
on conflict (dataset_version) do nothing;

-- name: foreign_datasets
-- A separate statement after the ones above: only it sees the rows that they waited for.
select d.dataset_uuid, d.dag_name, d.org_id = :org_id as own
from unnest(:uuids::uuid[], :versions::uuid[]) as o(dataset_uuid, dataset_version)
join interlock.datasets d on d.dataset_uuid = o.dataset_uuid
join interlock.dataset_versions v on v.dataset_version = o.dataset_version
where d.org_id <> :org_id or v.dataset_uuid <> o.dataset_uuid or d.dag_name is not null
order by own limit 1;

-- name: insert_run^
-- If the total is known, the run is latched immediately; otherwise latch_run does it.
insert into interlock.runs (org_id, job_id, last_index, range_size, total, queued, max_concurrency, rate_key,
                            rate_per_second, tolerated_share, deadline_seconds, deadline_at, retention_days, latched,
                            state, ended_at)
values (:org_id, :job_id, :last_index, :range_size, :total::bigint, coalesce(:total::bigint, 0),
        :max_concurrency::int, :rate_key::text, :rate_per_second::float8, :tolerated_share::float8,
        :deadline_seconds::float8, interlock.clock() + make_interval(secs => :deadline_seconds::float8),
        :retention_days::float8, :total::bigint is not null,
        case when :total::bigint = 0 then 'Completed'::interlock.run_state else 'Running' end,
        case when :total::bigint = 0 then interlock.clock() end)
returning run_id, state;

-- name: insert_tasks
-- Skips an item whose dedupe key the job has seen: the first task covers it.
insert into interlock.tasks (shard, task_id, org_id, job_id, run_id, task_index, max_attempts, priority, dedupe_key,
                             slot_key, payload)
select 0, interlock.run_task_id(:run_id, i.n - 1), :org_id, :job_id, :run_id, i.n - 1, :max_attempts, :priority,
       i.dedupe_key, i.slot_key, i.payload::json
from unnest(:payloads::text[], :dedupe_keys::text[], :slot_keys::text[]) with ordinality
    as i(payload, dedupe_key, slot_key, n)
order by i.dedupe_key, i.n  -- one lock order, so that two submissions with the same keys cannot deadlock
on conflict do nothing
returning task_index;

-- name: insert_all_tasks!
-- Without dedupe keys there can be no conflict: the ids are derived from a new run.
insert into interlock.tasks (shard, task_id, org_id, job_id, run_id, task_index, max_attempts, priority, slot_key, payload)
select 0, interlock.run_task_id(:run_id, i.n - 1), :org_id, :job_id, :run_id, i.n - 1, :max_attempts, :priority,
       i.slot_key, i.payload::json
from unnest(:payloads::text[], :slot_keys::text[]) with ordinality as i(payload, slot_key, n);

-- name: latch_run^
-- Sets the total together with the latch, so that the run cannot end early.
update interlock.runs
set total = :total, queued = :total, latched = true,
    state = case when :total::bigint = 0 then 'Completed'::interlock.run_state else state end,
    ended_at = case when :total::bigint = 0 then interlock.clock() end
where run_id = :run_id
returning run_id, state;

-- name: enqueue_ranges
-- One message per range of the run that has at least one task.
with ranges as (
    select distinct i / :range_size::int as chunk from unnest(:indexes::bigint[]) i
), messages as (
    select :run_id::uuid || ':' || chunk as dedupe_key,
           json_build_object('job_id', :job_id::uuid, 'run_id', :run_id::uuid, 'start', chunk * :range_size::int,
                             'end', least((chunk + 1) * :range_size::int - 1, :last::bigint)) as body
    from ranges order by chunk
), direct as (
    insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key)
    select :queue, :priority, :org_id::uuid, :run_id::uuid, body, dedupe_key from messages where :direct::boolean
    on conflict do nothing
), owed as (
    insert into interlock.outbox (kind, target, body, priority, org_id, share_id, dedupe_key)
    select 'send', :queue, body, :priority, :org_id::uuid, :run_id::uuid, dedupe_key from messages where not :direct::boolean
)
select case when :direct::boolean then pg_notify('interlock_queue', :queue) else pg_notify('interlock_outbox', '') end;
