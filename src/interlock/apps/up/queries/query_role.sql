-- The role that the query service uses to read tables of datasets. Recreated with a new password at every start of
-- `interlock up`. It may read those tables and nothing else.

-- name: lock_schema!
-- The lock that the follower takes too: tables are created under it.
select pg_advisory_xact_lock(hashtextextended('interlock:datasets', 0));

-- name: keep_password
-- The statement below takes no parameters; this keeps the password out of every statement text.
select set_config('interlock.query_password', :password, true);

-- name: make_role!
do $$
declare
    one record;
begin
    if not exists (select 1 from pg_roles where rolname = 'interlock_query') then
        create role interlock_query login;
    end if;
    execute format('alter role interlock_query password %L connection limit 200',
                   current_setting('interlock.query_password'));
    alter role interlock_query set default_transaction_read_only = on;
    -- The follower's own tables exist before later tables become readable.
    revoke all on all tables in schema datasets from interlock_query;
    for one in select tablename from pg_tables where schemaname = 'datasets' and tablename ~ '^dataset_[0-9a-f]{32}$' loop
        execute format('grant select on datasets.%I to interlock_query', one.tablename);
    end loop;
    grant usage on schema datasets to interlock_query;
    alter default privileges in schema datasets grant select on tables to interlock_query;
end $$;
