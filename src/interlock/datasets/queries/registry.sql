-- The read models of datasets: what exists, its lineage and its history. Every statement filters by org, or gets ids
-- that were filtered.

-- name: dataset_by_uuid^
select dataset_uuid from interlock.datasets where org_id = :org_id and dataset_uuid = :dataset_uuid;

-- name: dataset_by_name^
select dataset_uuid from interlock.publications where org_id = :org_id and name = :name;

-- name: dataset_by_output^
select dataset_uuid from interlock.datasets
where org_id = :org_id and dag_name = :dag and job_name = :job and output_name = :output;

-- name: dataset^
-- Without a published name every role of the org may read it. With several names, a role that one of them admits may.
select d.dataset_uuid, d.dag_name, d.job_name, d.output_name, d.current_version, p.names,
       coalesce(p.read_roles, '{reader,writer,admin}') as read_roles
from interlock.datasets d
cross join lateral (
    select coalesce(array_agg(distinct p.name order by p.name), '{}') as names, array_agg(distinct r.role) as read_roles
    from interlock.publications p cross join lateral unnest(p.read_roles::text[]) as r(role)
    where p.dataset_uuid = d.dataset_uuid
) p
where d.org_id = :org_id and d.dataset_uuid = :dataset_uuid;

-- name: list_datasets
-- Datasets that the role may read, by id, without those whose data was purged with their DAG.
select d.dataset_uuid, d.dag_name, d.job_name, d.output_name, d.current_version, v.storage, v.progress, v.cursor, p.names,
       (select j.partition from interlock.jobs j where j.job_id = v.job_id) as partition
from interlock.datasets d
cross join lateral (
    select coalesce(array_agg(p.name order by p.name), '{}') as names,
           coalesce(bool_or(:role = any(p.read_roles::text[])), true) as readable
    from interlock.publications p where p.dataset_uuid = d.dataset_uuid
) p
left join interlock.dataset_versions v on v.dataset_version = d.current_version
where d.org_id = :org_id and d.dataset_uuid > :after::uuid and p.readable and v.purged_at is null
order by d.dataset_uuid limit :limit;

-- name: versions_of
-- The newest versions, and the current one even if it is older. Partitions are counted up to a bound.
select v.dataset_version, v.job_id, v.storage, v.unique_key, v.schema_hash, v.schema, v.progress, v.cursor, v.created_at, j.partition,
       case when v.purged_at is not null then 'Purged'
            when v.dataset_version = :current_version then 'Current'
            when j.active then 'Building' else 'Retired' end as state,
       f.range_start, l.range_end,
       (select count(*) from (select 1 from interlock.partitions p where p.dataset_version = v.dataset_version
                              limit :bound::int + 1) p) as partitions
from (
    (select dataset_version from interlock.dataset_versions where dataset_uuid = :dataset_uuid
     order by created_at desc limit :limit)
    union
    select dataset_version from interlock.dataset_versions where dataset_version = :current_version
) i
join interlock.dataset_versions v on v.dataset_version = i.dataset_version
left join interlock.jobs j on j.job_id = v.job_id
left join lateral (select p.range_start from interlock.partitions p where p.dataset_version = v.dataset_version
                   order by p.range_start limit 1) f on true
left join lateral (select p.range_end from interlock.partitions p where p.dataset_version = v.dataset_version
                   order by p.range_start desc limit 1) l on true
order by v.created_at desc;

-- name: version_of^
-- Looked up by its key, not through all versions of the dataset.
select dataset_version from interlock.dataset_versions
where dataset_version = :dataset_version and (dataset_uuid = :dataset_uuid) is true;

-- name: partition_of$
select j.partition from interlock.dataset_versions v
join interlock.jobs j on j.job_id = v.job_id
where v.dataset_version = :dataset_version;

-- name: partitions_of
-- Partitions that overlap a range, from a position on. Partitions do not overlap, so at most one starts before the
-- range and reaches into it.
select p.* from interlock.partitions p
where p.dataset_version = :dataset_version
  and p.range_start > :after::bigint
  and p.range_start >= coalesce((select q.range_start from interlock.partitions q
                                 where q.dataset_version = :dataset_version and q.range_start <= :from_::bigint
                                 order by q.range_start desc limit 1), :from_::bigint)
  and p.range_start <= :to::bigint and p.range_end >= :from_::bigint
order by p.range_start limit :limit;

-- name: events_of
select e.event_id, e.dataset_version, e.cursor, e.partition_key, e.range_start, e.range_end, e.commit_id, e.task_id,
       e.attempt, e.accepted_at,
       (select j.partition from interlock.dataset_versions v join interlock.jobs j on j.job_id = v.job_id
        where v.dataset_version = e.dataset_version) as partition
from interlock.dataset_events e
where e.dataset_uuid = :dataset_uuid and e.event_id < :before::bigint
order by e.event_id desc limit :limit;

-- Lineage, one step at a time. Current generations only: others read and write the same datasets.

-- name: readers_of_datasets
select g.dataset_uuid, g.job_id, j.dag_name, j.name, g.condition
from interlock.edges g
join interlock.jobs j on j.job_id = g.job_id and j.current
where g.dataset_uuid = any(:dataset_uuids::uuid[]) and g.active and g.org_id = :org_id
order by j.dag_name, j.name, g.input_index limit :limit;

-- name: written_by
select v.dataset_uuid, v.job_id
from interlock.dataset_versions v
where v.job_id = any(:job_ids::uuid[]) and v.org_id = :org_id
order by v.job_id, v.output_index limit :limit;

-- name: writers_of_datasets
select d.dataset_uuid, j.job_id, j.dag_name, j.name
from interlock.datasets d
join interlock.dataset_versions v on v.dataset_version = d.current_version
join interlock.jobs j on j.job_id = v.job_id
where d.dataset_uuid = any(:dataset_uuids::uuid[]) and d.org_id = :org_id
order by j.dag_name, j.name limit :limit;

-- name: read_by
select g.dataset_uuid, g.job_id, g.condition
from interlock.edges g
where g.job_id = any(:job_ids::uuid[]) and g.org_id = :org_id
order by g.job_id, g.input_index limit :limit;

-- name: names_of_datasets
select d.dataset_uuid, d.dag_name, d.job_name, d.output_name,
       array(select p.name from interlock.publications p where p.dataset_uuid = d.dataset_uuid order by p.name) as names
from interlock.datasets d
where d.dataset_uuid = any(:dataset_uuids::uuid[]) and d.org_id = :org_id;
