-- Statements of block_follower. For the tables see schema.sql.

-- name: lock_schema!
select pg_advisory_xact_lock(hashtextextended('interlock:datasets', 0));

-- name: create_tables
select datasets.create_table(v.version, v.kind)
from unnest(:versions::uuid[], :kinds::text[]) as v(version, kind);

-- name: end_older
-- Ends the connections of older attempts: a process that hangs in the middle of a COPY would keep its locks. The same
-- process id with another start time is another process.
select pg_terminate_backend(a.pid, 5000)
from (select distinct f.backend, f.backend_start from datasets.followers f
      where f.dataset_version = any(:versions::uuid[])
        and ((f.task_id = :task_id and f.attempt <= :attempt) or f.cursor is null or :proven::boolean)) f
join pg_stat_activity a on a.pid = f.backend and a.backend_start = f.backend_start
where a.pid <> pg_backend_pid();

-- name: take_over
-- A newer attempt of the task, or the same one after a restart, takes over the versions. Any other holder must have
-- proven that its lease is valid, because a recreated task counts its attempts from 1 again.
insert into datasets.followers as f (dataset_version, kind, task_id, attempt, holder, backend, backend_start, chain_id,
                                     genesis, start_block, position)
select v.version, v.kind, :task_id, :attempt, :holder, a.pid, a.backend_start, :chain_id, :genesis::text, :start_block,
       :start_block::bigint - 1
from (select * from unnest(:versions::uuid[], :kinds::text[]) as v(version, kind) order by version) v
cross join (select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()) a
on conflict (dataset_version) do update
    set task_id = excluded.task_id, attempt = excluded.attempt, holder = excluded.holder, backend = excluded.backend,
        backend_start = excluded.backend_start, taken_at = now(), genesis = coalesce(f.genesis, excluded.genesis)
    where (f.task_id = excluded.task_id and f.attempt <= excluded.attempt) or f.cursor is null or :proven::boolean
returning dataset_version, kind, chain_id, genesis, start_block, position, cursor;

-- name: told_cursor$
select max(cursor) from datasets.followers where dataset_version = any(:versions::uuid[]);

-- name: known_hashes
select block_number, block_hash from datasets.followed_blocks where dataset_version = :version order by block_number;

-- name: hold
-- The fence of a write: no other attempt takes over the versions before it commits, and no older attempt gets past
-- this.
select dataset_version from datasets.followers
where dataset_version = any(:versions::uuid[]) and holder = :holder
order by dataset_version
for update;

-- name: delete_from
select datasets.delete_from(v.version, :first_block) from unnest(:versions::uuid[]) as v(version);

-- name: advance
-- The blocks given are everything from the first one on. Ranges that were announced as complete are owed to readers:
-- everything deleted or, if a shorter branch had left a gap, what fills it.
with moved as (
    update datasets.followers f
    set position = :last_block, cursor = greatest(f.cursor, nullif(:last_block::bigint, f.start_block - 1))
    where f.dataset_version = any(:versions::uuid[])
    returning f.dataset_version, old.position, old.cursor, f.cursor as new_cursor
), owed as (
    insert into datasets.owed_ranges (dataset_version, range_start, range_end)
    select dataset_version, :first_block,
           case when :first_block::bigint <= position then cursor else least(:last_block, cursor) end
    from moved where :first_block <= cursor
), forgotten as (
    delete from datasets.followed_blocks
    where dataset_version = (:versions::uuid[])[1]
      and (block_number >= :first_block or block_number <= :last_block::bigint - :keep_hashes)
)
select max(new_cursor) as cursor from moved;

-- name: remember!
-- Separate from `advance`: within one statement it would not see that rows with the same key are gone.
insert into datasets.followed_blocks (dataset_version, block_number, block_hash)
select :version, h.block_number, h.block_hash
from unnest(:numbers::bigint[], :hashes::text[]) as h(block_number, block_hash);

-- name: owed
select owed_id, dataset_version, range_start, range_end from datasets.owed_ranges
where dataset_version = any(:versions::uuid[]) order by owed_id limit :limit;

-- name: announced!
delete from datasets.owed_ranges where dataset_version = any(:versions::uuid[]) and owed_id = any(:owed_ids::bigint[]);
