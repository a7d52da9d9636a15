-- Deployment: versions of DAGs, the generations of their jobs, and the swap between generations.
--
-- Every change of a DAG holds `lock_deploys` of its org: published names and their edges lead from one DAG to another,
-- and a deploy is rare and short. Lock order: lock_deploys, the row of the DAG, everything else.

-- name: lock_deploys
select pg_advisory_xact_lock(hashtextextended('interlock:deploys:' || :org_id::uuid, 0));

-- name: lock_dag^
select * from interlock.dags where org_id = :org_id and name = :name for no key update;

-- name: insert_dag^
insert into interlock.dags (org_id, name) values (:org_id, :name) returning *;

-- name: live_versions
-- The current version, the one being built, and a retired one with this content, which can be reused.
select * from interlock.dag_versions where dag_id = :dag_id and state = 'Current'
union all
select * from interlock.dag_versions where dag_id = :dag_id and state = 'Building'
union all
-- Looked up by hash, in any state: there may be many retired versions.
select * from (select * from interlock.dag_versions
               where dag_id = :dag_id and content_hash = :content_hash::text and state in ('Building', 'Current', 'Retired')
               offset 0) v
where state = 'Retired';

-- name: insert_version^
insert into interlock.dag_versions (dag_id, org_id, content_hash, document, state, deployed_by)
values (:dag_id, :org_id, :content_hash, :document::text::json, 'Building', :deployed_by)
returning *;

-- name: version_by_prefix
-- Newest first. If the same content was abandoned or purged and then deployed again, the live version comes first.
select * from interlock.dag_versions
where dag_id = :dag_id and content_hash collate "C" between :prefix::text and :prefix::text || 'g'
order by state in ('Abandoned', 'Purged'), dag_version desc limit 100;

-- name: previous_version^
select * from interlock.dag_versions where dag_id = :dag_id and state = 'Retired'
order by retired_at desc, dag_version desc limit 1;

-- name: make_ids
select uuidv7() as id from generate_series(1, :count::int);

-- name: jobs_of_version
select j.* from interlock.dag_version_jobs m
join interlock.jobs j on j.job_id = m.job_id
where m.dag_version = :dag_version
order by j.name;

-- name: published_by_others
-- Names that no DAG publishes belong to the platform.
select p.name, p.dataset_uuid, d.current_version as dataset_version, coalesce(g.name, 'interlock') as dag_name, j.partition
from interlock.publications p
join interlock.datasets d on d.dataset_uuid = p.dataset_uuid
left join interlock.dataset_versions v on v.dataset_version = d.current_version
left join interlock.jobs j on j.job_id = v.job_id
left join interlock.dags g on g.dag_id = p.dag_id
where p.org_id = :org_id and p.name = any(:names::text[]) and g.name is distinct from :dag_name;

-- name: some_published
-- Candidates for a suggestion when a name is misspelt.
select p.name from interlock.publications p
left join interlock.dags g on g.dag_id = p.dag_id
where p.org_id = :org_id and g.name is distinct from :dag_name
order by p.name limit :limit;

-- name: existing_inputs
-- The existing data of datasets by (DAG, job, output), counted up to a bound.
select d.job_name, d.output_name, v.cursor, v.progress, j.partition, b.range_start, b.range_end, (
           select count(*) from (select 1 from interlock.partitions p where p.dataset_version = d.current_version
                                 limit :limit::int) c) as partitions
from unnest(:dag_names::text[], :job_names::text[], :output_names::text[]) as a(dag_name, job_name, output_name)
join interlock.datasets d on d.org_id = :org_id and d.dag_name = a.dag_name and d.job_name = a.job_name
    and d.output_name = a.output_name
join interlock.dataset_versions v on v.dataset_version = d.current_version and v.purged_at is null
left join interlock.jobs j on j.job_id = v.job_id
cross join lateral interlock.extent(v.dataset_version) b;

-- name: existing_published
select p.name, v.cursor, v.progress, j.partition, b.range_start, b.range_end, (
           select count(*) from (select 1 from interlock.partitions c where c.dataset_version = d.current_version
                                 limit :limit::int) c) as partitions
from interlock.publications p
join interlock.datasets d on d.dataset_uuid = p.dataset_uuid
join interlock.dataset_versions v on v.dataset_version = d.current_version
left join interlock.jobs j on j.job_id = v.job_id
cross join lateral interlock.extent(v.dataset_version) b
where p.org_id = :org_id and p.name = any(:names::text[]);

-- name: insert_datasets
-- An output keeps its dataset, identified by its names, through every version of its DAG.
with made as (
    insert into interlock.datasets (dataset_uuid, org_id, current_version, dag_name, job_name, output_name)
    select o.dataset_uuid, :org_id, o.dataset_version, :dag_name, o.job_name, o.output_name
    from json_to_recordset(:outputs::text::json)
        as o(dataset_uuid uuid, dataset_version uuid, job_name text, output_name text)
    order by o.job_name, o.output_name
    on conflict (org_id, dag_name, job_name, output_name) where dag_name is not null
        do update set dag_name = excluded.dag_name
    returning dataset_uuid, job_name, output_name
)
select * from made;

-- name: insert_jobs!
insert into interlock.jobs (job_id, org_id, dag_name, name, operator, runtime, queue, config, priority, max_attempts,
                            backoff_seconds, backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds,
                            timeout_seconds, max_concurrency, concurrency_key, max_concurrency_per_key, outputs,
                            definition_hash, current, active, inputs, wait_for_all, per_update, max_queue_depth,
                            max_queue_age, source, partition)
select j.job_id, :org_id, :dag_name, j.name, j.operator, j.runtime, j.queue, j.config::json, j.priority, j.max_attempts,
       j.backoff_seconds, j.backoff_factor, j.backoff_cap_seconds, j.jitter, j.non_retryable, j.lease_seconds,
       j.timeout_seconds, j.max_concurrency, j.concurrency_key, j.max_concurrency_per_key, j.outputs,
       decode(j.definition_hash, 'hex'), false, true, j.inputs, j.wait_for_all, j.per_update, j.max_queue_depth,
       j.max_queue_age, nullif(j.source, 'null'), j.partition
from json_to_recordset(:jobs::text::json)
    as j(job_id uuid, name text, operator text, runtime text, queue text, config text, priority smallint,
         max_attempts int, backoff_seconds float8, backoff_factor float8, backoff_cap_seconds float8, jitter float8,
         non_retryable text[], lease_seconds float8, timeout_seconds float8, max_concurrency int, concurrency_key text,
         max_concurrency_per_key int, outputs jsonb, definition_hash text, inputs jsonb, wait_for_all boolean,
         per_update boolean, max_queue_depth int, max_queue_age float8, source jsonb, partition text);

-- name: insert_versions!
insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id, job_id, output_index, storage, unique_key,
                                        schema, schema_hash, replace_rows)
select o.dataset_version, o.dataset_uuid, :org_id, o.job_id, o.output_index, o.storage, o.unique_key, o.schema::json,
       o.schema_hash, coalesce(o.replace_rows, false)
from json_to_recordset(:outputs::text::json)
    as o(dataset_version uuid, dataset_uuid uuid, job_id uuid, output_index int, storage text, unique_key text[],
         schema text, schema_hash text, replace_rows boolean);

-- name: insert_edges!
insert into interlock.edges (job_id, input_index, org_id, dataset_uuid, dataset_version, floating, condition)
select e.job_id, e.input_index, :org_id, e.dataset_uuid, e.dataset_version, e.floating, e."where"
from json_to_recordset(:edges::text::json)
    as e(job_id uuid, input_index int, dataset_uuid uuid, dataset_version uuid, floating boolean, "where" text);

-- name: insert_version_jobs!
insert into interlock.dag_version_jobs (dag_version, job_id)
select :dag_version, job_id from unnest(:job_ids::uuid[]) job_id;

-- name: wake_loops
-- After a change of jobs: the next steps of a build are due now, not with the next poll.
select pg_notify('interlock_outbox', topic) from unnest('{scopes,sources,cutover}'::text[]) as topic;

-- name: set_state^
update interlock.dag_versions
set state = :state::text::interlock.dag_state,
    current_at = case when :state::text = 'Current' then interlock.clock() else current_at end,
    retired_at = case when :state::text = 'Retired' then interlock.clock() else retired_at end
where dag_version = :dag_version
returning *;

-- name: retire_jobs!
-- Retired jobs get no more tasks. A loop processes their remaining tasks afterwards. A pause of their DAG no longer
-- concerns them.
with retired as (
    update interlock.jobs
    set current = false, active = false, swapped_at = interlock.clock(), paused = false, wake_from = null
    where job_id = any(:job_ids::uuid[])
), released as (
    delete from interlock.pauses where job_id = any(:job_ids::uuid[]) and cause_id = job_id
)
update interlock.edges set active = false where job_id = any(:job_ids::uuid[]);

-- name: activate_jobs!
-- The reconciler gives them what they missed, from their last position. What was canceled when they were retired is
-- given again: see `swapped_jobs`.
with activated as (
    update interlock.jobs
    set current = true, active = true, swapped_at = case when active then swapped_at else interlock.clock() end,
        deleted_at = null
    where job_id = any(:job_ids::uuid[]) and not (current and active)
)
update interlock.edges set active = true where job_id = any(:job_ids::uuid[]) and not active;

-- name: tune_jobs!
-- Completions free slots of capped jobs only. A job that loses its cap must keep no slots, or they would never be
-- freed.
with tuned as (
    update interlock.jobs j
    set priority = t.priority, max_attempts = t.max_attempts, backoff_seconds = t.backoff_seconds,
        backoff_factor = t.backoff_factor, backoff_cap_seconds = t.backoff_cap_seconds, jitter = t.jitter,
        non_retryable = t.non_retryable, lease_seconds = t.lease_seconds, timeout_seconds = t.timeout_seconds,
        max_concurrency = t.max_concurrency, concurrency_key = t.concurrency_key,
        max_concurrency_per_key = t.max_concurrency_per_key, max_queue_depth = t.max_queue_depth,
        max_queue_age = t.max_queue_age, source = nullif(t.source, 'null'),
        definition_hash = decode(t.definition_hash, 'hex')
    from json_to_recordset(:jobs::text::json)
        as t(name text, priority smallint, max_attempts int, backoff_seconds float8, backoff_factor float8,
             backoff_cap_seconds float8, jitter float8, non_retryable text[], lease_seconds float8,
             timeout_seconds float8, max_concurrency int, concurrency_key text, max_concurrency_per_key int,
             max_queue_depth int, max_queue_age float8, source jsonb, definition_hash text)
    where j.job_id = any(:job_ids::uuid[]) and j.name = t.name
      and j.definition_hash <> decode(t.definition_hash, 'hex')
    returning j.job_id, j.max_concurrency, j.max_concurrency_per_key
)
delete from interlock.slots where job_id = any(array(
    select job_id from tuned where max_concurrency is null and max_concurrency_per_key is null));

-- name: point_datasets
-- The swap: from now on the datasets' names refer to these versions.
update interlock.datasets d set current_version = v.dataset_version
from interlock.dataset_versions v
where v.job_id = any(:job_ids::uuid[]) and d.dataset_uuid = v.dataset_uuid and d.current_version <> v.dataset_version
returning d.dataset_uuid;

-- name: turn_edges
-- Edges from other DAGs follow the current version. All of its data is new to them: see `pointed_at` in routing.sql.
-- The versions are locked, so that no change in progress could appear to be older.
with followers as materialized (
    select e.job_id, e.input_index, e.dataset_uuid from interlock.edges e
    where e.active and e.floating and e.dataset_uuid = any(:datasets::uuid[])
    union
    select e.job_id, e.input_index, e.dataset_uuid from interlock.edges e
    where e.floating and e.job_id = any(:job_ids::uuid[])
), locked as materialized (
    select v.dataset_version, v.dataset_uuid from interlock.dataset_versions v
    where v.dataset_version = any(array(
        select d.current_version from interlock.datasets d
        where d.dataset_uuid = any(array(select dataset_uuid from followers))))
    order by v.dataset_version for no key update
), now as materialized (
    select nextval('interlock.commits') as commit_id from (select count(*) from locked) l
), turned as (
    update interlock.edges e
    set dataset_version = v.dataset_version, reconciled_to = 0, pointed_at = n.commit_id
    from followers f, locked v, now n
    where e.job_id = f.job_id and e.input_index = f.input_index and v.dataset_uuid = e.dataset_uuid
      and e.dataset_version <> v.dataset_version
    returning e.job_id, e.input_index, e.dataset_version, e.pointed_at
), told as (
    update interlock.jobs j
    set inputs = (select jsonb_agg(case when t.job_id is null then i.input
                                        else jsonb_set(i.input, '{dataset_version}', to_jsonb(t.dataset_version)) end
                                   order by i.n)
                  from jsonb_array_elements(j.inputs) with ordinality as i(input, n)
                  left join turned t on t.job_id = j.job_id and t.input_index = i.n - 1)
    where j.job_id = any(array(select job_id from turned))
)
select t.job_id, t.dataset_version, 0::bigint as range_start, v.cursor as range_end, t.pointed_at as commit_id
from turned t
join interlock.dataset_versions v on v.dataset_version = t.dataset_version and v.progress = 'cursor' and v.cursor >= 0;

-- name: touch_readers!
-- Jobs that read one of these datasets through ranges cut from it. Dispatchers cache the dataset behind a range with
-- the reader's row: a new row version makes them read it again.
with recursive cutters as (
    select e.job_id from interlock.edges e
    join interlock.jobs p on p.job_id = e.job_id and p.operator = any(:range_operators::text[])
    where e.active and e.floating and e.input_index = 0 and e.dataset_uuid = any(:datasets::uuid[])
    union
    select e.job_id from interlock.edges e
    join interlock.jobs p on p.job_id = e.job_id and p.operator = any(:range_operators::text[])
    where e.floating and e.input_index = 0 and e.job_id = any(:job_ids::uuid[])
), readers as (
    select c.job_id from cutters c
    union
    select e.job_id from readers r
    join interlock.jobs p on p.job_id = r.job_id and p.operator = any(:range_operators::text[])
    join interlock.dataset_versions v on v.job_id = r.job_id
    join interlock.edges e on e.dataset_version = v.dataset_version and e.active
)
update interlock.jobs set inputs = inputs where job_id in (select job_id from readers);

-- name: publish!
-- A new name belongs to its DAG from the deploy on, so that no other DAG takes it while the version is being built.
insert into interlock.publications (org_id, name, dataset_uuid, dag_id, read_roles)
select :org_id, p.name, d.dataset_uuid, :dag_id, string_to_array(p.read_roles, ',')::interlock.role[]
from unnest(:names::text[], :job_names::text[], :output_names::text[], :read_roles::text[])
    as p(name, job_name, output_name, read_roles)
join interlock.datasets d on d.org_id = :org_id and d.dag_name = :dag_name and d.job_name = p.job_name
    and d.output_name = p.output_name
on conflict (org_id, name) do update set dataset_uuid = excluded.dataset_uuid, read_roles = excluded.read_roles
    where interlock.publications.dag_id = excluded.dag_id and :move::boolean
      and (interlock.publications.dataset_uuid, interlock.publications.read_roles)
          <> (excluded.dataset_uuid, excluded.read_roles);

-- name: unpublish!
-- Keeps a name that a job has started to read since the deploy was checked.
delete from interlock.publications p
where p.dag_id = :dag_id and p.name <> all(:names::text[])
  and not exists (select 1 from interlock.edges e where e.dataset_uuid = p.dataset_uuid and e.active and e.floating);

-- name: publications_in_use
-- Published names of the DAG that would be removed or change their dataset, with a DAG that reads them.
select p.name, (select j.dag_name from interlock.edges e join interlock.jobs j on j.job_id = e.job_id
                where e.dataset_uuid = p.dataset_uuid and e.active and e.floating limit 1) as reader
from interlock.publications p
join interlock.datasets d on d.dataset_uuid = p.dataset_uuid
left join unnest(:names::text[], :job_names::text[], :output_names::text[]) as n(name, job_name, output_name)
    on n.name = p.name
where p.dag_id = :dag_id and (n.name is null or (n.job_name, n.output_name) <> (d.job_name, d.output_name))
  and exists (select 1 from interlock.edges e where e.dataset_uuid = p.dataset_uuid and e.active and e.floating)
order by p.name;

-- name: building_versions
select v.dag_version, v.dag_id, v.org_id, v.document, v.build_mark, v.build_round, g.name
from interlock.dag_versions v join interlock.dags g on g.dag_id = v.dag_id
where v.state = 'Building' and v.dag_version > :after::uuid
order by v.dag_version limit :limit;

-- name: mark_build!
-- Starts the next round, which waits for the data that exists now.
update interlock.dag_versions
set build_round = case when build_mark is null then 0 else build_round + 1 end,
    build_mark = (select last_value from interlock.commits)
where dag_version = :dag_version and state = 'Building' and build_round = :round;

-- name: build_progress
-- The remaining work of a version's jobs that are not current yet, counted up to a bound. While changes keep coming
-- there is always some: `caught_up` covers only what existed at the mark.
select p.*, p.undone = 0 and p.behind = 0 and p.unread = 0 and not p.catching_up as complete,
       not p.undone_then and not p.behind_then and (p.unread = 0 or p.read_then) and not p.catching_up as caught_up
from (
    select j.job_id, j.name, (
               select count(*) from (select 1 from interlock.materialisations m
                                     where m.job_id = j.job_id and (m.done_commit is null or m.done_commit < m.input_commit)
                                     limit :limit::int) u) as undone, (
               select count(*) from (select 1 from interlock.materialisations m
                                     join interlock.tasks t on t.shard = 0 and t.task_id = m.task_id and t.dead
                                     where m.job_id = j.job_id and (m.done_commit is null or m.done_commit < m.input_commit)
                                     limit :limit::int) u) as dead, (
               select count(*) from (select 1 from interlock.edges g
                                     join interlock.dataset_versions v on v.dataset_version = g.dataset_version
                                          and v.progress = 'partition'
                                     cross join lateral (select 1 from interlock.partitions c
                                                         where c.dataset_version = g.dataset_version
                                                           and c.commit_id > g.reconciled_to
                                                         order by c.commit_id limit :limit::int) c
                                     where g.job_id = j.job_id
                                     union all
                                     -- A stream next to partitions: see `open_gates` in routing.sql.
                                     select 1 from interlock.edges g
                                     join interlock.dataset_versions v on v.dataset_version = g.dataset_version
                                          and v.progress = 'cursor' and v.cursor >= g.reconciled_to
                                     where g.job_id = j.job_id and j.wait_for_all and exists (
                                         select 1 from interlock.edges o join interlock.dataset_versions w
                                             on w.dataset_version = o.dataset_version and w.progress = 'partition'
                                         where o.job_id = j.job_id)
                                     limit :limit::int) b) as behind, (
               select coalesce(sum(greatest(s.upto - coalesce(c.committed, -1), 0)), 0)::bigint
               from (select case when j.wait_for_all then 0 else g.input_index end as input_index, min(v.cursor) as upto
                     from interlock.edges g
                     join interlock.dataset_versions v on v.dataset_version = g.dataset_version
                     where g.job_id = j.job_id group by 1
                     having bool_and(coalesce(v.progress, '') = 'cursor')) s
               left join interlock.job_cursors c on c.job_id = j.job_id and c.input_index = s.input_index) as unread,
           coalesce(j.source ->> 'kind', '') = 'always_on' and exists (
               select 1 from interlock.dataset_versions n
               join interlock.datasets d on d.dataset_uuid = n.dataset_uuid and d.current_version <> n.dataset_version
               join interlock.dataset_versions o on o.dataset_version = d.current_version
               join interlock.jobs was on was.job_id = o.job_id and was.current
               where n.job_id = j.job_id and case o.progress
                   when 'cursor' then coalesce(n.cursor, -1) < o.cursor
                   when 'partition' then not exists (
                       select 1 from (select range_end from interlock.partitions c
                                      where c.dataset_version = n.dataset_version order by range_start desc limit 1) a
                       where a.range_end >= (select range_end from interlock.partitions c
                                             where c.dataset_version = o.dataset_version
                                             order by range_start desc limit 1))
                   else false end) as catching_up,
           exists (select 1 from interlock.materialisations m
                   where m.job_id = j.job_id and (m.done_commit is null or m.done_commit < m.input_commit)
                     and m.undone_since <= d.build_mark) as undone_then,
           exists (select 1 from interlock.edges g
                   join interlock.dataset_versions v on v.dataset_version = g.dataset_version and v.progress = 'partition'
                   cross join lateral (select c.commit_id from interlock.partitions c
                                       where c.dataset_version = g.dataset_version and c.commit_id > g.reconciled_to
                                       order by c.commit_id limit 1) c
                   where g.job_id = j.job_id and c.commit_id <= d.build_mark) as behind_then,
           -- A task that took in a change after the mark has read up to the stream's position at that time.
           not exists (select 1 from interlock.job_cursors c
                       cross join lateral (select m.done_commit from interlock.materialisations m
                                           where m.job_id = c.job_id and m.input_index = c.input_index
                                             and m.range_start <= c.committed
                                           order by m.range_start desc limit 1) m
                       where c.job_id = j.job_id and coalesce(m.done_commit < d.build_mark, true))
           and exists (select 1 from interlock.job_cursors c where c.job_id = j.job_id and c.committed >= 0) as read_then
    from interlock.dag_version_jobs m
    join interlock.dag_versions d on d.dag_version = m.dag_version
    join interlock.jobs j on j.job_id = m.job_id and not j.current
    where m.dag_version = :dag_version
) p
order by p.name;

-- name: swapped_jobs
-- Generations that were retired or reactivated and whose tasks are still to be processed. `dropped` is true if no
-- reusable version contains the generation, so that its data may be deleted.
select j.job_id, j.org_id, j.active, j.swapped_at < interlock.clock() - make_interval(secs => :grace::float8) as settled,
       exists (select 1 from interlock.pauses p where p.job_id = j.job_id and (not p.bulk or j.priority = 1)) as paused,
       (select 1 from interlock.dag_version_jobs m join interlock.dag_versions v on v.dag_version = m.dag_version
        where m.job_id = j.job_id and v.state not in ('Abandoned', 'Purged') limit 1) is null as dropped
from interlock.jobs j
where j.swapped_at is not null and j.job_id > :after::uuid
order by j.job_id limit :limit;

-- name: settled!
-- Unless it was swapped again in the meantime.
update interlock.jobs set swapped_at = null
where job_id = :job_id and active = :active::boolean
  and swapped_at < interlock.clock() - make_interval(secs => :grace::float8);

-- name: unended_tasks
-- `asked` includes tasks with a cancel request.
select task_id from interlock.tasks
where shard = 0 and run_id is null and job_id = :job_id and org_id = :org_id
  and listed_status = any('{Queued,Running,Failed}'::interlock.task_status[]) and not dead
  and (:asked::boolean or not cancel_requested)
limit :limit;

-- name: live_runs
select run_id from interlock.runs where job_id = :job_id and org_id = :org_id and ended_at is null and not cancel_requested
order by run_id limit :limit;

-- name: take_back_scopes
-- Withdraws scopes from tasks that will never run, as if they had not been given. give_scopes gives them again
-- immediately, as of a new change: their inputs are locked, so that no change is in progress. Tasks of all shards may
-- be among them. This runs when a generation is reactivated, and rarely otherwise.
with locked as materialized (
    select v.dataset_version from interlock.dataset_versions v
    where v.dataset_version = any(array(select dataset_version from interlock.edges where job_id = :job_id))
    order by v.dataset_version for no key update
), now as materialized (
    select nextval('interlock.commits') as commit_id from (select count(*) from locked) l
), canceled as materialized (
    select m.job_id, m.input_index, m.range_start, m.range_end
    from interlock.materialisations m
    left join lateral (select t.task_id, t.status, t.cancel_requested from interlock.tasks t
                       where t.shard = m.task_shard and t.task_id = m.task_id limit 1) t on true
    where m.job_id = :job_id and (m.done_commit is null or m.done_commit < m.input_commit)
      and (t.task_id is null or t.status = 'Canceled' or t.cancel_requested)
    limit :limit
), back as (
    update interlock.materialisations m set input_commit = coalesce(m.done_commit, 0)
    from canceled c
    where m.job_id = c.job_id and m.input_index = c.input_index and m.range_start = c.range_start
      and m.range_end = c.range_end
    returning m.job_id, m.input_index, m.range_start, m.range_end
)
select b.range_start, b.range_end, n.commit_id, e.dataset_version
from back b
join interlock.edges e on e.job_id = b.job_id and e.input_index = b.input_index
cross join now n
order by b.range_start;

-- name: drop_rows^
-- Deletes a part of the registry rows of a generation that no version can reuse.
with versions as materialized (
    select dataset_version from interlock.dataset_versions where job_id = :job_id and org_id = :org_id
), marked as (
    update interlock.dataset_versions set purged_at = interlock.clock()
    where dataset_version = any(array(select dataset_version from versions)) and purged_at is null
    returning dataset_uuid, dataset_version, storage
), files as (
    insert into interlock.file_sweeps (place, dataset_version, due_at, final_at)
    select :root || '/dataset/' || dataset_uuid || '/version/' || dataset_version || '/', dataset_version,
           interlock.clock(), interlock.clock()
    from marked where storage = 'parquet'
    on conflict (place) do nothing
), partitions as (
    delete from interlock.partitions
    where (dataset_version, range_start) in (
        select p.dataset_version, p.range_start from versions v
        join interlock.partitions p on p.dataset_version = v.dataset_version limit :limit)
    returning 1
), scopes as (
    delete from interlock.materialisations
    where (job_id, input_index, range_start, range_end) in (
        select job_id, input_index, range_start, range_end from interlock.materialisations
        where job_id = :job_id limit :limit)
    returning 1
), edges as (
    delete from interlock.edges where job_id = :job_id
), cursors as (
    delete from interlock.job_cursors where job_id = :job_id
), state as (
    delete from interlock.operator_state where job_id = :job_id
)
select (select count(*) from partitions) + (select count(*) from scopes) as dropped;

-- name: touch_jobs!
-- Marks generations for the loop that deletes their data.
update interlock.jobs set swapped_at = interlock.clock() where job_id = any(:job_ids::uuid[]) and not active;

-- name: list_dags
select g.name, g.created_at, g.dag_id, g.paused_at, g.paused_by, g.pause_reason,
       c.dag_version, c.content_hash, c.state, c.deployed_by, c.deployed_at, c.current_at, c.retired_at
from (select * from interlock.dags where org_id = :org_id and name > :after::text and deleted_at is null
      order by name limit :limit) g
left join lateral (
    select * from interlock.dag_versions c where c.dag_id = g.dag_id and c.state = 'Current'
    union all
    select * from interlock.dag_versions c where c.dag_id = g.dag_id and c.state = 'Building') c on true
order by g.name, c.state;

-- name: dag_by_name^
select * from interlock.dags where org_id = :org_id and name = :name;

-- name: list_versions
select dag_version, content_hash, state, deployed_by, deployed_at, current_at, retired_at
from interlock.dag_versions
where dag_id = :dag_id and dag_version < coalesce(:cursor::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
order by dag_version desc limit :limit;

-- name: dag_jobs
select j.job_id, j.name, j.operator, j.runtime, j.source ->> 'kind' as source, j.partition, j.outputs,
       exists (select 1 from interlock.pauses p where p.job_id = j.job_id) as paused
from interlock.dag_version_jobs m
join interlock.jobs j on j.job_id = m.job_id
where m.dag_version = :dag_version
order by j.name;

-- name: publications_of
select name from interlock.publications where dag_id = :dag_id order by name;

-- name: hand_over_tasks
-- Passes unfinished tasks of a retiring source to its successor as triggers, so that accepted work is not lost. The
-- dedupe key prevents doing it twice.
with successor as materialized (
    select n.job_id, n.org_id
    from interlock.jobs j
    join interlock.jobs n on n.org_id = j.org_id and n.dag_name = j.dag_name and n.name = j.name and n.active
                         and n.source ->> 'kind' <> 'always_on'
    where j.job_id = :job_id and j.source ->> 'kind' <> 'always_on'
), fresh as (
    insert into interlock.triggers (org_id, job_id, dedupe_key, payload)
    select s.org_id, s.job_id, coalesce(t.dedupe_key, t.task_id::text), t.payload
    from interlock.tasks t cross join successor s
    where t.shard = 0 and t.task_id = any(:task_ids::uuid[]) and t.org_id = s.org_id
    order by t.task_id, s.job_id
    on conflict (job_id, dedupe_key) do nothing
    returning job_id
), owed as (
    insert into interlock.outbox (kind, target, body)
    select 'trigger', '', json_build_object('jobs', array_agg(distinct job_id)) from fresh having count(*) > 0
    returning 1
)
select count(pg_notify('interlock_outbox', 'trigger')) as told from owed;
