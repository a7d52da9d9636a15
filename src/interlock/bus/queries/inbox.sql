-- Dead letters of the bus's queues. For live messages see tasks/queries/queue.sql.

-- name: receives_from$
-- A queue belongs to the target of the routes that lead to it.
select exists (select 1 from interlock.bus_routes
               where org_id = :org_id and queue = :queue and target = :service limit 1);

-- name: dead
-- The queue is compared as a range of one value. As an equality, the sort order would match the primary key too, and
-- that scan would read past every other queue.
select message_id, body, receives, enqueued_at, dead_at from interlock.queue_messages
where queue between :queue::text and :queue::text and dead_at is not null and message_id > :after
order by queue, message_id limit :limit;

-- name: redrive
update interlock.queue_messages
set dead_at = null, receives = 0, receipt = null, visible_at = interlock.clock()
where message_id = any(array(
    select message_id from interlock.queue_messages
    where queue between :queue::text and :queue::text and dead_at is not null
    order by queue, message_id limit :limit for no key update skip locked))
returning message_id, pg_notify('interlock_commands', queue);

-- name: redrive_named
-- By id, as in tasks/queries/queue.sql: `queue || ''` rules out any other plan.
update interlock.queue_messages
set dead_at = null, receives = 0, receipt = null, visible_at = interlock.clock()
where message_id = any(array(
    select message_id from interlock.queue_messages
    where message_id = any(:ids::bigint[]) and queue || '' = :queue and dead_at is not null
    order by message_id for no key update skip locked))
returning message_id, pg_notify('interlock_commands', queue);

-- name: discard
delete from interlock.queue_messages
where message_id = any(array(
    select message_id from interlock.queue_messages
    where queue between :queue::text and :queue::text and dead_at is not null
    order by queue, message_id limit :limit for update skip locked))
returning message_id;

-- name: discard_named
delete from interlock.queue_messages
where message_id = any(array(
    select message_id from interlock.queue_messages
    where message_id = any(:ids::bigint[]) and queue || '' = :queue and dead_at is not null
    order by message_id for update skip locked))
returning message_id;
