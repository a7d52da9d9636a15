-- Statements of the sink. For the tables and functions see schema.sql.

-- name: lock_schema!
select pg_advisory_xact_lock(hashtextextended('interlock:datasets', 0));

-- name: ensure!
select datasets.sink_ensure(:version, :org_id, :columns::text::json, :key::text[]);

-- name: stage!
select datasets.sink_stage(:columns::text::json);

-- name: lock_table$
-- Numbers the batches of a version in commit order: a reader that was notified of one has all batches up to it.
select batches from datasets.sink_tables where dataset_version = :version and org_id = :org_id for update;

-- name: committed
select publish_id, batch, rows from datasets.sink_commits
where publish_id = any(:publish_ids::uuid[]) and org_id = :org_id;

-- name: merge!
select datasets.sink_merge(:version, :org_id, :stage, :publish_ids::uuid[], :numbers::bigint[], :columns::text::json,
                           :key::text[], :update_rows, :repeated);

-- name: remember!
with counted as (
    update datasets.sink_tables set batches = (select max(n) from unnest(:numbers::bigint[]) n)
    where dataset_version = :version and org_id = :org_id
)
insert into datasets.sink_commits (publish_id, dataset_version, org_id, batch, rows)
select c.publish_id, :version, :org_id, c.batch, c.rows
from unnest(:publish_ids::uuid[], :numbers::bigint[], :rows::bigint[]) as c(publish_id, batch, rows);

-- name: forget!
delete from datasets.sink_commits where publish_id = any(:publish_ids::uuid[]);

-- name: staged
select publish_id, rows, bytes, refusal from datasets.sink_staged where staging = :name;

-- name: stagings
-- Tasks with staging tables to merge or to drop.
select distinct substr(name, 9, 32)::uuid as task_id
from (select tablename::text as name from pg_tables where schemaname = 'datasets'
      union all
      select staging from datasets.sink_staged) s
where name ~ '^staging_[0-9a-f]{32}_[0-9]+$'
limit :limit;

-- name: drop_staging!
select datasets.sink_drop_staging(:prefix);
