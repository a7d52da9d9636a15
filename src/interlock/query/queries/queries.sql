-- Queries: readable data, and records. Every statement filters by org.

-- Readable data

-- name: attempt_of^
-- The current state of the task that a capability token names.
select t.job_id, t.status, t.attempt, t.lease_token, t.lease_expires_at > interlock.clock() as leased
from interlock.tasks t
where t.shard = :shard and t.task_id = :task_id and t.org_id = :org_id;

-- name: granted_versions
-- Versions by their keys, if they belong to the org. Looked up one by one, not through all versions of the org.
select v.dataset_version, v.dataset_uuid, v.storage, v.schema, d.job_name, d.output_name
from unnest(:versions::uuid[]) as i(dataset_version)
cross join lateral (
    select * from interlock.dataset_versions v
    where v.dataset_version = i.dataset_version and v.org_id = :org_id and v.purged_at is null limit 1) v
cross join lateral (
    select job_name, output_name from interlock.datasets d
    where d.dataset_uuid = v.dataset_uuid and (d.org_id = v.org_id) is true limit 1) d;

-- name: published_among
select name from interlock.publications
where org_id = :org_id and name = any(:names::text[])
order by name limit :limit;

-- name: readable_relations
-- Datasets that the role may read and that have a readable version, by id.
select d.dataset_uuid, d.dag_name, d.job_name, d.output_name, v.storage, v.schema, p.names
from interlock.datasets d
cross join lateral (
    select coalesce(array_agg(p.name order by p.name), '{}') as names,
           coalesce(bool_or(:role = any(p.read_roles::text[])), true) as readable
    from interlock.publications p where p.dataset_uuid = d.dataset_uuid
) p
cross join lateral (
    select v.storage, v.schema from interlock.dataset_versions v
    where v.dataset_version = d.current_version and v.org_id = :org_id and v.purged_at is null limit 1) v
where d.org_id = :org_id and d.dataset_uuid > :after::uuid and p.readable
order by d.dataset_uuid limit :limit;

-- name: behind_ranges
-- A dataset of ranges has no rows: it resolves to the dataset that the ranges were cut from.
with recursive behind as (
    select i.dataset_version as asked, i.dataset_version, 0 as depth from unnest(:versions::uuid[]) as i(dataset_version)
    union all
    select b.asked, e.dataset_version, b.depth + 1
    from behind b
    -- From here on one by one, as in data_of_inputs.
    cross join lateral (
        select job_id from interlock.dataset_versions v
        where v.dataset_version = b.dataset_version and v.org_id = :org_id limit 1) v
    cross join lateral (
        select job_id from interlock.jobs p
        where p.job_id = v.job_id and p.operator = any(:range_operators::text[]) limit 1) p
    cross join lateral (
        select * from interlock.edges e where e.job_id = p.job_id and e.input_index = 0 limit 1) e
    where b.depth < 50
)
select distinct on (asked) asked, dataset_version from behind order by asked, depth desc;

-- name: committed_files
-- All files of these versions from one snapshot, because this is one statement.
select p.dataset_version, p.location, p.bytes, p.schema_hash, p.range_start, p.range_end
from unnest(:versions::uuid[]) as i(dataset_version)
join interlock.dataset_versions v on v.dataset_version = i.dataset_version and v.org_id = :org_id
cross join lateral (
    select * from interlock.partitions p
    where p.dataset_version = i.dataset_version and p.location is not null
    order by p.range_start limit :limit
) p
order by p.dataset_version, p.range_start;

-- Records

-- name: open_query$
insert into interlock.query_audit (org_id, user_name, key_id, task_id, attempt, mode, sql_sha256, statement)
values (:org_id, :user_name, :key_id, :task_id, :attempt, :mode, :sql_sha256, :statement)
returning query_id;

-- name: note_export!
-- Recorded before anything is written there, so that the files are deleted when they expire.
with noted as (
    update interlock.query_audit set export_prefix = :prefix where query_id = :query_id and org_id = :org_id
)
insert into interlock.file_sweeps (place, due_at, final_at)
values (:prefix, interlock.clock() + make_interval(secs => :seconds::float8),
        -- The sweeper adds its own grace period for readers; it is part of the lifetime of an export.
        interlock.clock() + make_interval(secs => :seconds::float8 - :keep::float8))
on conflict (place) do nothing;

-- name: close_query!
-- Closes a record once. A later writer, such as the loop that marks lost records, changes nothing.
update interlock.query_audit
set outcome = :outcome, code = :code, dataset_versions = :versions, row_count = :row_count, bytes = :bytes,
    truncated = :truncated, batch_task_id = :batch_task_id, export_files = :export_files::text::json,
    ended_at = interlock.clock()
where query_id = :query_id and org_id = :org_id and outcome = 'Running';

-- name: find_query^
select * from interlock.query_audit where query_id = :query_id and org_id = :org_id;

-- name: list_queries
-- Newest first: ids are ordered by creation time.
select * from interlock.query_audit
where org_id = :org_id and query_id < :before::uuid
order by query_id desc limit :limit;

-- name: lose_queries
-- Records of dead processes: no query runs this long.
update interlock.query_audit set outcome = 'Lost', code = 'query_lost', ended_at = interlock.clock()
where query_id = any(array(
    select query_id from interlock.query_audit
    where outcome = 'Running' and started_at < interlock.clock() - make_interval(secs => :seconds::float8)
    order by started_at limit :limit for update skip locked))
returning query_id;

-- name: delete_old_queries
-- The scan starts where the last pass ended: see LowWater.
delete from interlock.query_audit where query_id = any(array(
    select a.query_id
    from (select query_id, started_at from interlock.query_audit where query_id > :since::uuid
          order by query_id limit :limit) a
    where a.started_at < interlock.clock() - make_interval(secs => :age_seconds::float8)))
returning query_id;

-- Batch queries

-- name: insert_query_edges!
-- Pins the inputs of a batch query. The edges are not active: nothing is routed along them. For storage with rows of
-- several orgs, the condition selects those of this org.
insert into interlock.edges (job_id, input_index, org_id, dataset_uuid, dataset_version, floating, active, condition)
select :job_id, i.n - 1, :org_id, v.dataset_uuid, v.dataset_version, false, false,
       case when v.storage = 'buffered' then format('org_id = %L', :org_id::uuid) end
from unnest(:versions::uuid[]) with ordinality as i(dataset_version, n)
join interlock.dataset_versions v on v.dataset_version = i.dataset_version and v.org_id = :org_id;

-- name: batch_task^
select t.status, t.result, t.dead, t.run_id, t.pack, t.pack_offset, t.pack_length,
       (select a.error_message from interlock.attempts a where a.task_id = t.task_id
        order by a.attempt desc, a.ended_at desc limit 1) as error
from interlock.tasks t
where t.shard = :shard and t.task_id = :task_id and t.org_id = :org_id;
