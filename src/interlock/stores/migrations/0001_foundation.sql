-- The state database.
--
--   orgs ─┬─ api_keys            who may call the gateway            worker_tokens   who may claim
--         ├─ jobs ── runs ── tasks ── attempts                      signing_keys    who may sign capabilities
--         │            │       │
--         │            │       └─ output_commits, dataset_events, buffer_publishes   what an attempt caused
--         │            └─ run_deltas   changes of run counters, folded into runs in the background
--         └─ datasets            which org a dataset belongs to
--
--   outbox          side effects that a committed change still owes
--   queue_messages  pgqueue: wake-ups; losing, doubling or delaying one is harmless
--   workers         who has asked for work lately
--
-- A task row carries its current attempt and that attempt's lease: claiming and completing touch one row. An attempt
-- that ends in anything but success is copied to `attempts`; `attempt_history` shows both as one.

create schema interlock;

-- Tests move time by setting interlock.now on their connections; elsewhere it is Postgres' own clock, so that
-- dispatchers with skewed clocks agree about leases.
create function interlock.clock() returns timestamptz language sql stable parallel safe as
$$ select coalesce(nullif(current_setting('interlock.now', true), '')::timestamptz, now()) $$;

create type interlock.task_status as enum ('Queued', 'Running', 'Completed', 'Failed', 'Canceled');
create type interlock.run_state as enum
    ('Ingesting', 'Running', 'Paused', 'Completed', 'CompletedWithFailures', 'Failed', 'Canceled');
create type interlock.outcome as enum ('Completed', 'Failed', 'LeaseExpired', 'TimedOut', 'Canceled', 'Released');
create type interlock.role as enum ('reader', 'writer', 'admin');

create table interlock.orgs (
    org_id     uuid primary key default uuidv7(),
    name       text not null unique,
    created_at timestamptz not null default interlock.clock()
);

create table interlock.api_keys (
    key_id      text primary key,
    org_id      uuid not null references interlock.orgs,
    user_name   text not null,
    role        interlock.role not null,
    scopes      text[] not null,
    secret_hash bytea not null,
    created_at  timestamptz not null default interlock.clock(),
    expires_at  timestamptz,
    revoked_at  timestamptz
);
create index api_keys_by_org on interlock.api_keys (org_id, created_at);

create table interlock.worker_tokens (
    token_id    text primary key,
    name        text not null,
    runtimes    text[],                             -- null: every runtime
    secret_hash bytea not null,
    created_at  timestamptz not null default interlock.clock(),
    expires_at  timestamptz,
    revoked_at  timestamptz
);

-- Public halves only. A retired key verifies until its last token has expired.
create table interlock.signing_keys (
    kid          text primary key,
    public_jwk   jsonb not null,
    created_at   timestamptz not null default interlock.clock(),
    retired_at   timestamptz,
    verify_until timestamptz
);
-- At most one key signs.
create unique index signing_keys_active on interlock.signing_keys ((true)) where retired_at is null;

create table interlock.idempotency_keys (
    org_id       uuid not null,
    endpoint     text not null,
    key          text not null,
    request_hash bytea not null,
    status       int,
    response     json,
    expires_at   timestamptz not null,
    primary key (org_id, endpoint, key)
);
create index idempotency_keys_expiry on interlock.idempotency_keys (expires_at);

create table interlock.datasets (
    dataset_uuid    uuid primary key,
    org_id          uuid not null references interlock.orgs,
    current_version uuid not null,
    created_at      timestamptz not null default interlock.clock()
);

create table interlock.jobs (
    job_id                  uuid primary key default uuidv7(),
    org_id                  uuid not null references interlock.orgs,
    dag_name                text,
    name                    text,
    operator                text not null,
    runtime                 text not null,
    queue                   text,                   -- null: the runtime is invoked or runs in the dispatcher
    config                  json not null,
    priority                smallint not null,      -- 0 normal, 1 bulk
    max_attempts            int not null,
    backoff_seconds         float8 not null,
    backoff_factor          float8 not null,
    backoff_cap_seconds     float8 not null,
    jitter                  float8 not null,
    non_retryable           text[] not null,
    lease_seconds           float8 not null,
    timeout_seconds         float8 not null,
    max_concurrency         int,
    concurrency_key         text,                   -- JSON pointer into the payload
    max_concurrency_per_key int,
    outputs                 jsonb not null,         -- [{dataset_uuid, dataset_version}], by output_index
    definition_hash         bytea not null,
    created_at              timestamptz not null default interlock.clock()
);
create unique index jobs_by_name on interlock.jobs (org_id, coalesce(dag_name, ''), name) where name is not null;
create index jobs_by_org on interlock.jobs (org_id, job_id);

create table interlock.runs (
    run_id           uuid primary key default uuidv7(),
    org_id           uuid not null,
    job_id           uuid not null references interlock.jobs,
    shard            int not null default 0,
    state            interlock.run_state not null,
    total            bigint,                        -- unknown while tasks are still being added
    last_index       bigint not null,               -- highest index in use; deduplicated items leave gaps below it
    range_size       int not null,                  -- tasks per queue message: names the message that covers an index
    latched          boolean not null,              -- no more tasks will come: the run may end
    swept_index      bigint not null default 0,     -- retention has deleted the tasks below it
    cancel_requested boolean not null default false,
    queued           bigint not null default 0,
    running          bigint not null default 0,
    completed        bigint not null default 0,
    failed           bigint not null default 0,
    dead             bigint not null default 0,
    canceled         bigint not null default 0,
    created_at       timestamptz not null default interlock.clock(),
    ended_at         timestamptz
);
create index runs_by_job on interlock.runs (job_id, run_id);
create index runs_ended on interlock.runs (ended_at) where ended_at is not null;
create index runs_canceling on interlock.runs (run_id) where cancel_requested and ended_at is null;
create index runs_live on interlock.runs (run_id) where ended_at is null;

-- Append-only: a counter row per run would make every completion of that run wait for every other.
create table interlock.run_deltas (
    run_id    uuid not null,
    queued    int not null default 0,
    running   int not null default 0,
    completed int not null default 0,
    failed    int not null default 0,
    dead      int not null default 0,
    canceled  int not null default 0
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

-- Keys and indexes belong to the partitions: a large run's shard is loaded bare and indexed afterwards.
create table interlock.tasks (
    shard            int not null default 0,
    task_id          uuid not null,
    org_id           uuid not null,
    job_id           uuid not null,
    run_id           uuid,
    task_index       bigint,
    status           interlock.task_status not null default 'Queued',
    attempt          int not null default 1,        -- of the running or else the next execution
    max_attempts     int not null,                  -- moves up when a dead letter is redriven
    priority         smallint not null,
    cancel_requested boolean not null default false,
    parked           boolean not null default false, -- queued, but its job is at its cap: a freed slot wakes it
    late_reply       boolean not null default false, -- the lease ran out: its holder may still report
    dead             boolean not null default false, -- failed for good
    lease_token      uuid,                          -- of the running or else the last execution
    lease_expires_at timestamptz,                   -- set exactly while running; never beyond timeout_at
    timeout_at       timestamptz,
    retry_at         timestamptz,                   -- set exactly while failed and waiting
    created_at       timestamptz not null default interlock.clock(),
    queued_at        timestamptz not null default interlock.clock(),
    started_at       timestamptz,
    ended_at         timestamptz,
    progress         real,
    worker_id        text,
    dedupe_key       text,
    slot_key         text,                          -- value of the job's concurrency_key, for jobs with a cap per key
    progress_text    text,
    payload          json not null,
    result           json
) partition by list (shard);

create table interlock.tasks_0 partition of interlock.tasks for values in (0)
    with (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
alter table interlock.tasks_0 add primary key (task_id);
-- Pages by run and status; tasks of no run by job and status. Running and completed tasks of a run are left out: the
-- first are found by their lease, the others by walking the run's indexes, and every claim and completion is cheaper.
create index tasks_0_by_run on interlock.tasks_0 (run_id, status, task_index)
    where run_id is not null and status in ('Queued', 'Failed', 'Canceled');
create index tasks_0_by_job on interlock.tasks_0 (job_id, status, task_id) where run_id is null;
create unique index tasks_0_dedupe on interlock.tasks_0 (job_id, dedupe_key) where dedupe_key is not null;
create index tasks_0_leases on interlock.tasks_0 (lease_expires_at) where lease_expires_at is not null;
create index tasks_0_retries on interlock.tasks_0 (retry_at) where retry_at is not null;
create index tasks_0_parked on interlock.tasks_0 (job_id, priority, queued_at) where parked;
create index tasks_0_parked_by_key on interlock.tasks_0 (job_id, slot_key, priority, queued_at) where parked;

-- The exact in-flight count of jobs with a cap is the number of these rows: a crash cannot leak a slot, because the
-- reaper that ends an attempt deletes its slot in the same statement.
create table interlock.slots (
    task_id  uuid primary key,
    job_id   uuid not null,
    slot_key text
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index slots_by_job on interlock.slots (job_id, slot_key);

create table interlock.attempts (
    task_id       uuid not null,
    attempt       int not null,
    lease_token   uuid not null,
    outcome       interlock.outcome not null,
    worker_id     text,
    started_at    timestamptz not null,
    ended_at      timestamptz not null,
    error_class   text,
    error_message text,
    crash         json,
    primary key (task_id, attempt, lease_token)
);

create view interlock.attempt_history as
    select task_id, attempt, lease_token, outcome, worker_id, started_at, ended_at, error_class, error_message, crash
    from interlock.attempts
    union all
    select task_id, attempt, lease_token, case status when 'Completed' then 'Completed'::interlock.outcome end,
           worker_id, started_at, ended_at, null, null, null
    from interlock.tasks
    where status in ('Running', 'Completed') and started_at is not null;

create table interlock.output_commits (
    task_id         uuid not null,
    output_index    int not null,
    dataset_uuid    uuid not null,
    dataset_version uuid not null,
    org_id          uuid not null,
    attempt         int not null,
    body            json not null,
    committed_at    timestamptz not null default interlock.clock(),
    primary key (task_id, output_index, dataset_uuid)
);

create table interlock.dataset_events (
    event_id        bigint generated always as identity primary key,
    org_id          uuid not null,
    dataset_uuid    uuid not null,
    dataset_version uuid not null,
    scope           text not null,                  -- c:{cursor} or p:{partition_key}
    cursor          bigint,
    partition_key   text,
    range_start     bigint,
    range_end       bigint,
    task_id         uuid not null,
    attempt         int not null,
    accepted_at     timestamptz not null default interlock.clock()
);
-- The same scope reported again by the same producer is the same event, whichever attempt says so.
create unique index dataset_events_once on interlock.dataset_events (task_id, dataset_uuid, dataset_version, scope);

create table interlock.buffer_publishes (
    publish_id      uuid primary key default uuidv7(),
    org_id          uuid not null,
    task_id         uuid not null,
    attempt         int not null,
    dataset_uuid    uuid not null,
    dataset_version uuid not null,
    batch_uri       text not null,
    record_count    bigint not null,
    published_at    timestamptz not null default interlock.clock(),
    unique (task_id, attempt, dataset_uuid, batch_uri)
);

create table interlock.outbox (
    outbox_id  bigint generated always as identity primary key,
    kind       text not null,                       -- send: a message for a queue; invoke: a task for an in-process runtime
    target     text not null,
    body       json not null,
    priority   smallint not null default 0,
    dedupe_key text,
    due_at     timestamptz not null default interlock.clock(),
    tries      int not null default 0
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index outbox_due on interlock.outbox (due_at, outbox_id);

create table interlock.queue_messages (
    message_id  bigint generated always as identity primary key,
    queue       text not null,
    priority    smallint not null default 0,
    visible_at  timestamptz not null default interlock.clock(),
    enqueued_at timestamptz not null default interlock.clock(),
    receives    int not null default 0,
    receipt     uuid,                               -- of the last receive; a new receive makes older receipts worthless
    dead_at     timestamptz,
    dedupe_key  text,
    body        json not null
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
create index queue_messages_ready on interlock.queue_messages (queue, priority, visible_at) where dead_at is null;
create index queue_messages_dead on interlock.queue_messages (queue, message_id) where dead_at is not null;
-- One live message per unit of work: sending it again re-arms the one that is there.
create unique index queue_messages_once on interlock.queue_messages (queue, dedupe_key) where dedupe_key is not null;

create table interlock.workers (
    worker_id    text not null,
    queue        text not null,
    last_seen_at timestamptz not null,
    primary key (worker_id, queue)
);
create index workers_by_queue on interlock.workers (queue, last_seen_at);

-- Where the reconciler goes on next time.
create table interlock.sweeps (
    name   text primary key,
    cursor uuid
);

-- A task id of a run follows from the run and the index, so writing it twice overwrites and a range names its ids.
create function interlock.run_task_id(run_id uuid, task_index bigint) returns uuid
    language sql immutable parallel safe as
$$ select encode(substring(sha256((run_id::text || ':' || task_index::text)::bytea) for 16), 'hex')::uuid $$;

-- Exponential with a cap and jitter; `dice` in [0, 1) keeps it a pure function.
create function interlock.backoff(attempt int, base float8, factor float8, cap float8, jitter float8, dice float8)
    returns interval language sql immutable parallel safe as
$$ select make_interval(secs => least(cap, base * power(factor, least(attempt - 1, 60))) * (1 - jitter + 2 * jitter * dice)) $$;

-- Grants too large for a token: the token carries the id, verifiers look the rest up.
create table interlock.capabilities (
    capability_id uuid primary key default uuidv7(),
    task_id       uuid not null,
    attempt       int not null,
    grants        json not null,
    expires_at    timestamptz not null
);
create index capabilities_expiry on interlock.capabilities (expires_at);
