-- Alerts: open, notify, list, resolve.

-- name: raise_alerts
-- One alert per tenant, event and time window; repeats within the window are counted. Only a new alert sends
-- notifications.
with told as (
    select t.org_id, t.event, t.told, t.sample, t.critical,
           to_timestamp(floor(extract(epoch from interlock.clock()) / :seconds::float8) * :seconds::float8) as opened_at
    from unnest(:org_ids::uuid[], :events::text[], :told::bigint[], :samples::text[], :criticals::boolean[])
        as t(org_id, event, told, sample, critical)
), routed as (
    select t.*, coalesce(s.channels, '[{"kind": "dashboard", "to": ""}]') as channels
    from told t left join interlock.bus_alert_settings s on s.org_id = t.org_id and s.event = t.event
), opened as (
    insert into interlock.bus_alerts as a (org_id, event, opened_at, told, sample, critical, shown, unrouted)
    select r.org_id, r.event, r.opened_at, r.told, r.sample::json, r.critical,
           r.critical or r.channels @> '[{"kind": "dashboard"}]',
           r.critical and not (r.channels @> '[{"kind": "email"}]' or r.channels @> '[{"kind": "webhook"}]')
    from routed r where r.critical or r.channels <> '[]'
    order by r.org_id, r.event
    on conflict (org_id, event, opened_at) do update set told = a.told + excluded.told, last_at = interlock.clock()
    returning a.*, old.alert_id is null as fresh
), emailed as (
    insert into interlock.bus_alert_emails (org_id, alert_id, address)
    select o.org_id, o.alert_id, c.channel ->> 'to'
    from opened o join routed r on r.org_id = o.org_id and r.event = o.event
    cross join lateral jsonb_array_elements(r.channels) as c(channel)
    where o.fresh and c.channel ->> 'kind' = 'email'
)
select o.*, g.name as org, array(select c.channel ->> 'to' from jsonb_array_elements(r.channels) as c(channel)
                                 where c.channel ->> 'kind' = 'webhook') as webhooks
from opened o join routed r on r.org_id = o.org_id and r.event = o.event
join interlock.orgs g on g.org_id = o.org_id
where o.fresh;

-- name: webhooks_named
select w.webhook_id, w.org_id, w.name, uuidv7() as delivery_id
from unnest(:org_ids::uuid[], :names::text[]) as n(org_id, name)
join interlock.webhooks w on w.org_id = n.org_id and w.name = n.name;

-- name: settings_of
select event, channels, changed_by, changed_at from interlock.bus_alert_settings where org_id = :org_id order by event;

-- name: set_channels^
insert into interlock.bus_alert_settings (org_id, event, channels, changed_by)
values (:org_id, :event, :channels::text::jsonb, :changed_by)
on conflict (org_id, event) do update
    set channels = excluded.channels, changed_by = excluded.changed_by, changed_at = interlock.clock()
returning event, channels, changed_by, changed_at;

-- name: unknown_webhooks
select n.name from unnest(:names::text[]) as n(name)
where not exists (select 1 from interlock.webhooks w where w.org_id = :org_id and w.name = n.name);

-- name: feed
select a.*, g.name as org from interlock.bus_alerts a join interlock.orgs g on g.org_id = a.org_id
where a.org_id = :org_id and a.shown and a.alert_id < :before order by a.alert_id desc limit :limit;

-- name: operations
-- Across all orgs, for the operators of the platform.
select a.*, g.name as org from interlock.bus_alerts a join interlock.orgs g on g.org_id = a.org_id
where a.unrouted and a.resolved_at is null and a.alert_id > :after order by a.alert_id limit :limit;

-- name: resolve^
update interlock.bus_alerts a
set resolved_at = coalesce(a.resolved_at, interlock.clock()), resolved_by = coalesce(a.resolved_by, :resolved_by)
from interlock.orgs g
where a.alert_id = :alert_id and a.unrouted and g.org_id = a.org_id
returning a.*, g.name as org;

-- name: take_emails
-- Due again later: if the process dies, the emails are sent at least once.
update interlock.bus_alert_emails e
set tries = e.tries + 1, due_at = interlock.clock() + make_interval(secs => :hold_seconds::float8)
from interlock.bus_alerts a join interlock.orgs g on g.org_id = a.org_id
where e.email_id = any(array(select email_id from interlock.bus_alert_emails
                             where status = 'Pending' and due_at <= interlock.clock()
                             order by due_at limit :limit for no key update skip locked))
  and a.alert_id = e.alert_id
returning e.email_id, e.address, e.tries, g.name as org, a.alert_id, a.event, a.critical, a.opened_at, a.last_at, a.told,
          a.sample, a.unrouted, a.resolved_at, a.resolved_by;

-- name: settle_email!
update interlock.bus_alert_emails
set status = :status::text::interlock.delivery_status, reason = :reason,
    ended_at = case when :status::text <> 'Pending' then interlock.clock() end,
    due_at = interlock.clock() + interlock.backoff(tries, 5, 2, 3600, 0.2, random())
where email_id = :email_id and tries = :tries and status = 'Pending';

-- name: delete_old
delete from interlock.bus_alerts
where alert_id = any(array(
    select alert_id from interlock.bus_alerts
    where opened_at < interlock.clock() - make_interval(secs => :age_seconds::float8)
    order by opened_at limit :limit for update skip locked))
returning alert_id;
