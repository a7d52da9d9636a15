-- The task lifecycle: every statement that moves a task from one status to another.
--
-- Each is one set-based statement that decides by the rows it locks, never by what a caller read before. A statement
-- that waits for a row then sees its new state and leaves it alone. Background loops and partial claims skip locked
-- rows. All others lock in the order (run_id, task_index, task_id), so that no two of them deadlock. Every change of
-- status writes a delta of its run in the same statement, and every claim writes a lease alarm. All tasks of one claim
-- share its lease token: a fence is task, attempt and lease, and using one requires the worker's token or the attempt's
-- own.
--
-- Plans are made once, possibly while tables are empty. `between` over all possible values makes the planner expect few
-- input rows. It then looks up each of them instead of scanning the tasks to join them with the input.

-- name: claim
-- Jobs with a concurrency cap are left out here and below: claim_capped first locks their job.
with moment as materialized (
    select interlock.clock() as now, interlock.lease_token(:shard) as lease_token
), asked as materialized (
    select task_id, run_id from interlock.tasks
    where shard = :shard and task_id = any(:task_ids::uuid[]) and status = 'Queued'
    order by run_id, task_index, task_id
), held_back as materialized (
    -- Once per run, not per task.
    select array(select u.run_id from interlock.runs u
                 where u.run_id = any(array(select distinct run_id from asked where run_id is not null))
                   and (u.paused or u.delete_requested)) as runs
), claimed as (
    update interlock.tasks t
    set status = 'Running', lease_token = m.lease_token, worker_id = :worker_id, started_at = m.now,
        ended_at = null, parked = false, late_reply = false, progress = null, progress_text = null,
        timeout_at = m.now + make_interval(secs => j.timeout_seconds),
        lease_expires_at = m.now + make_interval(secs => least(j.lease_seconds, j.timeout_seconds))
    from moment m, asked a, interlock.jobs j, held_back h
    where t.shard = :shard and t.task_id = a.task_id and t.status = 'Queued' and j.job_id = t.job_id
      and (t.run_id is null or t.run_id <> all(h.runs)) and not j.paused
      and j.max_concurrency is null and j.max_concurrency_per_key is null
      and (:runtimes::text[] is null or j.runtime = any(:runtimes::text[]))
    returning t.task_id, t.org_id, t.job_id, j.xmin::text as job_version, t.run_id, t.task_index, t.attempt, t.lease_token,
              t.lease_expires_at, t.timeout_at, t.payload
), counted as (
    insert into interlock.run_deltas (run_id, queued, running)
    select run_id, -count(*), count(*) from claimed where run_id is not null group by run_id
), alarm as (
    insert into interlock.lease_alarms (shard, due_at, tasks, task_ids)
    select :shard, min(lease_expires_at), count(*), array_agg(task_id) from claimed having count(*) > 0
)
select c.*, (select kid from interlock.signing_keys where retired_at is null) as kid from claimed c;

-- name: claim_ranges
-- Claims everything queued in ranges of runs. A row without a task holds the fields common to all tasks of its range.
with moment as materialized (
    select interlock.clock() as now, interlock.lease_token(:shard) as lease_token
), ranges as materialized (
    select r.n, r.run_id, r.first, r.last, j.job_id, j.org_id, j.xmin::text as job_version,
           m.now + make_interval(secs => j.timeout_seconds) as timeout_at,
           m.now + make_interval(secs => least(j.lease_seconds, j.timeout_seconds)) as lease_expires_at
    from moment m, unnest(:run_ids::uuid[], :firsts::bigint[], :lasts::bigint[]) with ordinality as r(run_id, first, last, n)
    join interlock.runs u on u.run_id = r.run_id
    join interlock.jobs j on j.job_id = u.job_id
    where not u.paused and not u.delete_requested and not j.paused and j.max_concurrency is null and j.max_concurrency_per_key is null
      and (:runtimes::text[] is null or j.runtime = any(:runtimes::text[]))
    order by r.run_id, r.first
), claimed as (
    update interlock.tasks t
    set status = 'Running', lease_token = m.lease_token, worker_id = :worker_id, started_at = m.now,
        ended_at = null, parked = false, late_reply = false, progress = null, progress_text = null,
        timeout_at = r.timeout_at, lease_expires_at = r.lease_expires_at
    from moment m, ranges r
    where t.shard = :shard and t.run_id = r.run_id and t.task_index between r.first and r.last and t.status = 'Queued'
    returning r.n, t.task_id, t.task_index, t.attempt, t.payload
), found as (
    select n, count(*) as tasks, min(task_index) as first, max(task_index) as last from claimed group by n
), counted as (
    insert into interlock.run_deltas (run_id, queued, running)
    select r.run_id, -sum(f.tasks), sum(f.tasks) from found f join ranges r on r.n = f.n group by r.run_id
), alarm as (
    insert into interlock.lease_alarms (shard, due_at, tasks, run_id, first_index, last_index)
    select :shard, r.lease_expires_at, f.tasks, r.run_id, f.first, f.last from found f join ranges r on r.n = f.n
)
select r.n, null::uuid as task_id, null::bigint as task_index, null::int as attempt,
       json_build_object('job_id', r.job_id, 'job_version', r.job_version, 'org_id', r.org_id, 'run_id', r.run_id,
                         'lease_token', m.lease_token, 'lease_expires_at', r.lease_expires_at,
                         'timeout_at', r.timeout_at,
                         'kid', (select kid from interlock.signing_keys where retired_at is null)) as payload
from found f join ranges r on r.n = f.n, moment m
union all
select n, task_id, task_index, attempt, payload from claimed;

-- name: claim_range_start
-- Claims the first `most` tasks of a range, for a worker that has no room for all of it.
with moment as materialized (
    select interlock.clock() as now, interlock.lease_token(:shard) as lease_token
), picked as materialized (
    select t.task_id, j.lease_seconds, j.timeout_seconds, j.xmin::text as version
    from interlock.tasks t
    join interlock.jobs j on j.job_id = t.job_id
    where t.shard = :shard and t.run_id = :run_id and t.status = 'Queued'
      and t.task_index between :first::bigint and :last::bigint
      and (select not u.paused and not u.delete_requested from interlock.runs u where u.run_id = :run_id) and not j.paused
      and j.max_concurrency is null and j.max_concurrency_per_key is null
      and (:runtimes::text[] is null or j.runtime = any(:runtimes::text[]))
    order by t.task_index
    limit :limit
    for no key update of t skip locked
), claimed as (
    update interlock.tasks t
    set status = 'Running', lease_token = m.lease_token, worker_id = :worker_id, started_at = m.now,
        ended_at = null, parked = false, late_reply = false, progress = null, progress_text = null,
        timeout_at = m.now + make_interval(secs => p.timeout_seconds),
        lease_expires_at = m.now + make_interval(secs => least(p.lease_seconds, p.timeout_seconds))
    from moment m, picked p
    where t.shard = :shard and t.task_id = p.task_id
    returning t.task_id, t.org_id, t.job_id, p.version as job_version, t.run_id, t.task_index, t.attempt, t.lease_token,
              t.lease_expires_at, t.timeout_at, t.payload
), counted as (
    insert into interlock.run_deltas (run_id, queued, running)
    select run_id, -count(*), count(*) from claimed where run_id is not null group by run_id
), alarm as (
    insert into interlock.lease_alarms (shard, due_at, tasks, run_id, first_index, last_index)
    select :shard, min(lease_expires_at), count(*), run_id, min(task_index), max(task_index) from claimed group by run_id
)
select c.*, (select kid from interlock.signing_keys where retired_at is null) as kid from claimed c;

-- name: next_queued$
-- The first index of a range left to claim. Tasks of a paused run or DAG get new messages when it is resumed.
select t.task_index from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
where t.shard = :shard and t.run_id = :run_id and t.status = 'Queued' and not t.parked
  and t.task_index between :first::bigint and :last::bigint
  and (select not u.paused and not u.delete_requested from interlock.runs u where u.run_id = :run_id) and not j.paused
  and (:runtimes::text[] is null or j.runtime = any(:runtimes::text[]))
order by t.task_index limit 1;

-- name: lock_capped_jobs
-- Serialises claims and completions of a capped job. One lock order, so that two batches cannot deadlock.
select job_id from interlock.jobs
where job_id = any(:job_ids::uuid[]) and (max_concurrency is not null or max_concurrency_per_key is not null)
order by job_id
for no key update;

-- name: claim_capped
-- Runs under lock_capped_jobs. A task that finds no slot is parked: it has no message until a slot is freed. The
-- statement waits for locked rows, because the caller acks the messages: every task that is still queued must be
-- claimed or parked here. A transaction that holds rows of tasks must therefore not wait for the row of their job.
with moment as materialized (
    select interlock.clock() as now, interlock.lease_token(:shard) as lease_token
), used as (
    select job_id, slot_key, count(*) as n from interlock.slots where job_id = any(:job_ids::uuid[])
    group by job_id, slot_key
), candidates as materialized (
    select t.task_id, t.job_id, t.slot_key, t.queued_at, t.task_index, j.lease_seconds, j.timeout_seconds,
           j.max_concurrency, j.max_concurrency_per_key, j.xmin::text as version
    from interlock.tasks t
    join interlock.jobs j on j.job_id = t.job_id
    where t.shard = :shard and t.task_id = any(:task_ids::uuid[]) and t.status = 'Queued'
      and t.job_id = any(:job_ids::uuid[])
      and (t.run_id is null or (select not u.paused and not u.delete_requested from interlock.runs u where u.run_id = t.run_id))
      and not j.paused
      and (:runtimes::text[] is null or j.runtime = any(:runtimes::text[]))
    order by t.run_id, t.task_index, t.task_id
    for no key update of t
), within_key as (
    select c.*, row_number() over (partition by job_id, slot_key order by queued_at, task_index, task_id)
                + coalesce((select n from used u where u.job_id = c.job_id and u.slot_key = c.slot_key), 0) as key_rank
    from candidates c
), ranked as (
    select k.*, row_number() over (partition by job_id order by queued_at, task_index, task_id)
                + coalesce((select sum(n) from used u where u.job_id = k.job_id), 0) as rank
    from within_key k
    where max_concurrency_per_key is null or slot_key is null or key_rank <= max_concurrency_per_key
), admitted as (
    select * from ranked where max_concurrency is null or rank <= max_concurrency
), chosen as (
    -- A worker may have room for fewer tasks than there are slots. The others keep their message.
    select * from admitted order by task_index, task_id limit :limit::int
), claimed as (
    update interlock.tasks t
    set status = 'Running', lease_token = m.lease_token, worker_id = :worker_id,
        started_at = m.now, ended_at = null, parked = false, late_reply = false,
        timeout_at = m.now + make_interval(secs => a.timeout_seconds),
        lease_expires_at = m.now + make_interval(secs => least(a.lease_seconds, a.timeout_seconds)),
        progress = null, progress_text = null
    from moment m, chosen a
    where t.shard = :shard and t.task_id = a.task_id
    returning t.task_id, t.org_id, t.job_id, a.version as job_version, t.run_id, t.task_index, t.attempt,
              t.lease_token, t.lease_expires_at, t.timeout_at, t.payload, t.slot_key
), taken as (
    insert into interlock.slots (task_id, job_id, slot_key) select task_id, job_id, slot_key from claimed
), counted as (
    insert into interlock.run_deltas (run_id, queued, running)
    select run_id, -count(*), count(*) from claimed where run_id is not null group by run_id
), alarm as (
    insert into interlock.lease_alarms (shard, due_at, tasks, task_ids)
    select :shard, min(lease_expires_at), count(*), array_agg(task_id) from claimed having count(*) > 0
), parked as (
    update interlock.tasks t set parked = true
    from candidates c
    where t.shard = :shard and t.task_id = c.task_id
      and not exists (select 1 from admitted a where a.task_id = c.task_id)
)
select c.*, (select kid from interlock.signing_keys where retired_at is null) as kid from claimed c;

-- name: claim_states
-- Explains why tasks of a claim were not claimed.
select t.task_id, t.job_id, t.status, t.dead, t.parked,
       j.paused or coalesce((select u.paused or u.delete_requested from interlock.runs u where u.run_id = t.run_id), false)
           as held_back,
       j.max_concurrency is not null or j.max_concurrency_per_key is not null as capped,
       :runtimes::text[] is null or j.runtime = any(:runtimes::text[]) as allowed
from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
where t.shard = :shard and t.task_id = any(:task_ids::uuid[]);

-- name: fail_unclaimable
-- Queued tasks that no claim can take, such as one with a concurrency key too long for an index, become dead letters.
with ended as (
    update interlock.tasks t
    set status = 'Failed', dead = true, ended_at = interlock.clock(), late_reply = false
    where t.shard = :shard and t.task_id = any(:task_ids::uuid[]) and t.status = 'Queued'
    returning t.task_id, t.run_id, t.attempt
), history as (
    insert into interlock.attempts (shard, task_id, attempt, lease_token, outcome, started_at, ended_at, error_class,
                                    error_message)
    select :shard, task_id, attempt, interlock.lease_token(:shard), 'Failed', interlock.clock(), interlock.clock(),
           'Unclaimable', 'the task cannot be claimed because of its payload or its concurrency key'
    from ended
), counted as (
    insert into interlock.run_deltas (run_id, queued, failed, dead, error_class, errors)
    select run_id, -count(*), count(*), count(*), 'Unclaimable', count(*) from ended where run_id is not null group by run_id
)
select task_id from ended;

-- name: claimed_jobs
select job_id, xmin::text as version, dag_name, name, operator, config, outputs, wait_for_all, partition,
       jsonb_array_length(inputs) as inputs
from interlock.jobs where job_id = any(:job_ids::uuid[]);

-- name: readers_among
-- The tasks whose jobs have inputs.
select t.task_id, t.job_id
from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
where t.shard = :shard and t.task_id = any(:task_ids::uuid[]) and j.inputs <> '[]';

-- name: fetch_task^
select t.task_id, t.org_id, t.job_id, t.run_id, t.task_index, t.attempt, t.payload, t.status, t.timeout_at,
       t.cancel_requested, j.dag_name, j.name, j.operator, j.config, j.outputs, j.wait_for_all, j.partition,
       jsonb_array_length(j.inputs) as inputs
from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
where t.shard = :shard and t.task_id = :task_id
  and (:runtimes::text[] is null or j.runtime = any(:runtimes::text[]));

-- name: heartbeat
-- The lease never extends past the hard timeout: an attempt that still sends heartbeats then expires like any other.
with moment as materialized (
    select interlock.clock() as now
), input as materialized (
    select i.* from unnest(:task_ids::uuid[], :attempts::int[], :leases::uuid[], :progresses::float8[], :texts::text[])
        as i(task_id, attempt, lease_token, progress, progress_text)
    join interlock.tasks t on t.shard = :shard and t.task_id = i.task_id
    where i.attempt between 1 and 2147483647
    order by t.run_id, t.task_index, t.task_id
)
update interlock.tasks t
set lease_expires_at = least(t.timeout_at, m.now + make_interval(secs => j.lease_seconds)),
    progress = coalesce(i.progress, t.progress), progress_text = coalesce(i.progress_text, t.progress_text)
from moment m, input i, interlock.jobs j
where t.shard = :shard and t.task_id = i.task_id and j.job_id = t.job_id
  and t.status = 'Running' and t.attempt = i.attempt and t.lease_token = i.lease_token
  and t.timeout_at > m.now
returning t.task_id, t.org_id, t.attempt, t.lease_expires_at, t.cancel_requested, j.outputs,
          j.source is not null and exists (select 1 from interlock.pauses p where p.job_id = j.job_id
                                           and (not p.bulk or j.priority = 1)) as paused;

-- name: complete_by_index$
-- The common case, for tasks of runs: completed, still held, no side effects. The count shows the caller whether all of
-- them qualified; the rest go through complete. So do tasks of capped jobs and of DAGs, because complete frees their
-- slots and marks their scopes as done.
with moment as materialized (
    select interlock.clock() as now
), groups as materialized (
    select g.* from unnest(:run_ids::uuid[], :attempts::int[], :leases::uuid[], :firsts::int[], :lasts::int[],
                           :packs::uuid[])
        as g(run_id, attempt, lease_token, first, last, pack)
    join interlock.runs u on u.run_id = g.run_id
    join interlock.jobs j on j.job_id = u.job_id and j.max_concurrency is null and j.max_concurrency_per_key is null
         and j.dag_name is null
), input as materialized (
    select g.run_id, g.attempt, g.lease_token, g.pack, i.* from groups g
    cross join lateral unnest((:indexes::bigint[])[g.first : g.last], (:results::text[])[g.first : g.last],
                              (:offsets::int[])[g.first : g.last], (:lengths::int[])[g.first : g.last])
        as i(task_index, result, pack_offset, pack_length)
    where i.task_index between 0 and 4611686018427387904
    order by g.run_id, i.task_index
), ended as (
    update interlock.tasks t
    set status = 'Completed', ended_at = m.now, lease_expires_at = null, result = i.result::json,
        pack = case when i.pack_length is not null then i.pack end, pack_offset = i.pack_offset,
        pack_length = i.pack_length
    from moment m, input i
    where t.shard = :shard and t.run_id = i.run_id and t.task_index = i.task_index
      and t.status = 'Running' and t.attempt = i.attempt and t.lease_token = i.lease_token
    returning t.run_id
), per_run as (
    select run_id, count(*) as tasks from ended group by run_id
), counted as (
    insert into interlock.run_deltas (run_id, running, completed) select run_id, -tasks, tasks from per_run
)
select coalesce(sum(tasks), 0)::bigint as tasks from per_run;

-- name: complete
-- Accepts the holder of the current lease, expired or not, and after the reaper the last holder as long as no newer
-- attempt has started. A failure after a cancel request counts as the cancel.
--
-- A late report withdraws a dead letter that the reaper made. The task stays dead once a user has canceled its run or
-- deleted its job, while retention deletes its run, and after its scope of a DAG was given to another task. Scalar
-- subqueries are never hashed: each looks up one row, and only for a dead letter.
with moment as materialized (
    select interlock.clock() as now
), input as materialized (
    select i.* from unnest(:task_ids::uuid[], :attempts::int[], :leases::uuid[], :statuses::text[],
                           :error_classes::text[], :error_messages::text[], :results::text[], :crashes::text[],
                           :packs::uuid[], :offsets::int[], :lengths::int[])
        as i(task_id, attempt, lease_token, status, error_class, error_message, result, crash, pack, pack_offset,
             pack_length)
    join interlock.tasks t on t.shard = :shard and t.task_id = i.task_id
    where i.attempt between 1 and 2147483647
    order by t.run_id, t.task_index, t.task_id
), ended as (
    update interlock.tasks t
    set status = case when i.status = 'Failed' and t.cancel_requested then 'Canceled'
                      else i.status::interlock.task_status end,
        attempt = i.attempt, ended_at = m.now, lease_expires_at = null, late_reply = false, parked = false,
        result = i.result::json, pack = i.pack, pack_offset = i.pack_offset, pack_length = i.pack_length,
        dead = i.status = 'Failed' and not t.cancel_requested
               and (i.attempt >= t.max_attempts or coalesce(i.error_class = any(j.non_retryable), false)),
        retry_at = case when i.status = 'Failed' and not t.cancel_requested and i.attempt < t.max_attempts
                             and not coalesce(i.error_class = any(j.non_retryable), false)
                        then m.now + interlock.backoff(i.attempt, j.backoff_seconds, j.backoff_factor,
                                                                   j.backoff_cap_seconds, j.jitter, random()) end
    from moment m, input i, interlock.jobs j
    where t.shard = :shard and t.task_id = i.task_id and j.job_id = t.job_id and t.lease_token = i.lease_token
      and ((t.status = 'Running' and t.attempt = i.attempt)
           or (t.late_reply
               and ((t.status = 'Failed' and t.attempt = i.attempt)
                    or (t.status = 'Queued' and t.attempt = i.attempt + 1))
               and (not t.dead
                    or (j.deleted_at is null
                        and (t.run_id is null
                             or (select not u.delete_requested and (not u.cancel_requested or u.reason is not null)
                                 from interlock.runs u where u.run_id = t.run_id))
                        and (j.dag_name is null or j.source is not null
                             or (select true from interlock.materialisations m where m.task_id = t.task_id limit 1))))))
    returning t.task_id, t.org_id, t.job_id, t.run_id, t.attempt, t.lease_token, t.status, t.dead, t.retry_at,
              t.worker_id, t.started_at, t.ended_at, old.status as was, old.late_reply as late, old.dead as was_dead,
              i.error_class, i.error_message, i.crash, t.slot_key,
              j.max_concurrency is not null or j.max_concurrency_per_key is not null as capped,
              j.dag_name is not null and t.status = 'Completed' as scoped, not j.current and j.active as building
), history as (
    insert into interlock.attempts (shard, task_id, attempt, lease_token, outcome, worker_id, started_at, ended_at,
                                    error_class, error_message, crash)
    select :shard, task_id, attempt, lease_token, status::text::interlock.outcome, worker_id, started_at, ended_at,
           error_class, error_message, crash::json
    from ended where status <> 'Completed'
    on conflict (task_id, attempt, lease_token) do update
    set outcome = excluded.outcome, ended_at = excluded.ended_at, error_class = excluded.error_class,
        error_message = excluded.error_message, crash = excluded.crash
), corrected as (
    -- The reaper had recorded this attempt as lost.
    delete from interlock.attempts a using ended e
    where e.late and e.status = 'Completed'
      and a.task_id = e.task_id and a.attempt = e.attempt and a.lease_token = e.lease_token
), freed as (
    -- By an array: a join that was planned while there were hardly any slots reads all of them for every completion.
    delete from interlock.slots where task_id = any(array(select task_id from ended where capped))
    returning job_id, slot_key
), open as (
    -- A queued task may have been woken for a slot. The next parked task gets that slot.
    select job_id, slot_key from freed
    union all
    select job_id, slot_key from ended where capped and was = 'Queued'
), counted as (
    insert into interlock.run_deltas (run_id, queued, running, completed, failed, dead, canceled)
    select run_id, -count(*) filter (where was = 'Queued'), -count(*) filter (where was = 'Running'),
           count(*) filter (where status = 'Completed'),
           count(*) filter (where status = 'Failed') - count(*) filter (where was = 'Failed'),
           count(*) filter (where dead) - count(*) filter (where was_dead), count(*) filter (where status = 'Canceled')
    -- A dead letter that stays one changes no counter and must not reopen its run.
    from ended where run_id is not null and not (dead and was_dead) group by run_id
), classed as (
    -- Dead tasks by error class. A late report withdraws what the reaper has counted for its attempt, and may replace it.
    insert into interlock.run_deltas (run_id, error_class, errors)
    select run_id, error_class, sum(tasks) from (
        select run_id, coalesce(error_class, '(none)') as error_class, 1 as tasks
        from ended where run_id is not null and dead
        union all
        select e.run_id, coalesce(a.error_class, '(none)'), -1
        from ended e
        left join interlock.attempts a
            on a.task_id = e.task_id and a.attempt = e.attempt and a.lease_token = e.lease_token
        where e.run_id is not null and e.was_dead
    ) c group by run_id, error_class having sum(tasks) <> 0
), scopes as (
    update interlock.materialisations set done_commit = input_commit
    where task_id = any(array(select task_id from ended where scoped))
), streams as (
    -- A stream continues from the cursor that this task has read up to.
    update interlock.job_cursors set committed = upto, upto = null, task_id = null
    where task_id = any(array(select task_id from ended where scoped))
    returning job_id
), routed as (
    insert into interlock.outbox (kind, target, body)
    select 'route', '', json_build_object('jobs', array_agg(distinct job_id)) from streams having count(*) > 0
    returning 1
), told as (
    select pg_notify('interlock_outbox', 'route') from routed
    union all
    -- A version that is being built may be complete with this task.
    (select pg_notify('interlock_outbox', 'cutover') from ended where scoped and building limit 1)
)
select e.task_id, e.org_id, e.run_id, e.status, e.was, e.retry_at, e.attempt, (select count(*) from told) as told,
       (select array_agg(distinct job_id) from open) as freed_jobs,
       (select array_agg(distinct slot_key) from open) as freed_keys
from ended e;

-- name: runs_of
-- The runs of these tasks, without tasks that have no run.
select task_id, run_id from interlock.tasks
where shard = :shard and task_id = any(:task_ids::uuid[]) and run_id is not null;

-- name: fence_states
-- For the error of a refused write: which part of its fence is stale.
select task_id, status, attempt, lease_token, late_reply, dead, cancel_requested
from interlock.tasks where shard = :shard and task_id = any(:task_ids::uuid[]);

-- name: lock_attempt^
-- Locks the attempt while its events or batches are written, so that it cannot lose its lease in between.
select t.org_id, t.job_id, j.outputs
from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
where t.shard = :shard and t.task_id = :task_id and t.attempt = :attempt and t.lease_token = :lease_token
  and t.status = 'Running'
for no key update of t;

-- name: outputs_of
select t.task_id, t.org_id, j.outputs from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id
where t.shard = :shard and t.task_id = any(:task_ids::uuid[]);

-- name: release
-- A drain releases attempts: the same attempt number runs again under another lease.
with input as materialized (
    select i.* from unnest(:task_ids::uuid[], :attempts::int[], :leases::uuid[]) as i(task_id, attempt, lease_token)
    join interlock.tasks t on t.shard = :shard and t.task_id = i.task_id
    where i.attempt between 1 and 2147483647
    order by t.run_id, t.task_index, t.task_id
), given_back as (
    update interlock.tasks t
    set status = case when t.cancel_requested then 'Canceled'::interlock.task_status else 'Queued' end,
        ended_at = case when t.cancel_requested then interlock.clock() end,
        lease_expires_at = null, queued_at = interlock.clock(), started_at = null
    from input i
    where t.shard = :shard and t.task_id = i.task_id and t.status = 'Running'
      and t.attempt = i.attempt and t.lease_token = i.lease_token
    returning t.task_id, t.run_id, t.attempt, t.lease_token, t.status, t.worker_id, old.started_at as began
), history as (
    insert into interlock.attempts (shard, task_id, attempt, lease_token, outcome, worker_id, started_at, ended_at)
    select :shard, task_id, attempt, lease_token,
           case status when 'Canceled' then 'Canceled'::interlock.outcome else 'Released' end,
           worker_id, began, interlock.clock()
    from given_back
), freed as (
    delete from interlock.slots where task_id = any(array(select task_id from given_back)) returning job_id, slot_key
), counted as (
    insert into interlock.run_deltas (run_id, queued, running, canceled)
    select run_id, count(*) filter (where status = 'Queued'), -count(*), count(*) filter (where status = 'Canceled')
    from given_back where run_id is not null group by run_id
)
select task_id, run_id, status, (select array_agg(distinct job_id) from freed) as freed_jobs,
       (select array_agg(distinct slot_key) from freed) as freed_keys
from given_back;

-- name: reap
-- Ends attempts whose lease or hard timeout has passed, among those with a due alarm. Tasks that still run get another
-- alarm. A locked row is checked again in the next pass. The scan starts where the last one of the shard ended: see
-- LowWater.
with due as materialized (
    select ctid as alarm, due_at, tasks, run_id, first_index, last_index, task_ids from interlock.lease_alarms
    where shard = :shard and due_at > :since::timestamptz and due_at <= interlock.clock()
    order by due_at
    limit :limit
    for update skip locked
), rung as materialized (
    -- Many small alarms or a few large ones, so that a pass stays short.
    select * from (select d.*, sum(tasks) over (order by due_at, alarm) - tasks as before from due d) d
    where before < :limit
), stopped as (
    delete from interlock.lease_alarms where ctid = any(array(select alarm from rung))
), running as materialized (
    select r.alarm, t.task_id, t.run_id, t.task_index, t.lease_expires_at
    from rung r
    join interlock.tasks t on t.shard = :shard and t.run_id = r.run_id
         and t.task_index between r.first_index and r.last_index and t.status = 'Running'
    union all
    select r.alarm, t.task_id, null, null, t.lease_expires_at
    from rung r
    cross join lateral unnest(r.task_ids) as i(task_id)
    join interlock.tasks t on t.shard = :shard and t.task_id = i.task_id and t.status = 'Running'
), expired as (
    select t.task_id from interlock.tasks t
    where t.shard = :shard
      and t.task_id = any(array(select task_id from running where lease_expires_at <= interlock.clock() order by task_id))
      and t.status = 'Running' and t.lease_expires_at <= interlock.clock()
    for no key update skip locked
), ended as (
    update interlock.tasks t
    set status = case when t.cancel_requested then 'Canceled'::interlock.task_status else 'Failed' end,
        lease_expires_at = null, late_reply = not t.cancel_requested, ended_at = interlock.clock(),
        dead = not t.cancel_requested and t.attempt >= t.max_attempts,
        retry_at = case when not t.cancel_requested and t.attempt < t.max_attempts
                        then interlock.clock() + interlock.backoff(t.attempt, j.backoff_seconds, j.backoff_factor,
                                                                   j.backoff_cap_seconds, j.jitter, random()) end
    from expired x, interlock.jobs j
    where t.shard = :shard and t.task_id = x.task_id and j.job_id = t.job_id
    returning t.task_id, t.job_id, t.run_id, t.attempt, t.lease_token, t.status, t.dead, t.worker_id, t.started_at,
              t.timeout_at <= interlock.clock() as timed_out, j.timeout_seconds
), history as (
    insert into interlock.attempts (shard, task_id, attempt, lease_token, outcome, worker_id, started_at, ended_at,
                                    error_class, error_message)
    select :shard, task_id, attempt, lease_token,
           case when status = 'Canceled' then 'Canceled' when timed_out then 'TimedOut'
                else 'LeaseExpired' end::interlock.outcome,
           worker_id, started_at, interlock.clock(),
           case when timed_out then 'HardTimeout' else 'LeaseExpired' end,
           case when timed_out then format('ran longer than timeout_seconds = %s', timeout_seconds)
                else 'the worker stopped sending heartbeats' end
    from ended
), freed as (
    delete from interlock.slots where task_id = any(array(select task_id from ended)) returning job_id, slot_key
), counted as (
    insert into interlock.run_deltas (run_id, running, failed, dead, canceled)
    select run_id, -count(*), count(*) filter (where status = 'Failed'), count(*) filter (where dead),
           count(*) filter (where status = 'Canceled')
    from ended where run_id is not null group by run_id
), classed as (
    insert into interlock.run_deltas (run_id, error_class, errors)
    select run_id, case when timed_out then 'HardTimeout' else 'LeaseExpired' end, count(*)
    from ended where run_id is not null and dead group by 1, 2
), rearmed as (
    insert into interlock.lease_alarms (shard, due_at, tasks, run_id, first_index, last_index, task_ids)
    select :shard, greatest(min(lease_expires_at), interlock.clock()), count(*), run_id, min(task_index), max(task_index),
           case when run_id is null then array_agg(task_id) end
    from running where task_id not in (select task_id from ended)
    group by alarm, run_id
)
select e.task_id, e.run_id, e.status, e.dead, e.timed_out, d.alarms = :limit or d.alarms > r.alarms as more,
       coalesce(r.reached, interlock.clock()) as reached,
       (select array_agg(distinct job_id) from freed) as freed_jobs,
       (select array_agg(distinct slot_key) from freed) as freed_keys
from (select count(*) as alarms from due) d
cross join (select count(*) as alarms, max(due_at) as reached from rung) r
left join ended e on true;

-- name: requeue_due
-- Failed tasks whose backoff has elapsed. The lease token stays: until the next claim the last holder may still report.
-- The scan starts where the last one ended: see LowWater.
with due as (
    select t.task_id from interlock.tasks t
    where t.shard = :shard and t.retry_at > :since::timestamptz and t.retry_at <= interlock.clock()
    order by t.retry_at
    limit :limit
    for no key update skip locked
), requeued as (
    update interlock.tasks t
    set status = 'Queued', attempt = t.attempt + 1, retry_at = null, ended_at = null, queued_at = interlock.clock()
    from due d
    where t.shard = :shard and t.task_id = d.task_id
    returning t.task_id, t.run_id, old.retry_at as was_due_at
), counted as (
    insert into interlock.run_deltas (run_id, queued, failed)
    select run_id, count(*), -count(*) from requeued where run_id is not null group by run_id
)
select r.task_id, c.reached
from (select coalesce(max(was_due_at), interlock.clock()) as reached from requeued) c left join requeued r on true;

-- name: cancel
-- Waiting tasks end now. Running tasks are asked to stop: the attempt learns of it with its next heartbeat.
with asked as materialized (
    select task_id from interlock.tasks where shard = :shard and task_id = any(:task_ids::uuid[])
    order by run_id, task_index, task_id
), ended as (
    update interlock.tasks t
    set cancel_requested = true, parked = false, retry_at = null, late_reply = false,
        status = case when t.status = 'Running' then t.status else 'Canceled' end,
        ended_at = case when t.status = 'Running' then null else interlock.clock() end
    from asked a
    where t.shard = :shard and t.task_id = a.task_id and t.org_id = :org_id
      and (t.status in ('Queued', 'Running') or (t.status = 'Failed' and not t.dead))
      and not t.cancel_requested
    returning t.task_id, t.run_id, t.status, old.status as was
), counted as (
    insert into interlock.run_deltas (run_id, queued, failed, canceled)
    select run_id, -count(*) filter (where was = 'Queued'), -count(*) filter (where was = 'Failed'), count(*)
    from ended where run_id is not null and status = 'Canceled' group by run_id
)
select task_id, status from ended;

-- name: redrive
-- Queues failed tasks again: a waiting one immediately, a dead letter with a fresh set of attempts.
with asked as materialized (
    select task_id from interlock.tasks where shard = :shard and task_id = any(:task_ids::uuid[])
    order by run_id, task_index, task_id
), revived as (
    update interlock.tasks t
    set status = 'Queued', attempt = t.attempt + 1, dead = false, retry_at = null, ended_at = null,
        late_reply = false, queued_at = interlock.clock(),
        max_attempts = case when t.dead then t.attempt + j.max_attempts else t.max_attempts end
    from asked a, interlock.jobs j
    where t.shard = :shard and t.task_id = a.task_id and t.org_id = :org_id and j.job_id = t.job_id
      and t.status = 'Failed'
    returning t.task_id, t.run_id, old.dead as was_dead
), counted as (
    insert into interlock.run_deltas (run_id, queued, failed, dead)
    select run_id, count(*), -count(*), -count(*) filter (where was_dead)
    from revived where run_id is not null group by run_id
), classed as (
    insert into interlock.run_deltas (run_id, error_class, errors)
    select r.run_id, coalesce(a.error_class, '(none)'), -count(*)
    from revived r
    left join lateral (select error_class from interlock.attempts a where a.task_id = r.task_id
                       order by a.attempt desc, a.ended_at desc limit 1) a on true
    where r.run_id is not null and r.was_dead
    group by 1, 2
), reopened as (
    update interlock.runs r
    set ended_at = null, state = interlock.live_state(r.paused, r.ingesting), cancel_requested = false, reason = null
    where r.run_id in (select run_id from revived) and r.ended_at is not null
)
select task_id from revived;

-- name: unpark
-- Wakes the oldest tasks, as many as there are slots. For each key with a freed slot it also wakes tasks of that key,
-- however many tasks of busier keys are older. If it wakes one too many, the claim parks it again. Slots are counted
-- once, not per waiting task.
with used as materialized (
    select job_id, slot_key, count(*) as n from interlock.slots where job_id = any(:job_ids::uuid[])
    group by job_id, slot_key
), room as materialized (
    select j.job_id, j.max_concurrency_per_key as per_key,
           coalesce(j.max_concurrency - coalesce((select sum(n) from used u where u.job_id = j.job_id), 0), 1000) as free
    from interlock.jobs j where j.job_id = any(:job_ids::uuid[])
), waiting as (
    select t.*, r.job_id, r.free, r.per_key,
           row_number() over (partition by r.job_id, t.slot_key order by t.priority, t.queued_at) as key_row
    from room r
    cross join lateral (
        (select t.task_id, t.run_id, t.task_index, t.slot_key, t.priority, t.queued_at from interlock.tasks t
         where t.shard = :shard and t.job_id = r.job_id and t.parked
         order by t.priority, t.queued_at limit 1000)
        union
        select k.* from unnest(:keys::text[]) as key
        cross join lateral (
            select t.task_id, t.run_id, t.task_index, t.slot_key, t.priority, t.queued_at from interlock.tasks t
            where t.shard = :shard and t.job_id = r.job_id and t.parked and t.slot_key = key
            order by t.priority, t.queued_at limit coalesce(r.per_key, 0)
        ) k
    ) t
    where r.free > 0
), eligible as (
    select w.*, row_number() over (partition by w.job_id order by w.priority, w.queued_at) as row
    from waiting w
    left join used u on u.job_id = w.job_id and u.slot_key = w.slot_key
    where w.per_key is null or w.slot_key is null or w.key_row <= w.per_key - coalesce(u.n, 0)
), woken as materialized (
    select task_id from eligible where row <= free
    order by run_id, task_index, task_id
)
update interlock.tasks t set parked = false
from woken w
where t.shard = :shard and t.task_id = w.task_id and t.status = 'Queued'
returning t.task_id;

-- name: operator_of$
-- The operator of a task of shard 0 by its id, or of a run: a task of a run with limits is named by run and index.
select j.operator from interlock.jobs j
where j.org_id = :org_id and j.job_id = coalesce(
    (select t.job_id from interlock.tasks t where t.shard = 0 and t.task_id = :task_id and t.org_id = :org_id),
    (select r.job_id from interlock.runs r where r.run_id = :run_id and r.org_id = :org_id));
