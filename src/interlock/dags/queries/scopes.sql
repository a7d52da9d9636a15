-- Explanations of scopes: why a job has done a scope, or has not. Every statement filters by org, or gets ids that were
-- filtered.

-- name: job_of_dag^
select job_id, dag_name, name, partition, source is not null as is_source, wait_for_all, jsonb_array_length(inputs) as inputs
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
