-- Large runs: a shard of their own, loaded bare, indexed afterwards, attached, and dropped whole with the run.
--
--   runs.shard ── tasks_{shard}    0: the shard that DAGs and small runs share
--   create_shard ─► COPY ─► finish_shard ─► the kernel's statements find it ─► drop_shard
--
-- A statement learns the shard of a task from the lease token of its attempt, or from the task's run.

create sequence interlock.shards as int;

alter table interlock.runs
    add column paused           boolean not null default false, -- claims find nothing until it is resumed
    add column ingesting        boolean not null default false, -- its list is still being read
    add column wake_index       bigint,                         -- resumed: tasks below it have a message again
    add column reason           text,                           -- why it failed as a whole
    add column max_concurrency  int,
    add column rate_key         text,                           -- JSON pointer into the payload, or 'host'
    add column rate_per_second  float8,
    add column tolerated_share  float8,                         -- of its tasks that may fail for good
    add column deadline_at      timestamptz,
    add column delete_requested boolean not null default false;
create unique index runs_by_shard on interlock.runs (shard) where shard <> 0;
create index runs_of_shards on interlock.runs (shard) where shard <> 0 and ended_at is null;
create index runs_deadline on interlock.runs (deadline_at) where deadline_at is not null and ended_at is null;
create index runs_waking on interlock.runs (run_id) where wake_index is not null;
create index runs_deleting on interlock.runs (run_id) where delete_requested;

-- Gone for its users; what is left of it goes in the background.
alter table interlock.jobs add column deleted_at timestamptz;

-- What a run that has not ended is said to be.
create function interlock.live_state(paused boolean, ingesting boolean) returns interlock.run_state
    language sql immutable parallel safe as
$$ select (case when paused then 'Paused' when ingesting then 'Ingesting' else 'Running' end)::interlock.run_state $$;

-- The reaper goes shard by shard, along this index, and rings nothing of a shard that has nothing due.
alter table interlock.lease_alarms add column shard int not null default 0;
drop index interlock.lease_alarms_due;
create index lease_alarms_due on interlock.lease_alarms (shard, due_at);

-- Attempts of a shard go with it, although nobody lists its tasks then.
alter table interlock.attempts add column shard int not null default 0;
create index attempts_of_shards on interlock.attempts (shard) where shard <> 0;

-- All tasks of a claim have its token. One of a shard of its own is of version 8 and begins with the shard's four bytes;
-- 90 random bits are left. Any other version is of shard 0.
create function interlock.lease_token(shard int) returns uuid language sql volatile parallel safe as
$$ select case when shard = 0 then r else
       (lpad(to_hex(shard), 8, '0') || substr(r::text, 9, 6) || '8' || substr(r::text, 16))::uuid end
   from (select gen_random_uuid() as r) g $$;

create function interlock.shard_of(lease_token uuid) returns int language sql immutable parallel safe as
$$ select case when uuid_extract_version(lease_token) = 8
               then ('x' || substr(lease_token::text, 1, 8))::bit(32)::int else 0 end $$;

-- A bare table for the tasks of one run. What they share is a default, so that a load writes (task_id, task_index, payload)
-- alone; when the load began stands for when its tasks were made. Indexes that hold nothing of a task that was never run
-- are made here: that is cheaper than reading the table for each of them afterwards. False: the run is not to have one.
create function interlock.create_shard(
    shard int, org_id uuid, run_id uuid, job_id uuid, max_attempts int, priority int
) returns boolean language plpgsql as
$$
#variable_conflict use_variable
declare
    name text := 'tasks_' || shard;
    made text := interlock.clock();
begin
    if shard <= 0 then
        raise exception 'shard % cannot be a run''s own', shard using errcode = 'invalid_parameter_value';
    end if;
    perform pg_advisory_xact_lock(hashtextextended('interlock:' || name, 0));
    -- Whoever deletes the run waits, or was first.
    perform from interlock.runs r
    where r.run_id = create_shard.run_id and r.shard = create_shard.shard and not r.delete_requested
    for share;
    if not found then
        return false;
    end if;
    if to_regclass('interlock.' || name) is not null then
        return true;
    end if;
    execute format(
        'create table interlock.%I (like interlock.tasks including defaults including generated including storage,'
        ' constraint %I check (shard = %s))'
        ' with (fillfactor = 35, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)',
        name, name || '_shard', shard);
    execute format(
        'alter table interlock.%I alter shard set default %s, alter org_id set default %L, alter run_id set default %L,'
        ' alter job_id set default %L, alter max_attempts set default %s, alter priority set default %s,'
        ' alter created_at set default %L, alter queued_at set default %L',
        name, shard, org_id, run_id, job_id, max_attempts, priority, made, made);
    execute format('create index %I on interlock.%I (run_id, listed_status, task_index)'
                   ' where run_id is not null and listed_status is not null', name || '_by_run_status', name);
    execute format('create index %I on interlock.%I (retry_at) where retry_at is not null', name || '_retries', name);
    execute format('create index %I on interlock.%I (job_id, priority, queued_at) where parked', name || '_parked', name);
    execute format('create index %I on interlock.%I (job_id, slot_key, priority, queued_at) where parked',
                   name || '_parked_by_key', name);
    return true;
end
$$;

-- Keys of a loaded shard, and its place among the others. Attaching needs a lock on `tasks` that no claim minds, but
-- another attach or a detach does; a waiter for it is short, and the indexes are not built again.
create function interlock.finish_shard(shard int) returns boolean language plpgsql set maintenance_work_mem = '256MB' as
$$
declare
    name text := 'tasks_' || shard;
    loaded regclass;
    patience text := current_setting('lock_timeout');
begin
    perform pg_advisory_xact_lock(hashtextextended('interlock:' || name, 0));
    loaded := to_regclass('interlock.' || name);
    if loaded is null or (select relispartition from pg_class where oid = loaded) then
        return loaded is not null;
    end if;
    if not exists (select from pg_index where indrelid = loaded and indisprimary) then
        execute format('alter table interlock.%I add primary key (task_id)', name);
    end if;
    execute format('create unique index if not exists %I on interlock.%I (run_id, task_index) where run_id is not null',
                   name || '_by_run', name);
    for tries in 1 .. 300 loop
        begin
            perform set_config('lock_timeout', '200ms', true);
            execute format('alter table interlock.tasks attach partition interlock.%I for values in (%s)', name, shard);
            execute format('alter table interlock.%I drop constraint %I', name, name || '_shard');
            perform set_config('lock_timeout', patience, true);
            return true;
        exception when lock_not_available then
            perform pg_sleep(0.1);
        end;
    end loop;
    raise exception 'tasks is being changed by others: shard % is not attached yet', shard
        using errcode = 'lock_not_available';
end
$$;

-- What is left of a shard. A shard that is attached is detached by the caller before, concurrently, since no function can:
-- to drop it so takes a lock that every claim waits for, and therefore gives up soon.
create function interlock.drop_shard(shard int) returns void language plpgsql set lock_timeout = '100ms' as
$$
#variable_conflict use_variable
begin
    if shard > 0 then
        execute format('drop table if exists interlock.%I', 'tasks_' || shard);
        delete from interlock.lease_alarms a where a.shard = drop_shard.shard;
    end if;
end
$$;
