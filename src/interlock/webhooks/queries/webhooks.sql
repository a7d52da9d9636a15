-- Webhooks: subscriptions, events to deliver, and outcomes.

-- name: lock_org!
-- Serialises the creation of an org's webhooks, so that they can be counted.
select pg_advisory_xact_lock(hashtextextended('interlock:webhooks:' || :org_id::uuid, 0));

-- name: count_webhooks$
select count(*) from interlock.webhooks where org_id = :org_id;

-- name: insert_webhook^
insert into interlock.webhooks (org_id, name, url, events, dag_name, job_name, failed_share, done_share, sealed, paused,
                                created_by)
values (:org_id, :name, :url, :events::text[], :dag_name, :job_name, :failed_share, :done_share, :sealed, :paused,
        :created_by)
on conflict (org_id, name) do nothing
returning *;

-- name: clear_secrets
-- Secrets that an older version stored in clear. Locked, so that two starting processes do not seal the same row twice.
select webhook_id, org_id, name, secret, previous_secret from interlock.webhooks where secret is not null
order by webhook_id limit :limit for no key update;

-- name: seal_secrets!
update interlock.webhooks w
set sealed = s.sealed, previous_sealed = s.previous_sealed, secret = null, previous_secret = null
from unnest(:webhook_ids::uuid[], :sealed::bytea[], :previous_sealed::bytea[]) as s(webhook_id, sealed, previous_sealed)
where w.webhook_id = s.webhook_id;

-- name: list_webhooks
select * from interlock.webhooks where org_id = :org_id and name > :after order by name limit :limit;

-- name: find_webhook^
select * from interlock.webhooks where org_id = :org_id and name = :name;

-- name: webhook_by_id^
select * from interlock.webhooks where org_id = :org_id and webhook_id = :webhook_id;

-- name: set_paused^
-- A resumed webhook is called immediately.
update interlock.webhooks
set paused = :paused, resting_until = case when :paused::boolean then resting_until end
where org_id = :org_id and webhook_id = :webhook_id
returning *;

-- name: rotate_secret^
-- The secret before the previous one becomes invalid immediately: one overlap is enough for a rotation.
update interlock.webhooks
set sealed = :sealed, key_version = key_version + 1,
    previous_sealed = case when :overlap_seconds::float8 > 0 then sealed end,
    previous_until = case when :overlap_seconds::float8 > 0
                          then interlock.clock() + make_interval(secs => :overlap_seconds::float8) end
where org_id = :org_id and webhook_id = :webhook_id
returning *;

-- name: delete_webhook^
-- The sweep deletes its deliveries, because there may be many.
delete from interlock.webhooks where org_id = :org_id and webhook_id = :webhook_id returning *;

-- name: new_delivery_id$
select uuidv7();

-- name: waiting_webhooks
-- A loose index scan from webhook to webhook, which reads each one once, however many deliveries wait for it.
with recursive waiting as (
    (select webhook_id from interlock.webhook_deliveries
     where status = 'Pending' and webhook_id > :after order by webhook_id limit 1)
    union all
    select (select d.webhook_id from interlock.webhook_deliveries d
            where d.status = 'Pending' and d.webhook_id > w.webhook_id order by d.webhook_id limit 1)
    from waiting w where w.webhook_id is not null
)
select webhook_id from waiting where webhook_id is not null limit :limit;

-- name: take_deliveries
-- Taken rows become due again later: if a dispatcher dies, the delivery is sent at least once. The lock on the webhook
-- makes dispatchers count its calls in flight one after the other. A webhook whose last call failed gets a single call.
with ready as materialized (
    select w.webhook_id, case when w.failures > 0 then 1 else :each::int end as room
    from interlock.webhooks w
    where w.webhook_id = any(:webhook_ids::uuid[]) and not w.paused
      and (w.resting_until is null or w.resting_until <= interlock.clock())
      and (w.failures > 0) = :failing::boolean
    order by w.webhook_id
    for no key update skip locked
), chosen as materialized (
    select d.delivery_id
    from ready r
    cross join lateral (
        select d.delivery_id from interlock.webhook_deliveries d
        where d.webhook_id = r.webhook_id and d.status = 'Pending' and d.due_at <= interlock.clock()
        order by d.due_at
        limit greatest(0, r.room - (select count(*) from interlock.webhook_deliveries u
                                    where u.webhook_id = r.webhook_id and u.taken and u.due_at > interlock.clock()))
        for no key update skip locked
    ) d
    limit :limit
)
update interlock.webhook_deliveries d
set taken = true, tries = d.tries + 1, due_at = interlock.clock() + make_interval(secs => :hold_seconds::float8)
from interlock.webhooks w
where d.delivery_id = any(array(select delivery_id from chosen)) and w.webhook_id = d.webhook_id
returning d.delivery_id, d.org_id, d.webhook_id, d.event, d.body, d.tries, w.url, w.name, w.sealed,
          w.key_version, case when w.previous_until > interlock.clock() then w.previous_sealed end as previous_sealed;

-- name: set_delivered^
-- For this try only: if it took too long, another one has started.
with done as (
    update interlock.webhook_deliveries
    set status = 'Delivered', taken = false, ended_at = interlock.clock(), http_status = :http_status, reason = null
    where delivery_id = :delivery_id and org_id = :org_id and status = 'Pending' and taken and tries = :tries
    returning webhook_id
), well as (
    update interlock.webhooks w set failures = 0, resting_until = null
    from done d where w.webhook_id = d.webhook_id and w.failures > 0
)
select webhook_id from done;

-- name: set_failed^
-- Retried later, or dead. Only failures caused by the receiver count against it.
with failed as (
    update interlock.webhook_deliveries
    set status = case when :final::boolean or tries >= :most_tries then 'Dead' else 'Pending' end::interlock.delivery_status,
        ended_at = case when :final::boolean or tries >= :most_tries then interlock.clock() end,
        taken = false, http_status = :http_status, reason = :reason,
        due_at = interlock.clock() + greatest(make_interval(secs => :wait_seconds::float8),
                                              interlock.backoff(tries, :base, 2, :cap, 0.2, random()))
    where delivery_id = :delivery_id and org_id = :org_id and status = 'Pending' and taken and tries = :tries
    returning webhook_id, status
), ill as (
    update interlock.webhooks w
    set failures = least(w.failures + 1, 1000),
        resting_until = case when w.failures + 1 >= :rest_after
                             then interlock.clock() + interlock.backoff(w.failures + 2 - :rest_after, :base, 2, :rest_cap, 0.2, random())
                             end
    from failed f where w.webhook_id = f.webhook_id
)
select webhook_id, status from failed;

-- name: list_deliveries
select * from interlock.webhook_deliveries
where webhook_id = :webhook_id and org_id = :org_id and delivery_id < :before
order by delivery_id desc limit :limit;

-- name: list_deliveries_by_status
select * from interlock.webhook_deliveries
where webhook_id = :webhook_id and org_id = :org_id and status = :status::text::interlock.delivery_status
  and delivery_id < :before
order by delivery_id desc limit :limit;

-- name: find_delivery^
select * from interlock.webhook_deliveries
where delivery_id = :delivery_id and webhook_id = :webhook_id and org_id = :org_id;

-- name: redrive_deliveries
-- Oldest first, with as many tries as a new delivery. Ids stay, so that receivers can deduplicate.
update interlock.webhook_deliveries
set status = 'Pending', ended_at = null, tries = 0, due_at = interlock.clock(), waiting_since = interlock.clock()
where delivery_id = any(array(
    select delivery_id from interlock.webhook_deliveries
    where webhook_id = :webhook_id and org_id = :org_id and status = 'Dead'
      and (:delivery_ids::uuid[] is null or delivery_id = any(:delivery_ids::uuid[]))
    order by delivery_id limit :limit
    for no key update skip locked))
returning delivery_id, pg_notify('interlock_outbox', 'webhooks');

-- name: expire_deliveries
-- Not delivered for so long, for example because the webhook was paused, that the event is out of date.
update interlock.webhook_deliveries
set status = 'Dead', taken = false, ended_at = interlock.clock(), reason = coalesce(reason || '; ', '') || 'expired'
where delivery_id = any(array(
    select delivery_id from interlock.webhook_deliveries
    where status = 'Pending' and waiting_since < interlock.clock() - make_interval(secs => :age_seconds::float8)
      and not (taken and due_at > interlock.clock())
    order by waiting_since limit :limit
    for no key update skip locked))
returning delivery_id;

-- name: delete_old_deliveries
delete from interlock.webhook_deliveries where delivery_id = any(array(
    select delivery_id from interlock.webhook_deliveries
    where ended_at < interlock.clock() - make_interval(secs => :age_seconds::float8)
    order by ended_at limit :limit
    for update skip locked))
returning delivery_id;

-- name: webhooks_with_history
-- A loose index scan from webhook to webhook; `there` is true if it still exists.
with recursive told as (
    (select webhook_id from interlock.webhook_deliveries where webhook_id > :after order by webhook_id limit 1)
    union all
    select (select d.webhook_id from interlock.webhook_deliveries d
            where d.webhook_id > t.webhook_id order by d.webhook_id limit 1)
    from told t where t.webhook_id is not null
)
select t.webhook_id,
       (select true from interlock.webhooks w where w.webhook_id = t.webhook_id limit 1) is not null as there
from told t where t.webhook_id is not null limit :limit;

-- name: trim_deliveries
-- Keeps the newest deliveries, and those still to be sent.
delete from interlock.webhook_deliveries where delivery_id = any(array(
    select d.delivery_id from interlock.webhook_deliveries d
    where d.webhook_id = :webhook_id and (d.ended_at is not null or not :there::boolean)
      and d.delivery_id <= (select k.delivery_id from interlock.webhook_deliveries k
                            where k.webhook_id = :webhook_id order by k.delivery_id desc
                            offset case when :there::boolean then :keep::bigint else 0 end limit 1)
    order by d.delivery_id limit :limit
    for update skip locked))
returning delivery_id;
