-- What the dashboard shows first. Each statement reads a bounded number of rows by key; none counts what has ended.

-- name: add_minute_counts!
-- Only the process that folds the counters of runs writes them, so that no two wait for each other.
insert into interlock.minute_counts (org_id, minute, completed, failed, canceled)
select i.org_id, date_trunc('minute', interlock.clock()), i.completed, i.failed, i.canceled
from unnest(:org_ids::uuid[], :completed::bigint[], :failed::bigint[], :canceled::bigint[])
    as i(org_id, completed, failed, canceled)
on conflict (org_id, minute) do update
set completed = minute_counts.completed + excluded.completed, failed = minute_counts.failed + excluded.failed,
    canceled = minute_counts.canceled + excluded.canceled;

-- name: minute_counts
select minute, completed, failed, canceled from interlock.minute_counts
where org_id = :org_id and minute > interlock.clock() - make_interval(mins => :minutes::int)
order by minute limit :minutes::int + 1;

-- name: delete_old_minutes
delete from interlock.minute_counts where ctid = any(array(
    select ctid from interlock.minute_counts where minute at time zone 'UTC' < (interlock.clock() - interval '1 day') at time zone 'UTC' limit :limit
    for update skip locked))
returning minute;

-- name: recent_failed_attempts
-- The newest failed attempts of all orgs: the tasks decide whose they are.
select shard, task_id, attempt, outcome, worker_id, ended_at, error_class, error_message from interlock.attempts
where outcome in ('Failed', 'LeaseExpired', 'TimedOut') and ended_at > :since::timestamptz
order by ended_at desc limit :limit;

-- name: tasks_of_org
-- Those of the tasks that belong to the org.
select t.task_id, t.run_id, t.job_id, t.task_index, j.dag_name, j.name
from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id
where t.shard = :shard and t.task_id = any(:task_ids::uuid[]) and t.org_id = :org_id;

-- name: live_runs
-- The newest of all live runs; the org's are among them, or it has none that is recent.
select r.*, j.dag_name, j.name from (
    select * from interlock.runs where ended_at is null order by run_id desc limit :looked_at) r
join interlock.jobs j on j.job_id = r.job_id
where r.org_id = :org_id and not r.delete_requested
order by r.run_id desc limit :limit;

-- name: processes
-- The connections of each process to this database.
select application_name as name, count(*) as connections from pg_stat_get_activity(null) a
where a.application_name like 'interlock%'
  and a.datid = (select d.oid from pg_database d where d.datname = current_database())
group by application_name order by application_name limit 100;

-- name: sampled_tasks
-- Tasks at given indexes of a run, with their last attempt.
select t.task_id, t.task_index, t.status, t.attempt, t.worker_id, t.started_at, t.ended_at
from unnest(:indexes::bigint[]) as i(task_index)
cross join lateral (select * from interlock.tasks t
                    where t.shard = :shard and t.run_id = :run_id and t.task_index = i.task_index
                      and t.org_id = :org_id limit 1) t;

-- name: attempts_of_tasks
-- Earlier attempts of sampled tasks.
select a.task_id, a.attempt, a.outcome, a.worker_id, a.started_at, a.ended_at, a.error_class
from unnest(:task_ids::uuid[]) as i(task_id)
cross join lateral (select * from interlock.attempts a where a.task_id = i.task_id
                    order by a.attempt desc, a.ended_at desc limit 5) a;

-- name: failed_sample
-- Failed tasks of a run with their last error, from an index on.
select t.task_id, t.task_index, t.dead, a.error_class, a.error_message
from (select * from interlock.tasks
      where shard = :shard and run_id = :run_id and listed_status = 'Failed' and task_index >= :first::bigint
        and org_id = :org_id
      order by task_index limit :limit) t
left join lateral (select error_class, error_message from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
order by t.task_index;
