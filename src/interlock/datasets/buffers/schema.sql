-- The part of the data database that the sink needs. Run at every start of one, under an advisory lock.
--
--   sink_tables ── one row per dataset version with loaded batches: its lock, and their number
--   sink_commits ── one row per loaded batch, written with its rows: a second load finds it
--   dataset_… ── the rows of a version, each with its org, its publish and the publish's number

create schema if not exists datasets;

create table if not exists datasets.sink_tables (
    dataset_version uuid primary key,
    org_id          uuid not null,
    batches         bigint not null default 0
) with (fillfactor = 50);

create table if not exists datasets.sink_commits (
    publish_id      uuid primary key,
    dataset_version uuid not null,
    org_id          uuid not null,
    batch           bigint not null,
    rows            bigint not null,
    committed_at    timestamptz not null default now()
);

-- What a Spark task found in the batches it has staged: the number of rows, or the reason for a refusal.
create table if not exists datasets.sink_staged (
    staging    text not null,
    publish_id uuid not null,
    rows       bigint not null,
    bytes      bigint not null,
    refusal    json,
    primary key (staging, publish_id)
);

create or replace function datasets.sink_table(version uuid) returns text language sql immutable as $$
    select 'dataset_' || replace(version::text, '-', '') $$;

-- Creates the table of a version with every declared column. A column that was declared later is added if it is
-- nullable.
create or replace function datasets.sink_ensure(version uuid, org uuid, columns json, key text[]) returns void
language plpgsql as $$
declare
    name text := datasets.sink_table(version);
    one record;
begin
    execute format('create table if not exists datasets.%I (org_id uuid not null, _publish_id uuid not null, '
                   '_batch bigint not null)', name);
    for one in select * from json_to_recordset(columns) as c(name text, type text, nullable boolean) loop
        execute format('alter table datasets.%I add column if not exists %I %s %s', name, one.name, one.type,
                       case when one.nullable then '' else 'not null' end);
    end loop;
    execute format('create unique index if not exists %I on datasets.%I (org_id, %s)', name || '_key', name,
                   (select string_agg(format('%I', k), ', ' order by n) from unnest(key) with ordinality u(k, n)));
    execute format('create index if not exists %I on datasets.%I using brin (_batch) with (pages_per_range = 32)',
                   name || '_batch', name);
    insert into datasets.sink_tables (dataset_version, org_id) values (version, org) on conflict do nothing;
end $$;

-- The table that rows are copied to first. It is dropped with the transaction.
create or replace function datasets.sink_stage(columns json) returns void language plpgsql as $$
begin
    execute format('create temp table sink_stage (_publish smallint not null, %s) on commit drop',
                   (select string_agg(format('%I %s', c.name, c.type), ', ')
                    from json_to_recordset(columns) as c(name text, type text)));
end $$;

-- Moves rows of the given publishes from the stage to the table. `numbers` is null for a publish that is already there.
-- A row replaces another only if it was published later, so the order in which batches are loaded does not matter.
create or replace function datasets.sink_merge(version uuid, org uuid, stage text, publishes uuid[], numbers bigint[],
                                               columns json, key text[], update_rows boolean, repeated boolean)
returns void language plpgsql as $$
declare
    name text := datasets.sink_table(version);
    listed text := (select string_agg(format('%I', c.name), ', ') from json_to_recordset(columns) as c(name text));
    keys text := (select string_agg(format('%I', k), ', ' order by n) from unnest(key) with ordinality u(k, n));
    replaced text := (select string_agg(format('%1$I = excluded.%1$I', c.name), ', ')
                      from json_to_recordset(columns) as c(name text) where c.name <> all(key));
begin
    execute format(
        'insert into datasets.%I as t (org_id, _publish_id, _batch, %s) '
        'select $1, $2[s._publish], $3[s._publish], %s from %s s on conflict (org_id, %s) do %s',
        name, listed, listed,
        -- Batches that were staged separately may have rows with the same key.
        case when repeated
             then format('(select distinct on (%1$s) * from %2$s where $3[_publish] is not null order by %1$s, _publish %3$s)',
                         keys, stage::regclass, case when update_rows then 'desc' else 'asc' end)
             else format('(select * from %s where $3[_publish] is not null)', stage::regclass) end,
        keys,
        case when update_rows
             then format('update set %s_publish_id = excluded._publish_id, _batch = excluded._batch '
                         'where t._publish_id < excluded._publish_id', coalesce(replaced || ', ', ''))
             else 'nothing' end)
    using org, publishes, numbers;
end $$;

-- A table that a Spark load fills from several connections, and that the sink merges and drops.
create or replace function datasets.sink_staging(name text, columns json) returns void language plpgsql as $$
begin
    execute format('drop table if exists datasets.%I', name);
    execute format('create unlogged table datasets.%I (_publish smallint not null, %s)', name,
                   (select string_agg(format('%I %s', c.name, c.type), ', ')
                    from json_to_recordset(columns) as c(name text, type text)));
end $$;

-- Deletes the rows of a batch that a dead executor left.
create or replace function datasets.sink_unstage(name text, number bigint) returns void language plpgsql as $$
begin
    execute format('delete from datasets.%I where _publish = $1', name) using number;
end $$;

-- Drops the staging tables of all attempts of a task.
create or replace function datasets.sink_drop_staging(prefix text) returns void language plpgsql as $$
declare
    one record;
begin
    delete from datasets.sink_staged where starts_with(staging, prefix);
    for one in select tablename from pg_tables where schemaname = 'datasets' and starts_with(tablename, prefix) loop
        execute format('drop table if exists datasets.%I', one.tablename);
    end loop;
end $$;
