-- Runs created from tasks of other runs, all of them or filtered. Every user statement filters by org.

-- name: payloads_in_stretch
-- By index. A failed task that will be retried is left to its own run.
select t.payload from interlock.tasks t
left join lateral (select error_class from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on :error_class::text is not null
where t.shard = :shard and t.run_id = :run_id and t.org_id = :org_id
  and t.task_index between :first::bigint and :last::bigint
  and (:statuses::text[] is null or (t.status = any(:statuses::text[]::interlock.task_status[])
                                     and (t.status <> 'Failed' or t.dead)))
  and (:error_class::text is null or a.error_class = :error_class::text)
order by t.task_index
limit :limit;

-- name: payloads_by_status
-- Failed and canceled tasks have an index.
select t.payload from interlock.tasks t
left join lateral (select error_class from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on :error_class::text is not null
where t.shard = :shard and t.run_id = :run_id and t.org_id = :org_id
  and t.listed_status = any(:statuses::text[]::interlock.task_status[])
  and t.task_index between :first::bigint and :last::bigint and (t.status <> 'Failed' or t.dead)
  and (:error_class::text is null or a.error_class = :error_class::text)
order by t.task_index
limit :limit;

-- name: unmade_ingest^
-- The list of a run whose ingest failed or was canceled: that run has no tasks.
select i.source from interlock.ingests i
where i.run_id = :run_id and i.org_id = :org_id and i.step in ('Failed', 'Canceled');

-- name: insert_rerun!
insert into interlock.reruns (run_id, org_id, of_run, statuses, error_class, upload_id, next_index, last_index)
values (:run_id, :org_id, :of_run, :statuses::text[]::interlock.task_status[], :error_class, :upload_id, :first, :last);

-- name: next_rerun^
-- A rerun that no process is copying, with its original run; null if that is gone.
select e.*, o.shard as of_shard, r.cancel_requested or r.delete_requested as unwanted
from interlock.reruns e
join interlock.runs r on r.run_id = e.run_id
left join interlock.runs o on o.run_id = e.of_run
order by e.run_id limit 1
for no key update of e skip locked;

-- name: rerun_copied!
update interlock.reruns set next_index = :next_index, parts = :parts::text::json where run_id = :run_id;

-- name: set_parts!
update interlock.uploads set parts = :parts where upload_id = :upload_id;

-- name: end_rerun!
delete from interlock.reruns where run_id = :run_id;
