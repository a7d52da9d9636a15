-- Claims and completions of a run's tasks change no indexed value, so that Postgres updates a row within its page and
-- touches no index: half the processor time, half the WAL, and no index that grows with every attempt.

-- The status where an index needs it: of tasks of no run, and of what did not go well. Null for the others, so that
-- their usual way through Queued, Running and Completed leaves it as it is.
alter table interlock.tasks add column listed_status interlock.task_status
    generated always as (case when run_id is null or status in ('Failed', 'Canceled') then status end) stored;

drop index interlock.tasks_0_by_run, interlock.tasks_0_by_job, interlock.tasks_0_leases;
create unique index tasks_0_by_run on interlock.tasks_0 (run_id, task_index) where run_id is not null;
create index tasks_0_by_run_status on interlock.tasks_0 (run_id, listed_status, task_index)
    where run_id is not null and listed_status is not null;
create index tasks_0_by_job on interlock.tasks_0 (listed_status, job_id, task_id) where run_id is null;
-- Room on every page for the row of each task as it runs and as it ends.
alter table interlock.tasks_0 set (fillfactor = 35);

-- When to look at leases: one row per claim, written with it. A heartbeat moves only the lease in the task's row; the
-- reaper that an alarm calls finds it moved, and sets the next alarm. Tasks are named by a range of a run or by id.
create table interlock.lease_alarms (
    due_at      timestamptz not null,
    tasks       int not null,
    run_id      uuid,
    first_index bigint,
    last_index  bigint,
    task_ids    uuid[]
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index lease_alarms_due on interlock.lease_alarms (due_at);
insert into interlock.lease_alarms (due_at, tasks, task_ids)
select lease_expires_at, 1, array[task_id] from interlock.tasks where status = 'Running';

-- How far the cancel of a run has come: every task below was asked.
alter table interlock.runs add column cancel_index bigint not null default 0;
drop index interlock.runs_canceling;
create index runs_canceling on interlock.runs (run_id)
    where cancel_requested and ended_at is null and cancel_index <= last_index;
create index runs_busy on interlock.runs (job_id) where running <> 0;

-- The place within the run or job that a sweep has come to.
alter table interlock.sweeps add column position bigint, add column task_id uuid;

-- A late report takes back what the reaper wrote of its attempt. It cannot see that row if it had begun before the reaper
-- was done and waited for it; what the task's own row says then counts.
create or replace view interlock.attempt_history as
    select task_id, attempt, lease_token, outcome, worker_id, started_at, ended_at, error_class, error_message, crash
    from interlock.attempts a
    where not exists (select 1 from interlock.tasks t
                      where t.task_id = a.task_id and t.status = 'Completed' and t.attempt = a.attempt
                        and t.lease_token = a.lease_token)
    union all
    select task_id, attempt, lease_token, case status when 'Completed' then 'Completed'::interlock.outcome end,
           worker_id, started_at, ended_at, null, null, null
    from interlock.tasks
    where status in ('Running', 'Completed') and started_at is not null;
