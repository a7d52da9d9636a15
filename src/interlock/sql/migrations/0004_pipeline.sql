-- DAGs, the dataset registry, and what turns a change of a dataset into tasks.
--
--   dags ── dag_versions ── dag_version_jobs ── jobs ── edges ──► dataset_versions ── partitions
--                                                │                       │
--                                                │                    datasets ── publications
--                                                ├─ materialisations   which scopes a job has been given, and has done
--                                                ├─ job_cursors        how far a job has read a stream
--                                                ├─ triggers           webhooks, schedules, calls by hand: not yet tasks
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
    retired_at   timestamptz,
    unique (dag_id, content_hash)
);
create unique index dag_versions_current on interlock.dag_versions (dag_id) where state = 'Current';
create unique index dag_versions_building on interlock.dag_versions (dag_id) where state = 'Building';
create index dag_versions_in_work on interlock.dag_versions (dag_version) where state = 'Building';
create index dag_versions_by_dag on interlock.dag_versions (dag_id, dag_version);

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
    add column source          jsonb;                          -- null: reactive
drop index interlock.jobs_by_name;
create unique index jobs_by_name on interlock.jobs (org_id, coalesce(dag_name, ''), name) where name is not null and current;
create index jobs_sources on interlock.jobs ((source ->> 'kind'), job_id) where source is not null and active;
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
    task_id     uuid,
    primary key (job_id, input_index)
);
create index job_cursors_by_task on interlock.job_cursors (task_id) where task_id is not null;

-- Accepted, and not yet a task.
create table interlock.triggers (
    trigger_id bigint generated always as identity primary key,
    org_id     uuid not null,
    job_id     uuid not null,
    dedupe_key text,
    payload    json not null,
    created_at timestamptz not null default interlock.clock()
);
create index triggers_by_job on interlock.triggers (job_id, trigger_id);

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
