-- Limits of the command bus. One row per limit is authoritative; every statement decides by the row it locks.

-- name: take_tokens
-- Takes as many tokens of each limit as are requested and its window has left. Limits on a source alone come first,
-- then the others, each in key order. All takers lock in this order, so they cannot deadlock. The row to insert stands
-- for a request that finds an unused window: its `granted` is right for a first request.
insert into interlock.bus_windows as w
    (org_id, target, name, source, starts_at, window_seconds, rate, burst, cooldown, used, asked, granted, cooling_until)
select a.org_id, a.target, a.name, a.source, floor(interlock.bus_epoch() / a.seconds) * a.seconds, a.seconds, a.rate,
       a.burst, a.cooldown, least(a.asked, a.rate), a.asked, least(a.asked, a.rate),
       case when a.asked > a.rate and a.cooldown > 0 then interlock.bus_epoch() + a.cooldown else 0 end
from unnest(:org_ids::uuid[], :targets::text[], :names::text[], :sources::text[], :rates::bigint[], :seconds::float8[],
            :bursts::bigint[], :cooldowns::float8[], :asked::bigint[])
    as a(org_id, target, name, source, rate, seconds, burst, cooldown, asked)
order by a.target <> '', a.org_id, a.target, a.name, a.source
on conflict (org_id, target, name, source) do update
    set starts_at = greatest(w.starts_at, excluded.starts_at), window_seconds = excluded.window_seconds,
        rate = excluded.rate, burst = excluded.burst, cooldown = excluded.cooldown, asked = excluded.asked,
        carried = interlock.bus_carried(w, excluded.starts_at, excluded.burst),
        granted = interlock.bus_grant(w, excluded, interlock.bus_epoch()),
        used = interlock.bus_used(w, excluded.starts_at) + interlock.bus_grant(w, excluded, interlock.bus_epoch()),
        cooling_until = case
            when w.cooling_until > interlock.bus_epoch() then w.cooling_until
            when excluded.cooldown > 0 and interlock.bus_grant(w, excluded, interlock.bus_epoch()) < excluded.asked
                then interlock.bus_epoch() + excluded.cooldown
            else 0 end
returning w.org_id, w.target, w.name, w.source, w.granted,
          greatest(w.starts_at + w.window_seconds, w.cooling_until) - interlock.bus_epoch() as wait_seconds,
          w.starts_at + w.window_seconds - interlock.bus_epoch() as left_seconds,
          w.rate + w.carried - w.used as remaining;

-- name: give_back!
-- Returns tokens that were taken in this transaction, after another limit refused. The rows are still locked, so it is
-- the same window.
update interlock.bus_windows w set used = w.used - a.amount
from unnest(:org_ids::uuid[], :targets::text[], :names::text[], :sources::text[], :amounts::bigint[])
    as a(org_id, target, name, source, amount)
where w.org_id = a.org_id and w.target = a.target and w.name = a.name and w.source = a.source;

-- name: count_used
-- After dispatch: counts what was sent, even over the limit. `over` is true then.
insert into interlock.bus_windows as w
    (org_id, target, name, source, starts_at, window_seconds, rate, burst, cooldown, used, asked, granted)
select a.org_id, a.target, a.name, a.source, floor(interlock.bus_epoch() / a.seconds) * a.seconds, a.seconds, a.rate,
       a.burst, a.cooldown, a.asked, a.asked, a.asked
from unnest(:org_ids::uuid[], :targets::text[], :names::text[], :sources::text[], :rates::bigint[], :seconds::float8[],
            :bursts::bigint[], :cooldowns::float8[], :asked::bigint[])
    as a(org_id, target, name, source, rate, seconds, burst, cooldown, asked)
order by a.target <> '', a.org_id, a.target, a.name, a.source
on conflict (org_id, target, name, source) do update
    set starts_at = greatest(w.starts_at, excluded.starts_at), window_seconds = excluded.window_seconds,
        rate = excluded.rate, burst = excluded.burst, cooldown = excluded.cooldown, asked = excluded.asked,
        granted = excluded.asked,
        carried = interlock.bus_carried(w, excluded.starts_at, excluded.burst),
        used = interlock.bus_used(w, excluded.starts_at) + excluded.asked
returning w.org_id, w.target, w.name, w.source, w.used > w.rate + w.carried as over,
          greatest(w.starts_at + w.window_seconds - interlock.bus_epoch(), w.cooldown) as wait_seconds;

-- name: may_prefetch
-- At most `most` dispatchers per second and limit may prefetch; the others continue without.
insert into interlock.bus_prefetches as p (org_id, target, name, source, slot, holders)
select a.org_id, a.target, a.name, a.source, floor(interlock.bus_epoch())::bigint, 1
from unnest(:org_ids::uuid[], :targets::text[], :names::text[], :sources::text[]) as a(org_id, target, name, source)
order by a.target <> '', a.org_id, a.target, a.name, a.source
on conflict (org_id, target, name, source) do update
    set slot = excluded.slot, holders = case when p.slot = excluded.slot then p.holders + 1 else 1 end
    where p.slot <> excluded.slot or p.holders < :limit::int
returning p.org_id, p.target, p.name, p.source;
