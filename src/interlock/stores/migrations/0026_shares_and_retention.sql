-- Whose turn it is: messages that wait in one lane are received by turns, of orgs first and of their runs then.
--
-- share_id is the run that the message is of; of a task of no run, the job. Messages that are no tasks' have none.

alter table interlock.queue_messages add column org_id uuid, add column share_id uuid;
alter table interlock.outbox add column org_id uuid, add column share_id uuid;

-- From one share to the next, and within one from the oldest on. `queue || ''`: no look-up of the other indexes fits
-- it, nor it theirs, so that no plan made on an empty table takes the wrong one and sorts a whole queue.
create index queue_messages_shares on interlock.queue_messages ((queue || ''), priority, org_id, share_id, visible_at)
    where dead_at is null and share_id is not null;

-- How long an ended run is kept, where that was said of it; all others by the setting.
alter table interlock.runs add column retention_days float8;

-- Seconds are of one length in every time zone, so it is what it says.
create function interlock.kept_until(ended_at timestamptz, days float8) returns timestamptz
    language sql immutable parallel safe as
$$ select ended_at + make_interval(secs => days * 86400) $$;

-- Apart from each other: no look for what is past the setting steps over what is kept for years.
drop index interlock.runs_ended;
create index runs_ended on interlock.runs (ended_at) where ended_at is not null and retention_days is null;
create index runs_kept on interlock.runs (interlock.kept_until(ended_at, retention_days))
    where ended_at is not null and retention_days is not null;
