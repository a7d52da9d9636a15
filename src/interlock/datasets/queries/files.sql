-- The files behind datasets: the files of an attempt's inputs, its output prefixes, and the sweep.

-- name: held_attempts
-- Attempts that hold their tasks, with the fields that determine their data.
select t.task_id, t.attempt, t.job_id, t.org_id, t.payload, t.timeout_at, j.operator, j.outputs, j.wait_for_all
from unnest(:task_ids::uuid[], :attempts::int[], :leases::uuid[]) as i(task_id, attempt, lease_token)
join interlock.tasks t on t.shard = :shard and t.task_id = i.task_id and t.attempt = i.attempt
     and t.lease_token = i.lease_token and t.status = 'Running'
join interlock.jobs j on j.job_id = t.job_id;

-- name: files_of
-- Partitions that overlap each range, in order.
select s.n, p.range_start, p.range_end, p.location, p.commit_id, p.row_count, p.bytes
from unnest(:versions::uuid[], :starts::bigint[], :ends::bigint[]) with ordinality as s(dataset_version, range_start, range_end, n)
cross join lateral (
    (select * from interlock.partitions p
     where p.dataset_version = s.dataset_version and p.range_start <= s.range_start
     order by p.range_start desc limit 1)
    union all
    (select * from interlock.partitions p
     where p.dataset_version = s.dataset_version and p.range_start > s.range_start and p.range_start <= s.range_end
     order by p.range_start limit :limit)
) p
where p.range_end >= s.range_start and p.location is not null
order by s.n, p.range_start;

-- name: versions_written
select v.dataset_version, v.storage, v.schema, v.unique_key, d.output_name
from interlock.dataset_versions v
join interlock.datasets d on d.dataset_uuid = v.dataset_uuid
where v.dataset_version = any(:versions::uuid[]);

-- name: expect_files!
-- Recorded before anything is written there.
insert into interlock.file_sweeps (place, dataset_version, task_id, attempt, due_at, final_at, buffer)
select s.place, s.dataset_version, s.task_id, s.attempt,
       interlock.clock() + make_interval(secs => :grace::float8), s.timeout_at + make_interval(secs => :grace::float8),
       s.buffer
from unnest(:places::text[], :versions::uuid[], :task_ids::uuid[], :attempts::int[], :timeouts::timestamptz[],
            :buffers::boolean[]) as s(place, dataset_version, task_id, attempt, timeout_at, buffer)
on conflict (place) do update set final_at = greatest(interlock.file_sweeps.final_at, excluded.final_at);

-- name: expect_exports!
-- Results of queries: kept for their lifetime, which starts when no attempt can write there any more.
insert into interlock.file_sweeps (place, due_at, final_at)
select s.place, s.timeout_at + make_interval(secs => :seconds::float8),
       s.timeout_at + make_interval(secs => :seconds::float8 - :keep::float8)
from unnest(:places::text[], :timeouts::timestamptz[]) as s(place, timeout_at)
on conflict (place) do nothing;

-- name: condemn
-- Prefixes that are due, and whether to delete their files now. A prefix whose attempt still runs is checked again
-- later. Once the files of an attempt that lost its lease are deleted, its reports are no longer accepted. Committed
-- files are kept and not checked again: the commit that replaces them schedules their sweep. A prefix of batches is
-- swept once its attempt has ended and the file of each batch published from it is gone. A prefix does not contain its
-- shard, so this searches all shards.
with due as materialized (
    select * from interlock.file_sweeps where due_at <= interlock.clock() order by due_at limit :limit for update skip locked
), owners as materialized (
    select t.task_id, t.status, t.attempt, t.late_reply from interlock.tasks t
    where t.task_id = any(array(select task_id from due where task_id is not null))
    order by t.task_id
    for no key update
), judged as materialized (
    select d.place,
           case when d.buffer then
                    case when (o.attempt = d.attempt and o.status = 'Running')
                           or exists (select 1 from interlock.buffer_publishes p
                                      where p.task_id = d.task_id and p.attempt = d.attempt
                                        and (p.swept_at is null or p.sweep_at is not null)) then 'wait' else 'sweep' end
                when d.task_id is null then
                    case when d.final_at + make_interval(secs => :keep::float8) <= interlock.clock() then 'sweep' else 'wait' end
                when o.task_id is null then
                    case when exists (select 1 from interlock.partitions p where p.dataset_version = d.dataset_version
                                      and p.task_id = d.task_id and p.attempt = d.attempt) then 'keep' else 'sweep' end
                when o.attempt = d.attempt and o.status = 'Running' then 'wait'
                when o.attempt = d.attempt and o.status = 'Completed' then 'keep'
                else 'sweep' end as verdict,
           case when o.late_reply and not d.buffer and d.attempt in (o.attempt, o.attempt - 1) then o.task_id end as deaf
    from due d left join owners o on o.task_id = d.task_id
), silenced as (
    update interlock.tasks set late_reply = false
    where task_id = any(array(select deaf from judged where verdict = 'sweep' and deaf is not null))
), kept as (
    delete from interlock.file_sweeps where place = any(array(select place from judged where verdict = 'keep'))
), postponed as (
    -- If the sweep fails, it is due again after that.
    update interlock.file_sweeps s
    set due_at = greatest(interlock.clock() + make_interval(secs => :again::float8),
                          case when s.task_id is null then s.final_at + make_interval(secs => :keep::float8) end)
    where s.place = any(array(select place from judged where verdict <> 'keep'))
)
select place, verdict from judged;

-- name: swept!
-- Keeps the row until no attempt can write there any more.
with gone as (
    delete from interlock.file_sweeps
    where place = any(:places::text[]) and (task_id is null or final_at <= interlock.clock())
)
update interlock.file_sweeps set due_at = final_at
where place = any(:places::text[]) and task_id is not null and final_at > interlock.clock();
