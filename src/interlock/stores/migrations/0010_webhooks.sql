-- Webhooks: calls that we make, to tell an org what became of its runs.
--
--   a run ends, or passes a share ── same transaction ──► webhook_deliveries, a row per webhook that asked for it
--                                                              │ taken for a while, sent, and only then settled
--                                                              ▼
--                                      Delivered │ Pending again, later │ Dead, with a reason, until it is redriven

create type interlock.delivery_status as enum ('Pending', 'Delivered', 'Dead');

create table interlock.webhooks (
    webhook_id      uuid primary key default uuidv7(),
    org_id          uuid not null references interlock.orgs,
    name            text collate "C" not null,
    url             text not null,
    events          text[] not null,
    dag_name        text,                           -- null: runs of jobs of every DAG, and of none
    job_name        text,                           -- null: runs of every job
    failed_share    float8,
    done_share      float8,
    secret          text not null,                  -- a signature cannot be made from a hash
    key_version     int not null default 1,
    previous_secret text,
    previous_until  timestamptz,
    paused          boolean not null default false,
    failures        int not null default 0,         -- calls in a row that came to nothing
    resting_until   timestamptz,                    -- it has failed so often that it is left alone until then
    created_by      text not null,
    created_at      timestamptz not null default interlock.clock(),
    unique (org_id, name)
);

create table interlock.webhook_deliveries (
    delivery_id uuid primary key default uuidv7(),
    org_id      uuid not null,
    webhook_id  uuid not null,
    event       text not null,
    run_id      uuid,
    body        text not null,                      -- byte for byte what is signed and sent
    status      interlock.delivery_status not null default 'Pending',
    taken       boolean not null default false,     -- a dispatcher is sending it, and has until due_at
    tries       int not null default 0,             -- names the try, too: what an older one reports changes nothing
    due_at      timestamptz not null default interlock.clock(),
    created_at  timestamptz not null default interlock.clock(),
    waiting_since timestamptz not null default interlock.clock(), -- made, or redriven
    ended_at    timestamptz,
    http_status int,
    reason      text
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index webhook_deliveries_due on interlock.webhook_deliveries (webhook_id, due_at) where status = 'Pending';
create index webhook_deliveries_taken on interlock.webhook_deliveries (webhook_id) where taken;
create index webhook_deliveries_waiting on interlock.webhook_deliveries (waiting_since) where status = 'Pending';
create index webhook_deliveries_ended on interlock.webhook_deliveries (ended_at) where ended_at is not null;
create index webhook_deliveries_listed on interlock.webhook_deliveries (webhook_id, delivery_id);
create index webhook_deliveries_by_status on interlock.webhook_deliveries (webhook_id, status, delivery_id);

-- Shares that a run has passed, so that each is told once. They go with the run.
create table interlock.webhook_crossings (
    run_id     uuid not null references interlock.runs on delete cascade,
    webhook_id uuid not null,
    event      text not null,
    primary key (run_id, webhook_id, event)
);
