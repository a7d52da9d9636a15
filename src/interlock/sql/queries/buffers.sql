-- Published batches: what the sink has to do with them, and what became of them.

-- name: pointed_at
-- The records behind messages. A message is a wake-up: what is loaded, and for whom, stands in the record alone.
select p.publish_id, p.org_id, p.task_id, p.attempt, p.dataset_uuid, p.dataset_version, p.batch_uri, p.record_count,
       p.status, p.published_at, v.storage, v.schema, v.unique_key, v.replace_rows, v.purged_at, m.n
from unnest(:task_ids::uuid[], :attempts::int[], :uuids::uuid[], :uris::text[]) with ordinality
    as m(task_id, attempt, dataset_uuid, batch_uri, n)
join interlock.buffer_publishes p on p.task_id = m.task_id and p.attempt = m.attempt
     and p.dataset_uuid = m.dataset_uuid and p.batch_uri = m.batch_uri
left join interlock.dataset_versions v on v.dataset_version = p.dataset_version and v.org_id = p.org_id;

-- name: lock_open
-- Those that nobody has settled meanwhile. After their dataset versions, and in one order.
select publish_id from interlock.buffer_publishes
where publish_id = any(:publish_ids::uuid[]) and org_id = :org_id and status in ('Pending', 'Loading')
order by publish_id
for update;

-- name: set_loaded!
-- By id alone, whatever the planner believes of a table that was empty when it looked: so the org is compared as text.
update interlock.buffer_publishes p
set status = 'Loaded', batch = l.batch, rows = l.rows, bytes = l.bytes, refusal = null, settled_at = interlock.clock(),
    sweep_at = interlock.clock() + make_interval(secs => :keep_seconds::float8)
from unnest(:publish_ids::uuid[], :batches::bigint[], :rows::bigint[], :bytes::bigint[])
    as l(publish_id, batch, rows, bytes)
where p.publish_id = l.publish_id and p.org_id::text = :org_id::uuid::text;

-- name: set_settled^
-- Refused or given up, unless it is settled already.
update interlock.buffer_publishes
set status = :status::interlock.publish_status, refusal = :refusal::text::json, settled_at = interlock.clock(),
    sweep_at = interlock.clock() + make_interval(secs => :keep_seconds::float8)
where publish_id = :publish_id and org_id = :org_id and status in ('Pending', 'Loading')
returning publish_id;

-- name: list_publishes
select * from interlock.buffer_publishes
where org_id = :org_id and (:cursor::uuid is null or publish_id < :cursor)
order by publish_id desc limit :most;

-- name: list_publishes_by_status
select * from interlock.buffer_publishes
where org_id = :org_id and status = :status::interlock.publish_status
  and (:cursor::uuid is null or publish_id < :cursor)
order by publish_id desc limit :most;

-- name: publish_by_id^
select * from interlock.buffer_publishes where publish_id = :publish_id and org_id = :org_id;

-- name: redrive^
-- Its file must still be there, and nobody may be about to delete it.
update interlock.buffer_publishes
set status = 'Pending', refusal = null, settled_at = null, sweep_at = null, load_task = null, redrives = redrives + 1
where publish_id = :publish_id and org_id = :org_id and status in ('Refused', 'Failed') and swept_at is null
  and (sweep_at is null or sweep_at > interlock.clock())
returning *;

-- name: rearm
-- The message of a batch that is to be loaded, whatever became of the one before it.
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
-- Pending for longer than a message needs to arrive, and nobody will tell the sink: there is none, or it is dead.
select p.publish_id, p.org_id, p.task_id, p.attempt, p.dataset_uuid, p.dataset_version, p.batch_uri, p.record_count,
       m.message_id is not null as dead
from (select * from interlock.buffer_publishes
      where status in ('Pending', 'Loading') and publish_id > :after::uuid
      order by publish_id limit :most) p
left join interlock.queue_messages m on m.queue = :queue and m.dedupe_key = p.publish_id::text
where p.status = 'Pending' and p.published_at < interlock.clock() - make_interval(secs => :grace::float8)
  and (m.message_id is null or m.dead_at is not null)
  and not exists (select 1 from interlock.outbox o where o.kind = 'send' and o.dedupe_key = p.publish_id::text);

-- name: open_page
-- How far a pass over the open ones has come.
select max(publish_id::text)::uuid as last, count(*) as found
from (select publish_id from interlock.buffer_publishes
      where status in ('Pending', 'Loading') and publish_id > :after::uuid
      order by publish_id limit :most) p;

-- name: take_sweeps
-- Files that are due. Come due again a little later: a sweep that fails, or a sink that dies over it, leaves nothing.
update interlock.buffer_publishes p
set sweep_at = interlock.clock() + make_interval(secs => :again::float8), swept_at = interlock.clock()
where p.publish_id = any(array(
    select publish_id from interlock.buffer_publishes where sweep_at <= interlock.clock()
    order by sweep_at limit :most for update skip locked))
returning p.publish_id, p.org_id, p.batch_uri;

-- name: swept!
update interlock.buffer_publishes set sweep_at = null where publish_id = any(:publish_ids::uuid[]);

-- name: batches_of_loads
-- The status as text: its own index has all that is open.
select p.load_task, p.publish_id, p.batch_uri, p.record_count, v.schema, v.unique_key, v.replace_rows
from interlock.buffer_publishes p
join interlock.dataset_versions v on v.dataset_version = p.dataset_version and v.org_id = p.org_id
where p.load_task = any(:task_ids::uuid[]) and p.status::text = 'Loading'
order by p.load_task, p.publish_id;

-- name: set_loading
-- Those that still wait, and are the task's from now on.
update interlock.buffer_publishes set status = 'Loading', load_task = :task_id
where publish_id = any(array(
    select publish_id from interlock.buffer_publishes
    where publish_id = any(:publish_ids::uuid[]) and org_id = :org_id and status = 'Pending'
    order by publish_id for update))
returning publish_id;

-- name: ended_loads
-- Tasks of batches that are being loaded, and have ended: or are gone, with their org's history.
select l.load_task, t.attempt, t.status, a.error_message
from (select distinct load_task from (
          select load_task from interlock.buffer_publishes
          where status in ('Pending', 'Loading') and load_task is not null order by publish_id limit :most) o) l
left join interlock.tasks t on t.shard = 0 and t.task_id = l.load_task
left join lateral (select error_message from interlock.attempts a where a.task_id = l.load_task
                   order by a.attempt desc, a.ended_at desc limit 1) a on true
where t.task_id is null or t.status in ('Completed', 'Canceled') or t.dead;

-- name: loads_over
-- Those of these tasks that no batch waits for any more. The status as text, as above.
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

-- name: spark_is_there$
select exists (select 1 from interlock.workers
               where queue = :queue and last_seen_at > interlock.clock() - interval '60 seconds');

-- name: waiting_long$
select count(*) from (
    select 1 from interlock.buffer_publishes
    where status in ('Pending', 'Loading') and status = 'Pending'
      and published_at < interlock.clock() - make_interval(secs => :seconds::float8)
    limit :most) p;
