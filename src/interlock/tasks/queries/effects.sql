-- Side effects of attempts beyond their status: events, committed outputs, published batches, outbox rows.

-- name: insert_outputs!
insert into interlock.output_commits (task_id, output_index, dataset_uuid, dataset_version, org_id, attempt, body)
select o.task_id, o.output_index, o.dataset_uuid, o.dataset_version, o.org_id, o.attempt, o.body::json
from unnest(:task_ids::uuid[], :attempts::int[], :org_ids::uuid[], :indexes::int[], :uuids::uuid[], :versions::uuid[],
            :bodies::text[]) as o(task_id, attempt, org_id, output_index, dataset_uuid, dataset_version, body);

-- name: insert_publish^
insert into interlock.buffer_publishes (org_id, task_id, attempt, dataset_uuid, dataset_version, batch_uri, record_count)
values (:org_id, :task_id, :attempt, :dataset_uuid, :dataset_version, :batch_uri, :record_count)
on conflict (task_id, attempt, dataset_uuid, batch_uri) do nothing
returning publish_id;

-- name: existing_publish$
select publish_id from interlock.buffer_publishes
where task_id = :task_id and attempt = :attempt and dataset_uuid = :dataset_uuid and batch_uri = :batch_uri;

-- name: send_message
-- A message that exists exactly if this transaction commits.
with direct as (
    insert into interlock.queue_messages (queue, body, dedupe_key)
    select :queue, :body::text::json, :dedupe_key where :direct::boolean
    on conflict do nothing
), owed as (
    insert into interlock.outbox (kind, target, body, dedupe_key)
    select 'send', :queue, :body::text::json, :dedupe_key where not :direct::boolean
)
select case when :direct::boolean then pg_notify('interlock_queue', :queue) else pg_notify('interlock_outbox', '') end;

-- name: take_outbox
-- Taken rows become due again later: if a relay dies between sending and deleting, the message is sent twice, but never
-- lost. The scan starts where the last one ended: see LowWater.
update interlock.outbox o
set due_at = interlock.clock() + make_interval(secs => least(60, :retry_seconds::float8 * power(2, o.tries))), tries = o.tries + 1
where o.outbox_id = any(array(
    select outbox_id from interlock.outbox
    where due_at > :since::timestamptz and due_at <= interlock.clock() and kind = any(:kinds::text[])
    order by due_at limit :limit
    for no key update skip locked))
returning o.outbox_id, o.kind, o.target, o.body, o.priority, o.org_id, o.share_id, o.dedupe_key, o.tries, old.due_at as was_due_at;

-- name: make_due
-- A runtime has free slots: the oldest waiting rows become due now, limited to :orgs if any are given.
update interlock.outbox set due_at = interlock.clock()
where outbox_id = any(array(
    select w.outbox_id from unnest(:targets::text[]) as t(target)
    cross join lateral (
        select o.outbox_id, o.priority from interlock.outbox o
        where o.kind = 'invoke' and o.target = t.target and o.due_at > interlock.clock()
          and (:orgs::uuid[] is null or o.org_id = any(:orgs::uuid[]))
        order by o.priority, o.outbox_id limit :limit
        for no key update skip locked
    ) w
    order by w.priority, w.outbox_id limit :limit))
returning outbox_id;

-- name: delete_outbox!
delete from interlock.outbox where outbox_id = any(:ids::bigint[]);

-- name: outbox_stats^
select count(*) as rows, coalesce(extract(epoch from interlock.clock() - min(due_at))::float8, 0) as oldest_age
from (select due_at from interlock.outbox order by due_at limit :limit) o;
