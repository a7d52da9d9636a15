-- The read models of API and CLI. Every statement filters by org; none counts or scans ended rows.

-- name: job_by_id^
select * from interlock.jobs where org_id = :org_id and job_id = :job_id and deleted_at is null;

-- name: list_jobs
-- Newest first, each with its newest run.
select j.*, r.run_id, r.state, r.total, r.queued, r.running, r.completed, r.failed, r.dead, r.canceled, r.errors,
       r.cancel_requested, r.reason, r.created_at as run_created_at, r.ended_at, r.retention_days, r.rerun_of
from (select * from interlock.jobs
      where org_id = :org_id and job_id < coalesce(:cursor::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') and deleted_at is null
      order by job_id desc limit :limit) j
left join lateral (select * from interlock.runs r
                   where r.job_id = j.job_id and not r.delete_requested order by r.run_id desc limit 1) r on true
order by j.job_id desc;

-- name: newest_run^
select r.*, j.dag_name, j.name
from (select * from interlock.runs
      where org_id = :org_id and job_id = :job_id and not delete_requested order by run_id desc limit 1) r
join interlock.jobs j on j.job_id = r.job_id;

-- name: run_by_id^
select r.*, j.dag_name, j.name
from interlock.runs r join interlock.jobs j on j.job_id = r.job_id
where r.org_id = :org_id and r.run_id = :run_id and not r.delete_requested;

-- name: list_runs
-- A stretch of a job's runs, newest first. The last one walked is returned even if it is in another state.
with walked as materialized (
    select * from interlock.runs
    where org_id = :org_id and job_id = :job_id and not delete_requested
      and run_id < coalesce(:cursor::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
    order by run_id desc limit :walked
)
select r.*, j.dag_name, j.name, (select count(*) from walked) = :walked as more,
       :state::text is null or r.state = :state::text::interlock.run_state as wanted
from walked r join interlock.jobs j on j.job_id = r.job_id
where :state::text is null or r.state = :state::text::interlock.run_state
   or r.run_id = (select run_id from walked order by run_id limit 1)
order by r.run_id desc;

-- name: list_org_runs
-- Like list_runs, for all jobs of an org.
with walked as materialized (
    select * from interlock.runs
    where org_id = :org_id and org_id::text = :org_id::uuid::text and not delete_requested
      and run_id < coalesce(:cursor::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
    order by run_id desc limit :walked
)
select r.*, j.dag_name, j.name, (select count(*) from walked) = :walked as more,
       :state::text is null or r.state = :state::text::interlock.run_state as wanted
from walked r join interlock.jobs j on j.job_id = r.job_id
where :state::text is null or r.state = :state::text::interlock.run_state
   or r.run_id = (select run_id from walked order by run_id limit 1)
order by r.run_id desc;

-- name: runs_by_prefix
select run_id as id from interlock.runs
where org_id = :org_id and org_id::text = :org_id::uuid::text and run_id between :low and :high and not delete_requested
order by run_id desc limit :limit;

-- name: jobs_by_prefix
select job_id as id from interlock.jobs
where org_id = :org_id and job_id between :low and :high and deleted_at is null
order by job_id desc limit :limit;

-- name: tasks_by_prefix
-- Ids of shard 0 are shared by all orgs, so the range is read up to a limit and filtered afterwards. Runs with a shard
-- of their own are few.
select t.task_id as id, t.org_id = :org_id as own
from (select task_id, org_id from interlock.tasks
      where shard = 0 and task_id between :low and :high order by task_id limit :walked) t
union all
select t.task_id, true
from (select shard from interlock.runs where shard <> 0 and org_id = :org_id and not delete_requested) r
cross join lateral (select task_id from interlock.tasks t
                    where t.shard = r.shard and t.task_id between :low and :high order by task_id limit :limit) t;

-- name: runs_from
-- The runs of a job in the order in which pages of tasks walk them, newest first.
select run_id, shard, last_index, ended_at from interlock.runs
where org_id = :org_id and job_id = :job_id and not delete_requested
  and run_id <= coalesce(:cursor::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
order by run_id desc limit :limit;

-- name: jobs_from
select job_id, (:dag::text is null or dag_name = :dag) and (:operator::text is null or operator = :operator) as wanted
from interlock.jobs
where org_id = :org_id and deleted_at is null
  and job_id <= coalesce(:cursor::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
order by job_id desc limit :limit;

-- name: task_by_id^
select t.*, j.dag_name, j.name, j.partition, a.error_class, a.error_message,
       o.origins[t.task_index - o.first_index + 1] as origin_index
from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
left join lateral (select error_class, error_message from interlock.attempts a
                   where a.task_id = t.task_id and t.status in ('Failed', 'Canceled', 'Queued') and a.outcome <> 'Released'
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
left join lateral (select first_index, origins from interlock.run_origins o
                   where o.run_id = t.run_id and o.first_index <= t.task_index
                   order by o.first_index desc limit 1) o on true
where t.shard = :shard and t.task_id = :task_id and t.org_id = :org_id;

-- name: tasks_of_range
-- A range of a run, in any status.
select t.*, j.dag_name, j.name, j.partition, a.error_class, a.error_message,
       o.origins[t.task_index - o.first_index + 1] as origin_index
from (select * from interlock.tasks
      where shard = :shard and run_id = :run_id and task_index between :first::bigint and :last::bigint
        and org_id = :org_id and (:status::text is null or status = :status::text::interlock.task_status)
      order by task_index limit :limit) t
join interlock.jobs j on j.job_id = t.job_id
left join lateral (select error_class, error_message from interlock.attempts a
                   where a.task_id = t.task_id and t.status in ('Failed', 'Canceled', 'Queued') and a.outcome <> 'Released'
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
left join lateral (select first_index, origins from interlock.run_origins o
                   where o.run_id = t.run_id and o.first_index <= t.task_index
                   order by o.first_index desc limit 1) o on true
order by t.task_index;

-- name: tasks_of_run_by_status
-- Failed and canceled tasks have an index.
select t.*, j.dag_name, j.name, j.partition, a.error_class, a.error_message,
       o.origins[t.task_index - o.first_index + 1] as origin_index
from (select * from interlock.tasks
      where shard = :shard and run_id = :run_id and listed_status = :status::text::interlock.task_status
        and task_index > :after::bigint and org_id = :org_id
      order by task_index limit :limit) t
join interlock.jobs j on j.job_id = t.job_id
left join lateral (select error_class, error_message from interlock.attempts a
                   where a.task_id = t.task_id and t.status in ('Failed', 'Canceled', 'Queued') and a.outcome <> 'Released'
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
left join lateral (select first_index, origins from interlock.run_origins o
                   where o.run_id = t.run_id and o.first_index <= t.task_index
                   order by o.first_index desc limit 1) o on true
order by t.task_index;

-- name: tasks_of_job_by_status
-- Tasks without a run, newest first. Without a status, the caller walks the five statuses one after the other. Their results are in
-- their rows: of long ones, a list has only the length.
select t.task_id, t.job_id, t.run_id, t.task_index, t.status, t.listed_status, t.attempt, t.dead, t.cancel_requested,
       t.priority, t.payload, t.created_at, t.started_at, t.ended_at, t.retry_at, t.worker_id, t.lease_expires_at,
       t.progress, t.progress_text, t.pack, t.pack_offset,
       case when octet_length(t.result::text) <= :inline_bytes then t.result end as result,
       case when octet_length(t.result::text) > :inline_bytes then octet_length(t.result::text) end as pack_length,
       j.dag_name, j.name, j.partition, a.error_class, a.error_message, null::bigint as origin_index
from (select * from interlock.tasks
      where shard = 0 and run_id is null and job_id = :job_id and listed_status = :status::text::interlock.task_status
        and task_id < :after::uuid and org_id = :org_id
      order by task_id desc limit :limit) t
join interlock.jobs j on j.job_id = t.job_id
left join lateral (select error_class, error_message from interlock.attempts a
                   where a.task_id = t.task_id and t.status in ('Failed', 'Canceled', 'Queued') and a.outcome <> 'Released'
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
order by t.task_id desc;

-- name: attempts_of
-- Like the view attempt_history, for one task of a known shard.
with task as materialized (
    select * from interlock.tasks where shard = :shard and task_id = :task_id
)
select a.attempt, a.outcome, a.worker_id, a.started_at, a.ended_at, a.error_class, a.error_message, a.crash
from interlock.attempts a
where a.task_id = :task_id
  and not exists (select 1 from task t where t.status = 'Completed' and t.attempt = a.attempt and t.lease_token = a.lease_token)
union all
select attempt, case status when 'Completed' then 'Completed'::interlock.outcome end, worker_id, started_at, ended_at,
       null, null, null
from task
where status in ('Running', 'Completed') and started_at is not null
order by attempt, started_at;

-- name: explain_facts^
-- Everything an explanation needs, in one read.
select t.status, t.attempt, t.max_attempts, t.dead, t.parked, t.cancel_requested, t.late_reply, t.retry_at,
       t.lease_expires_at, t.timeout_at, t.started_at, t.ended_at, t.queued_at, t.worker_id, t.slot_key, t.progress,
       t.progress_text, t.job_id, j.runtime, j.queue, j.max_concurrency, j.max_concurrency_per_key,
       interlock.clock() as now,
       (select count(*) from interlock.slots s where s.job_id = t.job_id) as in_flight,
       (select count(*) from (select 1 from interlock.workers w
                              where w.queue = j.queue and w.last_seen_at > interlock.clock() - interval '60 seconds'
                              limit 1000) w) as workers,
       m.visible_at, m.dead_at is not null as message_dead, m.message_id is not null as has_message, m.receives,
       m.priority as lane, t.org_id, coalesce(t.run_id, t.job_id) as share_id, t.run_id is not null as of_run,
       a.outcome, a.error_class, a.error_message, a.crash, a.attempt as last_attempt,
       p.since as paused_since, p.reason as pause_reason, p.path as pause_path,
       t.run_id, t.task_index >= r.held_from as held, b.paused as backfill_paused,
       r.max_concurrency is not null or r.rate_key is not null as run_limited, r.paused as run_paused,
       j.dag_name, j.name, g.paused_at as dag_paused_at, g.paused_by as dag_paused_by, g.pause_reason as dag_pause_reason
from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
left join interlock.dags g on j.paused and g.org_id = t.org_id and g.name = j.dag_name
left join interlock.runs r on r.run_id = t.run_id
left join interlock.backfills b on b.run_id = t.run_id
left join lateral (
    select p.since, p.reason, array(select coalesce(s.name, s.job_id::text)
                                    from unnest(p.path) with ordinality as w(job_id, n)
                                    join interlock.jobs s on s.job_id = w.job_id order by w.n) as path
    from interlock.pauses p
    where p.job_id = t.job_id and p.cause_id <> p.job_id and (not p.bulk or coalesce(r.priority, j.priority) = 1)
    order by p.since limit 1
) p on true
left join lateral (
    select * from interlock.queue_messages m
    where m.queue = j.queue and m.dedupe_key in (t.task_id::text, t.run_id || ':' || (t.task_index / r.range_size))
    order by m.dead_at nulls first, m.visible_at limit 1
) m on true
left join lateral (select * from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
where t.shard = :shard and t.task_id = :task_id and t.org_id = :org_id;

-- name: busy_jobs
-- Jobs of the org with running tasks on a queue, by the counters of live runs and by their tasks without a run; up to a
-- limit of each.
select j.dag_name, j.name, j.job_id, sum(n.running)::bigint as running
from (select r.job_id, r.running
      from (select job_id, running, org_id from interlock.runs where running <> 0 limit :limit) r where r.org_id = :org_id
      union all
      select t.job_id, 1
      from (select job_id, org_id from interlock.tasks
            where shard = 0 and run_id is null and listed_status = 'Running' limit :limit) t where t.org_id = :org_id) n
join interlock.jobs j on j.job_id = n.job_id and j.queue = :queue
group by j.job_id order by running desc, j.job_id limit 5;

-- name: slot_holders
-- The tasks that hold the slots of a job, and those of one key if the limit is per key.
select s.task_id from interlock.slots s
where s.job_id = :job_id and (:slot_key::text is null or s.slot_key = :slot_key::text)
order by s.task_id limit :limit;

-- name: failed_of_run
-- Failed tasks that match a cancel or redrive filter.
select t.task_id from interlock.tasks t
left join lateral (select error_class from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on :error_class::text is not null
where t.shard = :shard and t.run_id = :run_id and t.org_id = :org_id and t.listed_status = 'Failed'
  and t.dead = :dead::boolean and (:error_class::text is null or a.error_class = :error_class::text)
limit :limit;

-- name: unended_of_run
-- Queued and running tasks in a range of a run.
select t.task_id from interlock.tasks t
where t.shard = :shard and t.run_id = :run_id and t.org_id = :org_id
  and t.task_index between :first::bigint and :last::bigint
  and t.status = any(:statuses::text[]::interlock.task_status[]) and not t.cancel_requested;

-- name: matching_job_tasks
-- Tasks without a run that match a filter.
select t.task_id from interlock.tasks t
left join lateral (select error_class from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on :error_class::text is not null
where t.shard = 0 and t.run_id is null and t.job_id = :job_id and t.org_id = :org_id
  and t.listed_status = any(:statuses::text[]::interlock.task_status[])
  and t.dead = :dead::boolean and not t.cancel_requested
  and (:error_class::text is null or a.error_class = :error_class::text)
limit :limit;

-- name: in_flight_by_operator
-- Running attempts per operator and runtime, from the counters of runs and from the running tasks without a run.
select j.operator, j.runtime, sum(n.running)::bigint as n
from (select job_id, running from interlock.runs where running <> 0
      union all
      select r.job_id, d.running from interlock.run_deltas d join interlock.runs r on r.run_id = d.run_id
      union all
      select job_id, count(*) from interlock.tasks
      where shard = 0 and run_id is null and listed_status = 'Running' group by job_id) n
join interlock.jobs j on j.job_id = n.job_id
group by j.operator, j.runtime having sum(n.running) > 0;
