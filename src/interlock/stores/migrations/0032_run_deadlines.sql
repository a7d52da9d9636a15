-- How long a run may take, as it was asked for: `deadline_at` is cleared when the run is stopped, and a rerun needs it.
alter table interlock.runs add column deadline_seconds float8;
update interlock.runs set deadline_seconds = extract(epoch from deadline_at - created_at) where deadline_at is not null;
