-- Runs: counters, ends, cancellation, retention.

-- name: only_one$
-- Held to the end of the transaction: this pass runs in one dispatcher at a time.
select pg_try_advisory_xact_lock(hashtextextended('interlock:' || :name, 0));

-- name: fold_deltas
-- Adds up what tasks did. `skip locked` leaves writers alone. A run that had ended is open again: a retry may have
-- crossed its end; end_runs decides anew.
with taken as (
    delete from interlock.run_deltas
    where ctid = any(array(select ctid from interlock.run_deltas limit :most for update skip locked))
    returning *
), sums as (
    select run_id, sum(queued) as queued, sum(running) as running, sum(completed) as completed, sum(failed) as failed,
           sum(dead) as dead, sum(canceled) as canceled
    from taken group by run_id
)
update interlock.runs r
set queued = r.queued + s.queued, running = r.running + s.running, completed = r.completed + s.completed,
    failed = r.failed + s.failed, dead = r.dead + s.dead, canceled = r.canceled + s.canceled,
    state = case when r.ended_at is null then r.state else 'Running' end, ended_at = null
from sums s where r.run_id = s.run_id
returning r.run_id, r.latched and r.queued = 0 and r.running = 0 and r.failed = r.dead as over;

-- name: end_runs
-- A run ends by what became of its tasks; only one that was asked to cancel is Canceled.
update interlock.runs r
set ended_at = interlock.clock(),
    state = (case when r.cancel_requested and r.canceled > 0 then 'Canceled'
                  when r.failed = 0 and r.canceled = 0 then 'Completed'
                  when r.completed = 0 and r.canceled = 0 then 'Failed'
                  when r.completed = 0 and r.failed = 0 then 'Canceled'
                  else 'CompletedWithFailures' end)::interlock.run_state
where r.run_id = any(:run_ids::uuid[]) and r.ended_at is null
  and r.latched and r.queued = 0 and r.running = 0 and r.failed = r.dead
returning r.run_id, r.state;

-- name: request_run_cancel^
update interlock.runs set cancel_requested = true
where run_id = :run_id and org_id = :org_id and ended_at is null
returning run_id;

-- name: canceling_runs
select run_id, org_id from interlock.runs
where cancel_requested and ended_at is null order by run_id limit :most;

-- name: cancelable_of_run
-- Not yet asked: waiting ones by the run's status index, running ones by their lease. Ended tasks are never read.
(select task_id from interlock.tasks
 where shard = 0 and run_id = :run_id and status in ('Queued', 'Failed') and not dead
 limit :most)
union all
(select task_id from interlock.tasks
 where shard = 0 and lease_expires_at is not null and run_id = :run_id and not cancel_requested
 limit :most);

-- name: expired_run^
select run_id, job_id, swept_index, last_index from interlock.runs
where ended_at < interlock.clock() - make_interval(secs => :age_seconds::float8)
order by ended_at limit 1
for no key update skip locked;

-- name: delete_run_tasks
-- By index range: the ids follow from it.
delete from interlock.tasks where shard = 0 and task_id = any(
    array(select interlock.run_task_id(:run_id, i) from generate_series(:first::bigint, :last::bigint) i))
returning task_id;

-- name: set_swept!
update interlock.runs set swept_index = :swept where run_id = :run_id;

-- name: delete_task_traces!
with ids as (select unnest(:task_ids::uuid[]) as task_id),
a as (delete from interlock.attempts x using ids where x.task_id = ids.task_id),
o as (delete from interlock.output_commits x using ids where x.task_id = ids.task_id),
e as (delete from interlock.dataset_events x using ids where x.task_id = ids.task_id)
delete from interlock.buffer_publishes x using ids where x.task_id = ids.task_id;

-- name: delete_run!
delete from interlock.runs where run_id = :run_id;

-- name: delete_nameless_job!
-- A job that was submitted without a name goes with its last run.
delete from interlock.jobs j
where j.job_id = :job_id and j.name is null and not exists (select 1 from interlock.runs r where r.job_id = j.job_id);

-- name: delete_expired_requests
delete from interlock.idempotency_keys where (org_id, endpoint, key) in (
    select org_id, endpoint, key from interlock.idempotency_keys
    where expires_at <= interlock.clock() limit :most)
returning key;

-- name: delete_stale_workers!
delete from interlock.workers where last_seen_at < interlock.clock() - interval '1 day';

-- name: sweep_cursor$
select cursor from interlock.sweeps where name = :name;

-- name: set_sweep_cursor!
insert into interlock.sweeps (name, cursor) values (:name, :cursor)
on conflict (name) do update set cursor = excluded.cursor;

-- name: live_runs_after
select run_id from interlock.runs
where ended_at is null and run_id > coalesce(:cursor::uuid, '00000000-0000-0000-0000-000000000000')
order by run_id limit :most;

-- name: lost_run_tasks
-- Queued, old enough, not parked, and neither its own message nor its range's still stands for it.
select t.task_id from interlock.runs r
join interlock.jobs j on j.job_id = r.job_id
join interlock.tasks t on t.shard = 0 and t.run_id = r.run_id and t.status = 'Queued' and not t.parked
     and t.queued_at < interlock.clock() - make_interval(secs => :grace::float8)
where r.run_id = any(:run_ids::uuid[])
  and not exists (select 1 from interlock.queue_messages m
                  where m.queue = j.queue and m.dedupe_key = t.task_id::text)
  and not exists (select 1 from interlock.queue_messages m
                  where m.queue = j.queue and m.dedupe_key = t.run_id || ':' || (t.task_index / r.range_size)
                    and (m.body ->> 'start')::bigint <= t.task_index)
  and not exists (select 1 from interlock.outbox o
                  where o.dedupe_key in (t.task_id::text, t.run_id || ':' || (t.task_index / r.range_size)))
limit :most;

-- name: jobs_after
select job_id from interlock.jobs
where job_id > coalesce(:cursor::uuid, '00000000-0000-0000-0000-000000000000')
order by job_id limit :most;

-- name: lost_job_tasks
select t.task_id from interlock.jobs j
join interlock.tasks t on t.shard = 0 and t.job_id = j.job_id and t.run_id is null and t.status = 'Queued'
     and not t.parked and t.queued_at < interlock.clock() - make_interval(secs => :grace::float8)
where j.job_id = any(:job_ids::uuid[])
  and not exists (select 1 from interlock.queue_messages m where m.queue = j.queue and m.dedupe_key = t.task_id::text)
  and not exists (select 1 from interlock.outbox o where o.dedupe_key = t.task_id::text)
limit :most;

-- name: stranded_jobs
-- Jobs with parked tasks: a cap may have been raised or taken away, or a wake-up lost between two commits.
select j.job_id from interlock.jobs j
where j.job_id = any(:job_ids::uuid[])
  and exists (select 1 from interlock.tasks t where t.job_id = j.job_id and t.parked);

-- name: parked_keys
select distinct slot_key from interlock.tasks
where job_id = any(:job_ids::uuid[]) and parked and slot_key is not null
limit :most;
