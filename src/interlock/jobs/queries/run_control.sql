-- Control of runs: pause, resume, deadline, deletion of jobs.

-- name: stop_overdue
-- Runs past their deadline. A run that has ended by then has met it.
update interlock.runs
set cancel_requested = true, cancel_index = 0, paused = false, wake_index = null, deadline_at = null,
    state = interlock.live_state(false, ingesting),
    reason = format('%s of %s tasks had ended at the deadline', completed + dead + canceled, coalesce(total::text, 'its'))
where run_id = any(array(
    select run_id from interlock.runs
    where deadline_at <= interlock.clock() and ended_at is null and not delete_requested
    order by deadline_at limit :limit
    for no key update skip locked))
returning run_id;

-- name: pause_runs
-- Pauses the live runs of a job. From now on claims return none of their tasks; running tasks continue.
update interlock.runs set paused = true, wake_index = null, state = interlock.live_state(true, ingesting)
where job_id = :job_id and org_id = :org_id and ended_at is null and not paused and not delete_requested
returning run_id;

-- name: resume_runs
-- Messages received during the pause are gone: RunWakes sends the missing ones. A backfill that was paused separately
-- stays paused.
update interlock.runs r
set paused = false, wake_index = 0,
    state = interlock.live_state((select b.paused from interlock.backfills b where b.run_id = r.run_id) is true, ingesting)
where r.job_id = :job_id and r.org_id = :org_id and r.ended_at is null and r.paused
returning r.run_id;

-- name: live_runs_of
select run_id from interlock.runs
where job_id = :job_id and org_id = :org_id and ended_at is null and not delete_requested
order by run_id limit :limit;

-- name: delete_job^
-- The job is hidden and its name is free. Its data is deleted run by run. Jobs of DAGs are deleted with their DAG.
with job as (
    update interlock.jobs set deleted_at = interlock.clock(), name = null
    where job_id = :job_id and org_id = :org_id and dag_name is null and deleted_at is null
    returning job_id
), runs as (
    update interlock.runs set delete_requested = true
    where job_id = any(array(select job_id from job)) and not delete_requested
    returning run_id
), freed as (
    delete from interlock.slots where job_id = any(array(select job_id from job))
)
select job_id, (select count(*) from runs) as runs from job;

-- name: waking_runs
-- A claim of a range acks its message even if the run was paused, so messages are missing. Held-back tasks never had
-- one.
select r.run_id, r.shard, r.wake_index, least(r.last_index, r.held_from - 1) as last_index, j.queue
from interlock.runs r
join interlock.jobs j on j.job_id = r.job_id
where r.wake_index is not null and not r.paused and not r.delete_requested
  and coalesce(r.ended_at, '-infinity') = '-infinity'  -- this form keeps the planner from walking all live runs
order by r.run_id limit :limit;

-- name: wake_ranges
-- One message for each range with a queued task, replacing any existing one: a worker that holds that one finds less to
-- claim.
with run as materialized (
    select r.run_id, r.org_id, r.job_id, r.range_size, r.last_index, j.queue,
           coalesce(r.priority, case when r.shard = 0 then j.priority else 1 end) as priority
    from interlock.runs r join interlock.jobs j on j.job_id = r.job_id where r.run_id = :run_id
), messages as materialized (
    select r.queue, r.priority, r.org_id, r.run_id, r.run_id || ':' || c.chunk as dedupe_key,
           json_build_object('job_id', r.job_id, 'run_id', r.run_id, 'start', c.chunk * r.range_size,
                             'end', least((c.chunk + 1) * r.range_size - 1, r.last_index)) as body
    from run r
    cross join lateral generate_series(:first::bigint / r.range_size, :last::bigint / r.range_size) as c(chunk)
    where (select true from interlock.tasks t
           where t.shard = :shard and t.run_id = :run_id and t.status = 'Queued' and not t.parked
             and t.task_index between c.chunk * r.range_size and (c.chunk + 1) * r.range_size - 1 limit 1)
), direct as (
    insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key)
    select queue, priority, org_id, run_id, body, dedupe_key from messages where :direct::boolean
    order by dedupe_key collate "C"  -- lock order of `send`
    on conflict (queue, dedupe_key) where dedupe_key is not null do update
        set body = excluded.body, visible_at = excluded.visible_at, receipt = null, receives = 0, dead_at = null
), owed as (
    insert into interlock.outbox (kind, target, body, priority, org_id, share_id, dedupe_key)
    select 'send', queue, body, priority, org_id, run_id, dedupe_key from messages where not :direct::boolean
)
select pg_notify(case when :direct::boolean then 'interlock_queue' else 'interlock_outbox' end, m.queue),
       (select count(*) from messages) as messages
from (select distinct queue from messages) m;

-- name: queued_of_range
select task_id from interlock.tasks
where shard = :shard and run_id = :run_id and task_index between :first::bigint and :last::bigint
  and status = 'Queued' and not parked;

-- name: woken_to!
-- Only from the position where the walk started, so that a newer resume is not overwritten.
update interlock.runs
set wake_index = case when :walked_to::bigint <= least(last_index, held_from - 1) then :walked_to::bigint end
where run_id = :run_id and wake_index = :walked_from;
