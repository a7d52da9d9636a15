-- The reconciler asks for each task that has no message whether the outbox still owes one.
create index outbox_by_key on interlock.outbox (dedupe_key) where dedupe_key is not null;

-- Without outbox_id: a plan made while the outbox is empty, as it mostly is, would look for ids in here.
drop index interlock.outbox_due;
create index outbox_due on interlock.outbox (due_at);
