-- Queries: who asked what of which data, and how it ended. The statement is never kept, only its hash.

create table interlock.query_audit (
    query_id         uuid primary key default uuidv7(),
    org_id           uuid not null references interlock.orgs,
    user_name        text,                          -- who asked: a user by a key…
    key_id           text,
    task_id          uuid,                          -- …or an attempt of a task
    attempt          int,
    mode             text not null,
    sql_sha256       bytea not null,
    dataset_versions uuid[] not null default '{}',  -- that the statement names
    outcome          text not null default 'Running',
    code             text,                          -- of the error
    row_count        bigint,
    bytes            bigint,
    truncated        boolean not null default false,
    batch_task_id    uuid,                          -- that has it now
    export_prefix    text,
    export_files     json,                          -- [{uri, bytes}]
    started_at       timestamptz not null default interlock.clock(),
    ended_at         timestamptz
);
create index query_audit_by_org on interlock.query_audit (org_id, query_id);
create index query_audit_running on interlock.query_audit (started_at) where outcome = 'Running';

-- An export belongs to no dataset: it goes when its time is over.
alter table interlock.file_sweeps alter column dataset_version drop not null;

-- Keys that may read everything else may query, too: what they are for has not changed.
update interlock.api_keys set scopes = scopes || '{query:read}'
where scopes @> '{jobs:read,tasks:read,queues:read}' and not scopes @> '{query:read}';
