-- Replays: commands that were accepted once, sent again by the platform. The row is the record of who did so, and why.
--
--   bus_commands, dead letters ── selected ──► bus_replays, bus_replay_items ── signed anew ──► the path of any command

create type interlock.replay_state as enum ('Selecting', 'Sending', 'Completed', 'Failed', 'Canceled');

create table interlock.bus_replays (
    replay_id  uuid primary key default uuidv7(),
    org_id     uuid not null references interlock.orgs,
    origin     text not null,                       -- archive, or dead-letters
    filters    jsonb not null,
    reason     text not null,
    operator   text not null,                       -- who asked
    dry_run    boolean not null,
    rate       float8 not null,                     -- commands per second
    most       bigint not null,
    state      interlock.replay_state not null default 'Selecting',
    task_id    uuid,                                -- that reads the archive, on Spark
    selected   bigint,
    sent       bigint not null default 0,
    failed     bigint not null default 0,
    detail     text,
    created_at timestamptz not null default interlock.clock(),
    due_at     timestamptz not null default interlock.clock(),
    ended_at   timestamptz
);
create index bus_replays_by_org on interlock.bus_replays (org_id, replay_id);
create index bus_replays_due on interlock.bus_replays (due_at) where ended_at is null;

-- What is to be sent: gone once it is decided about, so that a process that dies goes on where it was.
create table interlock.bus_replay_items (
    replay_id  uuid not null references interlock.bus_replays on delete cascade,
    position   bigint not null,
    command_id uuid not null,                       -- stays: deduplication knows it again
    source     text not null,                       -- org/service
    target     text not null,
    name       text not null,
    payload    text not null,
    message_id bigint,                              -- of the dead letter, which goes when it is sent
    primary key (replay_id, position)
);
