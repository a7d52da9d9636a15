-- Backfills: gives a job its scopes in a range once more, on request.
--
-- The definition of a scope follows give_scopes in dags/queries/routing.sql: a partition that every input has or, for a
-- job that reads only streams, a range of them that it has read before.

-- name: job_of_dag^
select job_id, org_id, max_queue_depth, jsonb_array_length(inputs) as inputs, partition, source ->> 'kind' as kind,
       extract(epoch from interlock.clock())::bigint as now
from interlock.jobs
where org_id = :org_id and coalesce(dag_name, '') = :dag_name and name = :name and current;

-- name: sources_upstream
-- Sources whose time partitions a job reads, directly or through other jobs.
with recursive above as (
    select :job_id::uuid as job_id, 0 as depth
    union
    select v.job_id, a.depth + 1
    from above a
    join interlock.edges g on g.job_id = a.job_id
    join interlock.dataset_versions v on v.dataset_version = g.dataset_version
    where a.depth < 50 and v.job_id is not null
)
select distinct j.dag_name, j.name
from above a join interlock.jobs j on j.job_id = a.job_id
where a.depth > 0 and j.source is not null and j.partition is not null and j.source ->> 'kind' <> 'always_on'
order by j.dag_name, j.name limit 10;

-- name: scopes_after
-- The next scopes in the order (input_index, range_start, range_end), from a position on. A scope without a commit is
-- missing in some input. Partitions of a version never overlap, so all but the first one that reaches into the range
-- start in it. Ranges of a stream may start at the same position with different ends after a task was canceled;
-- completed ones take precedence.
with job as materialized (
    select job_id, wait_for_all from interlock.jobs where job_id = :job_id
), inputs as materialized (
    select g.input_index, g.dataset_version, g.pointed_at, v.progress, v.cursor, v.commit_id
    from interlock.edges g
    join interlock.dataset_versions v on v.dataset_version = g.dataset_version
    where g.job_id = :job_id
), walked as materialized (
    -- The source of scopes: one input for all, or each input separately. Without a version: the ranges that the job has
    -- read of streams.
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
         order by p.range_start limit :limit + 1)
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
         order by m.range_start, m.range_end limit :limit + 1)
    ) s
    where s.range_end >= :range_start::bigint
      and (w.input_index, s.range_start, s.range_end) > (:place_input::int, :place_start::bigint, :place_end::bigint)
    order by w.input_index, s.range_start, s.range_end
    limit :limit
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
-- A run whose list is the scopes. All of it is held back until the queue has room.
with run as (
    insert into interlock.runs (org_id, job_id, last_index, range_size, priority, held_from, latched, ingesting, state)
    values (:org_id, :job_id, -1, :range_size, :priority, 0, false, true, 'Ingesting')
    returning run_id
), ingest as (
    insert into interlock.ingests (run_id, org_id, source) select run_id, :org_id, :source::text::json from run
)
insert into interlock.backfills (run_id, org_id, job_id, range_start, range_end, priority, reason, requested_by, total)
select run_id, :org_id, :job_id, :range_start, :range_end, :priority, :reason, :requested_by, :total::bigint from run
returning run_id;

-- name: held_runs
-- Runs with tasks that have no message yet, one page of them.
select job_id, run_id from interlock.runs
where held_from is not null and ended_at is null and (job_id, run_id) > (:after_job::uuid, :after_run::uuid)
order by job_id, run_id limit :limit;

-- name: take_held^
-- A run that may release more tasks, or whose job is no longer deployed. Its row is locked first, like in every
-- statement that moves a run: a concurrent cancel either waits and sees the released tasks, or comes first and none is
-- released.
select r.run_id, r.org_id, r.job_id, r.shard, r.range_size, r.held_from, r.last_index, j.active, j.queue,
       j.max_queue_depth, coalesce(r.priority, case when r.shard = 0 then j.priority else 1 end) as lane,
       interlock.waiting_tasks(r.job_id, coalesce(j.max_queue_depth, :most_waiting::bigint)) as waiting
from interlock.runs r
join interlock.jobs j on j.job_id = r.job_id
where r.run_id = :run_id and r.held_from is not null and r.latched and r.ended_at is null
  and not r.paused and not r.cancel_requested and not r.delete_requested
  and (not j.active
       or (not exists (select 1 from interlock.backfills b where b.run_id = r.run_id and b.paused)
           and not exists (select 1 from interlock.pauses p where p.job_id = r.job_id
                           and (not p.bulk or coalesce(r.priority, j.priority) = 1))))
for no key update of r skip locked;

-- name: undone_scopes
-- Tasks about to be released whose scope belongs to another unfinished task, with that task's shard.
with made as materialized (
    select t.task_id, (t.payload ->> 'input_index')::int as input_index, (t.payload ->> 'start')::bigint as range_start,
           (t.payload ->> 'end')::bigint as range_end
    from interlock.tasks t
    where t.shard = :shard and t.run_id = :run_id and t.task_index between :first::bigint and :last::bigint
      and t.status = 'Queued'
)
select s.input_index, s.range_start, s.range_end, s.task_id, m.task_id as waits_for, m.task_shard
from made s
cross join lateral (
    select m.task_id, m.task_shard from interlock.materialisations m
    where m.job_id = :job_id and m.input_index = s.input_index and m.range_start = s.range_start
      and m.range_end = s.range_end and (m.done_commit is null or m.done_commit < m.input_commit)
    limit 1
) m;

-- name: may_end
-- Tasks that are neither dead nor canceled: they will complete their scopes.
select task_id from interlock.tasks
where shard = :shard and task_id = any(:task_ids::uuid[]) and not dead and status <> 'Canceled';

-- name: take_over_scopes!
-- Takes scopes from tasks that will never complete them. A scope that was given to another task in the meantime keeps
-- it. Same order as give_scopes, so that the two cannot deadlock.
with abandoned as materialized (
    select a.* from unnest(:inputs::int[], :starts::bigint[], :ends::bigint[], :left_by::uuid[], :task_ids::uuid[])
        as a(input_index, range_start, range_end, left_by, task_id)
    where a.range_start between -4611686018427387904 and 4611686018427387904
    order by a.input_index, a.range_start, a.range_end
)
update interlock.materialisations m set task_id = a.task_id, task_shard = :task_shard
from abandoned a
where m.job_id = :job_id and m.input_index = a.input_index and m.range_start = a.range_start
  and m.range_end = a.range_end and m.task_id = a.left_by;

-- name: send_ranges
-- Whole ranges: an existing message covers the same tasks.
with messages as (
    select :run_id::uuid || ':' || chunk as dedupe_key,
           json_build_object('job_id', :job_id::uuid, 'run_id', :run_id::uuid, 'start', chunk * :range_size::int,
                             'end', least((chunk + 1) * :range_size::int - 1, :last::bigint)) as body
    from generate_series(:first::bigint / :range_size::int, :last::bigint / :range_size::int) as chunk
), direct as (
    insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key)
    select :queue, :lane, :org_id::uuid, :run_id::uuid, body, dedupe_key from messages where :direct::boolean
    on conflict do nothing
), owed as (
    insert into interlock.outbox (kind, target, body, priority, org_id, share_id, dedupe_key)
    select 'send', :queue, body, :lane, :org_id::uuid, :run_id::uuid, dedupe_key from messages where not :direct::boolean
)
select case when :direct::boolean then pg_notify('interlock_queue', :queue) else pg_notify('interlock_outbox', '') end;

-- name: hold_from!
-- All tasks before this index have a message. Null when that is all of them.
update interlock.runs set held_from = case when :held_from::bigint <= last_index then :held_from::bigint end
where run_id = :run_id;

-- name: pause_backfill
-- Released tasks continue. A backfill that has released all tasks, or is canceled, is unchanged.
with live as (
    select r.run_id from interlock.runs r
    where r.run_id = :run_id and r.org_id = :org_id and r.held_from is not null and r.ended_at is null
      and not r.cancel_requested
    for no key update
), paused as (
    update interlock.backfills b set paused = true from live l where b.run_id = l.run_id and not b.paused
    returning b.run_id
)
update interlock.runs r set state = 'Paused' from paused p where r.run_id = p.run_id
returning r.run_id;

-- name: resume_backfill
with live as (
    select r.run_id from interlock.runs r
    where r.run_id = :run_id and r.org_id = :org_id and r.ended_at is null
    for no key update
), resumed as (
    update interlock.backfills b set paused = false from live l where b.run_id = l.run_id and b.paused
    returning b.run_id
)
update interlock.runs r set state = interlock.live_state(r.paused, r.ingesting) from resumed p where r.run_id = p.run_id
returning r.run_id;

-- name: list_backfills
-- Newest first.
select b.*, j.dag_name, j.name, j.partition, r.state as run_state, r.total as run_total, r.held_from, r.latched, r.cancel_requested,
       r.queued, r.running, r.completed, r.failed, r.dead, r.canceled, r.ended_at, r.reason as run_reason,
       i.step = 'Failed' as not_ingested
from (select * from interlock.backfills
      where org_id = :org_id and run_id < coalesce(:cursor::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      order by run_id desc limit :limit) b
join interlock.jobs j on j.job_id = b.job_id
join interlock.runs r on r.run_id = b.run_id
left join interlock.ingests i on i.run_id = b.run_id
order by b.run_id desc;

-- name: backfill_by_id^
select b.*, j.dag_name, j.name, j.partition, r.state as run_state, r.total as run_total, r.held_from, r.latched, r.cancel_requested,
       r.queued, r.running, r.completed, r.failed, r.dead, r.canceled, r.ended_at, r.reason as run_reason,
       i.step = 'Failed' as not_ingested
from interlock.backfills b
join interlock.jobs j on j.job_id = b.job_id
join interlock.runs r on r.run_id = b.run_id
left join interlock.ingests i on i.run_id = b.run_id
where b.run_id = :run_id and b.org_id = :org_id;
