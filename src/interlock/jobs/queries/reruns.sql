-- Runs created from tasks of other runs, all of them or filtered. Every user statement filters by org.

-- name: payloads_in_stretch
-- By index. A failed task that will be retried is left to its own run. If the run is a rerun itself, the origin of a task
-- is that of the run that it repeats.
select t.payload, coalesce(o.origins[t.task_index - o.first_index + 1], t.task_index) as origin from interlock.tasks t
left join lateral (select error_class from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on :error_class::text is not null
left join lateral (select first_index, origins from interlock.run_origins o
                   where o.run_id = t.run_id and o.first_index <= t.task_index
                   order by o.first_index desc limit 1) o on :of_rerun::boolean
where t.shard = :shard and t.run_id = :run_id and t.org_id = :org_id
  and t.task_index between :first::bigint and :last::bigint
  and (:statuses::text[] is null or (t.status = any(:statuses::text[]::interlock.task_status[])
                                     and (t.status <> 'Failed' or t.dead)))
  and (:error_class::text is null or a.error_class = :error_class::text)
order by t.task_index
limit :limit;

-- name: payloads_by_status
-- Failed and canceled tasks have an index.
select t.payload, coalesce(o.origins[t.task_index - o.first_index + 1], t.task_index) as origin from interlock.tasks t
left join lateral (select error_class from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on :error_class::text is not null
left join lateral (select first_index, origins from interlock.run_origins o
                   where o.run_id = t.run_id and o.first_index <= t.task_index
                   order by o.first_index desc limit 1) o on :of_rerun::boolean
where t.shard = :shard and t.run_id = :run_id and t.org_id = :org_id
  and t.listed_status = any(:statuses::text[]::interlock.task_status[])
  and t.task_index between :first::bigint and :last::bigint and (t.status <> 'Failed' or t.dead)
  and (:error_class::text is null or a.error_class = :error_class::text)
order by t.task_index
limit :limit;

-- name: insert_origins!
insert into interlock.run_origins (run_id, first_index, origins)
select :run_id, :first_index::bigint + (i.n - 1) / :stretch::int * :stretch::int, array_agg(i.origin order by i.n)
from unnest(:origins::bigint[]) with ordinality as i(origin, n)
group by 2
on conflict (run_id, first_index) do update set origins = excluded.origins;

-- name: set_rerun_of!
update interlock.runs set rerun_of = :rerun_of where run_id = :run_id and org_id = :org_id;

-- name: unmade_ingest^
-- The list of a run whose ingest failed or was canceled: that run has no tasks.
select i.source from interlock.ingests i
where i.run_id = :run_id and i.org_id = :org_id and i.step in ('Failed', 'Canceled');

-- name: insert_rerun!
insert into interlock.reruns (run_id, org_id, of_run, statuses, error_class, upload_id, next_index, last_index)
values (:run_id, :org_id, :of_run, :statuses::text[]::interlock.task_status[], :error_class, :upload_id, :first, :last);

-- name: next_rerun^
-- A rerun that no process is copying, with its original run; null if that is gone.
select e.*, o.shard as of_shard, o.rerun_of is not null as of_rerun, r.cancel_requested or r.delete_requested as unwanted
from interlock.reruns e
join interlock.runs r on r.run_id = e.run_id
left join interlock.runs o on o.run_id = e.of_run
order by e.run_id limit 1
for no key update of e skip locked;

-- name: rerun_copied!
update interlock.reruns
set next_index = :next_index, parts = :parts::text::json, copied = copied + :copied::bigint where run_id = :run_id;

-- name: set_parts!
update interlock.uploads set parts = :parts where upload_id = :upload_id;

-- name: end_rerun!
delete from interlock.reruns where run_id = :run_id;
