-- Pausing, resuming and deleting DAGs. Every change holds `lock_deploys` and the row of the DAG; see dags.sql.

-- name: pause_dag^
-- The first pause counts, so that repeating one changes nothing.
update interlock.dags
set paused_at = coalesce(paused_at, interlock.clock()), paused_by = coalesce(paused_by, :by),
    pause_reason = case when paused_at is null then :reason else pause_reason end
where dag_id = :dag_id
returning *;

-- name: hold_jobs
-- Claims refuse tasks of these jobs, and no scope and no trigger becomes a task. The cause of the pause is the job
-- itself: backpressure never pauses a job on its own account, and leaves these rows alone. Rows are locked in the order
-- of `lock_capped_jobs`.
with found as materialized (
    select job_id from interlock.jobs
    where org_id = :org_id and dag_name = :dag_name and active and not paused
    order by job_id for no key update
), held as (
    update interlock.jobs set paused = true, wake_from = null where job_id = any(array(select job_id from found))
    returning job_id
)
insert into interlock.pauses (job_id, cause_id, bulk, path, reason)
select job_id, job_id, false, array[job_id], :reason from held order by job_id
on conflict (job_id, cause_id) do update set reason = excluded.reason
returning job_id;

-- name: resume_dag!
update interlock.dags set paused_at = null, paused_by = null, pause_reason = null where dag_id = :dag_id;

-- name: release_jobs
-- Makes the waiting work due: streams through the router, triggers through their loop, partitions through the scope
-- reconciler, tasks that exist already through JobWakes, and those of runs through RunWakes.
with found as materialized (
    select job_id, source from interlock.jobs
    where org_id = :org_id and dag_name = :dag_name and active and paused
    order by job_id for no key update
), released as (
    update interlock.jobs set paused = false, wake_from = '00000000-0000-0000-0000-000000000000'
    where job_id = any(array(select job_id from found))
), gone as (
    delete from interlock.pauses p using found f where p.job_id = f.job_id and p.cause_id = f.job_id
), woken as (
    update interlock.runs set wake_index = 0
    where job_id = any(array(select job_id from found)) and ended_at is null and not paused and not delete_requested
), owed as (
    insert into interlock.outbox (kind, target, body)
    select 'route', '', json_build_object('jobs', array_agg(job_id)) from found having count(*) > 0
    union all
    select 'trigger', '', json_build_object('jobs', array_agg(job_id)) from found where source is not null having count(*) > 0
    returning kind
)
select (select count(*) from found) as jobs,
       (select count(pg_notify('interlock_outbox', topic))
        from (select kind from owed union all select unnest('{scopes,sources,job-wakes}'::text[])) n(topic)) as told;

-- name: waking_jobs
-- Jobs of resumed DAGs whose queued tasks have no messages yet.
select job_id, org_id, wake_from from interlock.jobs
where wake_from is not null and not paused order by job_id limit :limit;

-- name: queued_after
-- Claims acked the messages of these tasks while the job was paused. Tasks of runs are left to RunWakes.
select task_id from interlock.tasks
where shard = 0 and run_id is null and listed_status = 'Queued' and job_id = :job_id and org_id = :org_id
  and task_id > :after::uuid and not parked
order by task_id limit :limit;

-- name: job_woken_to!
-- Only from the position where the walk started, so that a newer resume is not overwritten.
update interlock.jobs set wake_from = :walked_to where job_id = :job_id and wake_from = :walked_from;

-- name: delete_dag!
-- The row stays: it owns the published names, and a deploy under the same name restores it.
update interlock.dags
set deleted_at = interlock.clock(), deleted_by = :by, paused_at = null, paused_by = null, pause_reason = null
where dag_id = :dag_id;

-- name: restore_dag!
update interlock.dags set deleted_at = null, deleted_by = null where dag_id = :dag_id and deleted_at is not null;

-- name: hide_jobs!
update interlock.jobs set deleted_at = interlock.clock()
where job_id = any(:job_ids::uuid[]) and deleted_at is null;

-- name: purge_versions!
-- Gives up every version of the DAG. The retirement loop deletes the data of their jobs.
with purged as (
    update interlock.dag_versions set state = 'Purged'
    where dag_id = :dag_id and state in ('Current', 'Building', 'Retired')
    returning dag_version
), jobs as (
    update interlock.jobs set swapped_at = interlock.clock()
    where not active and job_id = any(array(
        select m.job_id from interlock.dag_version_jobs m where m.dag_version = any(array(select dag_version from purged))))
)
delete from interlock.hooks h using interlock.dags g
where g.dag_id = :dag_id and h.org_id = g.org_id and h.dag_name = g.name;
