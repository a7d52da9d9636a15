-- Source jobs: always on, scheduled, or triggered.
--
-- A trigger starts a source. Triggers are durable and ordered; a loop turns each into a task as soon as its job is not
-- paused. Every active generation of a job gets the trigger, and the same trigger makes one task in each.

-- name: source_generations
-- The current generation first. The name of an output is that of its dataset.
select j.job_id, j.current, j.partition, interlock.source_task_id(j.job_id) as producer, j.source ->> 'kind' as kind, j.source ->> 'auth' as auth,
       coalesce((select json_agg(json_build_object('name', d.output_name, 'dataset_uuid', v.dataset_uuid,
                                                   'dataset_version', v.dataset_version) order by v.output_index)
                 from interlock.dataset_versions v join interlock.datasets d on d.dataset_uuid = v.dataset_uuid
                 where v.job_id = j.job_id), '[]') as outputs
from interlock.jobs j
where j.org_id = :org_id and j.dag_name = :dag_name and j.name = :name and j.active
order by j.current desc, j.job_id;

-- name: take_trigger_notes
-- In the transaction that creates the tasks: after a crash they are still there.
delete from interlock.outbox
where outbox_id = any(array(
    select outbox_id from interlock.outbox
    where due_at > :since::timestamptz and due_at <= interlock.clock() and kind = 'trigger'
    order by due_at limit :limit
    for update skip locked))
returning body, due_at;

-- name: jobs_with_triggers
-- A loose index scan from job to job, however many triggers each has: a paused job may have many.
with recursive found as (
    (select job_id, 1 as n from interlock.triggers where job_id > :after::uuid order by job_id limit 1)
    union all
    select (select t.job_id from interlock.triggers t where t.job_id > f.job_id order by t.job_id limit 1), f.n + 1
    from found f where f.job_id is not null and f.n < :limit::int
)
select job_id from found where job_id is not null;

-- name: fire_triggers^
-- Turns the oldest triggers of active jobs that are not paused into tasks. A trigger whose task exists already is done.
with ready as materialized (
    select j.job_id, t.trigger_id, t.dedupe_key, t.payload
    from unnest(:job_ids::uuid[]) as i(job_id)
    join interlock.jobs j on j.job_id = i.job_id and j.active
    cross join lateral (select trigger_id, dedupe_key, payload from interlock.triggers
                        where job_id = j.job_id order by trigger_id limit :each::int) t
    where not exists (select 1 from interlock.pauses p where p.job_id = j.job_id and (not p.bulk or j.priority = 1))
    limit :limit::int
), done as (
    delete from interlock.triggers where trigger_id = any(array(select trigger_id from ready))
), made as (
    insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, dedupe_key, slot_key, payload)
    select uuidv7(), j.org_id, j.job_id, j.max_attempts, j.priority, r.dedupe_key,
           case when j.concurrency_key is not null
                then left(r.payload::jsonb #>> string_to_array(substr(j.concurrency_key, 2), '/'), 500) end,
           r.payload
    from ready r join interlock.jobs j on j.job_id = r.job_id
    order by r.trigger_id
    on conflict do nothing
    returning task_id, job_id, priority
), tasks as materialized (
    select m.task_id, m.priority, j.org_id, j.job_id, j.queue, j.runtime
    from made m join interlock.jobs j on j.job_id = m.job_id
), direct as (
    insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key)
    select queue, priority, org_id, job_id, json_build_object('task_id', task_id), task_id::text
    from tasks where queue is not null and :direct::boolean
    order by task_id
), owed as (
    insert into interlock.outbox (kind, target, body, priority, org_id, share_id, dedupe_key)
    select case when queue is null then 'invoke' else 'send' end, coalesce(queue, runtime),
           json_build_object('task_id', task_id), priority, org_id, job_id, task_id::text
    from tasks where queue is null or not :direct::boolean
    order by task_id
), told as (
    select pg_notify(case when queue is not null and :direct::boolean then 'interlock_queue' else 'interlock_outbox' end,
                     coalesce(queue, ''))
    from (select distinct queue from tasks) q
)
select (select count(*) from ready) as triggers, (select count(*) from tasks) as tasks, (select count(*) from told) as told;

-- name: hand_on_triggers
-- Passes the unstarted triggers of a retired generation to the current one. If that has received a trigger already, the
-- key exists.
with left_over as materialized (
    select t.trigger_id, t.org_id, t.dedupe_key, t.payload, t.created_at, n.job_id
    from unnest(:job_ids::uuid[]) as i(job_id)
    join interlock.jobs j on j.job_id = i.job_id and not j.active
    join interlock.jobs n on n.org_id = j.org_id and n.dag_name = j.dag_name and n.name = j.name and n.active and n.current
         and n.source ->> 'kind' = j.source ->> 'kind'
    cross join lateral (select * from interlock.triggers where job_id = j.job_id order by trigger_id limit :each::int) t
), gone as (
    delete from interlock.triggers where trigger_id = any(array(select trigger_id from left_over))
), handed as (
    insert into interlock.triggers (org_id, job_id, dedupe_key, payload, created_at)
    select org_id, job_id, dedupe_key, payload, created_at from left_over order by trigger_id
    on conflict (job_id, dedupe_key) do nothing
)
select trigger_id from left_over;

-- name: forget_triggers
-- Triggers of jobs that were not reactivated in time.
delete from interlock.triggers
where trigger_id = any(array(
    select t.trigger_id
    from unnest(:job_ids::uuid[]) as i(job_id)
    join interlock.jobs j on j.job_id = i.job_id and not j.active
    cross join lateral (select trigger_id, created_at from interlock.triggers
                        where job_id = j.job_id order by trigger_id limit :each::int) t
    where t.created_at < interlock.clock() - make_interval(secs => :age_seconds::float8)))
returning trigger_id;

-- Always on

-- name: start_sources
-- First starts. The task id is derived from the job, so a second start has no effect.
with wanted as materialized (
    select j.job_id, j.org_id, j.max_attempts, j.priority, interlock.source_task_id(j.job_id) as task_id
    from interlock.jobs j
    where j.source is not null and j.active and j.source ->> 'kind' = 'always_on'
      and not exists (select 1 from interlock.tasks t
                      where t.shard = 0 and t.task_id = interlock.source_task_id(j.job_id))
      and not exists (select 1 from interlock.pauses p where p.job_id = j.job_id and (not p.bulk or j.priority = 1))
    order by j.job_id limit :limit
), made as (
    insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)
    select task_id, org_id, job_id, max_attempts, priority, json_build_object('producer', task_id) from wanted
    on conflict do nothing
    returning task_id, job_id
), noted as (
    insert into interlock.source_tasks (job_id, task_id) select job_id, task_id from made
    on conflict (job_id) do update set restarts = 0, started_at = excluded.started_at
)
select task_id from made;

-- name: restart_sources
-- Restarts a source that returned, failed for good or was canceled: immediately after a long run, otherwise with a
-- backoff that grows with every restart in a row. The previous run goes into the history of its attempts, which keeps
-- the newest.
with ended as materialized (
    select t.task_id, t.status, j.job_id, j.dag_name, j.name, j.max_attempts as fresh_attempts, r.restarts
    from interlock.jobs j
    join interlock.tasks t on t.shard = 0 and t.task_id = interlock.source_task_id(j.job_id)
    left join interlock.source_tasks s on s.job_id = j.job_id
    cross join lateral (
        select case when t.ended_at - t.started_at >= make_interval(secs => :steady_seconds::float8) then 0
                    else coalesce(s.restarts, 0) end as restarts) r
    where j.source is not null and j.active and j.source ->> 'kind' = 'always_on'
      and (t.status in ('Completed', 'Canceled') or (t.status = 'Failed' and t.dead))
      and not exists (select 1 from interlock.pauses p where p.job_id = j.job_id and (not p.bulk or j.priority = 1))
      and t.ended_at + case when s.job_id is null then interval '0'
                            else interlock.backoff(r.restarts + 1, greatest(j.backoff_seconds, 1),
                                                   greatest(j.backoff_factor, 1.5), :most_seconds::float8, j.jitter,
                                                   (hashtext(t.task_id::text || t.attempt) & 1023) / 1024.0) end
          <= interlock.clock()
    order by j.job_id limit :limit
    for no key update of t skip locked
), restarted as (
    update interlock.tasks t
    set status = 'Queued', attempt = t.attempt + 1, max_attempts = t.attempt + e.fresh_attempts, dead = false,
        cancel_requested = false, parked = false, late_reply = false, retry_at = null, ended_at = null, result = null,
        queued_at = interlock.clock()
    from ended e
    where t.shard = 0 and t.task_id = e.task_id
    returning t.task_id, t.attempt, t.lease_token, t.worker_id, t.started_at, old.ended_at as ended_at,
              old.status as was, e.job_id, e.dag_name, e.name, e.restarts + 1 as restarts
), history as (
    insert into interlock.attempts (task_id, attempt, lease_token, outcome, worker_id, started_at, ended_at)
    select task_id, attempt - 1, lease_token, 'Completed', worker_id, started_at, ended_at
    from restarted where was = 'Completed' and lease_token is not null and started_at is not null
    on conflict do nothing
), released as (
    -- The registry has what it committed; its next attempt commits under the same names.
    delete from interlock.output_commits where task_id = any(array(select task_id from restarted))
), forgotten as (
    delete from interlock.attempts a using restarted r
    where a.task_id = r.task_id and a.attempt < r.attempt - :kept::int
), noted as (
    insert into interlock.source_tasks (job_id, task_id, restarts) select job_id, task_id, restarts from restarted
    on conflict (job_id) do update set restarts = excluded.restarts, started_at = excluded.started_at
)
select task_id, dag_name, name, was, restarts from restarted;

-- name: stop_sources
-- Tasks of jobs that are no longer active. A running one learns of it with its next heartbeat.
with left_over as materialized (
    select t.task_id
    from interlock.source_tasks s
    join interlock.jobs j on j.job_id = s.job_id and not (j.active and coalesce(j.source ->> 'kind' = 'always_on', false))
    join interlock.tasks t on t.shard = 0 and t.task_id = s.task_id
    where (t.status in ('Queued', 'Running') or (t.status = 'Failed' and not t.dead)) and not t.cancel_requested
    order by s.job_id limit :limit
    for no key update of t skip locked
)
update interlock.tasks t
set cancel_requested = true, parked = false, retry_at = null, late_reply = false,
    status = case when t.status = 'Running' then t.status else 'Canceled' end,
    ended_at = case when t.status = 'Running' then null else interlock.clock() end
from left_over e
where t.shard = 0 and t.task_id = e.task_id
returning t.task_id;

-- name: forget_sources!
-- Ended sources of jobs that are no longer active.
delete from interlock.source_tasks
where job_id = any(array(
    select s.job_id
    from interlock.source_tasks s
    join interlock.jobs j on j.job_id = s.job_id and not (j.active and coalesce(j.source ->> 'kind' = 'always_on', false))
    left join interlock.tasks t on t.shard = 0 and t.task_id = s.task_id
    where t.status is null or t.status in ('Completed', 'Canceled') or t.dead));

-- name: list_sources
-- The state and progress of each source. Triggers are counted up to a bound. The newest event is searched between two
-- bounds from the dataset itself: by id only, a dataset without events would mean a scan of all.
select j.job_id, j.name, j.current, j.source ->> 'kind' as kind,
       t.task_id, t.status, t.dead, t.attempt, t.queued_at, t.started_at, t.ended_at, t.retry_at, t.worker_id,
       s.restarts, e.error_class, e.error_message, e.ended_at as failed_at, c.next_at, c.covered_to, j.partition, j.source,
       (select h.hook_id from interlock.hooks h
        where h.org_id = j.org_id and h.dag_name = j.dag_name and h.job_name = j.name) as hook_id,
       p.reason as pause_reason, p.since as paused_since,
       (select count(*) from (select 1 from interlock.triggers w where w.job_id = j.job_id limit :limit::int) w) as waiting,
       coalesce((select json_agg(json_build_object(
                            'output', d.output_name, 'dataset_uuid', v.dataset_uuid, 'dataset_version', v.dataset_version,
                            'cursor', v.cursor, 'last_scope', coalesce(l.partition_key, l.cursor::text),
                            'last_at', l.accepted_at) order by v.output_index)
                 from interlock.dataset_versions v
                 join interlock.datasets d on d.dataset_uuid = v.dataset_uuid
                 left join lateral (select ev.dataset_version, ev.partition_key, ev.cursor, ev.accepted_at
                                    from interlock.dataset_events ev
                                    where (ev.dataset_uuid, ev.event_id) >= (v.dataset_uuid, 0)
                                      and (ev.dataset_uuid, ev.event_id) <= (v.dataset_uuid, 9223372036854775807)
                                    order by ev.dataset_uuid desc, ev.event_id desc limit 1) l
                      on l.dataset_version = v.dataset_version
                 where v.job_id = j.job_id), '[]') as outputs
from interlock.jobs j
left join interlock.tasks t on t.shard = 0 and t.task_id = interlock.source_task_id(j.job_id)
left join interlock.source_tasks s on s.job_id = j.job_id
left join interlock.cron_state c on c.job_id = j.job_id
left join lateral (select a.error_class, a.error_message, a.ended_at from interlock.attempts a
                   where a.task_id = t.task_id and a.error_class is not null
                   order by a.attempt desc limit 1) e on true
left join lateral (select q.reason, q.since from interlock.pauses q
                   where q.job_id = j.job_id and (not q.bulk or j.priority = 1) order by q.since limit 1) p on true
where j.org_id = :org_id and j.dag_name = :dag_name and j.active and j.source is not null
order by j.name, j.job_id limit :limit;

-- name: dag_exists$
select exists (select 1 from interlock.dags where org_id = :org_id and name = :dag_name)
    or exists (select 1 from interlock.jobs where org_id = :org_id and dag_name = :dag_name and active);

-- Cron

-- name: follow_schedules!
-- Follows new or changed schedules from now on; a time just before the job was first seen is not missed. Forgets
-- schedules of inactive jobs. Those with time partitions rest instead, until their data is purged: after a rollback they
-- go on where they were. A new generation goes on where the previous one is.
with inactive as materialized (
    select c.job_id, j.partition is not null
                     and not exists (select 1 from interlock.dataset_versions v
                                     where v.job_id = j.job_id and v.purged_at is not null) as rests
    from interlock.cron_state c join interlock.jobs j on j.job_id = c.job_id
    where not (j.active and coalesce(j.source ->> 'kind' = 'cron', false))
), gone as (
    delete from interlock.cron_state where job_id = any(array(select job_id from inactive where not rests))
), resting as (
    update interlock.cron_state set next_at = null
    where job_id = any(array(select job_id from inactive where rests)) and next_at is not null
), covered as materialized (
    -- Read from the schedules, which are few, and not from all jobs of the org.
    select o.org_id, o.dag_name, o.name, o.partition, b.covered_to
    from interlock.cron_state b join interlock.jobs o on o.job_id = b.job_id where b.covered_to is not null
)
insert into interlock.cron_state (job_id, source, last_at, next_at, covered_to)
select j.job_id, j.source,
       case when k.job_id is not null then interlock.clock()
            when j.partition is not null then j.created_at
            else greatest(j.created_at, interlock.clock() - coalesce(j.source ->> 'misfire_grace', '60s')::interval) end,
       interlock.clock(),
       (select max(o.covered_to) from covered o
        where o.org_id = j.org_id and o.dag_name = j.dag_name and o.name = j.name and o.partition = j.partition)
from interlock.jobs j
left join interlock.cron_state k on k.job_id = j.job_id
where j.source is not null and j.active and j.source ->> 'kind' = 'cron'
  and (k.source is distinct from j.source or (k.next_at is null and j.partition is not null))
on conflict (job_id) do update
    set source = excluded.source, last_at = excluded.last_at, next_at = excluded.next_at;

-- name: due_schedules
select c.job_id, c.source, c.last_at, c.covered_to, interlock.clock() as now,
       (select j.partition from interlock.jobs j where j.job_id = c.job_id) as partition
from interlock.cron_state c
where c.next_at <= interlock.clock() order by c.next_at limit :limit
for no key update of c skip locked;

-- name: set_schedules!
update interlock.cron_state c set last_at = i.last_at, next_at = i.next_at, covered_to = i.covered_to
from unnest(:job_ids::uuid[], :last_ats::timestamptz[], :next_ats::timestamptz[], :covered_tos::timestamptz[])
    as i(job_id, last_at, next_at, covered_to)
where c.job_id = i.job_id;

-- Webhooks

-- name: insert_hook^
-- Returns no row if there is one already.
insert into interlock.hooks (hook_id, org_id, dag_name, job_name, secret_hash, sealed)
values (:hook_id, :org_id, :dag_name, :name, :secret_hash, :sealed)
on conflict (org_id, dag_name, job_name) do nothing
returning hook_id, previous_until;

-- name: rotate_hook^
update interlock.hooks
set previous_hash = secret_hash, previous_sealed = sealed,
    previous_until = interlock.clock() + make_interval(secs => :overlap_seconds::float8),
    secret_hash = :secret_hash, sealed = :sealed, rotated_at = interlock.clock()
where org_id = :org_id and dag_name = :dag_name and job_name = :name
returning hook_id, previous_until;

-- name: find_hook^
-- With the way its calls authenticate. Returns no row if no active job accepts them.
select h.org_id, h.dag_name, h.job_name, h.secret_hash, h.sealed,
       case when h.previous_until > interlock.clock() then h.previous_hash end as previous_hash,
       case when h.previous_until > interlock.clock() then h.previous_sealed end as previous_sealed,
       j.auth
from interlock.hooks h
cross join lateral (select j.source ->> 'auth' as auth from interlock.jobs j
                    where j.org_id = h.org_id and j.dag_name = h.dag_name and j.name = h.job_name and j.active
                      and j.source ->> 'kind' = 'webhook'
                    order by j.current desc, j.job_id limit 1) j
where h.hook_id = :hook_id;

-- name: clear_secrets
-- Secrets that an older version stored in clear. Locked, so that two starting processes do not seal the same row twice.
select hook_id, org_id, dag_name, job_name, secret, previous_secret from interlock.hooks
where secret is not null or previous_secret is not null
order by hook_id limit :limit for no key update;

-- name: seal_secrets!
update interlock.hooks h
set sealed = s.sealed, previous_sealed = s.previous_sealed, secret = null, previous_secret = null
from unnest(:hook_ids::text[], :sealed::bytea[], :previous_sealed::bytea[]) as s(hook_id, sealed, previous_sealed)
where h.hook_id = s.hook_id;
