-- name: failures
-- Jobs of DAGs with tasks that are failed now, looking at the newest failed tasks of each job. An error is over once its
-- task is queued again, its scope has another task or is done, or a later start of a schedule has completed.
select j.job_id, j.dag_name, j.name, j.runtime, f.failing, f.dead, f.task_id, f.attempt, f.ended_at,
       a.error_class, a.error_message
from interlock.jobs j
cross join lateral (
    select count(*) as failing, count(*) filter (where t.dead) as dead, (array_agg(t.task_id))[1] as task_id,
           (array_agg(t.attempt))[1] as attempt, max(t.ended_at) as ended_at
    from (select t.task_id, t.attempt, t.dead, t.ended_at from interlock.tasks t
          where t.shard = 0 and t.run_id is null and t.listed_status = 'Failed' and t.job_id = j.job_id
          order by t.task_id desc limit :most) t
    where case when j.source is null
               then exists (select 1 from interlock.materialisations m where m.task_id = t.task_id
                            and (m.done_commit is null or m.done_commit < m.input_commit))
                    or exists (select 1 from interlock.job_cursors c where c.job_id = j.job_id and c.task_id = t.task_id)
               when j.source ->> 'kind' = 'cron'
               then not exists (select 1 from interlock.tasks l
                                where l.shard = 0 and l.run_id is null and l.listed_status = 'Completed'
                                  and l.job_id = j.job_id and l.task_id > t.task_id)
               else true end
) f
left join lateral (select error_class, error_message from interlock.attempts a
                   where a.task_id = f.task_id and a.outcome <> 'Released'
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
where j.org_id = :org_id and j.active and j.dag_name is not null and (:dag::text is null or j.dag_name = :dag::text)
  and f.failing > 0
order by j.dag_name, j.name limit :limit;
