-- Bundles: zips of user code, immutable, by their SHA-256. The zip itself is an object, {root}/bundles/{org_id}/{sha256}.zip.

create table interlock.bundles (
    org_id         uuid not null references interlock.orgs,
    sha256         text collate "C" not null,
    size_bytes     bigint not null,
    files          int not null,
    unpacked_bytes bigint not null,
    modules        jsonb not null,                  -- what an entrypoint may name, with its language
    uploaded_by    text not null,
    uploaded_at    timestamptz not null default interlock.clock(),
    primary key (org_id, sha256)
);

-- A name stands for the bundle that was last uploaded under it. Jobs are pinned to what it stood for at their deploy.
create table interlock.bundle_names (
    org_id uuid not null,
    name   text not null,
    sha256 text collate "C" not null,
    set_at timestamptz not null default interlock.clock(),
    primary key (org_id, name),
    foreign key (org_id, sha256) references interlock.bundles
);
create index bundle_names_by_bundle on interlock.bundle_names (org_id, sha256);

-- Zips that go once they are due, unless there is a bundle of theirs by then: of uploads that came to nothing, and of
-- bundles that were deleted.
create table interlock.bundle_sweeps (
    org_id uuid not null,
    sha256 text collate "C" not null,
    due_at timestamptz not null,
    primary key (org_id, sha256)
);
create index bundle_sweeps_due on interlock.bundle_sweeps (due_at);

-- Whether a bundle may go is asked of the jobs.
create index jobs_by_bundle on interlock.jobs (org_id, (config ->> 'bundle')) where operator = 'udf';

-- A place of a runner that was freed goes to the oldest that waits.
create index outbox_invocations on interlock.outbox (target, priority, outbox_id) where kind = 'invoke';

-- Keys that may write what there was to write may write this, too.
update interlock.api_keys set scopes = array_append(scopes, 'bundles:write')
where scopes @> array['jobs:write', 'tasks:write'] and not scopes @> array['bundles:write'];
