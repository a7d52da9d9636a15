-- From dataset changes to tasks. Each statement handles any number of changes and dependents.
--
-- `materialisations` decides: a scope is given to a job once per change of its inputs, however often it is requested.
-- So the router, which follows events, and the reconciler, which follows the registry, run the same statement. A
-- duplicated, reordered or lost event changes nothing.

-- name: take_routes
-- In the transaction that routes them: after a crash they are still there.
delete from interlock.outbox
where outbox_id = any(array(
    select outbox_id from interlock.outbox
    where due_at > :since::timestamptz and due_at <= interlock.clock() and kind = 'route'
    order by due_at limit :limit
    for update skip locked))
returning body, due_at;

-- name: changed_scopes
select dataset_version, range_start, range_end, max(commit_id) as commit_id
from interlock.dataset_events
where event_id = any(:event_ids::bigint[]) and range_start is not null
group by dataset_version, range_start, range_end;

-- name: give_scopes
-- Gives changed scopes of dataset versions to every job that reads them, once everything it waits for exists. For a
-- stream, a changed range maps to the scopes that a job has made of it. A task that has not started since takes in a
-- newer change; its row is locked, so that it cannot start before the change is written. A task that had started before
-- does not, because it would not repeat what it has already reported about its outputs. Nor does a task of a backfill,
-- which may be canceled.
with changed as materialized (
    select c.* from unnest(:versions::uuid[], :starts::bigint[], :ends::bigint[], :commits::bigint[])
        as c(dataset_version, range_start, range_end, commit_id)
    where c.range_start between -4611686018427387904 and 4611686018427387904
), readers as materialized (
    -- For a reader that was switched to this version recently, all of it is as new as the switch.
    select c.dataset_version, c.range_start, c.range_end, greatest(c.commit_id, g.pointed_at) as commit_id,
           j.job_id, j.wait_for_all, j.per_update, jsonb_array_length(j.inputs) as inputs, v.progress,
           case when j.wait_for_all then 0 else g.input_index end as input_index
    from changed c
    join interlock.dataset_versions v on v.dataset_version = c.dataset_version
    join interlock.edges g on g.dataset_version = c.dataset_version and g.active
    join interlock.jobs j on j.job_id = g.job_id
    where (:job_id::uuid is null or j.job_id = :job_id)
      -- No registry row records a rewritten part of a stream for later, so it is given even during a pause.
      and (v.progress = 'cursor'
           or not exists (select 1 from interlock.pauses p where p.job_id = j.job_id and (not p.bulk or j.priority = 1)))
), wanted as materialized (
    select r.job_id, r.input_index, r.range_start, r.range_end, r.per_update, null::bigint as from_, null::bigint as upto,
           case when r.wait_for_all and r.inputs > 1 then (
               -- Null unless every input has it.
               select case when bool_and(p.commit_id is not null or coalesce(v.cursor >= r.range_end, false))
                           then greatest(max(p.commit_id), r.commit_id) end
               from interlock.edges o
               join interlock.dataset_versions v on v.dataset_version = o.dataset_version
               left join interlock.partitions p on p.dataset_version = o.dataset_version and v.progress = 'partition'
                    and p.range_start = r.range_start and p.range_end = r.range_end
               where o.job_id = r.job_id)
           else r.commit_id end as commit_id
    from readers r where r.progress = 'partition'
    union all
    select r.job_id, r.input_index, m.range_start, m.range_end, r.per_update, greatest(r.range_start, m.range_start),
           least(r.range_end, m.range_end), r.commit_id
    from readers r
    cross join lateral (
        (select * from interlock.materialisations m
         where m.job_id = r.job_id and m.input_index = r.input_index and m.range_start < r.range_start
         order by m.range_start desc limit 1)
        union all
        select * from interlock.materialisations m
        where m.job_id = r.job_id and m.input_index = r.input_index and m.range_start between r.range_start and r.range_end
    ) m
    where r.progress = 'cursor' and m.range_end >= r.range_start
), asked as materialized (
    select job_id, input_index, range_start, range_end, per_update, min(from_) as from_, max(upto) as upto,
           max(commit_id) as commit_id
    from wanted where commit_id is not null
    group by job_id, input_index, range_start, range_end, per_update
), waiting as materialized (
    select t.task_id
    from asked a
    join interlock.materialisations m on m.job_id = a.job_id and m.input_index = a.input_index
         and m.range_start = a.range_start and m.range_end = a.range_end and m.input_commit < a.commit_id
    join interlock.tasks t on t.shard = 0 and t.task_id = m.task_id
    where not a.per_update and t.status = 'Queued' and t.attempt = 1 and not t.cancel_requested and t.run_id is null
      and not exists (select 1 from interlock.attempts b where b.task_id = t.task_id)
    for no key update of t skip locked
), given as (
    insert into interlock.materialisations as m (job_id, input_index, range_start, range_end, input_commit, undone_since,
                                                 changed_start, changed_end, task_id)
    select job_id, input_index, range_start, range_end, commit_id, commit_id, from_, upto, uuidv7() from asked
    order by job_id, input_index, range_start, range_end
    on conflict (job_id, input_index, range_start, range_end) do update
        set input_commit = excluded.input_commit, task_shard = 0,
            undone_since = case when m.done_commit >= m.input_commit then excluded.input_commit else m.undone_since end,
            (changed_start, changed_end, task_id) = (
                select case when w.waits then case when m.changed_start is not null
                                                   then least(m.changed_start, excluded.changed_start) end
                            else excluded.changed_start end,
                       case when w.waits then case when m.changed_end is not null
                                                   then greatest(m.changed_end, excluded.changed_end) end
                            else excluded.changed_end end,
                       case when w.waits then m.task_id else excluded.task_id end
                from (select m.task_id = any(array(select task_id from waiting)) as waits) w)
        where m.input_commit < excluded.input_commit
    returning job_id, input_index, range_start, range_end, input_commit, changed_start, changed_end, new.task_id,
              old.task_id is distinct from new.task_id as fresh
), tasks as materialized (
    select g.task_id, j.org_id, j.job_id, j.max_attempts, j.priority, j.queue, j.runtime, j.concurrency_key,
           json_build_object('input_index', g.input_index, 'partition_key', g.range_start || '-' || g.range_end,
                             'start', g.range_start, 'end', g.range_end, 'changed_start', g.changed_start,
                             'changed_end', g.changed_end, 'commit', g.input_commit) as payload
    from given g
    join interlock.jobs j on j.job_id = g.job_id
    where g.fresh
), widened as (
    -- A task for a rewritten part of its scope takes in the other part.
    update interlock.tasks t
    set payload = (t.payload::jsonb || jsonb_build_object('changed_start', g.changed_start, 'changed_end', g.changed_end))::json
    from given g
    where not g.fresh and t.shard = 0 and t.task_id = g.task_id and t.payload ->> 'changed_start' is not null
), made as (
    insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, slot_key, payload)
    select task_id, org_id, job_id, max_attempts, priority,
           payload::jsonb #>> string_to_array(substr(concurrency_key, 2), '/'), payload
    from tasks
), direct as (
    insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key)
    select queue, priority, org_id, job_id, json_build_object('task_id', task_id), task_id::text
    from tasks where queue is not null and :direct::boolean
), owed as (
    insert into interlock.outbox (kind, target, body, priority, org_id, share_id, dedupe_key)
    select case when queue is null then 'invoke' else 'send' end, coalesce(queue, runtime),
           json_build_object('task_id', task_id), priority, org_id, job_id, task_id::text
    from tasks where queue is null or not :direct::boolean
), told as (
    select pg_notify(case when queue is not null and :direct::boolean then 'interlock_queue' else 'interlock_outbox' end,
                     coalesce(queue, ''))
    from (select distinct queue from tasks) q
)
select (select count(*) from tasks) as tasks, (select count(*) from given) as scopes, (select count(*) from told) as told;

-- name: wake_builds
-- If these changes or jobs concern a version that is being built, the reconciler has to advance over them, and the
-- version may then be complete. Without such a version, this is one look-up.
select pg_notify('interlock_outbox', topic)
from unnest('{scopes,cutover}'::text[]) as topic
where (select true from interlock.dag_versions v where v.state = 'Building' limit 1)
  and (exists (select 1 from unnest(:job_ids::uuid[]) as i(job_id)
               join interlock.jobs j on j.job_id = i.job_id and j.active and not j.current)
       or exists (select 1
                  from (select distinct e.dataset_version
                        from unnest(:event_ids::bigint[]) as i(event_id)
                        join interlock.dataset_events e on e.event_id = i.event_id) changed
                  join interlock.edges g on g.dataset_version = changed.dataset_version and g.active
                  join interlock.jobs j on j.job_id = g.job_id and not j.current));

-- name: readers_of
-- Jobs that read streams of these versions.
select distinct g.job_id
from interlock.edges g
join interlock.dataset_versions v on v.dataset_version = g.dataset_version and v.progress = 'cursor'
where g.dataset_version = any(:versions::uuid[]) and g.active;

-- name: start_streams
-- A job whose inputs are all streams reads from its position to where all of them are, one task at a time. A canceled
-- or deleted task is replaced. A dead one waits for a retry, because later tasks depend on it.
--
-- Two passes may run at once. The row of the position is read as it is now, but the task is read from the snapshot of
-- this statement, so a task that another pass has just started looks deleted. The snapshot must therefore know that
-- the position belongs to this task. A second task from the same position would overlap the first one and never commit.
with streams as materialized (
    select j.job_id, case when j.wait_for_all then 0 else g.input_index end as input_index, min(v.cursor) as upto,
           max(v.commit_id) as commit_id
    from interlock.jobs j
    join interlock.edges g on g.job_id = j.job_id
    join interlock.dataset_versions v on v.dataset_version = g.dataset_version
    where j.job_id = any(:job_ids::uuid[]) and j.active
      and not exists (select 1 from interlock.pauses p where p.job_id = j.job_id and (not p.bulk or j.priority = 1))
    group by j.job_id, 2
    having bool_and(v.progress = 'cursor') and min(v.cursor) is not null and count(v.cursor) = count(*)
), started as (
    insert into interlock.job_cursors (job_id, input_index, upto, input_commit, task_id)
    select job_id, input_index, upto, commit_id, uuidv7() from streams order by job_id, input_index
    on conflict (job_id, input_index) do update
        set upto = excluded.upto, input_commit = excluded.input_commit, task_id = excluded.task_id
        where interlock.job_cursors.committed < excluded.upto
          and (interlock.job_cursors.task_id is null
               or exists (select 1 from interlock.job_cursors known
                          where known.job_id = interlock.job_cursors.job_id
                            and known.input_index = interlock.job_cursors.input_index
                            and known.task_id = interlock.job_cursors.task_id))
          and not exists (select 1 from interlock.tasks t where t.shard = 0 and t.task_id = interlock.job_cursors.task_id
                          and t.status in ('Queued', 'Running', 'Failed'))
    returning job_id, input_index, committed + 1 as range_start, upto as range_end, input_commit, task_id
), given as (
    insert into interlock.materialisations (job_id, input_index, range_start, range_end, input_commit, undone_since, task_id)
    select job_id, input_index, range_start, range_end, input_commit, input_commit, task_id from started
    on conflict (job_id, input_index, range_start, range_end) do update
        set task_id = excluded.task_id, task_shard = 0, input_commit = excluded.input_commit
    returning job_id, input_index, range_start, range_end, task_id, input_commit
), tasks as materialized (
    select g.task_id, j.org_id, j.job_id, j.max_attempts, j.priority, j.queue, j.runtime, j.concurrency_key,
           json_build_object('input_index', g.input_index, 'partition_key', g.range_start || '-' || g.range_end,
                             'start', g.range_start, 'end', g.range_end, 'cursor', g.range_end,
                             'commit', g.input_commit) as payload
    from given g join interlock.jobs j on j.job_id = g.job_id
), made as (
    insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, slot_key, payload)
    select task_id, org_id, job_id, max_attempts, priority,
           payload::jsonb #>> string_to_array(substr(concurrency_key, 2), '/'), payload
    from tasks
), direct as (
    insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key)
    select queue, priority, org_id, job_id, json_build_object('task_id', task_id), task_id::text
    from tasks where queue is not null and :direct::boolean
), owed as (
    insert into interlock.outbox (kind, target, body, priority, org_id, share_id, dedupe_key)
    select case when queue is null then 'invoke' else 'send' end, coalesce(queue, runtime),
           json_build_object('task_id', task_id), priority, org_id, job_id, task_id::text
    from tasks where queue is null or not :direct::boolean
), told as (
    select pg_notify(case when queue is not null and :direct::boolean then 'interlock_queue' else 'interlock_outbox' end,
                     coalesce(queue, ''))
    from (select distinct queue from tasks) q
)
select (select count(*) from tasks) as tasks, (select count(*) from told) as told;

-- name: open_gates
-- For streams next to partitions: partitions whose end the stream has reached since. For the edge of a stream,
-- `reconciled_to` is the first position that was not checked yet. A row without a partition means that there are none.
select g.job_id, g.input_index, g.dataset_version as stream, v.cursor, p.dataset_version, p.range_start, p.range_end,
       p.commit_id
from interlock.edges g
join interlock.jobs j on j.job_id = g.job_id and j.wait_for_all and jsonb_array_length(j.inputs) > 1
join interlock.dataset_versions v on v.dataset_version = g.dataset_version and v.progress = 'cursor'
                                 and v.cursor >= g.reconciled_to
join interlock.edges o on o.job_id = g.job_id
join interlock.dataset_versions w on w.dataset_version = o.dataset_version and w.progress = 'partition'
left join lateral (
    select * from interlock.partitions p
    where p.dataset_version = o.dataset_version and p.range_end between g.reconciled_to and v.cursor
      and p.range_start between coalesce((select max(q.range_start) from interlock.partitions q
                                          where q.dataset_version = o.dataset_version and q.range_start < g.reconciled_to),
                                         g.reconciled_to) and v.cursor
    order by p.range_start limit :limit
) p on true
where g.job_id = any(:job_ids::uuid[]) and g.active
  and not exists (select 1 from interlock.pauses h where h.job_id = j.job_id and (not h.bulk or j.priority = 1));

-- name: set_gates!
update interlock.edges e set reconciled_to = g.position
from unnest(:job_ids::uuid[], :input_indexes::int[], :streams::uuid[], :positions::bigint[])
    as g(job_id, input_index, dataset_version, position)
where e.job_id = g.job_id and e.input_index = g.input_index and e.dataset_version = g.dataset_version;

-- name: edges_behind
-- One page of the inputs with changes that were not yet checked for tasks.
select g.job_id, g.input_index, g.dataset_version, g.reconciled_to, v.progress, v.commit_id > g.reconciled_to as behind,
       g.pointed_at, case when j.wait_for_all then 0 else g.input_index end as given_as,
       j.max_queue_depth is not null as limited,
       exists (select 1 from interlock.pauses p where p.job_id = g.job_id and (not p.bulk or j.priority = 1)) as paused
from (select * from interlock.edges where active and (job_id, input_index) > (:job_id::uuid, :input_index::int)
      order by job_id, input_index limit :limit) g
join interlock.dataset_versions v on v.dataset_version = g.dataset_version
join interlock.jobs j on j.job_id = g.job_id
order by g.job_id, g.input_index;

-- name: room_of
-- How many more tasks may wait. Held-back work is created no faster than that, so a release causes no flood.
select job_id, max_queue_depth - interlock.waiting_tasks(job_id, max_queue_depth) as room
from interlock.jobs where job_id = any(:job_ids::uuid[]) and max_queue_depth is not null;

-- name: keep_pauses
-- Prevents pauses from starting or ending during a pass that remembers its position; see pressure.sql.
select pg_advisory_xact_lock_shared(hashtextextended('interlock:pauses', 0));

-- name: changes_since
-- `missing` marks changes without a task, as far as can be determined without the other inputs.
select p.dataset_version, p.range_start, p.range_end, p.commit_id,
       not exists (select 1 from interlock.materialisations m
                   where m.job_id = :job_id and m.input_index = :input_index and m.range_start = p.range_start
                     and m.range_end = p.range_end
                     and m.input_commit >= greatest(p.commit_id, :pointed_at::bigint)) as missing
from (select dataset_version, range_start, range_end, commit_id from interlock.partitions
      where dataset_version = :dataset_version and commit_id > :since::bigint
      order by commit_id fetch first :limit rows with ties) p
order by p.commit_id;

-- name: set_reconciled!
update interlock.edges set reconciled_to = :reconciled_to
where job_id = :job_id and input_index = :input_index and dataset_version = :dataset_version;
