-- pgqueue: messages with a visibility timeout. A message is a wake-up, so at-least-once and roughly ordered is enough.

-- name: send!
-- Ordered by key, as in enqueue_tasks: two senders of the same messages then lock in the same order.
insert into interlock.queue_messages (queue, priority, org_id, share_id, body, dedupe_key, visible_at)
select :queue, m.priority, m.org_id, m.share_id, m.body::json, m.dedupe_key,
       interlock.clock() + make_interval(secs => m.delay)
from unnest(:bodies::text[], :priorities::int[], :org_ids::uuid[], :share_ids::uuid[], :dedupe_keys::text[],
            :delays::float8[])
    as m(body, priority, org_id, share_id, dedupe_key, delay)
order by m.dedupe_key collate "C"
on conflict (queue, dedupe_key) where dedupe_key is not null do update
    set visible_at = excluded.visible_at, receipt = null, receives = 0, dead_at = null;

-- name: notify$
select pg_notify('interlock_queue', :queue);

-- name: receive
-- Normal before bulk, but `reserved` messages are taken from bulk first, so that it never starves. A message that was
-- received too often without being acked becomes a dead letter here. It is returned too, because the caller's scan
-- position needs it. The scans start where the last ones ended: see LowWater.
with reserved as (
    select message_id from interlock.queue_messages
    where queue = :queue and priority = 1 and dead_at is null
      and visible_at > :bulk_since::timestamptz and visible_at <= interlock.clock()
    order by visible_at limit :reserved
    for no key update skip locked
), normal as (
    select message_id from interlock.queue_messages
    where queue = :queue and priority = 0 and dead_at is null
      and visible_at > :normal_since::timestamptz and visible_at <= interlock.clock()
    order by visible_at limit :limit - (select count(*) from reserved)
    for no key update skip locked
), bulk as (
    select message_id from interlock.queue_messages
    where queue = :queue and priority = 1 and dead_at is null
      and visible_at > :bulk_since::timestamptz and visible_at <= interlock.clock()
      and message_id not in (select message_id from reserved)
    order by visible_at limit :limit - (select count(*) from reserved) - (select count(*) from normal)
    for no key update skip locked
), taken as (
    update interlock.queue_messages m
    set visible_at = interlock.clock() + make_interval(secs => :visibility::float8), receives = m.receives + 1,
        receipt = gen_random_uuid(),
        dead_at = case when m.receives >= :max_receives::int then interlock.clock() end
    where m.message_id = any(array(select message_id from reserved union all select message_id from normal
                                   union all select message_id from bulk))
    returning m.message_id, m.receipt, m.body, m.receives, m.enqueued_at, m.priority, m.dead_at,
              old.visible_at as was_visible_at
)
select message_id, receipt, body, receives, enqueued_at, priority, was_visible_at, dead_at is not null as dead from taken
order by priority, message_id;

-- name: waiting_shares
-- Runs, and jobs of tasks without a run, that have messages waiting in a lane, from a position on, with their number of
-- running tasks. A loose index scan: it reads only the oldest message of each share, however many there are.
with recursive shares as (
    (select org_id, share_id, visible_at, body from interlock.queue_messages
     where queue || '' = :queue and priority = :lane::int and dead_at is null and share_id is not null
       and (org_id, share_id) > (:after_org::uuid, :after_share::uuid)
     order by org_id, share_id, visible_at limit 1)
    union all
    select n.* from shares s
    cross join lateral (
        select m.org_id, m.share_id, m.visible_at, m.body from interlock.queue_messages m
        where m.queue || '' = :queue and m.priority = :lane::int and m.dead_at is null and m.share_id is not null
          and (m.org_id, m.share_id) > (s.org_id, s.share_id)
        order by m.org_id, m.share_id, m.visible_at limit 1
    ) n
), walked as materialized (
    select * from shares limit :limit
)
select w.org_id, w.share_id, w.visible_at, w.visible_at <= interlock.clock() as waits,
       coalesce((w.body ->> 'end')::bigint - (w.body ->> 'start')::bigint + 1, 1) as size,
       coalesce(
           (select r.running + coalesce((select sum(d.running) from interlock.run_deltas d where d.run_id = r.run_id), 0)
            from interlock.runs r where r.run_id = w.share_id),
           (select count(*) from (select 1 from interlock.tasks t
                                  where t.shard = 0 and t.run_id is null and t.listed_status = 'Running'
                                    and t.job_id = w.share_id limit 1000) t))::bigint as running
from walked w;

-- name: receive_in_turn
-- Like `receive`, for given shares with a number of messages each. Before them come `normal_most` messages of the
-- normal lane in order of arrival, for a lane in which no share has to wait: a new share is then served immediately.
with normal as materialized (
    select message_id from interlock.queue_messages
    where queue = :queue and priority = 0 and dead_at is null
      and visible_at > :normal_since::timestamptz and visible_at <= interlock.clock()
    order by visible_at limit :normal_most
    for no key update skip locked
), turns as materialized (
    select * from unnest(:lanes::int[], :org_ids::uuid[], :share_ids::uuid[], :sinces::timestamptz[], :mosts::int[])
        as t(lane, org_id, share_id, since, most)
), picked as materialized (
    select m.message_id from turns t
    cross join lateral (
        select m.message_id from interlock.queue_messages m
        where m.queue || '' = :queue and m.priority = t.lane and m.org_id = t.org_id and m.share_id = t.share_id
          and m.dead_at is null and m.visible_at >= t.since and m.visible_at <= interlock.clock()
        order by m.visible_at limit t.most
        for no key update skip locked
    ) m
    limit :limit - (select count(*) from normal)
), taken as (
    update interlock.queue_messages m
    set visible_at = interlock.clock() + make_interval(secs => :visibility::float8), receives = m.receives + 1,
        receipt = gen_random_uuid(),
        dead_at = case when m.receives >= :max_receives::int then interlock.clock() end
    where m.message_id = any(array(select message_id from normal union all select message_id from picked))
    returning m.message_id, m.receipt, m.body, m.receives, m.enqueued_at, m.priority, m.dead_at, m.org_id, m.share_id,
              old.visible_at as was_visible_at
)
select message_id, receipt, body, receives, enqueued_at, priority, org_id, share_id, was_visible_at,
       dead_at is not null as dead
from taken order by priority, message_id;

-- name: next_visible^
-- Seconds until the next message of the queue becomes visible: when to poll again even without a notification.
select interlock.clock() as now, (
    select extract(epoch from min(visible_at) - interlock.clock())::float8 from (
        (select visible_at from interlock.queue_messages
         where queue = :queue and priority = 0 and dead_at is null and visible_at > :normal_since::timestamptz
         order by visible_at limit 1)
        union all
        (select visible_at from interlock.queue_messages
         where queue = :queue and priority = 1 and dead_at is null and visible_at > :bulk_since::timestamptz
         order by visible_at limit 1)
    ) v
) as seconds;

-- name: extend
-- Only the last receiver knows a receipt, so it need not be paired with its id; a dead letter has no valid receipt.
-- Here and below messages are found by id. Without a join and with `queue || ''`, no plan made on an empty table can
-- read the whole queue. A locked message is skipped: the transaction that holds it delivers or sends it again, which
-- invalidates this receipt. So a statement that settles several messages waits for none, and cannot deadlock with one
-- that sends several.
update interlock.queue_messages m
set visible_at = interlock.clock() + make_interval(secs => :visibility::float8)
where m.message_id = any(array(
    select message_id from interlock.queue_messages
    where message_id = any(:ids::bigint[]) and receipt = any(:receipts::uuid[]) and queue || '' = :queue
    for no key update skip locked))
returning m.message_id;

-- name: ack
delete from interlock.queue_messages m
where m.message_id = any(array(
    select message_id from interlock.queue_messages
    where message_id = any(:ids::bigint[]) and receipt = any(:receipts::uuid[]) and queue || '' = :queue
    for update skip locked))
returning m.message_id;

-- name: nack
update interlock.queue_messages m
set visible_at = interlock.clock() + make_interval(secs => :delay::float8), receipt = null
where m.message_id = any(array(
    select message_id from interlock.queue_messages
    where message_id = any(:ids::bigint[]) and receipt = any(:receipts::uuid[]) and queue || '' = :queue
    for no key update skip locked))
returning m.message_id;

-- name: bury
update interlock.queue_messages m
set dead_at = interlock.clock(), receipt = null
where m.message_id = any(array(
    select message_id from interlock.queue_messages
    where message_id = any(:ids::bigint[]) and receipt = any(:receipts::uuid[]) and queue || '' = :queue
    for no key update skip locked))
returning m.message_id;

-- name: replace
-- The rest of a partly settled message: visible to others immediately or after a delay, and not counted as a failed
-- delivery.
update interlock.queue_messages m
set body = :body::text::json, visible_at = interlock.clock() + make_interval(secs => :delay::float8), receipt = null,
    receives = 0
where m.message_id = :message_id and m.receipt = :receipt and m.queue || '' = :queue
returning m.message_id, pg_notify('interlock_queue', m.queue);

-- name: stats^
-- Counting stops at `most`: a gauge need not be exact beyond it, and must not scan a backlog.
select (select count(*) from (select 1 from interlock.queue_messages
                              where queue = :queue and priority in (0, 1) and dead_at is null
                                and visible_at <= interlock.clock() limit :limit) d) as depth,
       (select count(*) from (select 1 from interlock.queue_messages
                              where queue = :queue and priority in (0, 1) and dead_at is null
                                and visible_at > interlock.clock() and receipt is not null limit :limit) f) as in_flight,
       (select count(*) from (select 1 from interlock.queue_messages
                              where queue = :queue and dead_at is not null limit :limit) x) as dead_letters,
       (select extract(epoch from interlock.clock() - min(visible_at))::float8 from (
            (select visible_at from interlock.queue_messages where queue = :queue and priority = 0
              and dead_at is null and visible_at <= interlock.clock() order by visible_at limit 1)
            union all
            (select visible_at from interlock.queue_messages where queue = :queue and priority = 1
              and dead_at is null and visible_at <= interlock.clock() order by visible_at limit 1)) o) as oldest_age;

-- name: dead_letters
select message_id, body, receives, enqueued_at, dead_at from interlock.queue_messages
where queue = :queue and dead_at is not null order by message_id limit :limit;

-- name: dead_by_queue
-- Queues that have dead letters, counted up to :limit.
select q.queue, d.dead_letters
from unnest(:queues::text[]) as q(queue)
cross join lateral (select count(*) as dead_letters from (
    select 1 from interlock.queue_messages m where m.queue = q.queue and m.dead_at is not null limit :limit) m) d
where d.dead_letters > 0 order by q.queue;

-- name: redrive_messages
update interlock.queue_messages
set dead_at = null, receives = 0, receipt = null, visible_at = interlock.clock()
where message_id = any(array(select message_id from interlock.queue_messages
                             where queue = :queue and dead_at is not null order by message_id limit :limit
                             for no key update skip locked))
returning message_id;

-- name: worker_seen!
insert into interlock.workers (worker_id, queue, last_seen_at) values (:worker_id, :queue, interlock.clock())
on conflict (worker_id, queue) do update set last_seen_at = excluded.last_seen_at;

-- name: live_workers
select worker_id, queue, last_seen_at from interlock.workers
where last_seen_at > interlock.clock() - interval '60 seconds' order by queue, worker_id limit 1000;
