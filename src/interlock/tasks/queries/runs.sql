-- Runs: counters, ends, cancellation, retention.

-- name: fold_deltas
-- Folds deltas into counters. `skip locked` does not wait for writers. A run that had ended is reopened, because a
-- retry may have crossed its end; end_runs decides again. A late report may change only the error class of a dead task:
-- then the run stays ended. The scan starts where the last one ended: see LowWater.
with taken as (
    delete from interlock.run_deltas
    where ctid = any(array(select ctid from interlock.run_deltas where ctid > :since::tid limit :limit
                           for update skip locked))
    returning ctid as place, *
), sums as (
    select run_id, sum(queued) as queued, sum(running) as running, sum(completed) as completed, sum(failed) as failed,
           sum(dead) as dead, sum(canceled) as canceled, sum(greatest(completed, 0))::bigint as newly_completed,
           sum(greatest(failed, 0))::bigint as newly_failed, sum(greatest(canceled, 0))::bigint as newly_canceled,
           bool_or((queued, running, completed, failed, dead, canceled) <> (0, 0, 0, 0, 0, 0)) as moved
    from taken group by run_id
), classes as (
    select run_id, jsonb_object_agg(error_class, errors) as errors
    from (select run_id, error_class, sum(errors) as errors from taken
          where error_class is not null group by run_id, error_class) c
    group by run_id
)
update interlock.runs r
set errors = coalesce((select interlock.add_errors(r.errors, c.errors) from classes c where c.run_id = r.run_id), r.errors),
    queued = r.queued + s.queued, running = r.running + s.running, completed = r.completed + s.completed,
    failed = r.failed + s.failed, dead = r.dead + s.dead, canceled = r.canceled + s.canceled,
    state = case when r.ended_at is null or not s.moved then r.state else interlock.live_state(r.paused, r.ingesting) end,
    ended_at = case when not s.moved then r.ended_at end
from sums s where r.run_id = any(array(select run_id from sums)) and r.run_id = s.run_id
returning r.run_id, r.org_id, s.newly_completed, s.newly_failed, s.newly_canceled,
          r.latched and r.queued = 0 and r.running = 0 and r.failed = r.dead as over,
          r.completed + r.dead + r.canceled as done, r.reason is null and r.dead > r.tolerated_share * r.total as intolerable,
          (select true from interlock.webhooks w where w.org_id = r.org_id limit 1) is not null as watched,
          (select max(place) from taken) as reached;

-- name: end_runs
-- The outcomes of its tasks decide the state of a run. It is Canceled only if a cancel was requested.
update interlock.runs r
set ended_at = interlock.clock(),
    state = (case when r.reason is not null then 'Failed'
                  when r.cancel_requested and r.canceled > 0 then 'Canceled'
                  when r.failed = 0 and r.canceled = 0 then 'Completed'
                  when r.completed = 0 and r.canceled = 0 then 'Failed'
                  when r.completed = 0 and r.failed = 0 then 'Canceled'
                  else 'CompletedWithFailures' end)::interlock.run_state
where r.run_id = any(:run_ids::uuid[]) and r.ended_at is null
  and r.latched and r.queued = 0 and r.running = 0 and r.failed = r.dead
returning r.run_id, r.state;

-- name: stop_intolerable!
-- More tasks are dead than the run tolerates: the others are canceled, and the run ends as failed.
update interlock.runs
set cancel_requested = true, cancel_index = 0, paused = false, wake_index = null,
    state = interlock.live_state(false, ingesting),
    reason = format('%s of %s tasks have failed for good; the run tolerates a share of %s', dead, total, tolerated_share)
where run_id = any(:run_ids::uuid[]) and ended_at is null and reason is null;

-- name: request_run_cancel^
-- Also resumes a paused run, so that it can end.
update interlock.runs
set cancel_requested = true, cancel_index = 0, paused = false, wake_index = null,
    state = interlock.live_state(false, ingesting)
where run_id = :run_id and org_id = :org_id and ended_at is null
returning run_id, org_id, shard, cancel_index, last_index;

-- name: lock_runs_of
-- Ended runs, locked before their tasks change: retention also locks the run first and then its tasks.
select run_id, delete_requested from interlock.runs
where run_id = any(array(select t.run_id from interlock.tasks t
                         where t.shard = :shard and t.task_id = any(:task_ids::uuid[]) and t.org_id = :org_id))
  and (ended_at is not null or delete_requested)
order by run_id
for no key update;

-- name: canceling_runs
select run_id, org_id, shard, cancel_index, last_index from interlock.runs
where cancel_requested and ended_at is null and cancel_index <= last_index order by run_id limit :limit;

-- name: cancelable_of_run
select task_id from interlock.tasks
where shard = :shard and run_id = :run_id and task_index between :first::bigint and :last::bigint
  and (status in ('Queued', 'Running') or (status = 'Failed' and not dead)) and not cancel_requested;

-- name: cancel_walked!
-- Only from the position where the walk started, so that a second walker or a newer cancel is not overwritten.
update interlock.runs set cancel_index = :walked_to where run_id = :run_id and cancel_index = :walked_from;

-- name: expired_run^
-- The scan starts where the last one ended: see LowWater.
select run_id, job_id, shard, swept_index, last_index, ended_at from interlock.runs
where not delete_requested and retention_days is null
  and ended_at > :since::timestamptz and ended_at < interlock.clock() - make_interval(secs => :age_seconds::float8)
order by ended_at limit 1
for no key update skip locked;

-- name: expired_kept_run^
-- Like expired_run, for runs with their own retention.
select run_id, job_id, shard, swept_index, last_index, interlock.kept_until(ended_at, retention_days) as kept_until
from interlock.runs
where not delete_requested and ended_at is not null and retention_days is not null
  and interlock.kept_until(ended_at, retention_days) > :since::timestamptz
  and interlock.kept_until(ended_at, retention_days) < interlock.clock()
order by interlock.kept_until(ended_at, retention_days) limit 1
for no key update skip locked;

-- name: request_deletion!
-- From now on none of its tasks can be revived; RunDeletions does the rest.
update interlock.runs set delete_requested = true where run_id = :run_id;

-- name: deleting_runs
select r.run_id, r.job_id, r.org_id, r.shard, r.swept_index, r.last_index, j.outputs <> '[]' as with_outputs
from interlock.runs r
join interlock.jobs j on j.job_id = r.job_id
where r.delete_requested order by r.run_id limit :limit;

-- name: take_turn$
-- Held over several transactions, until end_turn or the end of the connection.
select pg_try_advisory_lock(hashtextextended('interlock:' || :name, 0));

-- name: end_turn$
select pg_advisory_unlock(hashtextextended('interlock:' || :name, 0));

-- name: delete_shard_attempts
delete from interlock.attempts where ctid = any(array(
    select ctid from interlock.attempts where shard <> 0 and shard = :number limit :limit))
returning attempt;

-- name: ids_of_range
-- Computed from the run, because the tasks may already be gone.
select interlock.run_task_id(:run_id, i) as task_id from generate_series(:first::bigint, :last::bigint) as i;

-- name: delete_run_tasks
delete from interlock.tasks
where shard = 0 and run_id = :run_id and task_index between :first::bigint and :last::bigint
returning task_id;

-- name: set_swept!
update interlock.runs set swept_index = :swept where run_id = :run_id;

-- name: delete_task_traces!
with a as (delete from interlock.attempts where task_id = any(:task_ids::uuid[])),
o as (delete from interlock.output_commits where task_id = any(:task_ids::uuid[])),
e as (delete from interlock.dataset_events where task_id = any(:task_ids::uuid[])),
l as (delete from interlock.task_logs where task_id = any(:task_ids::uuid[]))
delete from interlock.buffer_publishes where task_id = any(:task_ids::uuid[]);

-- name: delete_run!
delete from interlock.runs where run_id = :run_id;

-- name: delete_nameless_job!
-- A job that was submitted without a name is deleted with its last run. The job of a batch query also has edges.
with gone as (
    select j.job_id from interlock.jobs j
    where j.job_id = :job_id and j.name is null and not exists (select 1 from interlock.runs r where r.job_id = j.job_id)
), edges as (
    delete from interlock.edges where job_id = any(array(select job_id from gone))
)
delete from interlock.jobs where job_id = any(array(select job_id from gone));

-- name: delete_expired_requests
delete from interlock.idempotency_keys where ctid = any(array(
    select ctid from interlock.idempotency_keys where expires_at <= interlock.clock() limit :limit
    for update skip locked))
returning key;

-- name: delete_stale_workers!
delete from interlock.workers where last_seen_at < interlock.clock() - interval '1 day';

-- name: sweep_place^
select cursor, position, task_id from interlock.sweeps where name = :name;

-- name: set_sweep_place!
insert into interlock.sweeps (name, cursor, position, task_id) values (:name, :cursor, :position, :task_id)
on conflict (name) do update
set cursor = excluded.cursor, position = excluded.position, task_id = excluded.task_id;

-- name: live_runs_from
-- Up to the last task that has had a message.
select run_id, shard, least(last_index, held_from - 1) as last_index from interlock.runs
where ended_at is null and not paused and not delete_requested and run_id >= coalesce(:cursor::uuid, '00000000-0000-0000-0000-000000000000')
order by run_id limit :limit;

-- name: lost_run_tasks
-- Queued long enough, not parked, and without a live message of its own or of its range; a dead letter wakes no worker.
-- Tasks of a range with a message are not read, unless a part of the range was claimed already. Subqueries with a limit
-- or an offset are not flattened; as joins they would be planned for the size of the tables at that time.
with ranges as materialized (
    select s.run_id, j.queue, k.key, m.start, greatest(s.first, c.chunk * r.range_size) as first,
           least(s.last, (c.chunk + 1) * r.range_size - 1) as last
    from unnest(:run_ids::uuid[], :firsts::bigint[], :lasts::bigint[]) as s(run_id, first, last)
    cross join lateral (select * from interlock.runs r where r.run_id = s.run_id limit 1) r
    cross join lateral (select * from interlock.jobs j where j.job_id = r.job_id and not j.paused limit 1) j
    cross join lateral generate_series(s.first / r.range_size, s.last / r.range_size) as c(chunk)
    cross join lateral (select s.run_id || ':' || c.chunk as key) k
    left join lateral (select (m.body ->> 'start')::bigint as start from interlock.queue_messages m
                       where m.queue = j.queue and m.dedupe_key = k.key and m.dead_at is null limit 1) m on true
)
select t.task_id, r.run_id from ranges r
cross join lateral (
    select t.task_id from interlock.tasks t
    where t.shard = :shard and t.run_id = r.run_id and t.task_index between r.first and least(r.last, r.start - 1)
      and t.status = 'Queued' and not t.parked
      and t.queued_at < interlock.clock() - make_interval(secs => :grace::float8)
    offset 0
) t
where (r.start is null or r.start > r.first)
  and (select true from interlock.queue_messages m
       where m.queue = r.queue and m.dedupe_key = t.task_id::text and m.dead_at is null limit 1) is null
  and (select true from interlock.outbox o where o.dedupe_key = t.task_id::text limit 1) is null
  and (select true from interlock.outbox o where o.dedupe_key = r.key limit 1) is null;

-- name: jobs_after
select job_id from interlock.jobs
where job_id > coalesce(:cursor::uuid, '00000000-0000-0000-0000-000000000000')
order by job_id limit :limit;

-- name: lost_job_tasks
-- Tasks without a run, from a position on. `lost` marks those without a message; a dead letter does not count.
select t.job_id, t.task_id, t.queued_at < interlock.clock() - make_interval(secs => :grace::float8) and not t.parked and not j.paused
       and (select true from interlock.queue_messages m
            where m.queue = j.queue and m.dedupe_key = t.task_id::text and m.dead_at is null limit 1) is null
       and (select true from interlock.outbox o where o.dedupe_key = t.task_id::text limit 1) is null as lost
from (select job_id, task_id, parked, queued_at from interlock.tasks
      where shard = 0 and run_id is null and listed_status = 'Queued'
        and (job_id, task_id) > (:from_job::uuid, :after::uuid)
      order by job_id, task_id limit :limit) t
cross join lateral (select j.queue, j.paused from interlock.jobs j where j.job_id = t.job_id limit 1) j
order by t.job_id, t.task_id;

-- name: stranded_jobs
-- Jobs with parked tasks: a cap may have been raised or removed, or a wake-up was lost between two commits.
select id as job_id from unnest(:job_ids::uuid[]) as id
where (select true from interlock.tasks t where t.shard = :shard and t.job_id = id and t.parked limit 1) is not null;

-- name: capped_jobs_of
-- Jobs and keys whose slots these tasks could have taken, had they not ended.
select distinct t.job_id, t.slot_key
from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
where t.shard = :shard and t.task_id = any(:task_ids::uuid[])
  and (j.max_concurrency is not null or j.max_concurrency_per_key is not null);

-- name: parked_keys
-- A loose index scan from key to key, which reads each key once, however many tasks wait for it.
with recursive keys as (
    select id as job_id, (select t.slot_key from interlock.tasks t
                          where t.shard = :shard and t.job_id = id and t.parked and t.slot_key is not null
                          order by t.slot_key limit 1) as slot_key
    from unnest(:job_ids::uuid[]) as id
    union all
    select k.job_id, (select t.slot_key from interlock.tasks t
                      where t.shard = :shard and t.job_id = k.job_id and t.parked and t.slot_key > k.slot_key
                      order by t.slot_key limit 1)
    from keys k where k.slot_key is not null
)
select distinct slot_key from keys where slot_key is not null
limit :limit;
