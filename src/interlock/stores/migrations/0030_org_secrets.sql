-- Secrets of orgs, which configs name as ${secret:NAME}. A value is sealed for its org and name: a row that is copied to
-- another org, or to another name, does not open.

create table interlock.org_secrets (
    org_id  uuid not null references interlock.orgs,
    name    text collate "C" not null,
    sealed  bytea not null,                         -- AES-256-GCM; the key is no part of the database
    hosts   text[] not null,                        -- empty: the value may be sent to any host
    version int not null default 1,                 -- counts the values that were set
    set_by  text not null,
    set_at  timestamptz not null default interlock.clock(),
    primary key (org_id, name)
);
