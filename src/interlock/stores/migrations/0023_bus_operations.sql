-- Operating the command bus: who is alerted of what, and how routes are.
--
--   bus_telemetry ── an event that alerts ──► bus_alerts, one per tenant, event and while ─┬─► bus_alert_emails
--                                                                                         └─► webhook_deliveries
--   bus_routes ── looked at now and then ──► bus_route_health

create table interlock.bus_alert_settings (
    org_id     uuid not null references interlock.orgs,
    event      text not null,
    channels   jsonb not null,                      -- [{kind, to}]
    changed_by text not null,
    changed_at timestamptz not null default interlock.clock(),
    primary key (org_id, event)
);

-- A flood of events is one alert: those of the same kind within a while are counted.
create table interlock.bus_alerts (
    alert_id    uuid primary key default uuidv7(),
    org_id      uuid not null references interlock.orgs,
    event       text not null,
    opened_at   timestamptz not null,               -- of the while
    last_at     timestamptz not null default interlock.clock(),
    told        bigint not null,
    sample      json not null,                      -- the first of them
    critical    boolean not null,
    shown       boolean not null default true,      -- in the tenant's feed
    unrouted    boolean not null default false,     -- critical, and nobody is called: operations sees to it
    resolved_at timestamptz,                        -- by operations
    resolved_by text,
    unique (org_id, event, opened_at)
);
create index bus_alerts_by_org on interlock.bus_alerts (org_id, alert_id) where shown;
create index bus_alerts_old on interlock.bus_alerts (opened_at);
create index bus_alerts_unrouted on interlock.bus_alerts (alert_id) where unrouted and resolved_at is null;

create table interlock.bus_alert_emails (
    email_id uuid primary key default uuidv7(),
    org_id   uuid not null,
    alert_id uuid not null references interlock.bus_alerts on delete cascade,
    address  text not null,
    status   interlock.delivery_status not null default 'Pending',
    tries    int not null default 0,
    due_at   timestamptz not null default interlock.clock(),
    ended_at timestamptz,
    reason   text
);
create index bus_alert_emails_due on interlock.bus_alert_emails (due_at) where status = 'Pending';
create index bus_alert_emails_by_alert on interlock.bus_alert_emails (alert_id);

create type interlock.route_status as enum ('healthy', 'unhealthy', 'stalled', 'unpolled', 'misrouted');

-- A row per queue that routes lead to, and one for each pair that commands were sent to without a route.
create table interlock.bus_route_health (
    org_id       uuid not null references interlock.orgs,
    target       text collate "C" not null,
    name         text collate "C" not null,
    status       interlock.route_status not null,
    since        timestamptz not null default interlock.clock(),
    checked_at   timestamptz not null default interlock.clock(),
    depth        bigint not null default 0,
    in_flight    bigint not null default 0,
    oldest_age   float8,
    dead_letters bigint not null default 0,
    rises        int not null default 0,            -- looks in a row at which the depth was greater than before
    idle_looks   int not null default 0,            -- looks in a row at which something waited and nothing was in flight
    misroutes    bigint not null default 0,
    primary key (org_id, target, name)
);
create index bus_route_health_bad on interlock.bus_route_health (org_id, target, name) where status <> 'healthy';
create index bus_route_health_checked on interlock.bus_route_health (checked_at);
