-- The health of routes.

-- name: look
-- Checks one page of routes: counts each queue up to a bound and compares it with the last check. A queue that grows at
-- every check is stalled. One with messages and no receiver is unpolled. One whose messages wait twice as long as
-- expected is unhealthy. A check right after that of another process does not count: several processes would otherwise
-- see in seconds what should take minutes.
with page as materialized (
    select r.org_id, r.target, r.name, r.expected_drain_seconds, 'bus:' || r.org_id || ':' || r.queue as queue
    from interlock.bus_routes r
    where r.queue is not null and (r.org_id, r.target, r.name) > (:org_id::uuid, :target::text, :name::text)
    order by r.org_id, r.target, r.name limit :limit
), seen as materialized (
    select p.org_id, p.target, p.name, p.expected_drain_seconds, d.depth, f.in_flight, x.dead_letters, o.oldest_age,
           case when d.depth > coalesce(h.depth, 0) then coalesce(h.rises, 0) + 1 else 0 end as rises,
           case when d.depth > 0 and f.in_flight = 0 and o.oldest_age > :idle_seconds::float8
                then coalesce(h.idle_looks, 0) + 1 else 0 end as idle_looks
    from page p
    left join interlock.bus_route_health h on h.org_id = p.org_id and h.target = p.target and h.name = p.name
    cross join lateral (select count(*) as depth from (
        select 1 from interlock.queue_messages m where m.queue = p.queue and m.priority = 0 and m.dead_at is null
          and m.visible_at <= interlock.clock() limit :bound) m) d
    cross join lateral (select count(*) as in_flight from (
        select 1 from interlock.queue_messages m where m.queue = p.queue and m.priority = 0 and m.dead_at is null
          and m.visible_at > interlock.clock() and m.receipt is not null limit :bound) m) f
    cross join lateral (select count(*) as dead_letters from (
        select 1 from interlock.queue_messages m where m.queue = p.queue and m.dead_at is not null limit :bound) m) x
    cross join lateral (select (
        select extract(epoch from interlock.clock() - m.visible_at)::float8 from interlock.queue_messages m
        where m.queue = p.queue and m.priority = 0 and m.dead_at is null and m.visible_at <= interlock.clock()
        order by m.visible_at limit 1) as oldest_age) o
), judged as materialized (
    select s.*, case when s.idle_looks >= :looks::int then 'unpolled'
                     when s.oldest_age > 2 * s.expected_drain_seconds then 'unhealthy'
                     when s.rises >= :looks::int then 'stalled'
                     else 'healthy' end::interlock.route_status as status
    from seen s
), written as (
    insert into interlock.bus_route_health as h
        (org_id, target, name, status, depth, in_flight, oldest_age, dead_letters, rises, idle_looks)
    select j.org_id, j.target, j.name, j.status, j.depth, j.in_flight, j.oldest_age, j.dead_letters, j.rises, j.idle_looks
    from judged j order by j.org_id, j.target, j.name
    on conflict (org_id, target, name) do update
        set status = excluded.status, checked_at = interlock.clock(), depth = excluded.depth,
            in_flight = excluded.in_flight, oldest_age = excluded.oldest_age, dead_letters = excluded.dead_letters,
            rises = excluded.rises, idle_looks = excluded.idle_looks,
            since = case when h.status = excluded.status then h.since else interlock.clock() end
        where h.checked_at <= interlock.clock() - make_interval(secs => :idle_seconds::float8 / 2)
    returning h.org_id, h.target, h.name, coalesce(old.status, 'healthy') as was
)
select j.*, coalesce(w.was, j.status) as was
from judged j left join written w on w.org_id = j.org_id and w.target = j.target and w.name = j.name
order by j.org_id, j.target, j.name;

-- name: count_misroutes!
-- Commands without a route. A route that is registered later is checked like any other.
insert into interlock.bus_route_health as h (org_id, target, name, status, misroutes)
select m.org_id, m.target, m.name, 'misrouted', m.misroutes
from unnest(:org_ids::uuid[], :targets::text[], :names::text[], :misroutes::bigint[])
    as m(org_id, target, name, misroutes)
order by m.org_id, m.target, m.name
on conflict (org_id, target, name) do update
    set misroutes = h.misroutes + excluded.misroutes, checked_at = interlock.clock(),
        status = case when h.depth > 0 then h.status else 'misrouted' end,
        since = case when h.status = 'misrouted' then h.since else interlock.clock() end;

-- name: forget
-- Routes that are gone, and misroutes that have stopped.
delete from interlock.bus_route_health
where (org_id, target, name) in (
    select org_id, target, name from interlock.bus_route_health
    where checked_at < interlock.clock() - make_interval(secs => :age_seconds::float8)
    order by checked_at limit :limit for update skip locked)
returning target;

-- name: health_of
select * from interlock.bus_route_health
where org_id = :org_id and (target, name) > (:target::text, :name::text) order by target, name limit :limit;

-- name: bad_health_of
select * from interlock.bus_route_health
where org_id = :org_id and status <> 'healthy' and (target, name) > (:target::text, :name::text)
order by target, name limit :limit;

-- name: dead_letters
-- Dead letters of the task queues by org: those of the last seconds, among the newest `most` of each queue.
select d.org_id, array_agg(distinct d.queue) as queues, count(*) as dead_letters
from unnest(:queues::text[]) as q(queue)
cross join lateral (select m.org_id, m.queue, m.dead_at from interlock.queue_messages m
                    where m.queue = q.queue and m.dead_at is not null
                    order by m.queue, m.message_id desc limit :limit) d
where d.org_id is not null and d.dead_at > interlock.clock() - make_interval(secs => :seconds::float8)
group by d.org_id;
