-- From changes of datasets to tasks. Each statement serves any number of changes and dependents at once.
--
-- What decides is `materialisations`: a scope is given to a job once per change of its inputs, whoever asks, however
-- often. So the router, which follows events, and the reconciler, which follows the registry, run the same statement,
-- and a doubled, reordered or lost event changes nothing.

-- name: take_routes
-- In the transaction that routes: a crash leaves them where they were.
delete from interlock.outbox
where outbox_id = any(array(
    select outbox_id from interlock.outbox
    where due_at > :since::timestamptz and due_at <= interlock.clock() and kind = 'route'
    order by due_at limit :most
    for update skip locked))
returning body, due_at;

-- name: changed_scopes
select dataset_version, range_start, range_end, max(commit_id) as commit_id
from interlock.dataset_events
where event_id = any(:event_ids::bigint[]) and range_start is not null
group by dataset_version, range_start, range_end;

-- name: give_scopes
-- Scopes of dataset versions have changed: every job that reads them is given them, if all it waits for is there.
-- Of a stream, a changed range is the scopes that a job has made of it. A task that has not begun since takes a newer
-- change in with it; its row is locked, so that it does not begin before that is written.
with changed as materialized (
    select c.* from unnest(:versions::uuid[], :starts::bigint[], :ends::bigint[], :commits::bigint[])
        as c(dataset_version, range_start, range_end, commit_id)
    where c.range_start between -4611686018427387904 and 4611686018427387904
), readers as materialized (
    select c.*, j.job_id, j.wait_for_all, j.per_update, jsonb_array_length(j.inputs) as inputs, v.progress,
           case when j.wait_for_all then 0 else g.input_index end as input_index
    from changed c
    join interlock.dataset_versions v on v.dataset_version = c.dataset_version
    join interlock.edges g on g.dataset_version = c.dataset_version and g.active
    join interlock.jobs j on j.job_id = g.job_id
    where (:job_id::uuid is null or j.job_id = :job_id)
      and not exists (select 1 from interlock.pauses p where p.job_id = j.job_id and (not p.bulk or j.priority = 1))
), wanted as (
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
    where not a.per_update and t.status in ('Queued', 'Failed') and not t.dead and not t.cancel_requested
    for no key update of t skip locked
), given as (
    insert into interlock.materialisations (job_id, input_index, range_start, range_end, input_commit, task_id)
    select job_id, input_index, range_start, range_end, commit_id, uuidv7() from asked
    order by job_id, input_index, range_start, range_end
    on conflict (job_id, input_index, range_start, range_end) do update
        set input_commit = excluded.input_commit,
            task_id = case when interlock.materialisations.task_id = any(array(select task_id from waiting))
                           then interlock.materialisations.task_id else excluded.task_id end
        where interlock.materialisations.input_commit < excluded.input_commit
    returning job_id, input_index, range_start, range_end, input_commit, new.task_id,
              old.task_id is distinct from new.task_id as fresh
), tasks as materialized (
    select g.task_id, j.org_id, j.job_id, j.max_attempts, j.priority, j.queue, j.runtime, j.concurrency_key,
           g.range_start || '-' || g.range_end || '@' || g.input_commit as dedupe_key,
           json_build_object('input_index', g.input_index, 'partition_key', g.range_start || '-' || g.range_end,
                             'start', g.range_start, 'end', g.range_end, 'changed_start', a.from_, 'changed_end', a.upto,
                             'commit', g.input_commit) as payload
    from given g
    join asked a on a.job_id = g.job_id and a.input_index = g.input_index and a.range_start = g.range_start
                 and a.range_end = g.range_end
    join interlock.jobs j on j.job_id = g.job_id
    where g.fresh
), made as (
    insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, dedupe_key, slot_key, payload)
    select task_id, org_id, job_id, max_attempts, priority, dedupe_key,
           payload::jsonb #>> string_to_array(substr(concurrency_key, 2), '/'), payload
    from tasks
), direct as (
    insert into interlock.queue_messages (queue, priority, body, dedupe_key)
    select queue, priority, json_build_object('task_id', task_id), task_id::text
    from tasks where queue is not null and :direct::boolean
), owed as (
    insert into interlock.outbox (kind, target, body, priority, dedupe_key)
    select case when queue is null then 'invoke' else 'send' end, coalesce(queue, runtime),
           json_build_object('task_id', task_id), priority, task_id::text
    from tasks where queue is null or not :direct::boolean
), told as (
    select pg_notify(case when queue is not null and :direct::boolean then 'interlock_queue' else 'interlock_outbox' end,
                     coalesce(queue, ''))
    from (select distinct queue from tasks) q
)
select (select count(*) from tasks) as tasks, (select count(*) from given) as scopes, (select count(*) from told) as told;

-- name: readers_of
-- Jobs that read a stream of these versions.
select distinct g.job_id
from interlock.edges g
join interlock.dataset_versions v on v.dataset_version = g.dataset_version and v.progress = 'cursor'
where g.dataset_version = any(:versions::uuid[]) and g.active;

-- name: start_streams
-- A job all of whose inputs are streams reads from where it is to where they all are, in one task at a time. A task
-- that was canceled, or is gone, is replaced; one that is dead waits to be retried, for what follows depends on it.
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
    insert into interlock.job_cursors (job_id, input_index, upto, task_id)
    select job_id, input_index, upto, uuidv7() from streams order by job_id, input_index
    on conflict (job_id, input_index) do update set upto = excluded.upto, task_id = excluded.task_id
        where interlock.job_cursors.committed < excluded.upto
          and not exists (select 1 from interlock.tasks t where t.shard = 0 and t.task_id = interlock.job_cursors.task_id
                          and t.status in ('Queued', 'Running', 'Failed'))
    returning job_id, input_index, committed + 1 as range_start, upto as range_end, task_id
), given as (
    insert into interlock.materialisations (job_id, input_index, range_start, range_end, input_commit, task_id)
    select s.job_id, s.input_index, s.range_start, s.range_end, m.commit_id, s.task_id
    from started s join streams m on m.job_id = s.job_id and m.input_index = s.input_index
    on conflict (job_id, input_index, range_start, range_end) do update
        set task_id = excluded.task_id, input_commit = excluded.input_commit
    returning job_id, input_index, range_start, range_end, task_id, input_commit
), tasks as materialized (
    select g.task_id, j.org_id, j.job_id, j.max_attempts, j.priority, j.queue, j.runtime, j.concurrency_key,
           g.range_start || '-' || g.range_end || '@' || g.input_commit as dedupe_key,
           json_build_object('input_index', g.input_index, 'partition_key', g.range_start || '-' || g.range_end,
                             'start', g.range_start, 'end', g.range_end, 'cursor', g.range_end,
                             'commit', g.input_commit) as payload
    from given g join interlock.jobs j on j.job_id = g.job_id
), made as (
    insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, dedupe_key, slot_key, payload)
    select task_id, org_id, job_id, max_attempts, priority, dedupe_key,
           payload::jsonb #>> string_to_array(substr(concurrency_key, 2), '/'), payload
    from tasks
), direct as (
    insert into interlock.queue_messages (queue, priority, body, dedupe_key)
    select queue, priority, json_build_object('task_id', task_id), task_id::text
    from tasks where queue is not null and :direct::boolean
), owed as (
    insert into interlock.outbox (kind, target, body, priority, dedupe_key)
    select case when queue is null then 'invoke' else 'send' end, coalesce(queue, runtime),
           json_build_object('task_id', task_id), priority, task_id::text
    from tasks where queue is null or not :direct::boolean
), told as (
    select pg_notify(case when queue is not null and :direct::boolean then 'interlock_queue' else 'interlock_outbox' end,
                     coalesce(queue, ''))
    from (select distinct queue from tasks) q
)
select (select count(*) from tasks) as tasks, (select count(*) from told) as told;

-- name: edges_behind
-- Inputs with changes that nobody has checked for tasks yet, a page of all.
select g.job_id, g.input_index, g.dataset_version, g.reconciled_to, v.progress, v.commit_id > g.reconciled_to as behind,
       exists (select 1 from interlock.pauses p join interlock.jobs j on j.job_id = p.job_id
               where p.job_id = g.job_id and (not p.bulk or j.priority = 1)) as paused
from (select * from interlock.edges where active and (job_id, input_index) > (:job_id::uuid, :input_index::int)
      order by job_id, input_index limit :most) g
join interlock.dataset_versions v on v.dataset_version = g.dataset_version
order by g.job_id, g.input_index;

-- name: keep_pauses
-- While a pass that remembers its place goes on, no pause comes or goes; see pressure.sql.
select pg_advisory_xact_lock_shared(hashtextextended('interlock:pauses', 0));

-- name: changes_since
select range_start, range_end, commit_id from interlock.partitions
where dataset_version = :dataset_version and commit_id > :since::bigint
order by commit_id fetch first :most rows with ties;

-- name: set_reconciled!
update interlock.edges set reconciled_to = :reconciled_to
where job_id = :job_id and input_index = :input_index and dataset_version = :dataset_version;
