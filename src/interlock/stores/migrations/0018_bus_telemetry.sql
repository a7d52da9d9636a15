-- What the command bus owes once it has decided about a command: telemetry for the tenant, and a place in the archive.
--
--   a decision ── same transaction ──► bus_telemetry ── per tenant, 10 or 1 s ──► the tenant's telemetry queue
--              └─ same transaction ──► bus_archive   ── per tenant, in files  ──► partitions of its archive dataset
--
-- A row holds all that one request caused for one tenant: a batch of commands costs one row of each, not one per command.

create table interlock.bus_telemetry (
    batch_id   bigint generated always as identity primary key,
    org_id     uuid not null,
    events     json not null,                       -- an array
    events_in  int not null,
    created_at timestamptz not null default interlock.clock()
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
create index bus_telemetry_by_org on interlock.bus_telemetry (org_id, batch_id);

-- Tenants that have been told anything, and whether they listen.
create table interlock.bus_telemetry_queues (
    org_id           uuid primary key references interlock.orgs,
    created_at       timestamptz not null default interlock.clock(),
    last_received_at timestamptz                    -- somebody asked for more, whether or not there was any
);

create table interlock.bus_archive (
    archive_id  bigint generated always as identity primary key,
    org_id      uuid not null,
    commands    json not null,                      -- an array
    commands_in int not null,
    accepted_at timestamptz not null default interlock.clock()
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
create index bus_archive_by_org on interlock.bus_archive (org_id, archive_id);
