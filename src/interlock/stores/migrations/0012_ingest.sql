-- Runs that are made of a staged list, in steps that a crash may come between.
--
--   POST /v1/uploads ─► PUT ─► POST /v1/jobs ─► ingests ─► message ─► chunks ─► shard ─► total ─► ranges ─► latch
--
-- ingests.step says what was done last. Each step may be done again, and the ledger of chunks lets each in once.

-- Where clients put lists. `sweep_at`: then nobody needs the files any more.
create table interlock.uploads (
    upload_id  uuid primary key default uuidv7(),
    org_id     uuid not null,
    parts      int not null,
    created_at timestamptz not null default interlock.clock(),
    sweep_at   timestamptz not null
);
create index uploads_due on interlock.uploads (sweep_at);

create type interlock.ingest_step as enum ('Loading', 'Finishing', 'Enqueuing', 'Done', 'Failed', 'Canceled');

-- Goes with its run. A run that is open takes more tasks by itself and has no row here.
create table interlock.ingests (
    run_id         uuid primary key references interlock.runs on delete cascade,
    org_id         uuid not null,
    source         json not null,                 -- what its tasks are made of: bulk/sources.py
    step           interlock.ingest_step not null default 'Loading',
    load_task      uuid,                          -- of Spark, when that loads it
    total          bigint,
    last_index     bigint,
    enqueued_index bigint not null default 0,     -- every range below it has its message
    created_at     timestamptz not null default interlock.clock(),
    settled_at     timestamptz
);
create index ingests_open on interlock.ingests (run_id) where settled_at is null;
create index ingests_on_spark on interlock.ingests (load_task) where load_task is not null and settled_at is null;

-- Written in the transaction that has the rows: a chunk that is read twice is loaded once. A chunk is named by its part and
-- its place there, never by who read it.
create table interlock.ingest_chunks (
    run_id     uuid not null references interlock.ingests on delete cascade,
    part       int not null,
    first_byte bigint not null,
    end_byte   bigint not null,
    first_line bigint not null,
    lines      bigint not null,
    rows       bigint not null,
    primary key (run_id, part, first_byte)
);

-- Takes more tasks by POST /v1/jobs/{job}/tasks until it is closed.
alter table interlock.runs add column open boolean not null default false;
create index runs_open_unwanted on interlock.runs (run_id) where open and cancel_requested and ended_at is null;

-- As before, but for the index by run and task: rows come in its order, so that each goes to the end of it and costs next
-- to nothing, where building it afterwards reads the whole table once more.
create or replace function interlock.create_shard(
    shard int, org_id uuid, run_id uuid, job_id uuid, max_attempts int, priority int
) returns boolean language plpgsql as
$$
#variable_conflict use_variable
declare
    name text := 'tasks_' || shard;
    made text := interlock.clock();
begin
    if shard <= 0 then
        raise exception 'shard % cannot be a run''s own', shard using errcode = 'invalid_parameter_value';
    end if;
    perform pg_advisory_xact_lock(hashtextextended('interlock:' || name, 0));
    -- Whoever deletes the run waits, or was first.
    perform from interlock.runs r
    where r.run_id = create_shard.run_id and r.shard = create_shard.shard and not r.delete_requested
    for share;
    if not found then
        return false;
    end if;
    if to_regclass('interlock.' || name) is not null then
        return true;
    end if;
    execute format(
        'create table interlock.%I (like interlock.tasks including defaults including generated including storage,'
        ' constraint %I check (shard = %s))'
        ' with (fillfactor = 35, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)',
        name, name || '_shard', shard);
    execute format(
        'alter table interlock.%I alter shard set default %s, alter org_id set default %L, alter run_id set default %L,'
        ' alter job_id set default %L, alter max_attempts set default %s, alter priority set default %s,'
        ' alter created_at set default %L, alter queued_at set default %L',
        name, shard, org_id, run_id, job_id, max_attempts, priority, made, made);
    execute format('create unique index %I on interlock.%I (run_id, task_index) where run_id is not null',
                   name || '_by_run', name);
    execute format('create index %I on interlock.%I (run_id, listed_status, task_index)'
                   ' where run_id is not null and listed_status is not null', name || '_by_run_status', name);
    execute format('create index %I on interlock.%I (retry_at) where retry_at is not null', name || '_retries', name);
    execute format('create index %I on interlock.%I (job_id, priority, queued_at) where parked', name || '_parked', name);
    execute format('create index %I on interlock.%I (job_id, slot_key, priority, queued_at) where parked',
                   name || '_parked_by_key', name);
    return true;
end
$$;
