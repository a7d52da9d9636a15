-- Ingest: creates runs from lists, step by step.

-- name: insert_upload^
insert into interlock.uploads (org_id, parts, sweep_at)
values (:org_id, :parts, interlock.clock() + make_interval(secs => :seconds::float8))
returning upload_id, parts, sweep_at;

-- name: keep_upload^
-- A run is created from the upload. The files stay until that is done, and as long again for another run of them.
update interlock.uploads
set sweep_at = greatest(sweep_at, interlock.clock() + make_interval(secs => :seconds::float8))
where upload_id = :upload_id and org_id = :org_id and sweep_at > interlock.clock()
returning upload_id, parts;

-- name: known_upload^
select upload_id, parts from interlock.uploads
where upload_id = :upload_id and org_id = :org_id and sweep_at > interlock.clock();

-- name: uploads_to_sweep
-- Uploads that a run is being created from stay.
select u.upload_id, u.org_id from interlock.uploads u
where u.sweep_at <= interlock.clock()
order by u.sweep_at limit :limit
for update skip locked;

-- name: uploads_in_use
select u.upload_id from unnest(:upload_ids::uuid[]) as u(upload_id)
where exists (select 1 from interlock.ingests i
              where i.settled_at is null and i.source ->> 'upload_id' = u.upload_id::text);

-- name: postpone_uploads!
update interlock.uploads set sweep_at = interlock.clock() + make_interval(secs => :seconds::float8)
where upload_id = any(:upload_ids::uuid[]);

-- name: delete_uploads!
delete from interlock.uploads where upload_id = any(:upload_ids::uuid[]);

-- name: insert_ingest!
insert into interlock.ingests (run_id, org_id, source) values (:run_id, :org_id, :source::text::json);

-- name: announce
-- Sends the message of an ingest again, whatever happened to the last one.
with direct as (
    insert into interlock.queue_messages (queue, body, dedupe_key)
    select :queue, json_build_object('run_id', r), r::text from unnest(:run_ids::uuid[]) as r where :direct::boolean
    on conflict (queue, dedupe_key) where dedupe_key is not null do update
        set visible_at = interlock.clock(), receipt = null, receives = 0, dead_at = null
), owed as (
    insert into interlock.outbox (kind, target, body, dedupe_key)
    select 'send', :queue, json_build_object('run_id', r), r::text from unnest(:run_ids::uuid[]) as r
    where not :direct::boolean
)
select case when :direct::boolean then pg_notify('interlock_queue', :queue) else pg_notify('interlock_outbox', '') end;

-- name: ingest_of^
-- Everything that a step depends on. The message is a wake-up: only this row defines the work.
select i.run_id, i.org_id, i.source, i.step, i.load_task, i.total, i.last_index, i.enqueued_index, i.settled_at,
       r.job_id, r.shard, r.range_size, r.cancel_requested, r.delete_requested, r.ended_at, r.held_from is not null as held,
       j.runtime, j.queue, coalesce(r.priority, j.priority) as priority, j.max_attempts, j.concurrency_key
from interlock.ingests i
join interlock.runs r on r.run_id = i.run_id
join interlock.jobs j on j.job_id = r.job_id
where i.run_id = :run_id;

-- name: lock_loading^
-- Two readers of a source that changes may disagree on whether it is small. The lock makes them decide one after the
-- other.
select run_id from interlock.ingests where run_id = :run_id and org_id = :org_id and step = 'Loading'
for no key update;

-- name: shard_of_run$
select shard from interlock.runs where run_id = :run_id;

-- name: give_shard^
-- Assigned once, before the first row is written and so before any process reads the shard.
update interlock.runs set shard = nextval('interlock.shards')
where run_id = :run_id and org_id = :org_id and shard = 0 and ended_at is null and not delete_requested
returning shard;

-- name: create_shard$
select interlock.create_shard(:number::int, :org_id::uuid, :run_id::uuid, :job_id::uuid, :max_attempts::int,
                              :priority::int);

-- name: finish_shard$
select interlock.finish_shard(:number::int);

-- name: begin_chunk$
-- Returns no row if the chunk was loaded before or is no longer wanted. Waits for a process that is loading it, and for
-- one that takes the list away from a Spark task: from such a task nothing more is accepted. Parameters are text and
-- 64-bit integers, as the Arrow driver requires.
insert into interlock.ingest_chunks (run_id, part, first_byte, end_byte, first_line, lines, rows, reached)
select i.run_id, :part::bigint::int, :first_byte::bigint, :end_byte::bigint, :first_line::bigint, :lines::bigint,
       :rows::bigint, nullif(:reached::text, '')::json
from interlock.ingests i
join interlock.runs r on r.run_id = i.run_id
where i.run_id = :run_id::text::uuid and i.step = 'Loading' and r.ended_at is null and not r.cancel_requested
  and not r.delete_requested and coalesce(i.load_task::text, '') = :load_task::text
for share of i
on conflict (run_id, part, first_byte) do nothing
returning part;

-- name: last_chunk^
-- The position reached so far: chunks are loaded in list order.
select part, end_byte, first_line + lines as next_line, reached from interlock.ingest_chunks
where run_id = :run_id order by part desc, first_byte desc limit 1;

-- name: sum_of_chunks^
-- Computed once, at the end. The total comes from the ledger, not from counts made on the way.
select coalesce(sum(rows), 0)::bigint as total, coalesce(max(first_line + lines), 0) - 1 as last_index
from interlock.ingest_chunks where run_id = :run_id;

-- name: set_loaded^
update interlock.ingests set step = 'Finishing', total = :total, last_index = :last_index
where run_id = :run_id and org_id = :org_id and step = 'Loading'
returning run_id;

-- name: set_run_total!
-- Sets the total once, and adds to `queued`, because workers may have processed the first tasks already. A cancel that
-- came before the first task has walked over none.
with counted as (
    update interlock.ingests set step = 'Enqueuing' where run_id = :run_id and org_id = :org_id and step = 'Finishing'
    returning total, last_index
)
update interlock.runs r set total = c.total, queued = r.queued + c.total, last_index = c.last_index, cancel_index = 0
from counted c where r.run_id = :run_id and r.total is null;

-- name: enqueue_run_ranges^
-- The next messages of the run, at most `most`. `enqueued_index` is where the next ones start.
with next_ones as (
    select i.run_id, i.org_id, r.job_id, r.shard, r.range_size, r.priority, i.last_index,
           i.enqueued_index / r.range_size as first,
           least(i.enqueued_index / r.range_size + :limit::int - 1, i.last_index / r.range_size) as last
    from interlock.ingests i join interlock.runs r on r.run_id = i.run_id
    where i.run_id = :run_id and i.org_id = :org_id and i.step = 'Enqueuing' and i.enqueued_index <= i.last_index
    for update of i
), messages as (
    -- A large run goes into the bulk lane, whatever the priority of its job, so that small runs do not wait behind it.
    select n.run_id || ':' || chunk as dedupe_key, n.org_id, n.run_id,
           coalesce(n.priority, case when n.shard = 0 then :priority::int else 1 end) as lane,
           json_build_object('job_id', n.job_id, 'run_id', n.run_id, 'start', chunk * n.range_size,
                             'end', least((chunk + 1) * n.range_size - 1, n.last_index)) as body
    from next_ones n cross join lateral generate_series(n.first, n.last) as chunk
), direct as (
    insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key)
    select :queue, lane, org_id, run_id, body, dedupe_key from messages where :direct::boolean
    on conflict do nothing
), owed as (
    insert into interlock.outbox (kind, target, body, priority, org_id, share_id, dedupe_key)
    select 'send', :queue, body, lane, org_id, run_id, dedupe_key from messages where not :direct::boolean
), moved as (
    update interlock.ingests i set enqueued_index = (n.last + 1) * n.range_size
    from next_ones n where i.run_id = n.run_id
    returning i.enqueued_index, i.last_index
)
select enqueued_index > last_index as done,
       case when :direct::boolean then pg_notify('interlock_queue', :queue) else pg_notify('interlock_outbox', '') end
from moved;

-- name: latch_ingested^
-- The last step: the run may end from now on. A paused run stays paused. In a run whose tasks are held back, those
-- without a message count as queued, so it cannot end before they have.
with done as (
    update interlock.ingests i set step = 'Done', settled_at = interlock.clock()
    from interlock.runs r
    where i.run_id = :run_id and i.org_id = :org_id and i.step = 'Enqueuing' and r.run_id = i.run_id
      and (i.enqueued_index > i.last_index or r.held_from is not null)
    returning i.run_id
)
update interlock.runs r
set latched = true, ingesting = false,
    state = interlock.live_state(r.paused or (select b.paused and not r.cancel_requested from interlock.backfills b
                                              where b.run_id = r.run_id) is true, false)
from done d where r.run_id = d.run_id and r.ended_at is null
returning r.run_id;

-- name: end_ingest^
-- Ends an ingest without any visible task: its list is invalid, or the run is no longer wanted. A run that was stopped
-- ends as failed, with its reason.
with settled as (
    update interlock.ingests set step = :step::interlock.ingest_step, settled_at = interlock.clock()
    where run_id = :run_id and org_id = :org_id and settled_at is null and step in ('Loading', 'Finishing')
    returning run_id
)
update interlock.runs r
set latched = true, ingesting = false, open = false, total = 0, queued = 0, reason = coalesce(:reason, r.reason),
    state = (case when r.reason is null then :state else 'Failed' end)::interlock.run_state, ended_at = interlock.clock()
from settled s where r.run_id = s.run_id and r.ended_at is null
returning r.run_id, r.shard;

-- name: set_load_task^
update interlock.ingests set load_task = :load_task
where run_id = :run_id and org_id = :org_id and step = 'Loading' and load_task is null
returning run_id;

-- name: clear_load_task^
-- The chunks that it has loaded are deleted too: another load cuts chunks at other positions.
update interlock.ingests set load_task = null where run_id = :run_id and org_id = :org_id and load_task = :load_task
returning run_id;

-- name: forget_chunks!
delete from interlock.ingest_chunks where run_id = :run_id;

-- name: set_chunk_rows$
update interlock.ingest_chunks set rows = :rows::bigint, lines = :lines::bigint
where run_id = :run_id::text::uuid and part = :part::bigint::int and first_byte = :first_byte::bigint
returning part;

-- name: loads_on_spark
select i.run_id from interlock.ingests i
left join interlock.tasks t on t.shard = 0 and t.task_id = i.load_task
where i.load_task is not null and i.settled_at is null
  and (t.task_id is null or t.status in ('Completed', 'Canceled') or t.dead)
order by i.load_task limit :limit;

-- name: load_task_state^
select t.status, t.dead, a.error_class, a.error_message from interlock.tasks t
left join lateral (select error_class, error_message from interlock.attempts a where a.task_id = t.task_id
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
where t.shard = 0 and t.task_id = :task_id;

-- name: ingest_of_load^
-- Only the row that names the task defines what a Spark task loads.
select i.run_id, i.org_id, i.source, i.load_task, r.shard, j.concurrency_key
from interlock.ingests i
join interlock.runs r on r.run_id = i.run_id
join interlock.jobs j on j.job_id = r.job_id
where i.load_task = :task_id and i.settled_at is null and i.step = 'Loading';

-- name: stuck_ingests
-- Open for longer than a message needs to arrive, and without a live message: it is missing, or a dead letter.
select i.run_id, i.org_id, i.step, m.message_id is not null as dead
from (select * from interlock.ingests where settled_at is null and load_task is null and run_id > :after::uuid
      order by run_id limit :limit) i
left join interlock.queue_messages m on m.queue = :queue and m.dedupe_key = i.run_id::text
where i.created_at < interlock.clock() - make_interval(secs => :grace::float8)
  and (m.message_id is null or m.dead_at is not null)
  and not exists (select 1 from interlock.outbox o where o.kind = 'send' and o.dedupe_key = i.run_id::text)
order by i.run_id;

-- name: insert_ingested!
-- For a list that proves to be small. Idempotent.
insert into interlock.tasks (shard, task_id, org_id, job_id, run_id, task_index, max_attempts, priority, slot_key, payload)
select 0, interlock.run_task_id(:run_id, i.task_index), :org_id, :job_id, :run_id, i.task_index, :max_attempts,
       :priority, i.slot_key, i.payload::json
from unnest(:indexes::bigint[], :payloads::text[], :slot_keys::text[]) as i(task_index, payload, slot_key)
on conflict do nothing;

-- name: insert_ingesting_run^
insert into interlock.runs (org_id, job_id, last_index, range_size, max_concurrency, rate_key, rate_per_second,
                            tolerated_share, deadline_seconds, deadline_at, retention_days, latched, ingesting, open,
                            state)
values (:org_id, :job_id, -1, :range_size, :max_concurrency::int, :rate_key::text, :rate_per_second::float8,
        :tolerated_share::float8, :deadline_seconds::float8,
        interlock.clock() + make_interval(secs => :deadline_seconds::float8), :retention_days::float8, false, true,
        :open, 'Ingesting')
returning run_id, state;

-- name: newest_run^
-- With the job fields that its tasks need.
select r.run_id, r.org_id, j.job_id, j.runtime, j.queue, j.priority, j.max_attempts, j.concurrency_key
from interlock.runs r
join interlock.jobs j on j.job_id = r.job_id
where r.job_id = :job_id and r.org_id = :org_id
order by r.run_id desc limit 1;

-- name: extend_open_run^
-- Concurrent callers wait for each other here, so that each gets its own indexes.
update interlock.runs r set last_index = r.last_index + :added::bigint, queued = r.queued + :added::bigint
where r.run_id = :run_id and r.org_id = :org_id and r.open and r.ended_at is null and not r.cancel_requested
  and not r.delete_requested
returning r.shard, r.state, r.range_size, r.last_index, r.last_index - :added::bigint + 1 as first_index;

-- name: add_tasks!
insert into interlock.tasks (shard, task_id, org_id, job_id, run_id, task_index, max_attempts, priority, slot_key, payload)
select :shard, interlock.run_task_id(:run_id, :first_index::bigint + i.n - 1), :org_id, :job_id, :run_id,
       :first_index::bigint + i.n - 1, :max_attempts, :priority, i.slot_key, i.payload::json
from unnest(:payloads::text[], :slot_keys::text[]) with ordinality as i(payload, slot_key, n);

-- name: add_ranges
-- The first range may have a message of earlier tasks, waiting or received by a worker. It is sent again for all of
-- them; a worker that had received it claims the rest, or nothing.
with messages as (
    select :run_id::uuid || ':' || chunk as dedupe_key, greatest(chunk * :range_size::int, :first::bigint) as start,
           least((chunk + 1) * :range_size::int - 1, :last::bigint) as last
    from generate_series(:first::bigint / :range_size::int, :last::bigint / :range_size::int) as chunk
), direct as (
    insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key)
    select :queue, :priority, :org_id::uuid, :run_id::uuid, json_build_object('job_id', :job_id::uuid, 'run_id', :run_id::uuid, 'start', start, 'end', last),
           dedupe_key
    from messages where :direct::boolean
    on conflict (queue, dedupe_key) where dedupe_key is not null do update
        set visible_at = interlock.clock(), receipt = null, receives = 0, dead_at = null,
            body = json_build_object('job_id', :job_id::uuid, 'run_id', :run_id::uuid,
                                     'start', least((interlock.queue_messages.body ->> 'start')::bigint,
                                                    (excluded.body ->> 'start')::bigint),
                                     'end', (excluded.body ->> 'end')::bigint)
), owed as (
    insert into interlock.outbox (kind, target, body, priority, org_id, share_id, dedupe_key)
    select 'send', :queue,
           json_build_object('job_id', :job_id::uuid, 'run_id', :run_id::uuid, 'start', start, 'end', last), :priority,
           :org_id::uuid, :run_id::uuid, dedupe_key
    from messages where not :direct::boolean
)
select case when :direct::boolean then pg_notify('interlock_queue', :queue) else pg_notify('interlock_outbox', '') end;

-- name: close_run^
-- Sets the total, which is the number of added tasks, together with the latch. A run that is not open is unchanged.
update interlock.runs r
set open = false, latched = true, ingesting = false, total = r.last_index + 1, state = interlock.live_state(r.paused, false)
where r.run_id = :run_id and r.org_id = :org_id and r.open and r.ended_at is null
returning r.run_id;

-- name: unwanted_open_runs
-- Runs that were canceled or stopped: their tasks are canceled, and the runs end with them.
select run_id, org_id from interlock.runs where open and cancel_requested and ended_at is null order by run_id limit :limit;

-- name: has_spark_worker$
select exists (select 1 from interlock.workers
               where queue = :queue and last_seen_at > interlock.clock() - interval '60 seconds');
