-- What attempts print: stdout, stderr, logging and tracebacks, in chunks.

create table interlock.task_logs (
    task_id     uuid not null,
    attempt     int not null,
    lease_token uuid not null,                      -- a released attempt runs again under its number
    start       bigint not null,                    -- bytes that the attempt had printed before; a gap was left out
    size        int not null,                       -- bytes
    log_id      bigint generated always as identity,
    org_id      uuid not null,
    job_id      uuid not null,
    run_id      uuid,
    text        text,                               -- null: in a pack
    pack        uuid,
    pack_offset int,
    written_at  timestamptz not null default interlock.clock(),
    primary key (task_id, attempt, lease_token, start)
);
comment on table interlock.task_logs is 'Chunks of the logs of attempts; deleted with their task';
-- The log of a run, or of a job of a DAG, and the deletion of a run.
create index task_logs_of_runs on interlock.task_logs (run_id, log_id) where run_id is not null;
create index task_logs_of_jobs on interlock.task_logs (job_id, log_id) where run_id is null;
