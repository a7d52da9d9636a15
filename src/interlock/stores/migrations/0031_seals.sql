-- A value sealed with the key that every sealed secret of this database is sealed with (bus/secrets.py). A process that
-- cannot open it has another key, and stops at its start. One row; it belongs to the platform, not to an org.
create table interlock.seals (
    name text primary key check (name = 'platform'),
    sealed bytea not null,
    created_at timestamptz not null default now()
);
