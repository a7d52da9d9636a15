-- A backfill is a run of the ingest: its scopes are its list.
--
--   POST …/backfills ─► ingests ─► message ─► chunks of scopes ─► shard ─► total ─► latch ─► handed out bit by bit
--
-- All of its tasks are there from the latch on. Which of them have a message is another matter: no more than their job's
-- queue has room for.

alter table interlock.runs
    add column priority smallint,                   -- of its tasks; null: its job's
    add column held_from bigint;                    -- tasks from here on have no message yet; null: all have had theirs
-- Rows of runs are many, those with tasks that are held back few.
create index runs_held on interlock.runs (job_id, run_id) where held_from is not null and ended_at is null;

-- Where the task of a scope lies: a backfill that has taken it over may have a shard of its own.
alter table interlock.materialisations add column task_shard int not null default 0;

-- A source that may have changed since is read on from here; null: where bytes tell.
alter table interlock.ingest_chunks add column reached json;

-- As before, but for tasks that are held back: they wait for room in the queue, and do not fill it.
create or replace function interlock.waiting_tasks(asked_job uuid, most bigint) returns bigint language sql stable as
$$ select least(most,
       (select count(*) from (select from interlock.tasks
                              where shard = 0 and run_id is null and listed_status = 'Queued' and job_id = asked_job
                              limit most) queued)
       + (select count(*) from (select from interlock.tasks
                                where shard = 0 and run_id is null and retry_at is not null and job_id = asked_job
                                limit most) retrying)
       + (select coalesce(sum(greatest(queued + failed - dead - coalesce(last_index + 1 - held_from, 0), 0)), 0)::bigint
          from (select queued, failed, dead, last_index, held_from from interlock.runs
                where job_id = asked_job and ended_at is null limit 1000) live)) $$;

alter table interlock.backfills add column paused boolean not null default false;

-- Of one whose tasks were being made, those that there are become a run that has all of its tasks, and the rest a
-- backfill of its own. Nobody needs to be told: the reconciler of ingests finds it.
with unfinished as materialized (
    select b.*, r.cancel_requested, uuidv7() as rest_id,
           -- As of a new one: see range_size_of in bulk/held.py.
           greatest(1, least(r.range_size, coalesce(j.max_queue_depth / 2, 10000) / 4)) as range_size
    from interlock.backfills b
    join interlock.runs r on r.run_id = b.run_id
    join interlock.jobs j on j.job_id = b.job_id
    where b.state in ('Running', 'Paused')
), latched as (
    update interlock.runs r
    set latched = true, total = u.made,
        state = case when r.state = 'Paused' then 'Running'::interlock.run_state else r.state end
    from unfinished u where r.run_id = u.run_id
), looked_at as (
    insert into interlock.run_deltas (run_id) select run_id from unfinished
), wanted as materialized (
    select * from unfinished where not cancel_requested
), runs as (
    insert into interlock.runs (run_id, org_id, job_id, last_index, range_size, priority, held_from, latched, ingesting,
                                state, created_at)
    select rest_id, org_id, job_id, -1, range_size, priority, 0, false, true,
           interlock.live_state(state = 'Paused', true), created_at
    from wanted
), ingests as (
    insert into interlock.ingests (run_id, org_id, source, created_at)
    select rest_id, org_id,
           json_build_object('kind', 'scopes', 'start', range_start, 'end', range_end,
                             'after', json_build_object('input_index', place_input, 'start', place_start,
                                                        'end', place_end)),
           created_at
    from wanted
)
insert into interlock.backfills (run_id, org_id, job_id, range_start, range_end, priority, reason, requested_by, paused,
                                 total, created_at)
select rest_id, org_id, job_id, range_start, range_end, priority, reason, requested_by, state = 'Paused',
       total - made, created_at
from wanted;

-- What it has come to stands in its run, with everybody else's.
alter table interlock.backfills
    drop column state, drop column place_input, drop column place_start, drop column place_end, drop column made,
    drop column ended_at;
drop type interlock.backfill_state;
