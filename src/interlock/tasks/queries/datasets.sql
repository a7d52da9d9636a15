-- Changes of datasets: what an attempt reads, and what it adds to their current state.

-- name: lock_versions
-- Locked before a change is written, and before the tasks that write it. So the changes of one version become visible
-- in the order of their commit_id.
select dataset_version, progress, cursor, storage, unique_key, schema, schema_hash,
       (select j.partition from interlock.jobs j where j.job_id = v.job_id) as partition
from interlock.dataset_versions v
where dataset_version = any(:versions::uuid[])
order by dataset_version
for no key update of v;

-- name: examine_scopes^
-- A number for the change, and the new partitions that would overlap another one.
select nextval('interlock.commits') as commit_id, (
    select json_agg(json_build_object('n', s.n, 'start', p.range_start, 'end', p.range_end))
    from unnest(:versions::uuid[], :starts::bigint[], :ends::bigint[])
        with ordinality as s(dataset_version, range_start, range_end, n)
    cross join lateral (select p.range_start, p.range_end from interlock.partitions p
                        where p.dataset_version = s.dataset_version and p.range_start <= s.range_end
                        order by p.range_start desc limit 1) p
    where p.range_end >= s.range_start and (p.range_start, p.range_end) <> (s.range_start, s.range_end)) as clashing;

-- name: write_changes^
-- Writes events with their outbox rows, partitions, and the positions of streams. The same scope reported again by the
-- same producer is the same event. A result of older inputs does not replace one of newer inputs.
with events as materialized (
    select * from unnest(:task_ids::uuid[], :attempts::int[], :org_ids::uuid[], :uuids::uuid[], :versions::uuid[],
                         :cursors::bigint[], :starts::bigint[], :ends::bigint[], :sequences::bigint[])
        as e(task_id, attempt, org_id, dataset_uuid, dataset_version, cursor, range_start, range_end, sequence)
), fresh as (
    insert into interlock.dataset_events (org_id, dataset_uuid, dataset_version, scope, cursor, partition_key, range_start,
                                          range_end, task_id, attempt, commit_id)
    select org_id, dataset_uuid, dataset_version,
           case when range_start is null then 'c:' || cursor else 'p:' || range_start || '-' || range_end end
           || coalesce('#' || sequence, ''),
           cursor, range_start || '-' || range_end, range_start, range_end, task_id, attempt, :commit_id
    from events
    on conflict (task_id, dataset_uuid, dataset_version, scope) do nothing
    returning event_id, dataset_version, cursor, range_start, range_end, task_id, attempt
), outputs as materialized (
    select * from unnest(:o_task_ids::uuid[], :o_attempts::int[], :o_versions::uuid[], :o_cursors::bigint[],
                         :o_starts::bigint[], :o_ends::bigint[], :o_locations::text[], :o_row_counts::bigint[],
                         :o_bytes::bigint[], :o_schema_hashes::text[])
        as o(task_id, attempt, dataset_version, cursor, range_start, range_end, location, row_count, bytes, schema_hash)
), scopes as materialized (
    select distinct on (dataset_version, range_start) * from (
        select task_id, attempt, dataset_version, range_start, range_end, location, row_count, bytes, schema_hash
        from outputs where dataset_version = any(:partitioned_versions::uuid[]) and range_start is not null
        union all
        select f.task_id, f.attempt, f.dataset_version, f.range_start, f.range_end, null, null, null, null
        from fresh f where f.dataset_version = any(:partitioned_versions::uuid[]) and f.range_start is not null
    ) s
    order by dataset_version, range_start, location nulls last
), made_of as materialized (
    select w.task_id, coalesce(
        (select max(m.input_commit) from interlock.materialisations m where m.task_id = w.task_id),
        (select (t.payload ->> 'commit')::bigint from interlock.tasks t
         join interlock.jobs j on j.job_id = t.job_id and j.dag_name is not null and j.source is null
         where t.shard = :shard and t.task_id = w.task_id and json_typeof(t.payload) = 'object'), 0) as input_commit
    from (select distinct task_id from scopes) w
), before as materialized (
    select p.dataset_version, p.range_start, p.location from scopes s
    join interlock.partitions p on p.dataset_version = s.dataset_version and p.range_start = s.range_start
), written as (
    insert into interlock.partitions (dataset_version, range_start, range_end, commit_id, input_commit, task_id, attempt,
                                      location, row_count, bytes, schema_hash)
    select s.dataset_version, s.range_start, s.range_end, :commit_id, m.input_commit, s.task_id, s.attempt, s.location,
           s.row_count, s.bytes, s.schema_hash
    from scopes s join made_of m on m.task_id = s.task_id
    on conflict (dataset_version, range_start) do update
        set commit_id = excluded.commit_id, input_commit = excluded.input_commit, task_id = excluded.task_id,
            attempt = excluded.attempt, committed_at = interlock.clock(),
            location = coalesce(excluded.location, interlock.partitions.location),
            row_count = coalesce(excluded.row_count, interlock.partitions.row_count),
            bytes = coalesce(excluded.bytes, interlock.partitions.bytes),
            schema_hash = coalesce(excluded.schema_hash, interlock.partitions.schema_hash)
        where interlock.partitions.input_commit <= excluded.input_commit
    returning dataset_version, range_start, location
), useless as (
    -- Replaced files, kept for current readers, and files that were too late to replace any.
    insert into interlock.file_sweeps (place, dataset_version, due_at, final_at)
    select distinct u.location, u.dataset_version, interlock.clock(), interlock.clock()
    from (select b.dataset_version, b.location from before b
          join written w on w.dataset_version = b.dataset_version and w.range_start = b.range_start
          where b.location <> w.location
          union all
          select s.dataset_version, s.location from scopes s
          where not exists (select 1 from written w
                            where w.dataset_version = s.dataset_version and w.range_start = s.range_start)) u
    where u.location like '%/_attempts/%'
    on conflict (place) do nothing
), moved as (
    update interlock.dataset_versions v
    set commit_id = :commit_id, cursor = greatest(v.cursor, c.cursor),
        progress = coalesce(v.progress, case when c.partitioned then 'partition' else 'cursor' end)
    from (select dataset_version, max(cursor) as cursor, dataset_version = any(:partitioned_versions::uuid[]) as partitioned
          from (select dataset_version, cursor from fresh
                union all
                select dataset_version, cursor from outputs where cursor is not null or range_start is not null) c
          group by dataset_version) c
    where v.dataset_version = c.dataset_version
), owed as (
    insert into interlock.outbox (kind, target, body)
    select 'route', '', json_build_object('events', array_agg(event_id), 'versions', array_agg(distinct dataset_version))
    from fresh having count(*) > 0
    returning 1
)
select (select count(*) from fresh) as accepted, (select count(pg_notify('interlock_outbox', 'route')) from owed) as told;

-- name: data_of_inputs
-- The datasets that the edges of jobs lead to. A dataset of ranges has no rows: it resolves to the dataset that the
-- ranges were cut from.
with recursive behind as (
    select g.job_id, g.input_index, g.dataset_version, array_remove(array[g.condition], null) as conditions, 0 as depth
    from interlock.edges g where g.job_id = any(:job_ids::uuid[])
    union all
    select b.job_id, b.input_index, e.dataset_version, b.conditions || array_remove(array[e.condition], null), b.depth + 1
    from behind b
    -- From here on one by one, even in a plan that was made while the tables were empty.
    cross join lateral (
        select job_id from interlock.dataset_versions v where v.dataset_version = b.dataset_version limit 1) v
    cross join lateral (
        select job_id from interlock.jobs p
        where p.job_id = v.job_id and p.operator = any(:range_operators::text[]) limit 1) p
    cross join lateral (
        select * from interlock.edges e where e.job_id = p.job_id and e.input_index = 0 limit 1) e
    where b.depth < 50
)
select distinct on (b.job_id, b.input_index) b.job_id, b.input_index, b.conditions, v.dataset_uuid, v.dataset_version,
       v.storage, v.schema, d.job_name, d.output_name
from behind b
join interlock.dataset_versions v on v.dataset_version = b.dataset_version
join interlock.datasets d on d.dataset_uuid = v.dataset_uuid
order by b.job_id, b.input_index, b.depth desc;

-- name: partitions_at
-- Partitions by their exact bounds.
select s.n, p.commit_id, p.location, p.row_count, p.bytes
from unnest(:versions::uuid[], :starts::bigint[], :ends::bigint[]) with ordinality as s(dataset_version, range_start, range_end, n)
join interlock.partitions p on p.dataset_version = s.dataset_version and p.range_start = s.range_start
     and p.range_end = s.range_end;

-- name: set_schemas!
update interlock.dataset_versions v set schema = s.schema::json, schema_hash = s.schema_hash
from unnest(:versions::uuid[], :schemas::text[], :hashes::text[]) as s(dataset_version, schema, schema_hash)
where v.dataset_version = s.dataset_version;
