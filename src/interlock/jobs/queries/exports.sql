-- Exports of runs: a loop stages the rows, Spark writes the files, the user reads them. Every user statement filters by
-- org.

-- name: insert_export^
insert into interlock.exports (org_id, job_id, run_id, format, stretch, last_index)
values (:org_id, :job_id, :run_id, :format, :stretch, :last_index)
returning *, null as status, false as dead, null as error;

-- name: expect_export!
-- Recorded before anything is written there, so that the files are deleted when they expire.
insert into interlock.file_sweeps (place, due_at, final_at)
values (:place, interlock.clock() + make_interval(secs => :seconds::float8),
        -- The sweeper adds its own grace period for readers; it is part of the lifetime of an export.
        interlock.clock() + make_interval(secs => :seconds::float8 - :keep::float8))
on conflict (place) do nothing;

-- name: find_export^
-- With the state of its task.
select e.*, t.status, t.attempt, t.dead,
       (select a.error_message from interlock.attempts a where a.task_id = e.task_id
        order by a.attempt desc, a.ended_at desc limit 1) as error
from interlock.exports e
left join interlock.tasks t on t.shard = 0 and t.task_id = e.task_id
where e.export_id = :export_id and e.job_id = :job_id and e.org_id = :org_id;

-- name: next_export^
-- An export that is still to be staged and that no process holds.
select e.*, r.shard from interlock.exports e
left join interlock.runs r on r.run_id = e.run_id
where e.task_id is null
order by e.export_id limit 1
for no key update of e skip locked;

-- name: rows_of_stretch
-- One task per line. Line feeds in JSON occur only as white space between tokens; in strings they are escaped.
select replace(json_build_object(
           'index', t.task_index, 'task_id', t.task_id,
           'id', encode(sha256(convert_to(t.run_id || ':' || t.task_index, 'UTF8')), 'hex'),
           'status', t.status, 'attempt', t.attempt, 'payload', t.payload, 'result', t.result, 'pack', t.pack,
           'offset', t.pack_offset, 'length', t.pack_length, 'error_class', a.error_class,
           'error_message', a.error_message, 'started_at', t.started_at, 'ended_at', t.ended_at)::text, E'\n', ' ') as line
from (select * from interlock.tasks
      where shard = :shard and run_id = :run_id and task_index between :first::bigint and :last::bigint
      order by task_index) t
left join lateral (select error_class, error_message from interlock.attempts a
                   where a.task_id = t.task_id and t.status in ('Failed', 'Canceled') and a.outcome <> 'Released'
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
order by t.task_index;

-- name: staged!
update interlock.exports set next_index = :next_index, task_id = :task_id where export_id = :export_id;

-- name: exports_of_tasks
-- For the attempts that write the files.
select e.export_id, e.org_id, e.run_id, e.format, e.stretch, e.last_index, e.task_id
from interlock.exports e where e.task_id = any(:task_ids::uuid[]);
