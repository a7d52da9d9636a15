-- Fairness across dispatchers: the reports of each, and the bans that follow from all of them.

-- name: read_bans
select source, kind, extract(epoch from until)::float8 as until, nullif(target, '') as target, nullif(name, '') as name,
       source_share, competing_share, dispatch_volume
from interlock.bus_bans where org_id = :org_id and until > interlock.clock();

-- name: report!
-- Reports what a dispatcher has seen since its last report: sources that lost the warm path, and dispatches per source.
with struck as (
    insert into interlock.bus_strikes (org_id, source, target, name, source_share, competing_share, dispatch_volume)
    select s.* from unnest(:strike_org_ids::uuid[], :strike_sources::text[], :strike_targets::text[],
                           :strike_names::text[], :source_shares::float8[], :competing_shares::float8[],
                           :volumes::bigint[]) as s
)
insert into interlock.bus_shares as b (minute, org_id, target, name, source, dispatched)
select date_trunc('minute', interlock.clock()), t.* from unnest(:org_ids::uuid[], :targets::text[], :names::text[],
                                                                :sources::text[], :dispatched::bigint[])
    as t(org_id, target, name, source, dispatched)
order by t.org_id, t.target, t.name, t.source
on conflict (minute, org_id, target, name, source) do update set dispatched = b.dispatched + excluded.dispatched;

-- name: ban_repeat_offenders
-- Bans a source everywhere after several losses of the warm path within a time window, in any dispatcher. A running ban
-- is not reported again.
with offended as materialized (
    select org_id, source, target, name, count(*) as violations, max(source_share) as source_share,
           max(competing_share) as competing_share, sum(dispatch_volume) as volume
    from interlock.bus_strikes
    where struck_at > interlock.clock() - make_interval(secs => :within_seconds::float8)
    group by org_id, source, target, name having count(*) >= :strikes::int
), banned as (
    insert into interlock.bus_bans as b
        (org_id, source, target, name, kind, until, source_share, competing_share, dispatch_volume)
    select org_id, source, target, name, 'warm', interlock.clock() + make_interval(secs => :ban_seconds::float8),
           source_share, competing_share, volume
    from offended order by org_id, source, target, name
    on conflict (org_id, source, target, name) do update
        set kind = excluded.kind, until = excluded.until, source_share = excluded.source_share, refused = 0,
            competing_share = excluded.competing_share, dispatch_volume = excluded.dispatch_volume
        where b.until <= interlock.clock()
    returning org_id, source, target, name, until
)
select b.org_id, b.source, b.target, b.name, b.until, o.violations
from banned b join offended o using (org_id, source, target, name);

-- name: ban_dominant
-- A share that no single dispatcher can see: of one lane, or of all contended lanes together. The current minute
-- counts, so that a flood is detected while it lasts.
with minutes as materialized (
    select org_id, target, name, source, sum(dispatched) as dispatched
    from interlock.bus_shares
    where minute > interlock.clock() - make_interval(secs => :within_seconds::float8)
    group by org_id, target, name, source
), lanes as materialized (
    select org_id, target, name, source, dispatched,
           sum(dispatched) over (partition by org_id, target, name) as total
    from minutes
), contended as materialized (
    select * from lanes
    where total >= :volume::bigint and exists (
        select 1 from minutes m
        where m.org_id = lanes.org_id and m.target = lanes.target and m.name = lanes.name and m.source <> lanes.source)
), found as (
    select org_id, source, target, name, dispatched, total, array[target] as targets from contended
    where dispatched > :lane_share::float8 * total and total - dispatched >= :competing::float8 * total
    union all
    select org_id, source, '', '', sum(dispatched), sum(total), array_agg(distinct target order by target) from contended
    group by org_id, source
    having count(distinct target) > 1 and sum(dispatched) > :share::float8 * sum(total)
       and sum(total) - sum(dispatched) >= :competing::float8 * sum(total)
), banned as (
    insert into interlock.bus_bans as b
        (org_id, source, target, name, kind, until, source_share, competing_share, dispatch_volume)
    select org_id, source, target, name, 'warm', interlock.clock() + make_interval(secs => :ban_seconds::float8),
           dispatched / total, (total - dispatched) / total, total
    from found order by org_id, source, target, name
    on conflict (org_id, source, target, name) do update
        set kind = excluded.kind, until = excluded.until, source_share = excluded.source_share, refused = 0,
            competing_share = excluded.competing_share, dispatch_volume = excluded.dispatch_volume
        where b.until <= interlock.clock()
    returning org_id, source, target, name, until
)
select b.org_id, b.source, b.until, f.targets
from banned b join found f using (org_id, source, target, name);

-- name: note_refusals
-- Counts refusals of banned sources that keep sending over capacity. Past `most`, the shield refuses them.
update interlock.bus_bans b
set refused = b.refused + r.refused, kind = case when b.refused + r.refused >= :limit::bigint then 'hard' else b.kind end
from unnest(:org_ids::uuid[], :sources::text[], :targets::text[], :names::text[], :refused::bigint[])
    as r(org_id, source, target, name, refused)
where b.org_id = r.org_id and b.source = r.source and b.target = r.target and b.name = r.name
  and b.until > interlock.clock()
returning b.org_id, b.source, b.target, b.name, b.source_share, b.competing_share, b.dispatch_volume,
          extract(epoch from b.until - interlock.clock())::float8 as left_seconds;

-- name: forget_fairness
-- Older rows have no effect any more.
with strikes as (
    delete from interlock.bus_strikes where strike_id = any(array(
        select strike_id from interlock.bus_strikes
        where struck_at <= interlock.clock() - make_interval(secs => :keep_seconds::float8)
        order by struck_at limit :limit))
    returning 1
), shares as (
    delete from interlock.bus_shares where (minute, org_id, target, name, source) in (
        select minute, org_id, target, name, source from interlock.bus_shares
        where minute <= interlock.clock() - make_interval(secs => :keep_seconds::float8) order by minute limit :limit)
    returning 1
), bans as (
    delete from interlock.bus_bans where (org_id, source, target, name) in (
        select org_id, source, target, name from interlock.bus_bans
        where until <= interlock.clock() - make_interval(secs => :keep_seconds::float8) order by until limit :limit)
    returning 1
)
select 1 from strikes union all select 1 from shares union all select 1 from bans;
