-- The path of a command: the writes of a decision, and the hand-off from the fast stage to the slow one.

-- name: write_effects!
-- Writes all effects of a batch of decisions in one statement: messages for targets, hand-offs, telemetry, archive.
-- Bodies arrive as lines of one text per queue, including telemetry that fills a message. Other telemetry and the
-- archive have one row per tenant and batch. The clock is read once: as a column default it would be read twice per
-- message. Without hand-offs their part is empty: it costs 23 µs of 290 µs per statement, which serves many requests.
with moment as materialized (
    select interlock.clock() as now
), sent as (
    insert into interlock.queue_messages (queue, body, visible_at, enqueued_at)
    select q.queue, m.body::json, n.now, n.now
    from moment n cross join unnest(:queues::text[], :bodies::text[]) as q(queue, bodies)
    cross join lateral string_to_table(q.bodies, E'\n') as m(body)
), handed as (
    insert into interlock.bus_handoffs (org_id, source, command_id, reason, body, facts, received_at)
    select h.org_id, h.source, h.command_id, h.reason, h.body, h.facts::json, h.received_at
    from unnest(:handoff_org_ids::uuid[], :handoff_sources::text[], :handoff_command_ids::uuid[],
                :handoff_reasons::text[], :handoff_bodies::text[], :handoff_facts::text[],
                :handoff_received::timestamptz[])
        as h(org_id, source, command_id, reason, body, facts, received_at)
), emitted as (
    insert into interlock.bus_telemetry (org_id, events, events_in)
    select t.org_id, t.events::json, t.events_in
    from unnest(:event_org_ids::uuid[], :events::text[], :events_in::int[]) as t(org_id, events, events_in)
)
insert into interlock.bus_archive (org_id, accepted, commands_in, accepted_at)
select a.org_id, a.accepted, a.accepted_in, :accepted_at
from unnest(:accepted_org_ids::uuid[], :accepted::bytea[], :accepted_in::int[]) as a(org_id, accepted, accepted_in);

-- name: wake$
-- Notifies the queues that got messages. Postgres serialises NOTIFY from before the commit until after it. As its own
-- transaction this one waits for no disk; in the transaction of the messages, others would wait for its commit.
select count(pg_notify('interlock_commands', q.queue)) from unnest(:queues::text[]) as q(queue);

-- name: take_handoffs
-- In the transaction that decides about them: after a crash they are still there for another process. The scan starts
-- where the last one ended: see LowWater.
delete from interlock.bus_handoffs
where handoff_id = any(array(
    select handoff_id from interlock.bus_handoffs
    where due_at > :since::timestamptz and due_at <= interlock.clock()
    order by due_at, handoff_id limit :limit
    for update skip locked))
returning handoff_id, org_id, source, command_id, reason, body, facts, received_at, due_at, tries;

-- name: put_back_handoffs!
-- Hand-offs that could not be decided, because of an outage or an unknown cause: retried later, one by one.
insert into interlock.bus_handoffs (org_id, source, command_id, reason, body, facts, received_at, due_at, tries)
select h.org_id, h.source, h.command_id, h.reason, h.body, h.facts::json, h.received_at,
       interlock.clock() + make_interval(secs => least(60, power(2, h.tries))), h.tries
from unnest(:org_ids::uuid[], :sources::text[], :command_ids::uuid[], :reasons::text[], :bodies::text[],
            :facts::text[], :received::timestamptz[], :tries::int[])
    as h(org_id, source, command_id, reason, body, facts, received_at, tries);

-- name: resolve
-- The registry's current state for each lane and source: the slow stage uses no cache. The source of an ACL is compared
-- as a range as well: otherwise a plan made on an empty table may read everything that a source may send.
select a.n::int as n, r.target is not null as routed, r.queue, r.dag_name, r.job_name, r.dedupe_mode::text as dedupe_mode,
       r.dedupe_seconds, c.target is not null as allowed,
       l.rate, l.window_seconds, l.burst, l.cooldown_seconds, l.enforcement::text as enforcement,
       q.rate as quota_rate, q.window_seconds as quota_window_seconds, q.burst as quota_burst,
       q.cooldown_seconds as quota_cooldown_seconds,
       s.rate as own_rate, s.window_seconds as own_window_seconds, s.burst as own_burst,
       s.cooldown_seconds as own_cooldown_seconds, s.enforcement::text as own_enforcement
from unnest(:org_ids::uuid[], :targets::text[], :names::text[], :services::text[]) with ordinality
    as a(org_id, target, name, service, n)
left join interlock.bus_routes r on r.org_id = a.org_id and r.target = a.target and r.name = a.name
     and (r.expires_at is null or r.expires_at > interlock.clock())
left join interlock.bus_acls c on c.org_id = a.org_id and c.target = a.target and c.name = a.name
     and c.source >= a.service and c.source <= a.service
     and (c.expires_at is null or c.expires_at > interlock.clock())
left join interlock.bus_limits l on l.org_id = a.org_id and l.target = a.target and l.name = a.name and l.source = ''
left join interlock.bus_limits q on q.org_id = a.org_id and q.target = a.target and q.name = a.name
     and q.source = a.service
left join interlock.bus_limits s on s.org_id = a.org_id and s.target = '' and s.name = '' and s.source = a.service;

-- name: claim_ids
-- The transaction that inserts an id makes the only delivery; others wait for it and then find the row. An expired id
-- is free again. In key order, so that dispatchers cannot deadlock.
insert into interlock.bus_dedupe as d (org_id, source, command_id, handoff_id, expires_at)
select i.org_id, i.source, i.command_id, i.handoff_id, interlock.clock() + make_interval(secs => i.seconds)
from unnest(:org_ids::uuid[], :sources::text[], :command_ids::uuid[], :handoff_ids::bigint[], :seconds::float8[])
    as i(org_id, source, command_id, handoff_id, seconds)
order by i.org_id, i.source, i.command_id
on conflict (org_id, source, command_id) do update
    set handoff_id = excluded.handoff_id, expires_at = excluded.expires_at
    where d.expires_at <= interlock.clock()
returning handoff_id;

-- name: release_ids!
-- Claimed in this transaction and then refused: if it is sent again, it is not a duplicate.
delete from interlock.bus_dedupe d
using unnest(:org_ids::uuid[], :sources::text[], :command_ids::uuid[]) as i(org_id, source, command_id)
where d.org_id = i.org_id and d.source = i.source and d.command_id = i.command_id;

-- name: delivered_ids
-- The ids that a strict route has delivered. A dispatcher asks this about commands that it handed on.
select d.source, d.command_id, extract(epoch from d.expires_at)::float8 as until
from unnest(:sources::text[], :command_ids::uuid[]) as i(source, command_id)
join interlock.bus_dedupe d on d.org_id = :org_id and d.source = i.source and d.command_id = i.command_id
where d.expires_at > interlock.clock();

-- name: forget_ids
delete from interlock.bus_dedupe
where (org_id, source, command_id) in (
    select org_id, source, command_id from interlock.bus_dedupe
    where expires_at <= interlock.clock() order by expires_at limit :limit
    for update skip locked)
returning 1;

-- name: revoked_at
-- The time when each of these ACLs was last revoked, from the changelog. The org is compared as text, so that no index
-- starting with it can be used: a plan made on an empty table would walk all changes of the org.
select i.n::int as n, c.changed_at
from unnest(:org_ids::uuid[], :subjects::text[]) with ordinality as i(org_id, subject, n)
cross join lateral (select max(changed_at) as changed_at from interlock.bus_changes
                    where org_id::text = i.org_id::text and kind = 'acls' and subject = i.subject
                      and action = 'delete') c
where c.changed_at is not null;

-- name: org_name$
select name from interlock.orgs where org_id = :org_id;

-- name: jobs_of_route
-- All active generations of the job that a route leads to. The caller filters by kind: as a condition, it would match
-- jobs_sources too, and that scan would read the jobs of all orgs.
select j.job_id, j.source ->> 'kind' as kind from interlock.jobs j
where j.org_id = :org_id and j.dag_name = :dag_name and j.name = :name and j.active
order by j.current desc, j.job_id;

-- Fates of handed-off commands

-- name: record_fates!
-- In the transaction that decides. A command whose id was sent twice keeps `delivered`. In key order, so that slow
-- stages cannot deadlock.
insert into interlock.bus_fates as f (org_id, source, command_id, outcome, reason, target, name, throttle_until, decided_at)
select distinct on (d.org_id, d.source, d.command_id)
       d.org_id, d.source, d.command_id, d.outcome, d.reason, d.target, d.name, d.throttle_until, interlock.clock()
from unnest(:org_ids::uuid[], :sources::text[], :command_ids::uuid[], :outcomes::text[], :reasons::text[],
            :targets::text[], :names::text[], :throttled::timestamptz[]) with ordinality
    as d(org_id, source, command_id, outcome, reason, target, name, throttle_until, n)
order by d.org_id, d.source, d.command_id, d.outcome <> 'delivered', d.n desc
on conflict (org_id, source, command_id) do update
    set outcome = excluded.outcome, reason = excluded.reason, target = excluded.target, name = excluded.name,
        throttle_until = excluded.throttle_until, decided_at = excluded.decided_at
    where f.outcome <> 'delivered';

-- name: find_fates
-- A command that was sent again is pending while a hand-off of it exists, unless it was delivered before.
select i.n::int as n, f.outcome, f.reason, f.target, f.name, f.throttle_until, h.reason as waits_for
from unnest(:org_ids::uuid[], :sources::text[], :command_ids::uuid[]) with ordinality as i(org_id, source, command_id, n)
left join interlock.bus_fates f
    on f.org_id = i.org_id and f.source = i.source and f.command_id = i.command_id
left join lateral (
    select h.reason from interlock.bus_handoffs h
    where h.org_id = i.org_id and h.source = i.source and h.command_id = i.command_id
    limit 1) h on true
order by i.n;

-- name: forget_fates
delete from interlock.bus_fates
where (org_id, source, command_id) in (
    select org_id, source, command_id from interlock.bus_fates
    where decided_at <= interlock.clock() - make_interval(secs => :seconds::float8)
    order by decided_at limit :limit
    for update skip locked)
returning 1;
