-- DAGs, the dataset registry, and what turns a change of a dataset into tasks.
--
--   dags ── dag_versions ── dag_version_jobs ── jobs ── edges ──► dataset_versions ── partitions
--                                                │                       │
--                                                │                    datasets ── publications
--                                                ├─ materialisations   which scopes a job has been given, and has done
--                                                ├─ job_cursors        how far a job has read a stream
--                                                ├─ triggers           webhooks, schedules, calls by hand: not yet tasks
--                                                ├─ source_tasks       the one task of an always_on source
--                                                ├─ cron_state         how far a schedule has been followed
--                                                ├─ operator_state     what an operator keeps from task to task
--                                                └─ pauses             whose tasks are held back, and why
--
-- A job's row is one generation of it: a definition that changed, or changed upstream, is another row with other dataset
-- versions, built beside the one that is current. Every edge names the dataset version that it reads, so an event finds
-- the generations that want it, and no others, by one look-up.

create type interlock.dag_state as enum ('Building', 'Current', 'Retired', 'Abandoned', 'Purged');

create table interlock.dags (
    dag_id          uuid primary key default uuidv7(),
    org_id          uuid not null references interlock.orgs,
    name            text not null,
    created_at      timestamptz not null default interlock.clock(),
    unique (org_id, name)
);

create table interlock.dag_versions (
    dag_version  uuid primary key default uuidv7(),
    dag_id       uuid not null references interlock.dags,
    org_id       uuid not null,
    content_hash text not null,
    document     json not null,                     -- canonical: see definition.py
    state        interlock.dag_state not null,
    deployed_by  text not null,
    deployed_at  timestamptz not null default interlock.clock(),
    current_at   timestamptz,                       -- when it last became current
    build_mark   bigint,                            -- of a build: changes up to this one are waited for
    build_round  int not null default 0,            -- and how often that has been so
    retired_at   timestamptz
);
-- One that was abandoned or purged is history: the same file deployed again is another version.
create unique index dag_versions_by_hash on interlock.dag_versions (dag_id, content_hash)
    where state in ('Building', 'Current', 'Retired');
create unique index dag_versions_current on interlock.dag_versions (dag_id) where state = 'Current';
create unique index dag_versions_building on interlock.dag_versions (dag_id) where state = 'Building';
create index dag_versions_in_work on interlock.dag_versions (dag_version) where state = 'Building';
create index dag_versions_by_dag on interlock.dag_versions (dag_id, dag_version);
create index dag_versions_by_prefix on interlock.dag_versions (dag_id, content_hash collate "C");
create index dag_versions_retired on interlock.dag_versions (dag_id, retired_at) where state = 'Retired';

create table interlock.dag_version_jobs (
    dag_version uuid not null references interlock.dag_versions,
    job_id      uuid not null references interlock.jobs,
    primary key (dag_version, job_id)
);
create index dag_version_jobs_by_job on interlock.dag_version_jobs (job_id);

alter table interlock.jobs
    add column current         boolean not null default true,  -- what the job's name means
    add column active          boolean not null default true,  -- gets tasks: current, or being built
    add column inputs          jsonb not null default '[]',    -- [{dataset_uuid, dataset_version, where}], by input_index
    add column wait_for_all    boolean not null default true,
    add column per_update      boolean not null default false,
    add column max_queue_depth int,
    add column max_queue_age   float8,                         -- seconds
    add column source          jsonb,                          -- null: reactive
    add column swapped_at      timestamptz;                    -- retired or brought back: its tasks are yet to be seen to
drop index interlock.jobs_by_name;
create unique index jobs_by_name on interlock.jobs (org_id, coalesce(dag_name, ''), name) where name is not null and current;
create index jobs_sources on interlock.jobs ((source ->> 'kind'), job_id) where source is not null and active;
create index jobs_of_dag on interlock.jobs (org_id, dag_name, name) where active and dag_name is not null;
create index jobs_in_dags on interlock.jobs (job_id) where dag_name is not null;
create index jobs_swapped on interlock.jobs (job_id) where swapped_at is not null;
create index jobs_limited on interlock.jobs (job_id)
    where active and (max_queue_depth is not null or max_queue_age is not null);

alter table interlock.datasets
    add column dag_name    text,
    add column job_name    text,
    add column output_name text;
create unique index datasets_by_output on interlock.datasets (org_id, dag_name, job_name, output_name)
    where dag_name is not null;
create index datasets_by_org on interlock.datasets (org_id, dataset_uuid);

create table interlock.dataset_versions (
    dataset_version uuid primary key,
    dataset_uuid    uuid not null references interlock.datasets,
    org_id          uuid not null,
    job_id          uuid references interlock.jobs,
    output_index    int not null default 0,
    storage         text not null default 'parquet',
    unique_key      text[] not null default '{}',
    schema_hash     text,
    schema          json,
    progress        text,                           -- cursor or partition, as its first change says
    cursor          bigint,                         -- how far a stream is complete
    commit_id       bigint not null default 0,      -- of its last change
    created_at      timestamptz not null default interlock.clock(),
    purged_at       timestamptz
);
create index dataset_versions_by_dataset on interlock.dataset_versions (dataset_uuid, created_at);
create index dataset_versions_by_job on interlock.dataset_versions (job_id, output_index);

insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id)
select current_version, dataset_uuid, org_id from interlock.datasets
union
select (o.output ->> 'dataset_version')::uuid, d.dataset_uuid, d.org_id
from interlock.jobs j
cross join lateral jsonb_array_elements(j.outputs) as o(output)
join interlock.datasets d on d.dataset_uuid = (o.output ->> 'dataset_uuid')::uuid and d.org_id = j.org_id
on conflict do nothing;

-- Names that others read a dataset by.
create table interlock.publications (
    org_id       uuid not null,
    name         text not null,
    dataset_uuid uuid not null references interlock.datasets,
    dag_id       uuid not null references interlock.dags,
    read_roles   interlock.role[] not null default '{reader,writer,admin}',
    primary key (org_id, name)
);
create index publications_by_dataset on interlock.publications (dataset_uuid);
create index publications_by_dag on interlock.publications (dag_id);

-- Orders the changes of a dataset version: taken while its row is locked, so that they become visible in that order.
create sequence interlock.commits;

-- Inclusive ranges that never overlap within a version. What is there now, not what was.
create table interlock.partitions (
    dataset_version uuid not null,
    range_start     bigint not null,
    range_end       bigint not null,
    commit_id       bigint not null,
    input_commit    bigint not null default 0,      -- of what it was made from: an older task never overwrites a newer
    task_id         uuid not null,                  -- that wrote it
    attempt         int not null,
    location        text,
    row_count       bigint,
    bytes           bigint,
    schema_hash     text,
    committed_at    timestamptz not null default interlock.clock(),
    primary key (dataset_version, range_start)
) with (fillfactor = 80);
create index partitions_by_commit on interlock.partitions (dataset_version, commit_id);

create table interlock.edges (
    job_id          uuid not null references interlock.jobs,
    input_index     int not null,
    org_id          uuid not null,
    dataset_uuid    uuid not null references interlock.datasets,
    dataset_version uuid not null,
    floating        boolean not null,               -- another DAG's: follows whatever is current there
    condition       text,
    active          boolean not null default true,  -- as its job
    reconciled_to   bigint not null default 0,      -- changes up to this one have their tasks
    pointed_at      bigint not null default 0,      -- commit at which it was turned to another version: all of it is new
    primary key (job_id, input_index)
);
create index edges_by_version on interlock.edges (dataset_version, job_id) where active;
create index edges_by_dataset on interlock.edges (dataset_uuid) where active;
create index edges_active on interlock.edges (job_id, input_index) where active;

-- A scope that a job was given. It is given again when an input's change is newer than `input_commit`.
create table interlock.materialisations (
    job_id       uuid not null,
    input_index  int not null,                      -- 0 unless each input by itself makes tasks (wait_for: any)
    range_start  bigint not null,
    range_end    bigint not null,
    input_commit bigint not null,                   -- newest change of its inputs that it was given for
    done_commit  bigint,                            -- newest that a completed task has taken in
    undone_since bigint not null default 0,         -- the first that none has, while there is one
    changed_start bigint,                           -- the part of a stream that was rewritten; null: all of the scope
    changed_end  bigint,
    task_id      uuid not null,                     -- last given it
    primary key (job_id, input_index, range_start, range_end)
) with (fillfactor = 80);
create index materialisations_undone on interlock.materialisations (job_id)
    where done_commit is null or done_commit < input_commit;
create index materialisations_by_task on interlock.materialisations (task_id);

-- How far a job has read its streams. One task at a time: it reads from `committed`, and its end moves that.
create table interlock.job_cursors (
    job_id      uuid not null,
    input_index int not null,                       -- as above
    committed   bigint not null default -1,
    upto        bigint,                             -- of the task that is under way
    input_commit bigint,                            -- the newest change that this takes in
    task_id     uuid,
    primary key (job_id, input_index)
);
create index job_cursors_by_task on interlock.job_cursors (task_id) where task_id is not null;

-- Accepted, and not yet a task.
create table interlock.triggers (
    trigger_id bigint generated always as identity primary key,
    org_id     uuid not null,
    job_id     uuid not null,
    dedupe_key text not null,                       -- of the task: the same call, told again, is the same task
    payload    json not null,
    created_at timestamptz not null default interlock.clock()
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index triggers_by_job on interlock.triggers (job_id, trigger_id);
create unique index triggers_once on interlock.triggers (job_id, dedupe_key);

-- The one task of an always_on source, from its first start until it has ended for a job that is not active any more.
create table interlock.source_tasks (
    job_id       uuid primary key,
    task_id      uuid not null,
    restarts     int not null default 0,            -- in a row: one that lasted is followed by a first one again
    started_at   timestamptz not null default interlock.clock()
);

-- How far the schedule of a cron source has been followed. Gone while its job is not active: it then begins anew.
create table interlock.cron_state (
    job_id  uuid primary key,
    source  jsonb not null,                         -- that `next_at` follows from
    last_at timestamptz not null,                   -- starts up to this one are made, or given up
    next_at timestamptz                             -- null: not known yet, or never
);
create index cron_state_due on interlock.cron_state (next_at);

-- Where the calls of a webhook source come in. By name, so that path and secret stay when the DAG is deployed again.
create table interlock.hooks (
    hook_id         text primary key,               -- cannot be guessed
    org_id          uuid not null,
    dag_name        text not null,
    job_name        text not null,
    secret_hash     bytea not null,
    secret          text,                           -- of hmac alone, which cannot be checked without
    previous_hash   bytea,                          -- after a rotation: good until `previous_until`
    previous_secret text,
    previous_until  timestamptz,
    created_at      timestamptz not null default interlock.clock(),
    rotated_at      timestamptz,
    unique (org_id, dag_name, job_name)
);

-- The task of an always_on source is the same through all its restarts, and so is the producer of its events.
create function interlock.source_task_id(job_id uuid) returns uuid language sql immutable parallel safe as
$$ select encode(substring(sha256(('source:' || job_id::text)::bytea) for 16), 'hex')::uuid $$;

create table interlock.operator_state (
    job_id     uuid not null,
    name       text not null,
    state      json not null,
    updated_at timestamptz not null default interlock.clock(),
    primary key (job_id, name)
);

-- Jobs whose tasks are held back, because a job downstream has more waiting than it may have.
create table interlock.pauses (
    job_id   uuid not null,                         -- held back
    cause_id uuid not null,                         -- the job downstream
    bulk     boolean not null,                      -- only bulk work
    path     uuid[] not null,                       -- of jobs, from the cause up to the one that is held back
    reason   text not null,
    since    timestamptz not null default interlock.clock(),
    primary key (job_id, cause_id)
);
create index pauses_by_cause on interlock.pauses (cause_id);

alter table interlock.dataset_events add column commit_id bigint not null default 0;
create index dataset_events_by_dataset on interlock.dataset_events (dataset_uuid, event_id);

-- Who had what made again, and why.
create table interlock.invalidations (
    invalidation_id uuid primary key default uuidv7(),
    org_id          uuid not null,
    dataset_uuid    uuid not null references interlock.datasets,
    dataset_version uuid not null,
    range_start     bigint not null,
    range_end       bigint not null,
    reason          text not null,
    asked_by        text not null,
    scopes          int not null,
    commit_id       bigint not null,
    created_at      timestamptz not null default interlock.clock()
);
create index invalidations_by_dataset on interlock.invalidations (dataset_uuid, invalidation_id);

-- Tasks of a job that wait for a worker or for their next attempt, counted up to `most`.
create index tasks_0_retrying on interlock.tasks_0 (job_id) where retry_at is not null and run_id is null;
create index runs_live_by_job on interlock.runs (job_id) where ended_at is null;
create function interlock.waiting_tasks(asked_job uuid, most bigint) returns bigint language sql stable as
$$ select least(most,
       (select count(*) from (select from interlock.tasks
                              where shard = 0 and run_id is null and listed_status = 'Queued' and job_id = asked_job
                              limit most) queued)
       + (select count(*) from (select from interlock.tasks
                                where shard = 0 and run_id is null and retry_at is not null and job_id = asked_job
                                limit most) retrying)
       + (select coalesce(sum(queued + failed - dead), 0)::bigint
          from (select queued, failed, dead from interlock.runs where job_id = asked_job and ended_at is null
                limit 1000) live)) $$;

-- A job's scopes in a range, computed again by hand. The run has the tasks; this row knows what is still to be made.
create type interlock.backfill_state as enum ('Running', 'Paused', 'Done', 'Canceled');
create table interlock.backfills (
    run_id       uuid primary key references interlock.runs on delete cascade,
    org_id       uuid not null,
    job_id       uuid not null,
    range_start  bigint not null,
    range_end    bigint not null,
    priority     smallint not null,                 -- 0 normal, 1 bulk
    reason       text,
    requested_by text not null,
    state        interlock.backfill_state not null default 'Running',
    place_input  int not null default -1,           -- the last scope that has its task
    place_start  bigint not null default 0,
    place_end    bigint not null default 0,
    made         bigint not null default 0,
    total        bigint,                            -- as counted at the start; null: more than were counted
    created_at   timestamptz not null default interlock.clock(),
    ended_at     timestamptz                        -- when the last task was made, or no more were to be
);
create index backfills_by_org on interlock.backfills (org_id, run_id);
create index backfills_making on interlock.backfills (run_id) where state = 'Running';
create index backfills_shedding on interlock.backfills (job_id) where state = 'Running' and priority = 1;

-- Tells whether what an operator has read of its state is still so when it writes it.
alter table interlock.operator_state add column version bigint not null default 1;
