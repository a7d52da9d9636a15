-- The path of a command: what the stages of the bus share with each other, and with other dispatchers.
--
--   POST /v1/commands ─► shield, fast ─┬─► queue_messages, triggers      decided at once
--                                      └─► bus_handoffs ─► slow ─► the same, with bus_windows and bus_dedupe
--
-- A hand-off is deleted by the transaction that delivers its command or tells why not: a crash leaves it where it was.

create table interlock.bus_handoffs (
    handoff_id  bigint generated always as identity primary key,
    org_id      uuid not null,
    source      text not null,                      -- org/service, as the credentials said
    reason      text not null,                      -- why the fast stage did not decide
    body        text not null,                      -- the message as it was signed
    facts       json not null,                      -- what the fast stage knew that the message does not say
    received_at timestamptz not null,
    due_at      timestamptz not null default interlock.clock(),
    tries       int not null default 0
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
create index bus_handoffs_due on interlock.bus_handoffs (due_at, handoff_id);

-- One row per limit, whatever it admits: windows follow each other in place. `asked` and `granted` are of the last
-- request: that is how one statement decides by the row it locks and tells what it gave.
create table interlock.bus_windows (
    org_id         uuid not null,
    target         text not null,
    name           text not null,
    source         text not null,                   -- '' for the lane; else the quota of one source in it
    starts_at      float8 not null,                 -- seconds since 1970, as below
    window_seconds float8 not null,
    rate           bigint not null,
    burst          bigint not null,
    cooldown       float8 not null,
    used           bigint not null,
    carried        bigint not null default 0,       -- left by earlier windows, at most `burst`
    cooling_until  float8 not null default 0,
    asked          bigint not null,
    granted        bigint not null,
    primary key (org_id, target, name, source)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Who may prefetch tokens of a lane in this second: a row per lane, so that nothing builds up.
create table interlock.bus_prefetches (
    org_id  uuid not null,
    target  text not null,
    name    text not null,
    slot    bigint not null,                        -- the second
    holders int not null,
    primary key (org_id, target, name)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Commands that strict routes have delivered. The source is in the key: nobody can use up the ids of another.
create table interlock.bus_dedupe (
    org_id     uuid not null,
    source     text not null,
    command_id uuid not null,
    handoff_id bigint not null,                     -- which of several with the same id it was
    expires_at timestamptz not null,
    primary key (org_id, source, command_id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
create index bus_dedupe_expiry on interlock.bus_dedupe (expires_at);

create function interlock.bus_epoch() returns float8 language sql stable parallel safe as
$$ select extract(epoch from interlock.clock())::float8 $$;

-- What a window that begins at `now_starts` inherits. A clock that went backwards moves no window.
create function interlock.bus_carried(w interlock.bus_windows, now_starts float8, burst bigint) returns bigint
    language sql immutable parallel safe as
$$ select case when now_starts <= w.starts_at then least(w.carried, burst)
          else least(burst, (greatest(0, w.rate + w.carried - w.used)
                             + w.rate * least(1000000, (now_starts - w.starts_at) / w.window_seconds - 1))::bigint) end $$;

create function interlock.bus_used(w interlock.bus_windows, now_starts float8) returns bigint
    language sql immutable parallel safe as
$$ select case when now_starts <= w.starts_at then w.used else 0 end $$;

-- How many of `asked` the row may still give; `next` is the row as the request would write it.
create function interlock.bus_grant(w interlock.bus_windows, next interlock.bus_windows, at float8) returns bigint
    language sql immutable parallel safe as
$$ select case when w.cooling_until > at then 0
          else greatest(0, least(next.asked, next.rate + interlock.bus_carried(w, next.starts_at, next.burst)
                                             - interlock.bus_used(w, next.starts_at))) end $$;

-- Who has lost the warm path everywhere, or is refused. One row per source and lane; '' for all lanes.
create table interlock.bus_bans (
    org_id          uuid not null,
    source          text not null,                  -- org/service
    target          text not null,
    name            text not null,
    kind            text not null,                  -- warm: by the slow stage; hard: refused
    until           timestamptz not null,
    source_share    float8 not null,
    competing_share float8 not null,
    dispatch_volume bigint not null,
    primary key (org_id, source, target, name)
);
create index bus_bans_ended on interlock.bus_bans (until);

-- Each loss of the warm path in one dispatcher: so many within a while are a ban everywhere.
create table interlock.bus_strikes (
    strike_id       bigint generated always as identity primary key,
    org_id          uuid not null,
    source          text not null,
    target          text not null,
    name            text not null,
    source_share    float8 not null,
    competing_share float8 not null,
    dispatch_volume bigint not null,
    struck_at       timestamptz not null default interlock.clock()
);
create index bus_strikes_by_time on interlock.bus_strikes (struck_at);

-- Warm dispatches of all dispatchers, by minute, for the auditor; old minutes are deleted.
create table interlock.bus_shares (
    minute     timestamptz not null,
    org_id     uuid not null,
    target     text not null,
    name       text not null,
    source     text not null,
    dispatched bigint not null,
    primary key (minute, org_id, target, name, source)
);
