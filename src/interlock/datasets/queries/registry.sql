-- The read models of datasets: what exists, its lineage and its history; and invalidations. Every statement filters by
-- org, or gets ids that were filtered.

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
-- Datasets that the role may read, by id.
select d.dataset_uuid, d.dag_name, d.job_name, d.output_name, d.current_version, v.storage, v.progress, v.cursor, p.names
from interlock.datasets d
cross join lateral (
    select coalesce(array_agg(p.name order by p.name), '{}') as names,
           coalesce(bool_or(:role = any(p.read_roles::text[])), true) as readable
    from interlock.publications p where p.dataset_uuid = d.dataset_uuid
) p
left join interlock.dataset_versions v on v.dataset_version = d.current_version
where d.org_id = :org_id and d.dataset_uuid > :after::uuid and p.readable
order by d.dataset_uuid limit :limit;

-- name: versions_of
-- The newest versions, and the current one even if it is older. Partitions are counted up to a bound.
select v.dataset_version, v.job_id, v.storage, v.unique_key, v.schema_hash, v.schema, v.progress, v.cursor, v.created_at,
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
select event_id, dataset_version, cursor, partition_key, range_start, range_end, commit_id, task_id, attempt, accepted_at
from interlock.dataset_events
where dataset_uuid = :dataset_uuid and event_id < :before::bigint
order by event_id desc limit :limit;

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

-- Invalidations

-- name: producer_of^
-- The job that writes a dataset version, and its inputs.
select v.dataset_version, v.progress, v.cursor, j.job_id, j.active,
       j.dag_name is not null and j.source is null as reactive,
       array(select g.dataset_version from interlock.edges g where g.job_id = j.job_id) as inputs
from interlock.dataset_versions v
left join interlock.jobs j on j.job_id = v.job_id
where v.dataset_version = :dataset_version and v.org_id = :org_id;

-- name: version_for_change^
-- Call it while holding the lock of lock_versions.
select progress, cursor from interlock.dataset_versions where dataset_version = :dataset_version;

-- name: next_commit$
select nextval('interlock.commits');

-- name: holding_back^
-- Jobs that get no tasks now, by the same rule as give_scopes and start_streams.
select j.dag_name, j.name, p.reason, p.since, array(
           select coalesce(s.name, s.job_id::text) from unnest(p.path) with ordinality as w(job_id, n)
           join interlock.jobs s on s.job_id = w.job_id order by w.n) as path
from interlock.pauses p
join interlock.jobs j on j.job_id = p.job_id
where p.job_id = any(:job_ids::uuid[]) and (not p.bulk or j.priority = 1)
order by p.since limit 1;

-- name: active_readers
select distinct job_id from interlock.edges where dataset_version = :dataset_version and active;

-- name: scopes_within
-- Scopes given to these jobs that overlap a range, up to a bound. Scopes of one job and input do not overlap each
-- other.
select m.job_id, e.dataset_version, m.range_start, m.range_end
from unnest(:job_ids::uuid[]) as i(job_id)
join interlock.jobs j on j.job_id = i.job_id
cross join lateral generate_series(0, case when j.wait_for_all then 0 else jsonb_array_length(j.inputs) - 1 end) as n(n)
join interlock.edges e on e.job_id = i.job_id and e.input_index = n.n
cross join lateral (
    (select m.* from interlock.materialisations m
     where m.job_id = i.job_id and m.input_index = n.n and m.range_start < :start::bigint
     order by m.range_start desc limit 1)
    union all
    select m.* from interlock.materialisations m
    where m.job_id = i.job_id and m.input_index = n.n and m.range_start between :start::bigint and :end::bigint
) m
where m.range_end >= :start::bigint
limit :limit;

-- name: partitions_within
select dataset_version, range_start, range_end from interlock.partitions p
where p.dataset_version = :dataset_version
  and p.range_start >= coalesce((select q.range_start from interlock.partitions q
                                 where q.dataset_version = :dataset_version and q.range_start <= :start::bigint
                                 order by q.range_start desc limit 1), :start::bigint)
  and p.range_start <= :end::bigint and p.range_end >= :start::bigint
order by p.range_start limit :limit;

-- name: renew_partitions
-- Marks the same partitions as changed: their readers get them again, through the router or the reconciler.
update interlock.partitions set commit_id = :commit_id
where dataset_version = :dataset_version and range_start = any(:starts::bigint[])
returning dataset_version, range_start, range_end, commit_id;

-- name: set_commit!
update interlock.dataset_versions set commit_id = :commit_id where dataset_version = :dataset_version;

-- name: insert_invalidation$
insert into interlock.invalidations (org_id, dataset_uuid, dataset_version, range_start, range_end, reason, asked_by, scopes,
                                     commit_id)
values (:org_id, :dataset_uuid, :dataset_version, :start, :end, :reason, :asked_by, :scopes, :commit_id)
returning invalidation_id;

-- Explanations: why a job has done a scope, or has not

-- name: job_of_dag^
select job_id, dag_name, name, source is not null as is_source, wait_for_all, jsonb_array_length(inputs) as inputs
from interlock.jobs where org_id = :org_id and coalesce(dag_name, '') = :dag and name = :name and current;

-- name: scope_given^
-- Among the scopes in a range: the first that is not done, otherwise the last that is.
select m.range_start, m.range_end, m.task_id, m.task_shard,
       m.done_commit is not null and m.done_commit >= m.input_commit as done
from (
    select m.* from generate_series(0, :inputs::int - 1) as n
    cross join lateral (
        (select * from interlock.materialisations m
         where m.job_id = :job_id and m.input_index = n and m.range_start < :start::bigint
         order by m.range_start desc limit 1)
        union all
        (select * from interlock.materialisations m
         where m.job_id = :job_id and m.input_index = n and m.range_start between :start::bigint and :end::bigint
         order by m.range_start limit :limit)
    ) m
) m
where m.range_end >= :start::bigint
order by done, m.range_start limit 1;

-- name: task_given^
-- The state of the task. The number of its shard is written into the statement: see the architecture.
select status, dead from interlock.tasks where shard = :shard and task_id = :task_id;

-- name: inputs_in_range
-- For each input: whether the range exists, with these bounds or with others.
select g.input_index, d.dag_name, d.job_name, d.output_name, g.dataset_uuid, v.progress, v.cursor,
       array(select p.name from interlock.publications p where p.dataset_uuid = g.dataset_uuid order by p.name) as names,
       exists (select 1 from interlock.partitions p where p.dataset_version = g.dataset_version
               and p.range_start = :start::bigint and p.range_end = :end::bigint) as exact,
       (select p.range_start || '-' || p.range_end from interlock.partitions p
        where p.dataset_version = g.dataset_version and p.range_start <= :end::bigint
        order by p.range_start desc limit 1) as nearest,
       (select p.range_end from interlock.partitions p
        where p.dataset_version = g.dataset_version and p.range_start <= :end::bigint
        order by p.range_start desc limit 1) >= :start::bigint as overlapping
from interlock.edges g
join interlock.datasets d on d.dataset_uuid = g.dataset_uuid
left join interlock.dataset_versions v on v.dataset_version = g.dataset_version
where g.job_id = :job_id
order by g.input_index;

-- name: streams_read^
select min(committed) as committed from interlock.job_cursors where job_id = :job_id;
