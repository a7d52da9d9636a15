-- The fate of commands that the slow stage decided: their senders wait for it, or read it later.
--
--   POST /v1/commands ─► bus_handoffs: pending ─► slow stage ─► bus_fates: delivered, duplicate, failed
--
-- The transaction that deletes a hand-off writes its fate, so a reader of both finds a command in at least one of them.

alter table interlock.bus_handoffs add column command_id uuid;
update interlock.bus_handoffs
set command_id = coalesce(substring(body from '"id":"([0-9a-f-]{36})"')::uuid, gen_random_uuid());
alter table interlock.bus_handoffs alter column command_id set not null;
create index bus_handoffs_command on interlock.bus_handoffs (org_id, source, command_id);

create table interlock.bus_fates (
    org_id         uuid not null,
    source         text not null,                   -- org/service of the credentials
    command_id     uuid not null,
    outcome        text not null check (outcome in ('delivered', 'duplicate', 'failed')),
    reason         text not null,                   -- '' unless failed
    target         text not null,
    name           text not null,
    throttle_until timestamptz,                     -- when a retry makes sense, if that is known
    decided_at     timestamptz not null,
    primary key (org_id, source, command_id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_insert_threshold = -1,
        autovacuum_analyze_threshold = 100000, autovacuum_analyze_scale_factor = 1);
create index bus_fates_age on interlock.bus_fates (decided_at);
