-- Anything by its id, or by the beginning of its name. Each statement reads at most a few rows of an index range.

-- name: run_by_id
select r.run_id as id, j.dag_name, j.name, r.state::text as detail,
       (select true from interlock.backfills b where b.run_id = r.run_id) is true as is_backfill
from interlock.runs r join interlock.jobs j on j.job_id = r.job_id
where r.org_id = :org_id and r.run_id = :id and not r.delete_requested;

-- name: job_of_id
select job_id as id, dag_name, name, operator as detail from interlock.jobs
where org_id = :org_id and job_id = :id and deleted_at is null;

-- name: jobs_by_name
-- The prefix as a range, in the order of the index, which compares bytes.
select job_id as id, dag_name, name, operator as detail from interlock.jobs
where org_id = :org_id and org_id::text = :org_id::uuid::text and name collate "C" >= :prefix and name collate "C" < :prefix || U&'\+10FFFF'
  and deleted_at is null
order by name collate "C" limit :limit;

-- name: dags_by_name
select dag_id as id, name from interlock.dags
where org_id = :org_id and name collate "C" >= :prefix and name collate "C" < :prefix || U&'\+10FFFF'
order by name collate "C" limit :limit;

-- name: publications_by_name
select dataset_uuid as id, name from interlock.publications
where org_id = :org_id and name collate "C" >= :prefix and name collate "C" < :prefix || U&'\+10FFFF'
  and :role::text = any(read_roles::text[])
order by name collate "C" limit :limit;

-- name: dataset_by_id
select dataset_uuid as id, dag_name, job_name, output_name from interlock.datasets
where org_id = :org_id and dataset_uuid = :id;

-- name: query_by_id
select query_id as id, outcome::text as detail from interlock.query_audit where org_id = :org_id and query_id = :id;

-- name: operation_by_id
select operation_id as id, kind, state as detail from interlock.bulk_operations
where org_id = :org_id and operation_id = :id;

-- name: workers_by_name
select worker_id as id, queue as detail from interlock.workers
where worker_id collate "C" >= :prefix and worker_id collate "C" < :prefix || U&'\+10FFFF'
  and last_seen_at > interlock.clock() - interval '1 day'
order by worker_id collate "C" limit :limit;
