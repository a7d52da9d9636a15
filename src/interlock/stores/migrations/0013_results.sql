-- Results of tasks of runs: short ones in the task's row, the others packed many to an object, and what is made of them.

-- Where a result lies that is not in the row: {root}/runs/{run_id}/results/{pack}.pack, `length` bytes from `offset` on.
-- In no index, so that a completion still updates its row in place.
alter table interlock.tasks add column pack uuid, add column pack_offset int, add column pack_length int;

-- What a receipt says of a run, as far as its tasks have been walked, and the signed receipt once that is all of them. A
-- run that was opened again by a retry ends at another time: its receipt is made anew.
create table interlock.run_receipts (
    run_id     uuid primary key,
    org_id     uuid not null,
    ended_at   timestamptz not null,
    next_index bigint not null default 0,           -- every task below is in the digests
    completed  bigint not null default 0,
    failed     bigint not null default 0,
    canceled   bigint not null default 0,
    ids        bytea not null,                      -- digests so far
    outcomes   bytea not null,
    signed     text,
    key        json                                 -- the public half of what has signed it: receipts outlive keys
);
