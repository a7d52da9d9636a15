-- A state database after a long time of work: `seed.mass` tasks of other jobs, and the few rows, the same in every
-- database, that the measured statements are about.

insert into interlock.orgs (org_id, name) select seed.id('org ' || n), 'org ' || n from generate_series(0, 3) n;

insert into interlock.api_keys (key_id, org_id, user_name, role, scopes, secret_hash)
select 'key ' || n, seed.id('org ' || n % 4), 'user', 'admin', '{}', sha256('secret') from generate_series(0, 99) n;

insert into interlock.members (issuer, subject, org_id, role, by)
select 'issuer', 'user ' || n, seed.id('org ' || n % 4), 'writer', 'root'
from generate_series(0, 1999 + seed.mass() / 100) n;

-- Minutes of a long time; those of the last hour are few.
insert into interlock.minute_counts (org_id, minute, completed)
select seed.id('org ' || n % 4), date_trunc('minute', interlock.clock()) - make_interval(mins => (n / 4)::int), 1
from generate_series(0, 1999 + seed.mass() / 100) n;

-- Bulk operations: nearly all have ended.
insert into interlock.bulk_operations (operation_id, org_id, kind, filter, requested_by, state, ended_at)
select seed.id('operation ' || n), seed.id('org ' || n % 4), 'retry', '{}', 'user', 'Completed', case when n > 9 then now() end
from generate_series(0, 1999 + seed.mass() / 100) n;

-- Sessions, all valid.
insert into interlock.sessions (session_id, org_id, issuer, subject, csrf, secret_hash, expires_at)
select 'session ' || n, seed.id('org ' || n % 4), 'issuer', 'user ' || n, 'csrf', '\x00',
       interlock.clock() + interval '1 day'
from generate_series(0, 1999 + seed.mass() / 100) n;
insert into interlock.sign_in_links (token_hash, key_id, expires_at)
select decode(lpad(to_hex(n), 8, '0'), 'hex'), (select min(key_id) from interlock.api_keys),
       interlock.clock() + interval '1 day'
from generate_series(0, 1999 + seed.mass() / 100) n;

insert into interlock.operators (queue, operator, worker_id, last_seen_at)
select 'platform', 'module:operator_' || n, 'worker 1', now() + interval '1 hour' from generate_series(0, 1999 + seed.mass() / 100) n;

insert into interlock.org_secrets (org_id, name, sealed, hosts, set_by)
select seed.id('org ' || n % 4), 'secret_' || n, 'sealed', '{}', 'root' from generate_series(0, 1999 + seed.mass() / 100) n;

insert into interlock.worker_tokens (token_id, name, secret_hash)
select 'token ' || n, 'worker', sha256('secret') from generate_series(0, 99) n;

insert into interlock.signing_keys (kid, public_jwk, retired_at, verify_until)
select 'kid ' || n, '{}', case when n > 0 then now() end, case when n > 0 then now() + interval '1 hour' end
from generate_series(0, 9) n;

insert into interlock.datasets (dataset_uuid, org_id, current_version)
select seed.id('dataset ' || n), seed.id('org ' || n % 4), seed.id('version ' || n)
from generate_series(0, 99 + seed.mass() / 100) n;

-- Jobs 0 to 3 are measured, 4 to 103 own the mass, and those from 104 on were posted without a name, with one task each.
-- Job 2 has a concurrency limit and one per key, jobs 100 to 103 have a concurrency limit.
create table seed.job as
select n, seed.id('job ' || n) as job_id, seed.id('org ' || case when n < 4 then 0 else n % 4 end) as org_id
from generate_series(0, 503 + seed.mass() / 20) n;

insert into interlock.jobs (job_id, org_id, name, operator, runtime, queue, config, priority, max_attempts,
    backoff_seconds, backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds, timeout_seconds,
    max_concurrency, concurrency_key, max_concurrency_per_key, outputs, definition_hash)
select job_id, org_id, case when n < 104 then 'job ' || n end, 'echo', 'platform', 'platform', '{}', n % 2, 3,
       1, 2, 60, 0.1, '{}', 60, 3600,
       case when n = 2 or n between 100 and 103 then 200 end, case when n = 2 then '/key' end,
       case when n = 2 then 20 end, '[]', sha256('definition')
from seed.job;

-- Runs. The kind determines the state of their tasks.
create table seed.run as
select seed.id('run ' || kind) as run_id, job, kind, size, case when ended then now() - interval '20 days' end as ended_at
from (values ('queued', 0, 1000, false), ('running', 0, 1000, false), ('expired', 0, 600, false),
             ('due', 0, 1100, false), ('dead', 0, 2500, false), ('canceled', 0, 1000, false),
             ('sweep', 0, 6000, true), ('parked', 2, 1500, false), ('parked capped', 103, 1200, false),
             ('slotted', 2, 100, false), ('canceling', 0, 2500, false))
     as focus(kind, job, size, ended)
union all
select seed.id('run big'), 1, 'big', seed.big(), null
union all
select seed.id('run short ' || n), 4, 'queued', 1, null from generate_series(1, 100) n
union all
select seed.id('run mass ' || n), case n % 20 when 19 then 100 + n % 4 else 4 + n % 96 end,
       coalesce((array['queued', 'running', 'waiting', 'dead', 'canceled', 'parked'])[n % 20 - 13], 'completed'), 500,
       case when n % 20 < 14 or n % 20 in (17, 18) then now() - interval '1 day' * random() * 13 end
from generate_series(0, seed.mass() * 7 / 10 / 500 - 1) n
union all
select seed.id('run single ' || n), n, 'single', 1, now() - interval '1 day' * random() * 13
from generate_series(104, 503 + seed.mass() / 20) n
union all
-- The history of a measured job.
select seed.id('run past ' || n), 0, 'single', 1, now() - interval '1 day' * random() * 13
from generate_series(1, 200 + seed.mass() / 100) n;

insert into interlock.runs (run_id, org_id, job_id, state, total, last_index, range_size, latched, cancel_requested,
                            ended_at)
select r.run_id, j.org_id, j.job_id,
       (case when r.ended_at is null then 'Running' else 'Completed' end)::interlock.run_state,
       r.size, r.size - 1, 100, true, r.kind = 'canceling', r.ended_at
from seed.run r join seed.job j on j.n = r.job;

-- A third of the ended runs is kept for years; another third has no setting; one has expired.
update interlock.runs set retention_days = case when run_id = seed.id('run past 1') then 0.001 else 3000 end
where ended_at is not null and (hashtext(run_id::text) % 3 = 0 or run_id = seed.id('run past 1')) and run_id <> seed.id('run sweep');

-- Lists of finished and of unfinished ingests.
insert into interlock.uploads (upload_id, org_id, parts, sweep_at)
select seed.id('upload ' || n), seed.id('org 0'), 1, now() + (n - 100) * interval '1 second'
from generate_series(0, 400 + seed.mass() / 100) n;
insert into interlock.ingests (run_id, org_id, source, step, total, last_index, settled_at)
select r.run_id, j.org_id, '{}', (case when r.ended_at is null then 'Loading' else 'Done' end)::interlock.ingest_step,
       r.size, r.size - 1, r.ended_at
from seed.run r join seed.job j on j.n = r.job where r.kind in ('single', 'running');
insert into interlock.ingest_chunks (run_id, part, first_byte, end_byte, first_line, lines, rows)
select run_id, 1, 0, 100, 0, 1, 1 from interlock.ingests;

-- Tasks of runs, and tasks without a run, as events create them; the latter belong to job 3.
create table seed.task as
select case when r.run_id is null then seed.id(r.kind || ' ' || i) else interlock.run_task_id(r.run_id, i) end as task_id,
       j.org_id, j.job_id, r.job, r.run_id, i as task_index,
       case when r.kind = 'big' and i % 50 = 7 then 'dead'
            when r.kind = 'big' and i % 50 = 8 then 'queued'
            when r.kind = 'big' and i % 50 = 9 then 'canceled'
            when r.kind in ('big', 'single', 'sweep') then 'completed'
            when r.kind = 'canceling' then 'queued'
            else split_part(r.kind, ' ', 1) end as kind
from (select run_id, job, kind, size from seed.run
      union all
      select null, 3, kind || ' alone', size + seed.mass() * share / 100
      from (values ('queued', 2000, 1), ('running', 200, 0), ('waiting', 200, 0), ('dead', 2500, 2),
                   ('completed', 2500, 2)) as alone(kind, size, share)) r
join seed.job j on j.n = r.job
cross join lateral generate_series(0, r.size - 1) i;

insert into interlock.tasks (task_id, org_id, job_id, run_id, task_index, status, attempt, max_attempts, priority, parked,
    dead, lease_token, lease_expires_at, timeout_at, retry_at, queued_at, started_at, ended_at, worker_id, dedupe_key,
    slot_key, payload, result)
select task_id, org_id, job_id, run_id, case when run_id is not null then task_index end,
       (case when kind in ('queued', 'parked') then 'Queued' when kind in ('running', 'expired', 'slotted') then 'Running'
             when kind in ('due', 'waiting', 'dead') then 'Failed' when kind = 'canceled' then 'Canceled'
             else 'Completed' end)::interlock.task_status,
       case when kind = 'dead' then 3 when kind in ('due', 'waiting') then 2 else 1 end, 3, job % 2, kind = 'parked',
       kind = 'dead',
       case when kind not in ('queued', 'parked', 'canceled') then seed.lease(task_id) end,
       case when kind in ('running', 'slotted') then now() + interval '1 hour'
            when kind = 'expired' then now() - interval '1 minute' end,
       case when kind in ('running', 'slotted', 'expired') then now() + interval '2 hours' end,
       case kind when 'waiting' then now() + interval '1 hour' * random() when 'due' then now() - interval '1 minute' end,
       now() - interval '2 minutes' * random() - interval '2 minutes',
       case when kind not in ('queued', 'parked', 'canceled') then now() - interval '2 minutes' end,
       case when kind in ('completed', 'canceled', 'dead') then now() - interval '1 minute' end, 'worker',
       case when job = 1 then task_index::text end,
       case when kind in ('parked', 'slotted') and job = 2 then (task_index % 50)::text end,
       '{"object": "s3://bucket/some/prefix/file.parquet", "rows": 1000}',
       case when kind = 'completed' then '{"rows": 1000}'::json end
from seed.task;

-- An alarm for each hundred tasks of a running run, as one claim would set it, and one for each task without a run.
insert into interlock.lease_alarms (due_at, tasks, run_id, first_index, last_index, task_ids)
select min(now() + interval '1 hour' * case kind when 'expired' then -1 else 1 end), count(*), run_id,
       case when run_id is not null then min(task_index) end, case when run_id is not null then max(task_index) end,
       case when run_id is null then array_agg(task_id) end
from seed.task where kind in ('running', 'slotted', 'expired')
group by run_id, task_index / case when run_id is null then 1 else 100 end;

insert into interlock.slots (task_id, job_id, slot_key)
select seed.task('slotted', i), seed.id('job 2'), (i % 50)::text from generate_series(0, 99) i;

insert into interlock.attempts (task_id, attempt, lease_token, outcome, worker_id, started_at, ended_at, error_class,
                                error_message)
select task_id, attempt, seed.id('lease ' || task_id || attempt), 'Failed', 'worker', now() - interval '1 hour',
       now() - interval '59 minutes', 'ValueError', 'no such file'
from seed.task cross join lateral generate_series(1, case kind when 'dead' then 3 else 1 end) attempt
where kind in ('dead', 'due', 'waiting') or (kind = 'completed' and task_index % 50 = 0);

insert into interlock.output_commits (task_id, output_index, dataset_uuid, dataset_version, org_id, attempt, body)
select task_id, 0, seed.id('dataset 0'), seed.id('version 0'), org_id, 1, '{}' from seed.task
where kind = 'completed' and task_index % 20 = 0;

insert into interlock.dataset_events (org_id, dataset_uuid, dataset_version, scope, cursor, task_id, attempt)
select org_id, seed.id('dataset 0'), seed.id('version 0'), 'c:1', 1, task_id, 1 from seed.task
where kind = 'completed' and task_index % 20 = 0;

insert into interlock.buffer_publishes (publish_id, org_id, task_id, attempt, dataset_uuid, dataset_version, batch_uri,
                                        record_count, status, sweep_at, load_task)
select seed.id('publish ' || task_index), org_id, task_id, 1, seed.id('dataset 0'), seed.id('version 0'), 'batch', 1,
       case when task_index % 2000 = 0 then 'Pending' when task_index % 2000 = 100 then 'Refused' else 'Loaded' end::interlock.publish_status,
       now() + (task_index - 2000) * interval '1 second', null from seed.task
where kind = 'completed' and task_index % 100 = 0
on conflict do nothing;

insert into interlock.run_deltas (run_id, completed)
select run_id, 1 from seed.run cross join generate_series(1, 50) where kind <> 'single' and ended_at is null;

-- A message for each hundred tasks of a waiting run, one for each task without a run; some of them received.
insert into interlock.queue_messages (queue, priority, body, dedupe_key, visible_at, receipt, receives)
select 'platform', job % 2, json_build_object('run_id', run_id, 'start', task_index / 100 * 100), range_key,
       now() - interval '1 minute' * random() * 60, null, 0
from (select distinct on (run_id, task_index / 100) *, run_id || ':' || task_index / 100 as range_key from seed.task
      where kind = 'queued' and run_id is not null order by run_id, task_index / 100) ranges
union all
select 'platform', job % 2, json_build_object('task_id', task_id), task_id::text,
       now() + interval '1 minute' * random() * case when task_index % 5 = 0 then 1 else -60 end,
       case when task_index % 5 = 0 then seed.id('receipt') end, (task_index % 5 = 0)::int
from seed.task where kind = 'queued' and run_id is null;

-- A lane with a thousand waiting runs, however many messages each of them has.
insert into interlock.queue_messages (queue, priority, org_id, share_id, body, visible_at)
select 'shared', 1, seed.id('org ' || n % 4), seed.id('share ' || n % 1000),
       json_build_object('run_id', seed.id('share ' || n % 1000), 'start', n, 'end', n + 99), now() - interval '1 minute' * random()
from generate_series(0, 1999 + seed.mass()) n;

insert into interlock.queue_messages (queue, body, dead_at, receives)
select 'platform', '{}', now(), 20 from generate_series(1, 1500 + seed.mass() / 100);

insert into interlock.queue_messages (queue, body, visible_at, receipt, receives)
select 'other', '{}', now() + interval '1 minute', seed.id('receipt'), 1
from generate_series(1, 500 + seed.mass() / 100);

insert into interlock.outbox (kind, target, body, dedupe_key, due_at)
select 'send', 'other', '{}', 'owed ' || n, now() + interval '1 second' * (n - 600)
from generate_series(1, 700 + seed.mass() / 50) n;

insert into interlock.idempotency_keys (org_id, endpoint, key, request_hash, expires_at)
select seed.id('org ' || n % 4), 'POST /v1/jobs', 'key ' || n, sha256('body'), now() + interval '1 second' * (n - 5100)
from generate_series(0, 5200 + seed.mass() / 20) n;

insert into interlock.capabilities (capability_id, task_id, attempt, grants, expires_at)
select seed.id('capability ' || n), seed.id('task ' || n), 1, '[]', now() + interval '1 second' * (n - 5100)
from generate_series(0, 5200 + seed.mass() / 20) n;

insert into interlock.workers (worker_id, queue, last_seen_at)
select 'worker ' || n, case when n % 2 = 0 then 'platform' else 'other' end, now() - interval '1 second' * (n % 50)
from generate_series(1, 200) n;

-- Sources: a hundred of each kind in one DAG, a few of them new; and the long trigger list of a paused one.
insert into interlock.jobs (job_id, org_id, dag_name, name, operator, runtime, queue, config, priority, max_attempts,
    backoff_seconds, backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds, timeout_seconds, outputs,
    definition_hash, source)
select seed.id(kind || ' ' || n), seed.id('org 0'), 'feeds ' || kind, kind || ' ' || n, 'echo', 'platform', 'platform',
       '{}', 0, 3, 1, 2, 60, 0.1, '{}', 60, 3600, '[]', sha256('definition'),
       json_build_object('kind', kind, 'schedule', '@daily', 'misfire_grace', '60s', 'auth', 'hmac')
from unnest('{always_on,cron,webhook,manual}'::text[]) kind cross join generate_series(0, 99) n;

insert into interlock.tasks (task_id, org_id, job_id, status, max_attempts, priority, ended_at, payload)
select interlock.source_task_id(seed.id('always_on ' || n)), seed.id('org 0'), seed.id('always_on ' || n),
       (case when n < 10 then 'Completed' else 'Queued' end)::interlock.task_status, 3, 0,
       case when n < 10 then now() - interval '1 day' end, '{}'
from generate_series(0, 89) n;

insert into interlock.source_tasks (job_id, task_id)
select seed.id('always_on ' || n), interlock.source_task_id(seed.id('always_on ' || n)) from generate_series(0, 89) n;

insert into interlock.cron_state (job_id, source, last_at, next_at)
select job_id, source, now(), now() + interval '1 minute' * (row_number() over () - 10)
from interlock.jobs where dag_name = 'feeds cron' and name <> 'cron 7';

insert into interlock.triggers (org_id, job_id, dedupe_key, payload)
select seed.id('org 0'), seed.id('manual ' || n), 'key ' || i, '{}'::json from generate_series(0, 9) n, generate_series(1, 200) i
union all
select seed.id('org 0'), seed.id('webhook 0'), 'key ' || i, '{}'::json from generate_series(1, 1200 + seed.mass() / 20) i;
insert into interlock.pauses (job_id, cause_id, bulk, path, reason)
values (seed.id('webhook 0'), seed.id('job 0'), false, '{}', 'full');

insert into interlock.hooks (hook_id, org_id, dag_name, job_name, secret_hash)
select 'hook ' || n, seed.id('org 0'), 'feeds webhook', 'webhook ' || n, sha256('secret') from generate_series(0, 99) n;

-- Datasets of DAGs. Those of number 0 are measured: a dataset with many versions, a version with many partitions, and a
-- job that was given as many scopes and is one of its hundred readers.
insert into interlock.dags (dag_id, org_id, name) select seed.id('dag 0'), seed.id('org 0'), 'dag 0';

insert into interlock.jobs (job_id, org_id, dag_name, name, operator, runtime, queue, config, priority, max_attempts,
    backoff_seconds, backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds, timeout_seconds, inputs,
    outputs, definition_hash)
select seed.id('dag job ' || n), seed.id('org 0'), 'dag 0', 'dag job ' || n, 'echo', 'platform', 'platform', '{}', 0, 3,
       1, 2, 60, 0.1, '{}', 60, 3600, '[{}]', '[]', sha256('definition')
from generate_series(0, 199 + seed.mass() / 100) n;

insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id, job_id, progress)
select current_version, dataset_uuid, org_id,
       case when dataset_uuid = seed.id('dataset 0') then seed.id('dag job 0') else seed.id('dag job 150') end, 'partition'
from interlock.datasets;
insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id, progress)
select seed.id('old version ' || n), seed.id('dataset 0'), seed.id('org 0'), 'partition' from generate_series(1, 300) n;

insert into interlock.publications (org_id, name, dataset_uuid, dag_id)
select seed.id('org 0'), 'name ' || n, seed.id('dataset ' || n), seed.id('dag 0')
from generate_series(0, 99 + seed.mass() / 100) n;

insert into interlock.partitions (dataset_version, range_start, range_end, commit_id, task_id, attempt)
select seed.id('version ' || v), n * 10, n * 10 + 9, n, seed.id('task ' || n), 1
from generate_series(0, 3) v cross join generate_series(0, 4999 + seed.mass() / 20) n;

insert into interlock.edges (job_id, input_index, org_id, dataset_uuid, dataset_version, floating)
select seed.id('dag job ' || n), 0, seed.id('org 0'), seed.id('dataset ' || case when n < 100 then 0 else n end),
       seed.id('version ' || case when n < 100 then 0 else n end), false
from generate_series(0, 99 + seed.mass() / 100) n;

insert into interlock.materialisations (job_id, input_index, range_start, range_end, input_commit, done_commit, task_id)
select seed.id('dag job ' || j), 0, n * 10, n * 10 + 9, n, n, seed.id('given ' || j || ' ' || n)
from generate_series(0, 3) j cross join generate_series(0, 4999 + seed.mass() / 20) n;

-- A chain of three jobs in their own DAG; the last has a limit, and the middle one reads many partitions. Also jobs with
-- limits that are not behind.
insert into interlock.jobs (job_id, org_id, dag_name, name, operator, runtime, queue, config, priority, max_attempts,
    backoff_seconds, backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds, timeout_seconds, outputs,
    definition_hash, inputs, max_queue_depth, max_queue_age)
select seed.id('pipe ' || n), seed.id('org 0'), 'pipe', 'pipe ' || n, 'echo', 'platform', 'platform', '{}', 0, 3, 1, 2, 60,
       0.1, '{}', 60, 3600, '[]', sha256('definition'), case when n between 1 and 2 then '[{}]'::jsonb else '[]' end,
       case when n >= 2 then 1000 end, case when n >= 2 then 600 end
from generate_series(0, 999) n;

insert into interlock.datasets (dataset_uuid, org_id, current_version)
select seed.id('pipe dataset ' || n), seed.id('org 0'), seed.id('pipe version ' || n) from generate_series(0, 2) n;
insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id, job_id, progress, commit_id)
select seed.id('pipe version ' || n), seed.id('pipe dataset ' || n), seed.id('org 0'), seed.id('pipe ' || n), 'partition', 9
from generate_series(0, 2) n;
insert into interlock.edges (job_id, input_index, org_id, dataset_uuid, dataset_version, floating)
select seed.id('pipe ' || n), 0, seed.id('org 0'), seed.id('pipe dataset ' || n - 1), seed.id('pipe version ' || n - 1), false
from generate_series(1, 2) n;
insert into interlock.partitions (dataset_version, range_start, range_end, commit_id, task_id, attempt)
select seed.id('pipe version 0'), n * 10, n * 10 + 9, n + 1, seed.id('none'), 1
from generate_series(0, 20000 + seed.mass() / 20) n;
insert into interlock.materialisations (job_id, input_index, range_start, range_end, input_commit, done_commit, task_id)
select seed.id('pipe 1'), 0, n * 10, n * 10 + 9, n + 1, n + 1, seed.id('none') from generate_series(0, 20000 + seed.mass() / 20) n;

insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)
select seed.id('piped ' || n), seed.id('org 0'), seed.id('pipe 2'), 3, 0, '{}'
from generate_series(1, 2000 + seed.mass() / 100) n;
insert into interlock.pauses (job_id, cause_id, bulk, path, reason)
select seed.id('pipe ' || n), seed.id('pipe 2'), true, array[seed.id('pipe 2')], 'full' from generate_series(0, 1) n;

insert into interlock.runs (run_id, org_id, job_id, state, last_index, range_size, latched, ended_at, priority, held_from)
select seed.id('pipe run ' || n), seed.id('org 0'), seed.id('pipe 1'), 'Running', -1, 100, true, case when n > 9 then now() end, 1,
       0
from generate_series(0, 99 + seed.mass() / 100) n;
insert into interlock.backfills (run_id, org_id, job_id, range_start, range_end, priority, requested_by)
select seed.id('pipe run ' || n), seed.id('org 0'), seed.id('pipe 1'), 0, 100000, 1, 'user'
from generate_series(0, 99 + seed.mass() / 100) n;
insert into interlock.operator_state (job_id, name, state)
select seed.id('pipe ' || n), 'range_aggregator', '{}' from generate_series(0, 999) n;

-- A stream that a hundred jobs have read nearly to its end, one of them together with partitions; and unrouted events.
insert into interlock.datasets (dataset_uuid, org_id, current_version)
values (seed.id('stream'), seed.id('org 0'), seed.id('stream version'));
insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id, progress, cursor, commit_id)
values (seed.id('stream version'), seed.id('stream'), seed.id('org 0'), 'cursor', 1000000, 9);
insert into interlock.jobs (job_id, org_id, dag_name, name, operator, runtime, queue, config, priority, max_attempts,
    backoff_seconds, backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds, timeout_seconds, outputs,
    definition_hash, inputs)
select seed.id('reader ' || n), seed.id('org 0'), 'streams', 'reader ' || n, 'echo', 'platform', 'platform', '{}', 0, 3, 1,
       2, 60, 0.1, '{}', 60, 3600, '[]', sha256('definition'), case n when 0 then '[{}, {}]'::jsonb else '[{}]' end
from generate_series(0, 99) n;
insert into interlock.edges (job_id, input_index, org_id, dataset_uuid, dataset_version, floating, reconciled_to)
select seed.id('reader ' || n), 0, seed.id('org 0'), seed.id('stream'), seed.id('stream version'), false, 40000
from generate_series(0, 99) n
union all
select seed.id('reader 0'), 1, seed.id('org 0'), seed.id('pipe dataset 0'), seed.id('pipe version 0'), false, 0;
insert into interlock.job_cursors (job_id, input_index, committed)
select seed.id('reader ' || n), 0, 999990 from generate_series(1, 99) n;
insert into interlock.materialisations (job_id, input_index, range_start, range_end, input_commit, done_commit, task_id)
select seed.id('reader 1'), 0, n * 10, n * 10 + 9, n + 1, n + 1, seed.id('none') from generate_series(0, 20000 + seed.mass() / 20) n;
insert into interlock.outbox (kind, target, body)
select 'route', '', json_build_object('events', array[n]) from generate_series(1, 1000) n;

-- A DAG with a long history of versions, one current and one under construction: its ten jobs read existing data, were
-- given all of it and have done nearly all. Also swapped generations, the first of which has much left to clean up.
insert into interlock.dags (dag_id, org_id, name)
select seed.id('deployed ' || n), seed.id('org 0'), 'deployed ' || n from generate_series(0, 199 + seed.mass() / 1000) n;
insert into interlock.dag_versions (dag_version, dag_id, org_id, content_hash, document, state, deployed_by, retired_at)
select seed.id('deploy ' || n), seed.id('deployed 0'), seed.id('org 0'), encode(sha256(n::text::bytea), 'hex'), '{}',
       (case n when 0 then 'Current' when 1 then 'Building' else 'Retired' end)::interlock.dag_state, 'user',
       case when n > 1 then now() - n * interval '1 second' end
from generate_series(0, 299 + seed.mass() / 100) n;
insert into interlock.jobs (job_id, org_id, dag_name, name, operator, runtime, queue, config, priority, max_attempts,
    backoff_seconds, backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds, timeout_seconds, inputs,
    outputs, definition_hash, current, active, swapped_at)
select seed.id('built ' || n), seed.id('org 0'), 'deployed 0', 'built ' || n, 'echo', 'platform', 'platform', '{}', 0, 3, 1,
       2, 60, 0.1, '{}', 60, 3600, '[{}]', '[]', sha256('definition'), false, n < 10, case when n >= 10 then now() end
from generate_series(0, 29) n;
insert into interlock.dag_version_jobs (dag_version, job_id)
select seed.id('deploy 1'), seed.id('built ' || n) from generate_series(0, 9) n
union all
select seed.id('deploy ' || v), seed.id('built ' || n)
from generate_series(2, 99) v cross join generate_series(10, 29) n;
insert into interlock.edges (job_id, input_index, org_id, dataset_uuid, dataset_version, floating, active, reconciled_to)
select seed.id('built ' || n), 0, seed.id('org 0'), seed.id('dataset 1'), seed.id('version 1'), false, n < 10,
       4990 + seed.mass() / 20
from generate_series(0, 29) n;
insert into interlock.materialisations (job_id, input_index, range_start, range_end, input_commit, done_commit, task_id)
select seed.id('built ' || j), 0, n * 10, n * 10 + 9, n, case when n > 20 then n end, seed.id('built task ' || n)
from (values (0), (10)) b(j) cross join generate_series(0, 4999 + seed.mass() / 20) n;
insert into interlock.tasks (task_id, org_id, job_id, max_attempts, priority, payload)
select seed.id('left ' || n), seed.id('org 0'), seed.id('built 10'), 3, 0, '{}'
from generate_series(1, 3000 + seed.mass() / 100) n;
insert into interlock.job_cursors (job_id, input_index, committed)
select seed.id('dag job ' || n), 0, 9 from generate_series(0, 199 + seed.mass() / 100) n;

-- Prefixes of attempts, of which a few are due for a sweep.
insert into interlock.file_sweeps (place, dataset_version, task_id, attempt, due_at, final_at)
select 'file:///objects/' || n || '/', seed.id('pipe version 0'), seed.task('running', n), 1,
       now() + case when n < 100 then -1 else 1 end * interval '1 hour', now() + interval '1 day'
from generate_series(0, 999 + seed.mass() / 10) n;

-- Bundles, every tenth with a name; DAG jobs that use them; zips to be deleted; and tasks that wait for a runner.
insert into interlock.bundles (org_id, sha256, size_bytes, files, unpacked_bytes, modules, uploaded_by)
select seed.id('org 0'), encode(sha256(('bundle ' || n)::bytea), 'hex'), 1000, 3, 3000, '{"main": "python"}', 'root'
from generate_series(0, 999 + seed.mass() / 100) n;
insert into interlock.bundle_names (org_id, name, sha256)
select seed.id('org 0'), 'name ' || n, encode(sha256(('bundle ' || n)::bytea), 'hex')
from generate_series(0, 99 + seed.mass() / 1000) n;
insert into interlock.bundle_sweeps (org_id, sha256, due_at)
select seed.id('org 0'), encode(sha256(('gone ' || n)::bytea), 'hex'), now() + interval '1 second' * (n - 200)
from generate_series(0, 999 + seed.mass() / 100) n;
insert into interlock.jobs (job_id, org_id, dag_name, name, operator, runtime, queue, config, priority, max_attempts,
    backoff_seconds, backoff_factor, backoff_cap_seconds, jitter, non_retryable, lease_seconds, timeout_seconds, outputs,
    definition_hash)
select seed.id('udf ' || n), seed.id('org 0'), 'udf', 'udf ' || n, 'udf', 'lambda', null,
       json_build_object('bundle', 'sha256:' || encode(sha256(('bundle ' || n * 2)::bytea), 'hex')), 0, 3, 1, 2, 60, 0.1, '{}',
       60, 900, '[]', sha256('definition')
from generate_series(0, 199 + seed.mass() / 1000) n;
insert into interlock.outbox (kind, target, body, dedupe_key, due_at)
select 'invoke', 'lambda', '{}', 'invoke ' || n, now() + interval '1 hour' from generate_series(1, 500 + seed.mass() / 50) n;

-- Queries: a few are running, some of them long abandoned; most have ended.
insert into interlock.query_audit (query_id, org_id, user_name, mode, sql_sha256, outcome, started_at, ended_at)
select case when n < 10 then seed.id('query ' || n) else uuidv7(make_interval(secs => n - 3000000)) end,
       seed.id('org ' || case when n % 10 = 0 then 1 else 0 end), 'ada', 'interactive', sha256('select 1'),
       case when n % 1000 = 5 then 'Running' else 'Completed' end,
       now() + make_interval(secs => n - 3000000), case when n % 1000 <> 5 then now() end
from generate_series(0, 1999 + seed.mass() / 10) n;

-- Webhooks: org 0 has as many as an org may have, each with pending deliveries, and webhook 0 has a long history. Other
-- orgs have some of both.
insert into interlock.webhooks (webhook_id, org_id, name, url, events, sealed, created_by, failed_share)
select seed.id('webhook ' || n), seed.id('org ' || case when n < 100 then 0 else 1 + n % 3 end), 'webhook ' || n,
       'https://hooks.example/', '{run.completed}', 'secret', 'root', 0.5
from generate_series(0, 199) n;
insert into interlock.webhook_deliveries (delivery_id, org_id, webhook_id, event, body, status, taken, due_at, ended_at)
select seed.id('delivery ' || n), seed.id('org ' || case when n % 200 < 100 then 0 else 1 + n % 200 % 3 end),
       seed.id('webhook ' || n % 200), 'run.completed', '{}', s.status,
       s.status = 'Pending' and n % 7 = 0, now() + interval '1 second' * (case when n % 7 = 0 then 60 else -60 end),
       case when s.status <> 'Pending' then now() - interval '1 day' * (n % 15) end
from generate_series(0, 3999 + seed.mass() / 10) n
cross join lateral (select case when n < 2000 then 'Pending' when n % 4 = 0 then 'Dead' else 'Delivered' end
                        ::interlock.delivery_status as status) s;

-- Commands: org 0 has a large registry with limits, many remembered ids and a few waiting hand-offs. Fairness has an old
-- history and a few minutes that still count.
insert into interlock.services (org_id, name, version, changed_by)
select seed.id('org 0'), 'service-' || n, 1, 'root' from generate_series(0, 9) n;
insert into interlock.services (org_id, name, version, changed_by) values (seed.id('org 0'), 'service-without', 1, 'root');
insert into interlock.bus_versions (org_id, kind, version)
select seed.id('org 0'), kind, 1 from unnest(enum_range(null::interlock.bus_kind)) kind;
-- Each service has a current key, a previous one, and an expired one; others have many that expired long ago.
insert into interlock.bus_keys (org_id, service, number, sealed, created_by, rotates_at, expires_at)
select seed.id('org 0'), 'service-' || s, n, 'x', 'root', case when n = 3 then now() + interval '1 day' end,
       case n when 1 then now() - interval '1 day' when 2 then now() + interval '1 day' end
from generate_series(0, 9) s, generate_series(1, 3) n;
insert into interlock.services (org_id, name, version, changed_by)
select seed.id('org 1'), 'old-' || n, 1, 'root' from generate_series(0, 99) n;
insert into interlock.bus_keys (org_id, service, number, sealed, created_by, expires_at)
select seed.id('org 1'), 'old-' || s, n, 'x', 'root', now() - interval '100 days'
from generate_series(0, 99) s, generate_series(1, 3 + seed.mass() / 10000) n;
insert into interlock.service_polls (org_id, service, polled_at)
select seed.id('org 0'), 'service-' || n, now() from generate_series(0, 9) n;
insert into interlock.bus_routes (org_id, target, name, queue, dlq, version, changed_by)
select seed.id('org 0'), 'service-' || n % 10, 'command-' || n, 'queue', 'dead', 1, 'root'
from generate_series(0, 999 + seed.mass() / 100) n;
insert into interlock.bus_acls (org_id, target, name, source, version, changed_by)
select org_id, target, name, 'service-0', 1, 'root' from interlock.bus_routes;
insert into interlock.bus_limits (org_id, target, name, rate, version, changed_by)
select org_id, target, name, 100, 1, 'root' from interlock.bus_routes;
insert into interlock.bus_limits (org_id, target, name, source, rate, version, changed_by)
select seed.id('org 0'), '', '', 'service-' || n, 100, 1, 'root' from generate_series(0, 9) n;
insert into interlock.bus_changes (org_id, kind, action, subject, version, changed_by)
select org_id, 'acls', 'delete', target || '/' || name || '/service-0', 1, 'root' from interlock.bus_acls;
insert into interlock.bus_windows (org_id, target, name, source, starts_at, window_seconds, rate, burst, cooldown, used,
                                   asked, granted)
select org_id, target, name, '', 0, 1, 100, 0, 0, 1, 1, 1 from interlock.bus_routes;
insert into interlock.bus_prefetches (org_id, target, name, slot, holders)
select org_id, target, name, 0, 1 from interlock.bus_routes;
insert into interlock.bus_dedupe (org_id, source, command_id, handoff_id, expires_at)
select seed.id('org 0'), 'org 0/service-0', seed.id('command ' || n), n,
       now() + (case when n % 2 = 0 then interval '1 day' else interval '-1 day' end)
from generate_series(0, 1999 + seed.mass() / 20) n;
insert into interlock.bus_handoffs (org_id, source, command_id, reason, body, facts, received_at)
select seed.id('org 0'), 'org 0/service-0', seed.id('command ' || n), 'cache_miss', '{}', '{}', now()
from generate_series(1, 300) n;
insert into interlock.bus_fates (org_id, source, command_id, outcome, reason, target, name, decided_at)
select seed.id('org 0'), 'org 0/service-0', seed.id('command ' || n), 'failed', 'acl-deny', 'service-1', 'command-1',
       now() - (case when n % 2 = 0 then interval '0' else interval '1 day' end)
from generate_series(0, 1999 + seed.mass() / 20) n;
insert into interlock.bus_bans (org_id, source, target, name, kind, until, source_share, competing_share, dispatch_volume)
select seed.id('org 0'), 'org 0/service-0', target, name, 'warm',
       now() + (case when row_number() over () <= 50 then interval '1 day' else interval '-1 day' end), 0.9, 0.1, 100
from interlock.bus_routes;
insert into interlock.bus_strikes (org_id, source, target, name, source_share, competing_share, dispatch_volume, struck_at)
select seed.id('org 0'), 'org 0/service-1', 'service-0', 'command-' || n, 0.9, 0.1, 100,
       now() - (case when n < 100 then interval '1 minute' else interval '1 day' end)
from generate_series(0, 1999 + seed.mass() / 100) n;
insert into interlock.bus_shares (minute, org_id, target, name, source, dispatched)
select now() - (case when n < 100 then interval '30 seconds' else interval '1 day' end), seed.id('org 0'), 'service-0',
       'command-' || n, 'org 0/service-1', 100
from generate_series(0, 1999 + seed.mass() / 100) n;
-- The command bus: pending telemetry and archive, mostly of org 0; queues with a backlog and dead letters; alerts, route
-- health and replays, most of them long finished.
insert into interlock.bus_telemetry (org_id, events, events_in, created_at)
select seed.id('org ' || case when n % 100 = 0 then 1 + n / 100 % 3 else 0 end), '[{"event": "snavio.command.delivered"}]', 1,
       now() - interval '1 minute'
from generate_series(0, 999 + seed.mass() / 20) n;
insert into interlock.bus_telemetry_queues (org_id) select seed.id('org ' || n) from generate_series(0, 3) n;
insert into interlock.bus_archive (org_id, accepted, commands_in, accepted_at)
select seed.id('org ' || case when n % 100 = 0 then 1 + n / 100 % 3 else 0 end), '[]', 1, now() - interval '1 hour'
from generate_series(0, 3999 + seed.mass() / 20) n;
insert into interlock.bus_archives (org_id, dataset_uuid, dataset_version, position)
select d.org_id, d.dataset_uuid, d.current_version, 1000000 from interlock.datasets d
where d.org_id = seed.id('org 0') order by d.dataset_uuid limit 1;
insert into interlock.partitions (dataset_version, range_start, range_end, commit_id, task_id, attempt, location, committed_at)
select a.dataset_version, 5000000 + n, 5000000 + n, 1, seed.id('archived ' || n), 1, 'file:///archive/' || n,
       now() - make_interval(days => case when n < 50 then 60 else 1 end)
from interlock.bus_archives a, generate_series(0, 999 + seed.mass() / 100) n;
insert into interlock.queue_messages (queue, body, visible_at, enqueued_at, dead_at, receives)
select q.queue || seed.id('org 0') || q.rest, '{"events": [1, 2]}',
       now() - make_interval(days => case when n < 100 then 20 else 0 end), now() - make_interval(days => case when n < 100 then 20 else 0 end),
       case when n % 2 = 0 then now() end, 0
from (values ('telemetry:', ''), ('bus:', ':monitored')) as q(queue, rest),
     generate_series(0, 1999 + seed.mass() / 100) n;
insert into interlock.services (org_id, name, version, changed_by) values (seed.id('org 0'), 'monitored', 1, 'root');
insert into interlock.bus_routes (org_id, target, name, queue, dlq, version, changed_by)
select seed.id('org 0'), 'monitored', 'n' || n, case when n = 0 then 'monitored' else 'empty-' || n end, 'dead', 1, 'root'
from generate_series(0, 999 + seed.mass() / 100) n;
insert into interlock.bus_route_health (org_id, target, name, status, checked_at)
select seed.id('org 0'), 'monitored', 'n' || n, case when n % 500 = 0 then 'unpolled' else 'healthy' end::interlock.route_status,
       now() - make_interval(days => case when n < 10 then 5 else 0 end)
from generate_series(0, 999 + seed.mass() / 100) n;
insert into interlock.bus_alerts (alert_id, org_id, event, opened_at, told, sample, critical, unrouted, resolved_at)
select seed.id('alert ' || n), seed.id('org 0'), 'snavio.command.invalid', now() - make_interval(secs => n * 300.0), 1, '{}', true,
       n % 2 = 0, case when n > 20 then now() end
from generate_series(0, 9999 + seed.mass() / 100) n;
insert into interlock.bus_alert_emails (email_id, org_id, alert_id, address, status, due_at)
select seed.id('email ' || n), seed.id('org 0'), seed.id('alert ' || n), 'ops@example.org',
       case when n < 100 then 'Pending' else 'Delivered' end::interlock.delivery_status, now() - interval '1 minute'
from generate_series(0, 9999 + seed.mass() / 100) n;
insert into interlock.bus_replays (replay_id, org_id, origin, filters, reason, operator, dry_run, rate, most, state, ended_at)
select seed.id('replay ' || n), seed.id('org 0'), 'archive', '{}', 'why', 'root', false, 50, 1000,
       case when n < 2 then 'Sending' else 'Completed' end::interlock.replay_state, case when n >= 2 then now() end
from generate_series(0, 999 + seed.mass() / 100) n;
insert into interlock.bus_replay_items (replay_id, position, command_id, source, target, name, payload)
select seed.id('replay 0'), n, seed.id('item ' || n), 'org/a', 'b', 'c', '{}' from generate_series(0, 999 + seed.mass() / 20) n;
