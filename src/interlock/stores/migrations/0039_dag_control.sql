-- Pausing and deleting DAGs, lists of runs and ids by prefix, errors by class, and the origin of rerun tasks.

-- The runs of an org, newest first, and ids by prefix. The org is an expression, so that no plan reads all runs of an org
-- for those of one job.
create index runs_by_org on interlock.runs ((org_id::text), run_id);
create index runs_sharded on interlock.runs (org_id, shard) where shard <> 0;

-- A paused DAG hands out no tasks. A deleted one is hidden; its row stays, with the owner of its published names.
alter table interlock.dags
    add column paused_at    timestamptz,
    add column paused_by    text,
    add column pause_reason text,
    add column deleted_at   timestamptz,
    add column deleted_by   text;

-- Its DAG is paused: no claim takes a task of it.
alter table interlock.jobs add column paused boolean not null default false;
-- Resumed: queued tasks without a run from this id on are still to get a message.
alter table interlock.jobs add column wake_from uuid;
create index jobs_waking on interlock.jobs (job_id) where wake_from is not null;

-- Dead tasks by the error class of their last attempt: {class: tasks}. Deltas carry one class each.
alter table interlock.runs add column errors jsonb not null default '{}';
alter table interlock.run_deltas add column error_class text, add column errors int not null default 0;

-- Error classes are named by user code, so their number is limited: the rest is counted as '(other)'.
create function interlock.add_errors(known jsonb, change jsonb) returns jsonb language sql immutable parallel safe as
$$ select coalesce(jsonb_object_agg(error_class, tasks) filter (where tasks > 0), '{}')
   from (select case when known ? c.key or (c.tasks > 0 and c.fresh <= 100 - (select count(*) from jsonb_object_keys(known)))
                     then c.key else '(other)' end as error_class, sum(c.tasks) as tasks
         from (select key, value::bigint as tasks, 0 as fresh from jsonb_each_text(known)
               union all
               select key, value::bigint,
                      row_number() over (partition by known ? key or value::bigint <= 0 order by value::bigint desc, key)
               from jsonb_each_text(change)) c
         group by 1) summed $$;

-- For a rerun: the indexes of its tasks in the first run that had them, in stretches.
alter table interlock.runs add column rerun_of uuid;
create table interlock.run_origins (
    run_id      uuid not null references interlock.runs on delete cascade,
    first_index bigint not null,
    origins     bigint[] not null,                  -- of the tasks from first_index on
    primary key (run_id, first_index)
);
alter table interlock.reruns add column copied bigint not null default 0; -- tasks copied so far
