-- Bundles of user code: uploads, their names, and zips to delete.

-- name: expect_zip!
-- Runs before the zip is written, so that the zip is swept if the upload fails.
insert into interlock.bundle_sweeps (org_id, sha256, due_at)
values (:org_id, :sha256, interlock.clock() + make_interval(secs => :seconds::float8))
on conflict (org_id, sha256) do update set due_at = greatest(interlock.bundle_sweeps.due_at, excluded.due_at);

-- name: lock_bundles
-- Locked until the job that uses them is inserted: a concurrent delete waits, and then finds the job.
select sha256 from interlock.bundles where org_id = :org_id and sha256 = any(:digests::text[]) order by sha256 for key share;

-- name: insert_bundle!
insert into interlock.bundles (org_id, sha256, size_bytes, files, unpacked_bytes, modules, uploaded_by)
values (:org_id, :sha256, :size_bytes, :files, :unpacked_bytes, :modules::text::jsonb, :uploaded_by)
on conflict (org_id, sha256) do nothing;

-- name: keep_zip!
delete from interlock.bundle_sweeps where org_id = :org_id and sha256 = :sha256;

-- name: name_bundle!
insert into interlock.bundle_names (org_id, name, sha256) values (:org_id, :name, :sha256)
on conflict (org_id, name) do update set sha256 = excluded.sha256, set_at = excluded.set_at;

-- name: bundle^
select b.*, array(select n.name from interlock.bundle_names n where n.org_id = b.org_id and n.sha256 = b.sha256 order by n.name) as names
from interlock.bundles b where b.org_id = :org_id and b.sha256 = :sha256;

-- name: bundles_named
-- Looked up by the name or the digest that a job may use.
select n.name as called, b.sha256, b.modules
from interlock.bundle_names n
join interlock.bundles b on b.org_id = n.org_id and b.sha256 = n.sha256
where n.org_id = :org_id and n.name = any(:names::text[])
union all
select 'sha256:' || b.sha256, b.sha256, b.modules
from interlock.bundles b where b.org_id = :org_id and b.sha256 = any(:digests::text[]);

-- name: bundles_by_prefix
-- Two rows are enough to detect an ambiguous prefix.
select sha256 from interlock.bundles
where org_id = :org_id and sha256 >= :prefix and sha256 < :prefix || 'g'
order by sha256 limit 2;

-- name: digest_of_name$
select sha256 from interlock.bundle_names where org_id = :org_id and name = :name;

-- name: list_bundles
select b.*, array(select n.name from interlock.bundle_names n where n.org_id = b.org_id and n.sha256 = b.sha256 order by n.name) as names
from interlock.bundles b
where b.org_id = :org_id and b.sha256 > :after
order by b.sha256 limit :limit;

-- name: lock_bundle^
select sha256 from interlock.bundles where org_id = :org_id and sha256 = :sha256 for update;

-- name: job_using^
-- A separate statement after the lock: only it sees jobs that the lock waited for.
select dag_name, name, job_id from interlock.jobs
where org_id = :org_id and operator = 'udf' and config ->> 'bundle' = 'sha256:' || :sha256::text
limit 1;

-- name: delete_names!
delete from interlock.bundle_names where org_id = :org_id and sha256 = :sha256;

-- name: delete_bundle!
delete from interlock.bundles where org_id = :org_id and sha256 = :sha256;

-- name: due_sweeps
-- Locked until the zip is deleted: an upload of the same content waits, and writes it again. Bundles are looked up one
-- by one: with `exists`, the planner would rather read all of them.
select s.org_id, s.sha256,
       (select true from interlock.bundles b where b.org_id = s.org_id and b.sha256 = s.sha256 limit 1) is not null as needed
from interlock.bundle_sweeps s
where s.due_at <= interlock.clock()
order by s.due_at limit :limit
for update of s skip locked;

-- name: swept!
delete from interlock.bundle_sweeps s
using unnest(:org_ids::uuid[], :digests::text[]) as d(org_id, sha256)
where s.org_id = d.org_id and s.sha256 = d.sha256;
