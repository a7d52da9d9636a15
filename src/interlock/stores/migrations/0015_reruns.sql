-- Runs of the tasks of another run, while these are copied to a list: once that is complete, the run is ingested as of any
-- other list.

create table interlock.reruns (
    run_id      uuid primary key references interlock.runs on delete cascade,
    org_id      uuid not null,
    of_run      uuid not null,
    statuses    interlock.task_status[],            -- null: whatever they have ended as, or not yet
    error_class text,
    upload_id   uuid not null,
    next_index  bigint not null,                    -- of the other run: every task below was looked at
    last_index  bigint not null,
    parts       json not null default '[]'          -- of the list, as they were written
);
