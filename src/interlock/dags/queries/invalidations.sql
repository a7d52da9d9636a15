-- Invalidations of datasets. Every statement filters by org, or gets ids that were filtered.

-- name: producer_of^
-- The job that writes a dataset version, and its inputs.
select v.dataset_version, v.progress, v.cursor, j.job_id, j.active, j.partition,
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
