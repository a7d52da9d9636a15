-- Buffered datasets: what became of each published batch, and what the sink does with the rows of a version.
--
--   buffer_publishes ── Pending ─► Loaded                the rows are in the data database, readers have been told
--                          │  ▲
--                          │  └── redrive
--                          ├─► Loading ─► Loaded         too large for the sink itself: a task loads it on Spark
--                          └─► Refused, Failed           the batch is wrong; or trouble outlasted the sink's patience

create type interlock.publish_status as enum ('Pending', 'Loading', 'Loaded', 'Refused', 'Failed');

alter table interlock.buffer_publishes
    add column status      interlock.publish_status not null default 'Pending',
    add column batch       bigint,                  -- its number in the dataset version, once it is loaded
    add column rows        bigint,                  -- in the batch
    add column bytes       bigint,
    add column refusal     json,                    -- {code, detail, bad_rows, rows: [{line, reason}]}
    add column load_task   uuid,                    -- that loads it on Spark
    add column settled_at  timestamptz,             -- when it was loaded, refused or failed
    add column redrives    int not null default 0,
    add column sweep_at    timestamptz,             -- when its file goes; null: not yet known, or gone
    add column swept_at    timestamptz;

-- Batches that were published before there was a sink are as pending as new ones.
create index buffer_publishes_open on interlock.buffer_publishes (publish_id) where status in ('Pending', 'Loading');
create index buffer_publishes_by_org on interlock.buffer_publishes (org_id, publish_id);
create index buffer_publishes_by_status on interlock.buffer_publishes (org_id, status, publish_id);
create index buffer_publishes_by_load on interlock.buffer_publishes (load_task) where load_task is not null;
create index buffer_publishes_sweep on interlock.buffer_publishes (sweep_at) where sweep_at is not null;

alter table interlock.dataset_versions
    add column replace_rows boolean not null default false; -- of a buffered one: a row with a known key replaces it

-- A prefix of batches: its files go once the attempt is over and each that was published has been swept.
alter table interlock.file_sweeps add column buffer boolean not null default false;
