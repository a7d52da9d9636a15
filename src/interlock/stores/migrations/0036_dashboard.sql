-- The dashboard: sessions, bulk operations, counts by minute, search by name.

-- Sessions of people in the dashboard. Each belongs to an API key, or to a member of an org, and has no rights of its
-- own: each request reads those that the key or the member has at that moment.

create table interlock.sessions (
    session_id    text primary key,
    org_id        uuid not null references interlock.orgs,
    key_id        text references interlock.api_keys,
    issuer        text,
    subject       text,
    csrf          text not null,
    secret_hash   bytea not null,
    previous_hash bytea,                            -- valid for a moment after a rotation, for requests under way
    rotated_at    timestamptz not null default interlock.clock(),
    created_at    timestamptz not null default interlock.clock(),
    expires_at    timestamptz not null,
    revoked_at    timestamptz,
    check ((key_id is null) = (subject is not null) and (issuer is null) = (subject is null))
);
create index sessions_by_org on interlock.sessions (org_id, session_id) where revoked_at is null;
create index sessions_expiry on interlock.sessions (expires_at);

-- Links that sign a person in once, with an API key that the person or the machine already holds.
create table interlock.sign_in_links (
    token_hash bytea primary key,
    key_id     text not null references interlock.api_keys,
    expires_at timestamptz not null
);
create index sign_in_links_expiry on interlock.sign_in_links (expires_at);

-- Actions on all tasks or runs that match a filter: retry, cancel, redrive, reprioritise, pause, resume.
--
-- A row is the operation's state and, once it has ended, its audit record. `place` is how far the walk over the org's
-- jobs, runs and tasks has come; it moves in the transaction of each batch, so that no task is acted on twice.

create table interlock.bulk_operations (
    operation_id     uuid primary key default uuidv7(),
    org_id           uuid not null references interlock.orgs,
    kind             text not null,
    filter           json not null,
    job_id           uuid,                          -- the job that the filter names
    priority         smallint,
    reason           text,
    requested_by     text not null,
    state            text not null default 'Running',
    cancel_requested boolean not null default false,
    place            json,                          -- null: not begun
    matched          bigint not null default 0,
    changed          bigint not null default 0,
    expected         bigint,                        -- upper bound when it began; null: unknown
    walked           float4,                        -- share of a single run that was walked
    created_at       timestamptz not null default interlock.clock(),
    ended_at         timestamptz
);
create index bulk_operations_by_org on interlock.bulk_operations (org_id, operation_id);
create index bulk_operations_running on interlock.bulk_operations (operation_id) where ended_at is null;

-- What the dashboard shows without counting: the tasks of runs that ended, by minute, and the newest failed attempts.

create table interlock.minute_counts (
    org_id    uuid not null,
    minute    timestamptz not null,
    completed bigint not null default 0,
    failed    bigint not null default 0,            -- attempts, whether they are retried or not
    canceled  bigint not null default 0,
    primary key (org_id, minute)
);
-- For retention. An expression, so that no plan reads an org's minutes among those of all orgs.
create index minute_counts_age on interlock.minute_counts ((minute at time zone 'UTC'));

create index attempts_failed on interlock.attempts (ended_at) where outcome in ('Failed', 'LeaseExpired', 'TimedOut');

-- Names by their beginning, for the search box. The org is an expression in the index of jobs, so that no plan reads all
-- jobs of an org for one of them.
create index jobs_by_prefix on interlock.jobs ((org_id::text), name collate "C") where deleted_at is null;
create index dags_by_prefix on interlock.dags (org_id, name collate "C");
create index publications_by_prefix on interlock.publications (org_id, name collate "C");
