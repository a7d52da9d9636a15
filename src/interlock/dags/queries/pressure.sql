-- Backpressure: queues past their limits, and the upstream jobs that are paused for them.

-- name: measure
-- One page of the jobs with limits, without those of paused DAGs, which hold up nobody. Waiting tasks are counted up to
-- just past the limit, and not at all for the many jobs without any: a look at the ends of three indexes is far cheaper
-- than the function. Task ids grow with time, and
-- a task that was queued again has a later `queued_at`, so the oldest is searched among the first hundred.
select j.job_id, j.dag_name, j.name, j.max_queue_depth, j.max_queue_age, interlock.clock() as now,
       case when j.max_queue_depth is null then 0
            when (select true from interlock.tasks t
                  where t.shard = 0 and t.run_id is null and t.listed_status = 'Queued' and t.job_id = j.job_id
                  limit 1) is null
             and (select true from interlock.tasks t
                  where t.shard = 0 and t.run_id is null and t.retry_at is not null and t.job_id = j.job_id
                  limit 1) is null
             and (select true from interlock.runs r where r.job_id = j.job_id and r.ended_at is null limit 1) is null
            then 0
            else interlock.waiting_tasks(j.job_id, j.max_queue_depth + 1::bigint) end as depth,
       coalesce(w.age, 0) as age
from (select * from interlock.jobs
      where active and not paused and (max_queue_depth is not null or max_queue_age is not null) and job_id > :after::uuid
      order by job_id limit :limit) j
left join lateral (
    select extract(epoch from interlock.clock() - min(t.queued_at))::float8 as age
    from (select queued_at from interlock.tasks
          where shard = 0 and run_id is null and listed_status = 'Queued' and job_id = j.job_id
          order by task_id limit 100) t
) w on j.max_queue_age is not null
order by j.job_id;

-- name: count_waiting$
-- For the reason that is shown.
select interlock.waiting_tasks(:job_id::uuid, :limit::bigint);

-- name: all_pauses
-- Without those of paused DAGs, whose cause is the job itself.
select job_id, cause_id, bulk, path, reason, since from interlock.pauses where cause_id <> job_id order by cause_id, job_id;

-- name: upstream
-- Every edge upstream of these jobs, across DAGs: a reader, the job that writes its input, and whether that job has
-- bulk work to shed. `union` terminates cycles of DAGs that read from each other. Subqueries with a limit or an offset
-- are not flattened; as joins they would be planned for the size of the tables at that time.
with recursive reached(job_id) as (
    select unnest(:job_ids::uuid[])
    union
    select v.job_id
    from reached r
    join interlock.edges g on g.job_id = r.job_id and g.active
    join interlock.dataset_versions v on v.dataset_version = g.dataset_version
    where v.job_id is not null
)
select distinct g.job_id as reader, j.job_id as writer, j.dag_name, j.name,
       j.priority = 1 or (select true from interlock.runs r
                          join interlock.backfills b on b.run_id = r.run_id and not b.paused
                          where r.job_id = j.job_id and r.held_from is not null and r.ended_at is null and r.priority = 1
                            and not r.cancel_requested
                          limit 1) is not null as sheds
from reached r
cross join lateral (select * from interlock.edges g where g.job_id = r.job_id and g.active offset 0) g
cross join lateral (select v.job_id from interlock.dataset_versions v
                    where v.dataset_version = g.dataset_version limit 1) v
cross join lateral (select * from interlock.jobs j
                    where j.job_id = v.job_id and j.org_id = g.org_id and j.active limit 1) j
order by reader, writer;

-- name: lock_pauses
-- Excludes passes that remember their position; see keep_pauses in routing.sql.
select pg_advisory_xact_lock(hashtextextended('interlock:pauses', 0));

-- name: hold!
-- An existing pause keeps its start time.
insert into interlock.pauses (job_id, cause_id, bulk, path, reason)
select p.job_id, p.cause_id, p.bulk, string_to_array(p.path, ',')::uuid[], p.reason
from unnest(:job_ids::uuid[], :cause_ids::uuid[], :bulks::boolean[], :paths::text[], :reasons::text[])
    as p(job_id, cause_id, bulk, path, reason)
on conflict (job_id, cause_id) do update
    set bulk = excluded.bulk, path = excluded.path, reason = excluded.reason;

-- name: release
-- Makes waiting work of these jobs due: streams through the router, triggers through their loop, partitions through the
-- reconciler.
with released as (
    delete from interlock.pauses p
    using unnest(:job_ids::uuid[], :cause_ids::uuid[]) as r(job_id, cause_id)
    where p.job_id = r.job_id and p.cause_id = r.cause_id
    returning p.job_id
), owed as (
    insert into interlock.outbox (kind, target, body)
    select 'route', '', json_build_object('jobs', array_agg(distinct job_id)) from released having count(*) > 0
    union all
    select 'trigger', '', json_build_object('jobs', array_agg(distinct r.job_id))
    from released r join interlock.jobs j on j.job_id = r.job_id and j.source is not null having count(*) > 0
    returning kind
)
select (select count(*) from released) as released,
       (select count(pg_notify('interlock_outbox', kind)) from owed) as told;

-- name: list_pauses
-- Pauses of one org. The table has one row per paused job and cause, so it is small even when much is held back.
select p.job_id, p.cause_id, p.bulk, p.reason, p.since, j.dag_name, j.name, c.dag_name as cause_dag, c.name as cause_name,
       (select array_agg(coalesce(coalesce(s.dag_name || '/', '') || s.name, s.job_id::text) order by step.n desc)
        from unnest(p.path) with ordinality as step(job_id, n)
        join interlock.jobs s on s.job_id = step.job_id) as path
from (select * from interlock.pauses p where (p.job_id, p.cause_id) > (:after_job::uuid, :after_cause::uuid) offset 0) p
cross join lateral (select * from interlock.jobs j where j.job_id = p.job_id and j.org_id = :org_id limit 1) j
cross join lateral (select * from interlock.jobs c where c.job_id = p.cause_id limit 1) c
order by p.job_id, p.cause_id
limit :limit;

-- name: pause_levels
select count(*) filter (where bulk) as bulk, count(*) filter (where not bulk) as "all"
from (select job_id, bool_and(bulk) as bulk from interlock.pauses group by job_id) p;
