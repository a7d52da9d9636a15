-- Telemetry of the command bus: pending events, and batches delivered to tenants.

-- name: emit!
-- For callers that have no other statement to write their events with.
insert into interlock.bus_telemetry (org_id, events, events_in)
select t.org_id, t.events::json, t.events_in
from unnest(:org_ids::uuid[], :events::text[], :events_in::int[]) as t(org_id, events, events_in);

-- name: tenants_due
-- A loose index scan from tenant to tenant, which reads each tenant once, however many rows it has. A tenant is due
-- when it has enough events for a message, or one that has waited long enough. Here and below a tenant is compared as a
-- range of one value: as an equality, the sort order would match the primary key too, and that scan would read past all
-- other tenants.
with recursive tenants as (
    (select org_id from interlock.bus_telemetry where org_id > :after order by org_id limit 1)
    union all
    select (select t.org_id from interlock.bus_telemetry t where t.org_id > w.org_id order by t.org_id limit 1)
    from tenants w where w.org_id is not null
)
select w.org_id from tenants w
where w.org_id is not null
  and ((select t.created_at from interlock.bus_telemetry t where t.org_id between w.org_id and w.org_id
        order by t.org_id, t.batch_id limit 1)
           <= interlock.clock() - make_interval(secs => :wait_seconds::float8)
       or (select sum(f.events_in) from (select t.events_in from interlock.bus_telemetry t
                                         where t.org_id between w.org_id and w.org_id
                                         order by t.org_id, t.batch_id limit :full::int) f) >= :full::int)
limit :limit;

-- name: take
-- A share of each tenant's batches, so that a flood of one delays no other. Taken and delivered in one transaction.
delete from interlock.bus_telemetry
where batch_id = any(array(
    select b.batch_id from unnest(:org_ids::uuid[]) as o(org_id)
    cross join lateral (select t.batch_id from interlock.bus_telemetry t where t.org_id between o.org_id and o.org_id
                        order by t.org_id, t.batch_id limit :each for update skip locked) b))
returning batch_id, org_id, events;

-- name: hand_over
with sent as (
    insert into interlock.queue_messages (queue, body)
    select m.queue, m.body::json from unnest(:queues::text[], :bodies::text[]) as m(queue, body)
)
select count(pg_notify('interlock_commands', q.queue))
from (select distinct m.queue from unnest(:queues::text[]) as m(queue)) q;

-- name: age_out
-- Deletes messages that were not received for too long: live ones by the time since they became visible, dead letters
-- by their age. Covers one page of tenants and a bounded number of messages each. An operator on `json` parses the
-- whole text and refuses an escaped NUL anywhere. So events are counted in a text without NULs; text that is still not
-- JSON counts as one event.
with tenants as materialized (
    select o.org_id, o.name, q.last_received_at, 'telemetry:' || o.org_id as queue
    from (select org_id, name from interlock.orgs where org_id > :after order by org_id limit :tenants) o
    left join interlock.bus_telemetry_queues q on q.org_id = o.org_id
), live as materialized (
    select t.org_id, m.message_id, m.enqueued_at, m.body from tenants t
    cross join lateral (select l.message_id, l.enqueued_at, l.body from interlock.queue_messages l
                        where l.queue = t.queue and l.priority = 0 and l.dead_at is null
                          and l.visible_at <= interlock.clock() - make_interval(secs => :age_seconds::float8)
                        order by l.visible_at limit :limit for update skip locked) m
), dead as materialized (
    select t.org_id, m.message_id, m.enqueued_at, m.body from tenants t
    cross join lateral (select d.message_id, d.enqueued_at, d.body from interlock.queue_messages d
                        where d.queue between t.queue and t.queue and d.dead_at is not null
                          and d.enqueued_at <= interlock.clock() - make_interval(secs => :age_seconds::float8)
                        order by d.queue, d.message_id limit :limit for update skip locked) m
), old as materialized (
    select m.org_id, m.message_id, m.enqueued_at,
           case when pg_input_is_valid(b.body, 'jsonb') and json_typeof(b.body::json) = 'object'
                then coalesce(case when pg_input_is_valid(b.body::json ->> 'events_in', 'int')
                                   then (b.body::json ->> 'events_in')::int end,
                              case json_typeof(b.body::json -> 'events')
                                   when 'array' then json_array_length(b.body::json -> 'events') end, 1)
                else 1 end as events_in
    from (select * from live union all select * from dead) m
    cross join lateral (select replace(m.body::text, '\u0000', '\ufffd') as body) b
), gone as (
    delete from interlock.queue_messages
    where message_id = any(array(select message_id from old))
    returning message_id
)
select t.org_id, t.name as tenant, t.last_received_at, coalesce(o.events_in, 0) as events_in, o.age_seconds,
       (select extract(epoch from interlock.clock() - m.visible_at)::float8 from interlock.queue_messages m
        where m.queue = t.queue and m.priority = 0 and m.dead_at is null and m.visible_at <= interlock.clock()
        order by m.visible_at limit 1) as waiting_seconds,
       (select count(*) from gone) as messages
from tenants t
left join lateral (select sum(x.events_in) as events_in,
                          extract(epoch from interlock.clock() - min(x.enqueued_at))::float8 as age_seconds
                   from old x where x.org_id = t.org_id) o on true
order by t.org_id;

-- name: received!
-- Writes at most once in ten seconds, so that frequent polls only read.
insert into interlock.bus_telemetry_queues as q (org_id, last_received_at)
select :org_id, interlock.clock()
where not exists (select 1 from interlock.bus_telemetry_queues k where k.org_id = :org_id
                    and k.last_received_at > interlock.clock() - interval '10 seconds')
on conflict (org_id) do update set last_received_at = excluded.last_received_at;
