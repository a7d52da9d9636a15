-- Receipts, which record how each task of a run ended. Every statement filters by org, or gets ids that were filtered.

-- name: result_place^
-- The location of one task's result.
select t.run_id, t.result, t.pack, t.pack_offset, t.pack_length
from interlock.tasks t
where t.shard = :shard and t.run_id = :run_id and t.task_index = :index and t.org_id = :org_id;

-- name: begin_receipt!
-- A receipt for the run's current end. Progress of a receipt for an earlier end is discarded.
insert into interlock.run_receipts (run_id, org_id, ended_at, ids, outcomes)
select run_id, org_id, ended_at, :start::bytea, :start::bytea from interlock.runs
where run_id = :run_id and org_id = :org_id and ended_at is not null
on conflict (run_id) do update
    set ended_at = excluded.ended_at, next_index = 0, completed = 0, failed = 0, canceled = 0, ids = excluded.ids,
        outcomes = excluded.outcomes, signed = null, key = null
    where interlock.run_receipts.ended_at <> excluded.ended_at;

-- name: receipt_so_far^
-- Locked, so that concurrent callers continue one after the other and no range is counted twice.
select c.*, r.job_id, r.total, r.last_index, r.state, r.created_at, r.shard, r.ended_at = c.ended_at as current,
       r.completed as run_completed, r.failed as run_failed, r.canceled as run_canceled
from interlock.run_receipts c join interlock.runs r on r.run_id = c.run_id
where c.run_id = :run_id and c.org_id = :org_id
for no key update of c;

-- name: receipt_block^
-- A range of a run: the digest of its full ids, and the digest of each id with its outcome, by index.
select count(*) filter (where t.status = 'Completed') as completed, count(*) filter (where t.status = 'Failed') as failed,
       count(*) filter (where t.status = 'Canceled') as canceled,
       sha256(coalesce(string_agg(t.id, ''::bytea order by t.task_index), '')) as ids,
       sha256(coalesce(string_agg(t.id || convert_to(t.status::text, 'UTF8'), ''::bytea order by t.task_index), '')) as outcomes
from (select task_index, status, sha256(convert_to(run_id || ':' || task_index, 'UTF8')) as id from interlock.tasks
      where shard = :shard and run_id = :run_id and task_index between :first::bigint and :last::bigint) t;

-- name: keep_receipt!
update interlock.run_receipts
set next_index = :next_index, completed = :completed, failed = :failed, canceled = :canceled, ids = :ids,
    outcomes = :outcomes, signed = :signed, key = :key::text::json
where run_id = :run_id and org_id = :org_id;
