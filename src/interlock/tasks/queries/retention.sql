-- Expired rows of DAGs, and expired capability tokens. For runs and their rows see runs.sql.

-- name: dag_jobs_after
-- A page of the jobs of DAGs.
select job_id from interlock.jobs
where job_id > :after::uuid and dag_name is not null
order by job_id limit :limit;

-- name: delete_ended_tasks
-- Ended tasks without a run. Ids are ordered by creation time, so the old ones come first. Tasks with unfinished
-- scopes, tasks that hold the position of a stream, and the single task of an always-on source stay.
with old as materialized (
    select t.task_id from unnest(:job_ids::uuid[]) as i(job_id)
    cross join lateral unnest('{Completed,Canceled,Failed}'::interlock.task_status[]) as s(status)
    cross join lateral (
        select t.task_id from interlock.tasks t
        where t.shard = 0 and t.run_id is null and t.listed_status = s.status and t.job_id = i.job_id
          and t.task_id < :made_before::uuid
          and t.ended_at < interlock.clock() - make_interval(secs => :age_seconds::float8)
          and (t.status <> 'Failed' or t.dead)
          and not exists (select 1 from interlock.job_cursors c where c.task_id = t.task_id)
          and not exists (select 1 from interlock.source_tasks s where s.job_id = i.job_id and s.task_id = t.task_id)
          and not exists (select 1 from interlock.materialisations m where m.task_id = t.task_id
                          and (m.done_commit is null or m.done_commit < m.input_commit))
        order by t.task_id limit :limit
    ) t
    limit :limit
)
delete from interlock.tasks where shard = 0 and task_id = any(array(select task_id from old))
returning task_id;

-- name: delete_old_events
-- Events of producers that still exist; other events are deleted with their tasks. The scan starts where the last pass
-- ended: see LowWater.
delete from interlock.dataset_events where event_id = any(array(
    select e.event_id
    from (select event_id, accepted_at from interlock.dataset_events where event_id > :since::bigint
          order by event_id limit :limit) e
    where e.accepted_at < interlock.clock() - make_interval(secs => :age_seconds::float8)))
returning event_id;

-- name: delete_expired_capabilities
-- Checks the expiry again when the row is deleted: a heartbeat may have renewed it since.
delete from interlock.capabilities
where expires_at <= interlock.clock() and capability_id = any(array(
    select capability_id from interlock.capabilities where expires_at <= interlock.clock() limit :limit))
returning capability_id;
