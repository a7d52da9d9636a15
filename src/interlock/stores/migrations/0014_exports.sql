-- Exports of whole runs: the rows of its tasks are staged as objects, stretch by stretch, and a task on Spark makes files
-- of them and of the packed results.

create table interlock.exports (
    export_id  uuid primary key default uuidv7(),
    org_id     uuid not null references interlock.orgs,
    job_id     uuid not null,
    run_id     uuid not null,
    format     text not null,
    stretch    int not null,                        -- indexes in one staged object, and so in one file
    last_index bigint not null,
    next_index bigint not null default 0,           -- every task below is staged
    task_id    uuid,                                -- on Spark, once all of them are
    created_at timestamptz not null default interlock.clock()
);
create index exports_by_run on interlock.exports (run_id);
create index exports_staging on interlock.exports (export_id) where task_id is null;
create unique index exports_by_task on interlock.exports (task_id) where task_id is not null;
