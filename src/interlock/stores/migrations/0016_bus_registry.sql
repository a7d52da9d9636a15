-- The registry of the command bus: which services there are, what leads where, who may send what, and how often.
--
--   services ─┬─ bus_routes   (target, name)          to a queue of the target, or to a job
--             ├─ bus_acls     (source, name, target)  may send; nothing else may
--             ├─ bus_limits   (target, name[, source])
--             ├─ bus_keys     versions of the secret that a service signs with
--             └─ service_polls
--
--   bus_changes     every change with what was before and after: the way back
--   bus_versions    a counter per org and kind, raised with every change of that kind
--
-- Everything belongs to one org: sources and targets are its services. A change locks its row of bus_versions first, so
-- that the changes of one kind in one org come one after another, and a version that was read names one state.

create type interlock.bus_kind as enum ('services', 'routes', 'acls', 'limits', 'keys');
create type interlock.bus_action as enum ('create', 'update', 'delete');
create type interlock.dispatch_mode as enum ('adaptive', 'cold-only');
create type interlock.dedupe_mode as enum ('none', 'strict');
create type interlock.sensitivity as enum ('critical', 'moderate', 'low');
create type interlock.enforcement as enum ('strict', 'relaxed', 'shadow');

create table interlock.services (
    org_id        uuid not null references interlock.orgs,
    name          text collate "C" not null,
    description   text not null default '',
    dispatch_mode interlock.dispatch_mode,              -- null: the platform's
    version       bigint not null,                      -- of the registry, when it last changed; so in all tables here
    changed_at    timestamptz not null default interlock.clock(),
    changed_by    text not null,
    primary key (org_id, name)
);

-- When a producer last asked for its configuration: nothing to refresh a cache for.
create table interlock.service_polls (
    org_id    uuid not null,
    service   text collate "C" not null,
    polled_at timestamptz not null,
    primary key (org_id, service),
    foreign key (org_id, service) references interlock.services on delete cascade
);

create table interlock.bus_routes (
    org_id                 uuid not null,
    target                 text collate "C" not null,
    name                   text collate "C" not null,
    queue                  text,                        -- of the target; null: a job
    dlq                    text,                        -- under which the dead letters of the queue are found
    dag_name               text,
    job_name               text,
    dedupe_mode            interlock.dedupe_mode not null default 'none',
    dedupe_seconds         float8 not null default 300,
    expected_drain_seconds float8 not null default 300,
    fairness               jsonb not null default '{}', -- what differs from the defaults
    expires_at             timestamptz,
    version                bigint not null,
    changed_at             timestamptz not null default interlock.clock(),
    changed_by             text not null,
    primary key (org_id, target, name),
    foreign key (org_id, target) references interlock.services,
    check ((queue is null) <> (job_name is null)),
    check ((queue is null) = (dlq is null))
);
create index bus_routes_by_queue on interlock.bus_routes (org_id, queue, target, name) where queue is not null;
create index bus_routes_by_dlq on interlock.bus_routes (org_id, dlq, target, name) where dlq is not null;

create table interlock.bus_acls (
    org_id      uuid not null,
    target      text collate "C" not null,
    name        text collate "C" not null,
    source      text collate "C" not null,              -- the service; the org is this one
    sensitivity interlock.sensitivity not null default 'moderate',
    expires_at  timestamptz,
    version     bigint not null,
    changed_at  timestamptz not null default interlock.clock(),
    changed_by  text not null,
    primary key (org_id, target, name, source),
    foreign key (org_id, target) references interlock.services,
    foreign key (org_id, source) references interlock.services
);
create index bus_acls_by_source on interlock.bus_acls (org_id, source);

create table interlock.bus_limits (
    org_id           uuid not null,
    target           text collate "C" not null,
    name             text collate "C" not null,
    source           text collate "C" not null default '', -- '': all sources together; else the quota of one of them
    rate             int not null,                         -- in each window
    window_seconds   float8 not null default 1,
    burst            int not null default 0,
    cooldown_seconds float8 not null default 0,
    enforcement      interlock.enforcement not null default 'strict',
    version          bigint not null,
    changed_at       timestamptz not null default interlock.clock(),
    changed_by       text not null,
    primary key (org_id, target, name, source),
    foreign key (org_id, target) references interlock.services
);

-- The secret is sealed with a key that is in no database. A version is current until the next one; then it is good
-- until expires_at, beside the current one, and after that it is only history.
create table interlock.bus_keys (
    org_id     uuid not null,
    service    text collate "C" not null,
    number     int not null,                            -- hmac-v{number}
    sealed     bytea not null,
    created_at timestamptz not null default interlock.clock(),
    created_by text not null,
    rotates_at timestamptz,                             -- null: it was replaced
    expires_at timestamptz,                             -- null: it is current
    revoked_at timestamptz,
    primary key (org_id, service, number),
    foreign key (org_id, service) references interlock.services
);
create unique index bus_keys_current on interlock.bus_keys (org_id, service) where expires_at is null;
create index bus_keys_rotating on interlock.bus_keys (rotates_at) where rotates_at is not null;
create index bus_keys_expiring on interlock.bus_keys (expires_at) where expires_at is not null;

create table interlock.bus_changes (
    change_id  bigint generated always as identity primary key,
    org_id     uuid not null references interlock.orgs,
    kind       interlock.bus_kind not null,
    action     interlock.bus_action not null,
    subject    text collate "C" not null,               -- the key of what was changed, its parts joined by /
    before     jsonb,
    after      jsonb,
    version    bigint not null,
    changed_at timestamptz not null default interlock.clock(),
    changed_by text not null,
    reverts    bigint
);
create index bus_changes_by_org on interlock.bus_changes (org_id, change_id);
create index bus_changes_by_kind on interlock.bus_changes (org_id, kind, change_id);
create index bus_changes_by_subject on interlock.bus_changes (org_id, kind, subject, change_id);

create table interlock.bus_versions (
    org_id  uuid not null references interlock.orgs,
    kind    interlock.bus_kind not null,
    version bigint not null,
    primary key (org_id, kind)
);

-- A key that names a service speaks for it: it sends as `org/service`, and receives what is sent to it.
alter table interlock.api_keys add column service text collate "C";

-- Keys that may read, or write, what there was may read and write this, too.
update interlock.api_keys set scopes = array_append(scopes, 'registry:read')
where scopes @> array['jobs:read', 'tasks:read'] and not scopes @> array['registry:read'];
update interlock.api_keys set scopes = array_append(scopes, 'registry:write')
where scopes @> array['jobs:write', 'tasks:write'] and not scopes @> array['registry:write'];
