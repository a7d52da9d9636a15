-- Published batches: their records, their load by the sink, and their outcome.

-- name: pointed_at
-- The records behind messages. A message is a wake-up: only the record says what to load and for which org.
select p.publish_id, p.org_id, p.task_id, p.attempt, p.dataset_uuid, p.dataset_version, p.batch_uri, p.record_count,
       p.status, p.published_at, v.storage, v.schema, v.unique_key, v.replace_rows, v.purged_at, m.n
from unnest(:task_ids::uuid[], :attempts::int[], :uuids::uuid[], :uris::text[]) with ordinality
    as m(task_id, attempt, dataset_uuid, batch_uri, n)
join interlock.buffer_publishes p on p.task_id = m.task_id and p.attempt = m.attempt
     and p.dataset_uuid = m.dataset_uuid and p.batch_uri = m.batch_uri
left join interlock.dataset_versions v on v.dataset_version = p.dataset_version and v.org_id = p.org_id;

-- name: lock_open
-- Batches that are still open. Locked after their dataset versions, in one order.
select publish_id from interlock.buffer_publishes
where publish_id = any(:publish_ids::uuid[]) and org_id = :org_id and status in ('Pending', 'Loading')
order by publish_id
for update;

-- name: set_loaded!
-- Compares the org as text, so that every plan looks up rows by id, even one made while the table was empty.
update interlock.buffer_publishes p
set status = 'Loaded', batch = l.batch, rows = l.rows, bytes = l.bytes, refusal = null, settled_at = interlock.clock(),
    sweep_at = interlock.clock() + make_interval(secs => :keep_seconds::float8)
from unnest(:publish_ids::uuid[], :batches::bigint[], :rows::bigint[], :bytes::bigint[])
    as l(publish_id, batch, rows, bytes)
where p.publish_id = l.publish_id and p.org_id::text = :org_id::uuid::text;

-- name: set_settled^
-- Refused or failed, unless it is already settled.
update interlock.buffer_publishes
set status = :status::interlock.publish_status, refusal = :refusal::text::json, settled_at = interlock.clock(),
    sweep_at = interlock.clock() + make_interval(secs => :keep_seconds::float8)
where publish_id = :publish_id and org_id = :org_id and status in ('Pending', 'Loading')
returning publish_id;

-- name: list_publishes
select * from interlock.buffer_publishes
where org_id = :org_id and (:cursor::uuid is null or publish_id < :cursor)
order by publish_id desc limit :limit;

-- name: list_publishes_by_status
select * from interlock.buffer_publishes
where org_id = :org_id and status = :status::interlock.publish_status
  and (:cursor::uuid is null or publish_id < :cursor)
order by publish_id desc limit :limit;

-- name: publish_by_id^
select * from interlock.buffer_publishes where publish_id = :publish_id and org_id = :org_id;

-- name: redrive^
-- Its file must still exist and must not be due for deletion.
update interlock.buffer_publishes
set status = 'Pending', refusal = null, settled_at = null, sweep_at = null, load_task = null, redrives = redrives + 1
where publish_id = :publish_id and org_id = :org_id and status in ('Refused', 'Failed') and swept_at is null
  and (sweep_at is null or sweep_at > interlock.clock())
returning *;

-- name: rearm
-- Sends the message of a batch again, whatever happened to the last one.
with direct as (
    insert into interlock.queue_messages (queue, body, dedupe_key)
    select :queue, b.body::json, b.dedupe_key
    from unnest(:bodies::text[], :dedupe_keys::text[]) as b(body, dedupe_key) where :direct::boolean
    on conflict (queue, dedupe_key) where dedupe_key is not null do update
        set visible_at = interlock.clock(), receipt = null, receives = 0, dead_at = null
), owed as (
    insert into interlock.outbox (kind, target, body, dedupe_key)
    select 'send', :queue, b.body::json, b.dedupe_key
    from unnest(:bodies::text[], :dedupe_keys::text[]) as b(body, dedupe_key) where not :direct::boolean
)
select case when :direct::boolean then pg_notify('interlock_queue', :queue) else pg_notify('interlock_outbox', '') end;

-- name: without_message
-- Pending for longer than a message needs to arrive, and without a live message: it is missing, or a dead letter.
select p.publish_id, p.org_id, p.task_id, p.attempt, p.dataset_uuid, p.dataset_version, p.batch_uri, p.record_count,
       m.message_id is not null as dead
from (select * from interlock.buffer_publishes
      where status in ('Pending', 'Loading') and publish_id > :after::uuid
      order by publish_id limit :limit) p
left join interlock.queue_messages m on m.queue = :queue and m.dedupe_key = p.publish_id::text
where p.status = 'Pending' and p.published_at < interlock.clock() - make_interval(secs => :grace::float8)
  and (m.message_id is null or m.dead_at is not null)
  and not exists (select 1 from interlock.outbox o where o.kind = 'send' and o.dedupe_key = p.publish_id::text);

-- name: open_page
-- The last id and the size of the page, for the scan over open batches.
select max(publish_id::text)::uuid as last, count(*) as found
from (select publish_id from interlock.buffer_publishes
      where status in ('Pending', 'Loading') and publish_id > :after::uuid
      order by publish_id limit :limit) p;

-- name: take_sweeps
-- Files that are due. The new due time covers a sweep that fails or a sink that dies in the middle.
update interlock.buffer_publishes p
set sweep_at = interlock.clock() + make_interval(secs => :again::float8), swept_at = interlock.clock()
where p.publish_id = any(array(
    select publish_id from interlock.buffer_publishes where sweep_at <= interlock.clock()
    order by sweep_at limit :limit for update skip locked))
returning p.publish_id, p.org_id, p.batch_uri;

-- name: swept!
update interlock.buffer_publishes set sweep_at = null where publish_id = any(:publish_ids::uuid[]);

-- name: batches_of_loads
-- The status is compared as text: its own index covers all open batches.
select p.load_task, p.publish_id, p.batch_uri, p.record_count, v.schema, v.unique_key, v.replace_rows
from interlock.buffer_publishes p
join interlock.dataset_versions v on v.dataset_version = p.dataset_version and v.org_id = p.org_id
where p.load_task = any(:task_ids::uuid[]) and p.status::text = 'Loading'
order by p.load_task, p.publish_id;

-- name: set_loading
-- Batches that are still pending, assigned to the task from now on.
update interlock.buffer_publishes set status = 'Loading', load_task = :task_id
where publish_id = any(array(
    select publish_id from interlock.buffer_publishes
    where publish_id = any(:publish_ids::uuid[]) and org_id = :org_id and status = 'Pending'
    order by publish_id for update))
returning publish_id;

-- name: ended_loads
-- Tasks of batches being loaded that have ended, or that were deleted with their org's history.
select l.load_task, t.attempt, t.status, a.error_message
from (select distinct load_task from (
          select load_task from interlock.buffer_publishes
          where status in ('Pending', 'Loading') and load_task is not null order by publish_id limit :limit) o) l
left join interlock.tasks t on t.shard = 0 and t.task_id = l.load_task
left join lateral (select error_message from interlock.attempts a where a.task_id = l.load_task
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
where t.task_id is null or t.status in ('Completed', 'Canceled') or t.dead;

-- name: loads_over
-- Tasks that no batch waits for any more. The status is compared as text, as above.
select l.task_id from unnest(:task_ids::uuid[]) as l(task_id)
where not exists (select 1 from interlock.buffer_publishes p
                  where p.load_task = l.task_id and p.status::text in ('Pending', 'Loading'));

-- name: publishes_of_load
select p.publish_id, p.org_id, p.task_id, p.attempt, p.dataset_uuid, p.dataset_version, p.batch_uri, p.record_count,
       p.status, p.published_at, v.storage, v.schema, v.unique_key, v.replace_rows, v.purged_at
from interlock.buffer_publishes p
left join interlock.dataset_versions v on v.dataset_version = p.dataset_version and v.org_id = p.org_id
where p.load_task = :load_task and p.status::text = 'Loading'
order by p.publish_id;

-- name: waiting_long$
select count(*) from (
    select 1 from interlock.buffer_publishes
    where status in ('Pending', 'Loading') and status = 'Pending'
      and published_at < interlock.clock() - make_interval(secs => :seconds::float8)
    limit :limit) p;
