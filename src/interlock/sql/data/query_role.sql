-- The role that the query service reads tables of datasets with. Made anew at every start of `interlock up`, with a new
-- password; it may read those tables, and nothing else.

-- name: lock_schema!
-- As the follower does: tables are made under the same lock.
select pg_advisory_xact_lock(hashtextextended('interlock:datasets', 0));

-- name: keep_password
-- A password is no parameter of the statement below; this way it is in no statement at all.
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
    -- The follower's own tables are there before what is made later becomes readable.
    revoke all on all tables in schema datasets from interlock_query;
    for one in select tablename from pg_tables where schemaname = 'datasets' and tablename ~ '^dataset_[0-9a-f]{32}$' loop
        execute format('grant select on datasets.%I to interlock_query', one.tablename);
    end loop;
    grant usage on schema datasets to interlock_query;
    alter default privileges in schema datasets grant select on tables to interlock_query;
end $$;
