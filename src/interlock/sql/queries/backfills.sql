-- Backfills: a job's scopes in a range, given to it once more by hand.
--
-- What is a scope follows give_scopes in routing.sql: a partition that every input has, or, of a job that reads streams
-- only, a stretch of them that it has read before.

-- name: job_of_dag^
select job_id, org_id, dag_name, name, priority, active, max_queue_depth, jsonb_array_length(inputs) as inputs
from interlock.jobs
where org_id = :org_id and coalesce(dag_name, '') = :dag_name and name = :name and current;

-- name: scopes_after
-- The next ones in the order of (input_index, range_start, range_end), from a place on; those without a commit are not
-- there in every input. Partitions of a version never overlap: all but the first that reaches into the range begin in it.
-- Stretches of a stream may begin at one place with different ends, when a task was canceled: what was done counts.
with job as materialized (
    select job_id, wait_for_all from interlock.jobs where job_id = :job_id
), inputs as materialized (
    select g.input_index, g.dataset_version, g.pointed_at, v.progress, v.cursor, v.commit_id
    from interlock.edges g
    join interlock.dataset_versions v on v.dataset_version = g.dataset_version
    where g.job_id = :job_id
), walked as materialized (
    -- What scopes come from: one input for all, or each for itself. Without a version: what the job has read of streams.
    select 0 as input_index, (select dataset_version from inputs where progress = 'partition'
                              order by input_index limit 1) as dataset_version
    from job where wait_for_all
    union all
    select i.input_index, case when i.progress = 'partition' then i.dataset_version end
    from inputs i, job where not job.wait_for_all and i.input_index >= :place_input::int
), found as (
    select w.input_index, s.range_start, s.range_end, w.dataset_version is null as of_stream
    from walked w
    cross join lateral (
        select w.input_index > :place_input::int as at_start,
               case when w.input_index > :place_input::int then :range_start::bigint
                    else greatest(:range_start::bigint, :place_start::bigint) end as lower
    ) b
    cross join lateral (
        (select p.range_start, p.range_end from interlock.partitions p
         where b.at_start and p.dataset_version = w.dataset_version and p.range_start < :range_start::bigint
         order by p.range_start desc limit 1)
        union all
        (select p.range_start, p.range_end from interlock.partitions p
         where p.dataset_version = w.dataset_version and p.range_start between b.lower and :range_end::bigint
         order by p.range_start limit :most + 1)
        union all
        (select m.range_start, m.range_end from interlock.materialisations m
         where b.at_start and w.dataset_version is null and m.job_id = :job_id and m.input_index = w.input_index
           and m.range_start < :range_start::bigint and m.done_commit is not null
         order by m.range_start desc, m.range_end desc limit 1)
        union all
        (select m.range_start, m.range_end from interlock.materialisations m
         where w.dataset_version is null and m.job_id = :job_id and m.input_index = w.input_index
           and m.range_start between b.lower and :range_end::bigint
           and (m.range_start, m.range_end) > (b.lower, case when b.at_start then b.lower - 1 else :place_end::bigint end)
           and m.done_commit is not null
         order by m.range_start, m.range_end limit :most + 1)
    ) s
    where s.range_end >= :range_start::bigint
      and (w.input_index, s.range_start, s.range_end) > (:place_input::int, :place_start::bigint, :place_end::bigint)
    order by w.input_index, s.range_start, s.range_end
    limit :most
)
select f.input_index, f.range_start, f.range_end, f.of_stream,
       case when f.of_stream then (select max(greatest(i.commit_id, i.pointed_at)) from inputs i)
            when not (select wait_for_all from job) then (
                select greatest(p.commit_id, i.pointed_at) from inputs i
                join interlock.partitions p on p.dataset_version = i.dataset_version
                where i.input_index = f.input_index and p.range_start = f.range_start and p.range_end = f.range_end)
            else (
                -- Null unless every input has it.
                select case when bool_and(p.commit_id is not null or coalesce(i.cursor >= f.range_end, false))
                            then max(greatest(p.commit_id, i.pointed_at)) end
                from inputs i
                left join interlock.partitions p on p.dataset_version = i.dataset_version and i.progress = 'partition'
                     and p.range_start = f.range_start and p.range_end = f.range_end)
       end as commit_id
from found f
order by f.input_index, f.range_start, f.range_end;

-- name: start_backfill^
-- With its run, which is latched when the last task is made.
with run as (
    insert into interlock.runs (org_id, job_id, last_index, range_size, latched, state)
    values (:org_id, :job_id, -1, :range_size, false, 'Running')
    returning run_id
)
insert into interlock.backfills (run_id, org_id, job_id, range_start, range_end, priority, reason, requested_by, total)
select run_id, :org_id, :job_id, :range_start, :range_end, :priority, :reason, :requested_by, :total::bigint from run
returning run_id;

-- name: backfills_in_work
select run_id from interlock.backfills where state = 'Running' and run_id > :after::uuid order by run_id limit :most;

-- name: take_backfill^
-- The backfill first, its run afterwards: so does everybody. A cancel of the run waits for the tasks that are being
-- made, and finds them; or comes first, and none are made.
select b.*, j.active, j.max_queue_depth, j.runtime, j.concurrency_key, j.max_attempts, r.cancel_requested, r.last_index,
       interlock.waiting_tasks(b.job_id, coalesce(j.max_queue_depth, :most_waiting::bigint)) as waiting,
       exists (select 1 from interlock.pauses p where p.job_id = b.job_id and (not p.bulk or b.priority = 1)) as held_back
from interlock.backfills b
join interlock.jobs j on j.job_id = b.job_id
join interlock.runs r on r.run_id = b.run_id
where b.run_id = :run_id and b.state = 'Running'
for no key update of b, r skip locked;

-- name: make_tasks
-- The next tasks of the run. `place_*` is the last scope that was looked at, ready or not. A scope whose own task will never end it, because that is dead or canceled, is ended by
-- this one; every other scope keeps the task that it has.
with scopes as materialized (
    select s.*, :first_index::bigint + s.n - 1 as task_index,
           interlock.run_task_id(:run_id, :first_index::bigint + s.n - 1) as task_id
    from unnest(:inputs::int[], :starts::bigint[], :ends::bigint[], :streams::boolean[], :commits::bigint[])
        with ordinality as s(input_index, range_start, range_end, of_stream, commit_id, n)
), tasks as materialized (
    select s.*, json_build_object(
               'input_index', s.input_index, 'partition_key', s.range_start || '-' || s.range_end,
               'start', s.range_start, 'end', s.range_end,
               'changed_start', case when s.of_stream then s.range_start end,
               'changed_end', case when s.of_stream then s.range_end end, 'commit', s.commit_id) as payload
    from scopes s
), made as (
    insert into interlock.tasks (task_id, org_id, job_id, run_id, task_index, max_attempts, priority, slot_key, payload)
    select task_id, :org_id, :job_id, :run_id, task_index, :max_attempts, :priority,
           payload::jsonb #>> string_to_array(substr(:concurrency_key::text, 2), '/'), payload
    from tasks
), abandoned as materialized (
    select m.input_index, m.range_start, m.range_end, s.task_id
    from scopes s
    join interlock.materialisations m on m.job_id = :job_id and m.input_index = s.input_index
         and m.range_start = s.range_start and m.range_end = s.range_end
         and (m.done_commit is null or m.done_commit < m.input_commit)
    left join interlock.tasks t on t.shard = 0 and t.task_id = m.task_id
    where t.task_id is null or t.dead or t.status = 'Canceled'
), taken_over as (
    update interlock.materialisations m set task_id = a.task_id
    from abandoned a
    where m.job_id = :job_id and m.input_index = a.input_index and m.range_start = a.range_start
      and m.range_end = a.range_end
), counted as (
    update interlock.runs
    set queued = queued + (select count(*) from scopes),
        last_index = greatest(last_index, (select max(task_index) from scopes))
    where run_id = :run_id
), moved as (
    update interlock.backfills
    set made = made + (select count(*) from scopes), place_input = :place_input, place_start = :place_start,
        place_end = :place_end
    where run_id = :run_id
)
select task_id from scopes order by n;

-- name: end_backfill
-- No more tasks will come. One whose tasks are all made can be canceled as long as they have not ended. The empty delta
-- makes the counters' loop look whether the run is over.
with ended as (
    update interlock.backfills b
    set state = :state::text::interlock.backfill_state, ended_at = coalesce(b.ended_at, interlock.clock())
    where b.run_id = :run_id
      and (b.state in ('Running', 'Paused')
           or (b.state = 'Done' and :state::text = 'Canceled'
               and (select true from interlock.runs r where r.run_id = b.run_id and r.ended_at is null) is not null))
    returning b.run_id, b.made
), latched as (
    update interlock.runs r
    set latched = true, total = e.made,
        state = case when r.state = 'Paused' then 'Running'::interlock.run_state else r.state end
    from ended e where r.run_id = e.run_id
)
insert into interlock.run_deltas (run_id) select run_id from ended
returning run_id;

-- name: pause_backfill
-- Tasks that are made go on.
with paused as (
    update interlock.backfills set state = 'Paused'
    where run_id = :run_id and org_id = :org_id and state = 'Running'
    returning run_id
)
update interlock.runs r set state = 'Paused' from paused p where r.run_id = p.run_id and r.ended_at is null
returning r.run_id;

-- name: resume_backfill
with resumed as (
    update interlock.backfills set state = 'Running'
    where run_id = :run_id and org_id = :org_id and state = 'Paused'
    returning run_id
)
update interlock.runs r set state = 'Running' from resumed p where r.run_id = p.run_id and r.ended_at is null
returning r.run_id;

-- name: list_backfills
-- Newest first.
select b.*, j.dag_name, j.name, r.state as run_state, r.queued, r.running, r.completed, r.failed, r.dead, r.canceled,
       r.ended_at as run_ended_at
from (select * from interlock.backfills
      where org_id = :org_id and run_id < coalesce(:cursor::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      order by run_id desc limit :most) b
join interlock.jobs j on j.job_id = b.job_id
join interlock.runs r on r.run_id = b.run_id
order by b.run_id desc;

-- name: backfill_by_id^
select b.*, j.dag_name, j.name, r.state as run_state, r.queued, r.running, r.completed, r.failed, r.dead, r.canceled,
       r.ended_at as run_ended_at
from interlock.backfills b
join interlock.jobs j on j.job_id = b.job_id
join interlock.runs r on r.run_id = b.run_id
where b.run_id = :run_id and b.org_id = :org_id;
