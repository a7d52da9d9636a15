-- Replays: requested, selected, sent, recorded.

-- name: insert_replay^
insert into interlock.bus_replays (org_id, origin, filters, reason, operator, dry_run, rate, most)
values (:org_id, :origin, :filters::text::jsonb, :reason, :operator, :dry_run, :rate, :limit)
returning *;

-- name: list_replays
select * from interlock.bus_replays where org_id = :org_id and replay_id < :before order by replay_id desc limit :limit;

-- name: find_replay^
select * from interlock.bus_replays where org_id = :org_id and replay_id = :replay_id;

-- name: cancel_replay^
with canceled as (
    update interlock.bus_replays set state = 'Canceled', ended_at = interlock.clock()
    where org_id = :org_id and replay_id = :replay_id and ended_at is null
    returning *
), gone as (
    delete from interlock.bus_replay_items where replay_id in (select replay_id from canceled)
)
select * from canceled;

-- name: take_replay^
-- One replay, leased to one process. If the process dies, another takes it when the lease expires.
update interlock.bus_replays
set due_at = interlock.clock() + make_interval(secs => :lease_seconds::float8)
where replay_id = (select replay_id from interlock.bus_replays
                   where ended_at is null and due_at <= interlock.clock()
                   order by due_at limit 1 for no key update skip locked)
returning *;

-- name: org_name$
select name from interlock.orgs where org_id = :org_id;

-- name: archive_of^
select a.dataset_uuid, v.dataset_version, v.storage, v.schema
from interlock.bus_archives a join interlock.dataset_versions v on v.dataset_version = a.dataset_version
where a.org_id = :org_id and v.org_id = :org_id;

-- name: set_task!
update interlock.bus_replays set task_id = :task_id, due_at = interlock.clock() + make_interval(secs => :pause::float8)
where replay_id = :replay_id and ended_at is null;

-- name: look_later!
update interlock.bus_replays set due_at = interlock.clock() + make_interval(secs => :pause::float8)
where replay_id = :replay_id and ended_at is null;

-- name: dead_letters
-- Dead letters of a queue, oldest first, one page. The caller parses the bodies: they may contain text that `json`
-- operators refuse.
select m.message_id, m.body from interlock.queue_messages m
where m.queue between :queue::text and :queue::text and m.dead_at is not null and m.message_id > :after
order by m.queue, m.message_id limit :limit;

-- name: insert_letters!
insert into interlock.bus_replay_items (replay_id, position, command_id, source, target, name, payload, message_id)
select :replay_id, i.message_id, i.command_id, i.source, i.target, i.name, i.payload, i.message_id
from unnest(:message_ids::bigint[], :command_ids::uuid[], :sources::text[], :targets::text[], :names::text[],
            :payloads::text[]) as i(message_id, command_id, source, target, name, payload);

-- name: clear_items!
-- Items of an interrupted selection.
delete from interlock.bus_replay_items where replay_id = :replay_id;

-- name: insert_items!
insert into interlock.bus_replay_items (replay_id, position, command_id, source, target, name, payload)
select :replay_id, :start::bigint + i.n, i.command_id, i.source, i.target, i.name, i.payload
from unnest(:command_ids::uuid[], :sources::text[], :targets::text[], :names::text[], :payloads::text[])
    with ordinality as i(command_id, source, target, name, payload, n);

-- name: set_selected!
update interlock.bus_replays
set selected = :selected, due_at = interlock.clock(),
    state = case when dry_run or :selected::bigint = 0 then 'Completed' else 'Sending' end::interlock.replay_state,
    ended_at = case when dry_run or :selected::bigint = 0 then interlock.clock() end
where replay_id = :replay_id and ended_at is null;

-- name: next_items
select position, command_id, source, target, name, payload, message_id from interlock.bus_replay_items
where replay_id = :replay_id order by position limit :limit;

-- name: settle_items$
-- Returns how many items were still there: fewer than were sent means that another process sends them too. A dead
-- letter that was sent again is deleted; one whose command was refused stays.
with gone as (
    delete from interlock.bus_replay_items where replay_id = :replay_id and position = any(:positions::bigint[])
    returning 1
), letters as (
    delete from interlock.queue_messages
    where message_id = any(:letters::bigint[]) and queue || '' = :queue and dead_at is not null
), counted as (
    update interlock.bus_replays set sent = sent + :sent, failed = failed + :failed
    where replay_id = :replay_id and ended_at is null
)
select count(*) from gone;

-- name: end_replay!
update interlock.bus_replays
set state = :state::text::interlock.replay_state, detail = :detail, ended_at = interlock.clock()
where replay_id = :replay_id and ended_at is null;
