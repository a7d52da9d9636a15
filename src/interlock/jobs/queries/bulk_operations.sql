-- Actions on all that match a filter. Each statement reads one bounded stretch; every statement filters by org.

-- name: insert_operation^
insert into interlock.bulk_operations (org_id, kind, filter, job_id, priority, reason, requested_by, expected)
values (:org_id, :kind, :filter::text::json, :job_id, :priority, :reason, :requested_by, :expected)
returning *;

-- name: operation^
select * from interlock.bulk_operations where org_id = :org_id and operation_id = :operation_id;

-- name: operations
select * from interlock.bulk_operations
where org_id = :org_id and operation_id < coalesce(:cursor::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
order by operation_id desc limit :limit;

-- name: running_operations
select * from interlock.bulk_operations
where ended_at is null and org_id = :org_id and operation_id > '00000000-0000-0000-0000-000000000000'
order by operation_id limit :limit;

-- name: request_operation_cancel^
update interlock.bulk_operations set cancel_requested = true
where org_id = :org_id and operation_id = :operation_id and ended_at is null
returning *;

-- name: next_operation^
-- One that no other process works on, after the last one that this process worked on: each makes progress.
select * from interlock.bulk_operations
where ended_at is null and operation_id > :after
order by operation_id limit 1
for no key update skip locked;

-- name: advance_operation!
update interlock.bulk_operations
set place = :place::text::json, matched = matched + :matched, changed = changed + :changed, walked = :walked
where operation_id = :operation_id;

-- name: end_operation!
update interlock.bulk_operations set state = :state, ended_at = interlock.clock()
where operation_id = :operation_id;

-- name: jobs_to_walk
-- A page of jobs, of which the filter may drop some.
select job_id, (:dag::text is null or dag_name = :dag) and (:operator::text is null or operator = :operator) as wanted
from interlock.jobs
where org_id = :org_id and job_id > :after and deleted_at is null
order by job_id limit :limit;

-- name: runs_to_walk
select r.run_id, r.job_id, r.shard, r.last_index, r.ended_at is not null as ended, r.failed, r.paused, j.queue,
       (:created_after::timestamptz is null or r.created_at >= :created_after)
           and (:created_before::timestamptz is null or r.created_at < :created_before) as in_time
from interlock.runs r join interlock.jobs j on j.job_id = r.job_id
where r.org_id = :org_id and r.job_id = :job_id and not r.delete_requested and r.run_id > :after
order by r.run_id limit :limit;

-- name: run_to_walk^
select r.run_id, r.job_id, r.shard, r.last_index, r.ended_at is not null as ended, r.failed, r.paused, j.queue,
       true as in_time
from interlock.runs r join interlock.jobs j on j.job_id = r.job_id
where r.org_id = :org_id and r.run_id = :run_id and not r.delete_requested;

-- name: failed_in_run
-- Failed tasks by index. Tasks that failed after the operation was requested are left alone: it acts once on each.
select t.task_id, t.task_index, t.run_id, t.job_id, t.status, a.error_class,
       (not :dead::boolean or t.dead) and t.ended_at < :requested_at
           and (:error_class::text is null or a.error_class = :error_class)
           and (:worker::text is null or t.worker_id = :worker)
           and (:created_after::timestamptz is null or t.created_at >= :created_after)
           and (:created_before::timestamptz is null or t.created_at < :created_before) as matches
from (select * from interlock.tasks
      where shard = :shard and run_id = :run_id and listed_status = 'Failed' and task_index > :after::bigint
        and org_id = :org_id
      order by task_index limit :limit) t
left join lateral (select error_class from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
order by t.task_index;

-- name: live_in_run
-- Tasks of a stretch that have not ended. A failed one among them waits for its retry.
select t.task_id, t.task_index, t.run_id, t.job_id, t.status, a.error_class
from interlock.tasks t
left join lateral (select error_class from interlock.attempts a where a.task_id = t.task_id and t.status = 'Failed'
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
where t.shard = :shard and t.run_id = :run_id and t.org_id = :org_id
  and t.task_index between :first::bigint and :last::bigint
  and t.status = any(:statuses::text[]::interlock.task_status[]) and not t.dead and not t.cancel_requested
  and (:error_class::text is null or a.error_class = :error_class)
  and (:worker::text is null or t.worker_id = :worker)
  and (:created_after::timestamptz is null or t.created_at >= :created_after)
  and (:created_before::timestamptz is null or t.created_at < :created_before)
order by t.task_index;

-- name: without_run
-- Tasks of a job that belong to no run, in one status.
select t.task_id, t.task_index, t.run_id, t.job_id, t.status, a.error_class,
       (:dead::boolean is null or t.dead = :dead) and not t.cancel_requested
           and (t.status <> 'Failed' or t.ended_at < :requested_at)
           and (:error_class::text is null or a.error_class = :error_class)
           and (:worker::text is null or t.worker_id = :worker)
           and (:created_after::timestamptz is null or t.created_at >= :created_after)
           and (:created_before::timestamptz is null or t.created_at < :created_before) as matches
from (select * from interlock.tasks
      where shard = 0 and run_id is null and job_id = :job_id and listed_status = :status::text::interlock.task_status
        and task_id > :after and org_id = :org_id
      order by task_id limit :limit) t
left join lateral (select error_class from interlock.attempts a where a.task_id = t.task_id and t.status = 'Failed'
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
order by t.task_id;

-- name: pause_run
update interlock.runs set paused = true, wake_index = null, state = interlock.live_state(true, ingesting)
where run_id = :run_id and org_id = :org_id and ended_at is null and not paused and not delete_requested
returning run_id;

-- name: resume_run
-- RunWakes sends the messages that were received during the pause.
update interlock.runs r
set paused = false, wake_index = 0,
    state = interlock.live_state((select b.paused from interlock.backfills b where b.run_id = r.run_id) is true, ingesting)
where r.run_id = :run_id and r.org_id = :org_id and r.ended_at is null and r.paused
returning r.run_id;

-- name: set_run_priority
-- Applies to messages from now on; `move_messages` moves those that wait.
update interlock.runs set priority = :priority
where run_id = :run_id and org_id = :org_id and ended_at is null and not delete_requested
returning run_id;

-- name: move_messages
update interlock.queue_messages set priority = :priority
where message_id = any(array(
    select message_id from interlock.queue_messages
    where queue || '' = :queue and priority = 1 - :priority and org_id = :org_id and share_id = :run_id
      and dead_at is null and share_id is not null
    limit :limit for update skip locked))
returning message_id;
