-- Files of datasets: which of them nobody needs any more.

-- Prefixes whose files go once they are due. That of an attempt is written down before the attempt writes there, so that
-- whatever ends it, somebody knows of its files.
create table interlock.file_sweeps (
    place           text primary key,               -- a file, or a prefix with its slash
    dataset_version uuid not null,
    task_id         uuid,                           -- of an attempt that may still commit; null: nobody reads this any more
    attempt         int,
    due_at          timestamptz not null,
    final_at        timestamptz not null            -- nobody writes there after this
);
create index file_sweeps_due on interlock.file_sweeps (due_at);
