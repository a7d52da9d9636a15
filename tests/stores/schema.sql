CREATE SCHEMA interlock;
CREATE TYPE interlock.bus_action AS ENUM (
    'create',
    'update',
    'delete'
);
CREATE TYPE interlock.bus_kind AS ENUM (
    'services',
    'routes',
    'acls',
    'limits',
    'keys'
);
CREATE TYPE interlock.dag_state AS ENUM (
    'Building',
    'Current',
    'Retired',
    'Abandoned',
    'Purged'
);
CREATE TYPE interlock.dedupe_mode AS ENUM (
    'none',
    'strict'
);
CREATE TYPE interlock.delivery_status AS ENUM (
    'Pending',
    'Delivered',
    'Dead'
);
CREATE TYPE interlock.dispatch_mode AS ENUM (
    'adaptive',
    'cold-only'
);
CREATE TYPE interlock.enforcement AS ENUM (
    'strict',
    'relaxed',
    'shadow'
);
CREATE TYPE interlock.ingest_step AS ENUM (
    'Loading',
    'Finishing',
    'Enqueuing',
    'Done',
    'Failed',
    'Canceled'
);
CREATE TYPE interlock.outcome AS ENUM (
    'Completed',
    'Failed',
    'LeaseExpired',
    'TimedOut',
    'Canceled',
    'Released'
);
CREATE TYPE interlock.publish_status AS ENUM (
    'Pending',
    'Loading',
    'Loaded',
    'Refused',
    'Failed'
);
CREATE TYPE interlock.replay_state AS ENUM (
    'Selecting',
    'Sending',
    'Completed',
    'Failed',
    'Canceled'
);
CREATE TYPE interlock.role AS ENUM (
    'reader',
    'writer',
    'admin'
);
CREATE TYPE interlock.route_status AS ENUM (
    'healthy',
    'unhealthy',
    'stalled',
    'unpolled',
    'misrouted'
);
CREATE TYPE interlock.run_state AS ENUM (
    'Ingesting',
    'Running',
    'Paused',
    'Completed',
    'CompletedWithFailures',
    'Failed',
    'Canceled'
);
CREATE TYPE interlock.sensitivity AS ENUM (
    'critical',
    'moderate',
    'low'
);
CREATE TYPE interlock.task_status AS ENUM (
    'Queued',
    'Running',
    'Completed',
    'Failed',
    'Canceled'
);
CREATE FUNCTION interlock.add_errors(known jsonb, change jsonb) RETURNS jsonb
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select coalesce(jsonb_object_agg(error_class, tasks) filter (where tasks > 0), '{}')
   from (select case when known ? c.key or (c.tasks > 0 and c.fresh <= 100 - (select count(*) from jsonb_object_keys(known)))
                     then c.key else '(other)' end as error_class, sum(c.tasks) as tasks
         from (select key, value::bigint as tasks, 0 as fresh from jsonb_each_text(known)
               union all
               select key, value::bigint,
                      row_number() over (partition by known ? key or value::bigint <= 0 order by value::bigint desc, key)
               from jsonb_each_text(change)) c
         group by 1) summed $$;
CREATE FUNCTION interlock.backoff(attempt integer, base double precision, factor double precision, cap double precision, jitter double precision, dice double precision) RETURNS interval
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select make_interval(secs => least(cap, base * power(factor, least(attempt - 1, 60))) * (1 - jitter + 2 * jitter * dice)) $$;
CREATE TABLE interlock.bus_windows (
    org_id uuid NOT NULL,
    target text NOT NULL,
    name text NOT NULL,
    source text NOT NULL,
    starts_at double precision NOT NULL,
    window_seconds double precision NOT NULL,
    rate bigint NOT NULL,
    burst bigint NOT NULL,
    cooldown double precision NOT NULL,
    used bigint NOT NULL,
    carried bigint DEFAULT 0 NOT NULL,
    cooling_until double precision DEFAULT 0 NOT NULL,
    asked bigint NOT NULL,
    granted bigint NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');
CREATE FUNCTION interlock.bus_carried(w interlock.bus_windows, now_starts double precision, burst bigint) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select case when now_starts <= w.starts_at then least(w.carried, burst)
          else least(burst, (greatest(0, w.rate + w.carried - w.used)
                             + w.rate * least(1000000, (now_starts - w.starts_at) / w.window_seconds - 1))::bigint) end $$;
CREATE FUNCTION interlock.bus_epoch() RETURNS double precision
    LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ select extract(epoch from interlock.clock())::float8 $$;
CREATE FUNCTION interlock.bus_grant(w interlock.bus_windows, next interlock.bus_windows, at double precision) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select case when w.cooling_until > at then 0
          else greatest(0, least(next.asked, next.rate + interlock.bus_carried(w, next.starts_at, next.burst)
                                             - interlock.bus_used(w, next.starts_at))) end $$;
CREATE FUNCTION interlock.bus_used(w interlock.bus_windows, now_starts double precision) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select case when now_starts <= w.starts_at then w.used else 0 end $$;
CREATE FUNCTION interlock.clock() RETURNS timestamp with time zone
    LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ select coalesce(nullif(current_setting('interlock.now', true), '')::timestamptz, now()) $$;
CREATE FUNCTION interlock.create_shard(shard integer, org_id uuid, run_id uuid, job_id uuid, max_attempts integer, priority integer) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
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
    execute format('create unique index %I on interlock.%I (run_id, task_index) where run_id is not null',
                   name || '_by_run', name);
    execute format('create index %I on interlock.%I (run_id, listed_status, task_index)'
                   ' where run_id is not null and listed_status is not null', name || '_by_run_status', name);
    execute format('create index %I on interlock.%I (retry_at) where retry_at is not null', name || '_retries', name);
    execute format('create index %I on interlock.%I (job_id, priority, queued_at) where parked', name || '_parked', name);
    execute format('create index %I on interlock.%I (job_id, slot_key, priority, queued_at) where parked',
                   name || '_parked_by_key', name);
    return true;
end
$$;
CREATE FUNCTION interlock.drop_shard(shard integer) RETURNS void
    LANGUAGE plpgsql
    SET lock_timeout TO '100ms'
    AS $$
#variable_conflict use_variable
begin
    if shard > 0 then
        execute format('drop table if exists interlock.%I', 'tasks_' || shard);
        delete from interlock.lease_alarms a where a.shard = drop_shard.shard;
    end if;
end
$$;
CREATE FUNCTION interlock.extent(version uuid, OUT range_start bigint, OUT range_end bigint) RETURNS record
    LANGUAGE sql STABLE
    AS $$
    select (select p.range_start from interlock.partitions p where p.dataset_version = version order by p.range_start limit 1),
           (select p.range_end from interlock.partitions p where p.dataset_version = version order by p.range_start desc limit 1)
$$;
CREATE FUNCTION interlock.finish_shard(shard integer) RETURNS boolean
    LANGUAGE plpgsql
    SET maintenance_work_mem TO '256MB'
    AS $$
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
CREATE FUNCTION interlock.kept_until(ended_at timestamp with time zone, days double precision) RETURNS timestamp with time zone
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select ended_at + make_interval(secs => days * 86400) $$;
CREATE FUNCTION interlock.kind_number(kind interlock.bus_kind) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select case kind when 'services' then 1 when 'routes' then 2 when 'acls' then 3 when 'limits' then 4 else 5 end $$;
CREATE FUNCTION interlock.lease_token(shard integer) RETURNS uuid
    LANGUAGE sql PARALLEL SAFE
    AS $$ select case when shard = 0 then r else
       (lpad(to_hex(shard), 8, '0') || substr(r::text, 9, 6) || '8' || substr(r::text, 16))::uuid end
   from (select gen_random_uuid() as r) g $$;
CREATE FUNCTION interlock.live_state(paused boolean, ingesting boolean) RETURNS interlock.run_state
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select (case when paused then 'Paused' when ingesting then 'Ingesting' else 'Running' end)::interlock.run_state $$;
CREATE FUNCTION interlock.run_task_id(run_id uuid, task_index bigint) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select encode(substring(sha256((run_id::text || ':' || task_index::text)::bytea) for 16), 'hex')::uuid $$;
CREATE FUNCTION interlock.shard_of(lease_token uuid) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select case when uuid_extract_version(lease_token) = 8
               then ('x' || substr(lease_token::text, 1, 8))::bit(32)::int else 0 end $$;
CREATE FUNCTION interlock.source_task_id(job_id uuid) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ select encode(substring(sha256(('source:' || job_id::text)::bytea) for 16), 'hex')::uuid $$;
CREATE FUNCTION interlock.waiting_tasks(asked_job uuid, most bigint) RETURNS bigint
    LANGUAGE sql STABLE
    AS $$ select least(most,
       (select count(*) from (select from interlock.tasks
                              where shard = 0 and run_id is null and listed_status = 'Queued' and job_id = asked_job
                              limit most) queued)
       + (select count(*) from (select from interlock.tasks
                                where shard = 0 and run_id is null and retry_at is not null and job_id = asked_job
                                limit most) retrying)
       + (select coalesce(sum(greatest(queued + failed - dead - coalesce(last_index + 1 - held_from, 0), 0)), 0)::bigint
          from (select queued, failed, dead, last_index, held_from from interlock.runs
                where job_id = asked_job and ended_at is null limit 1000) live)) $$;
CREATE TABLE interlock.api_keys (
    key_id text NOT NULL,
    org_id uuid NOT NULL,
    user_name text NOT NULL,
    role interlock.role NOT NULL,
    scopes text[] NOT NULL,
    secret_hash bytea NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    service text COLLATE pg_catalog."C"
);
CREATE TABLE interlock.attempts (
    task_id uuid NOT NULL,
    attempt integer NOT NULL,
    lease_token uuid NOT NULL,
    outcome interlock.outcome NOT NULL,
    worker_id text,
    started_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone NOT NULL,
    error_class text,
    error_message text,
    crash json,
    shard integer DEFAULT 0 NOT NULL
);
CREATE TABLE interlock.tasks (
    shard integer DEFAULT 0 NOT NULL,
    task_id uuid NOT NULL,
    org_id uuid NOT NULL,
    job_id uuid NOT NULL,
    run_id uuid,
    task_index bigint,
    status interlock.task_status DEFAULT 'Queued'::interlock.task_status NOT NULL,
    attempt integer DEFAULT 1 NOT NULL,
    max_attempts integer NOT NULL,
    priority smallint NOT NULL,
    cancel_requested boolean DEFAULT false NOT NULL,
    parked boolean DEFAULT false NOT NULL,
    late_reply boolean DEFAULT false NOT NULL,
    dead boolean DEFAULT false NOT NULL,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    timeout_at timestamp with time zone,
    retry_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    queued_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    started_at timestamp with time zone,
    ended_at timestamp with time zone,
    progress real,
    worker_id text,
    dedupe_key text,
    slot_key text,
    progress_text text,
    payload json NOT NULL,
    result json,
    listed_status interlock.task_status GENERATED ALWAYS AS (
CASE
    WHEN ((run_id IS NULL) OR (status = ANY (ARRAY['Failed'::interlock.task_status, 'Canceled'::interlock.task_status]))) THEN status
    ELSE NULL::interlock.task_status
END) STORED,
    pack uuid,
    pack_offset integer,
    pack_length integer
)
PARTITION BY LIST (shard);
CREATE VIEW interlock.attempt_history AS
 SELECT a.task_id,
    a.attempt,
    a.lease_token,
    a.outcome,
    a.worker_id,
    a.started_at,
    a.ended_at,
    a.error_class,
    a.error_message,
    a.crash
   FROM interlock.attempts a
  WHERE (NOT (EXISTS ( SELECT 1
           FROM interlock.tasks t
          WHERE ((t.task_id = a.task_id) AND (t.status = 'Completed'::interlock.task_status) AND (t.attempt = a.attempt) AND (t.lease_token = a.lease_token)))))
UNION ALL
 SELECT tasks.task_id,
    tasks.attempt,
    tasks.lease_token,
        CASE tasks.status
            WHEN 'Completed'::interlock.task_status THEN 'Completed'::interlock.outcome
            ELSE NULL::interlock.outcome
        END AS outcome,
    tasks.worker_id,
    tasks.started_at,
    tasks.ended_at,
    NULL::text AS error_class,
    NULL::text AS error_message,
    NULL::json AS crash
   FROM interlock.tasks
  WHERE ((tasks.status = ANY (ARRAY['Running'::interlock.task_status, 'Completed'::interlock.task_status])) AND (tasks.started_at IS NOT NULL));
CREATE TABLE interlock.backfills (
    run_id uuid NOT NULL,
    org_id uuid NOT NULL,
    job_id uuid NOT NULL,
    range_start bigint NOT NULL,
    range_end bigint NOT NULL,
    priority smallint NOT NULL,
    reason text,
    requested_by text NOT NULL,
    total bigint,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    paused boolean DEFAULT false NOT NULL
);
CREATE TABLE interlock.buffer_publishes (
    publish_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    task_id uuid NOT NULL,
    attempt integer NOT NULL,
    dataset_uuid uuid NOT NULL,
    dataset_version uuid NOT NULL,
    batch_uri text NOT NULL,
    record_count bigint NOT NULL,
    published_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    status interlock.publish_status DEFAULT 'Pending'::interlock.publish_status NOT NULL,
    batch bigint,
    rows bigint,
    bytes bigint,
    refusal json,
    load_task uuid,
    settled_at timestamp with time zone,
    redrives integer DEFAULT 0 NOT NULL,
    sweep_at timestamp with time zone,
    swept_at timestamp with time zone
);
CREATE TABLE interlock.bulk_operations (
    operation_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    kind text NOT NULL,
    filter json NOT NULL,
    job_id uuid,
    priority smallint,
    reason text,
    requested_by text NOT NULL,
    state text DEFAULT 'Running'::text NOT NULL,
    cancel_requested boolean DEFAULT false NOT NULL,
    place json,
    matched bigint DEFAULT 0 NOT NULL,
    changed bigint DEFAULT 0 NOT NULL,
    expected bigint,
    walked real,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    ended_at timestamp with time zone
);
CREATE TABLE interlock.bundle_names (
    org_id uuid NOT NULL,
    name text NOT NULL,
    sha256 text NOT NULL COLLATE pg_catalog."C",
    set_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
CREATE TABLE interlock.bundle_sweeps (
    org_id uuid NOT NULL,
    sha256 text NOT NULL COLLATE pg_catalog."C",
    due_at timestamp with time zone NOT NULL
);
CREATE TABLE interlock.bundles (
    org_id uuid NOT NULL,
    sha256 text NOT NULL COLLATE pg_catalog."C",
    size_bytes bigint NOT NULL,
    files integer NOT NULL,
    unpacked_bytes bigint NOT NULL,
    modules jsonb NOT NULL,
    uploaded_by text NOT NULL,
    uploaded_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
CREATE TABLE interlock.bus_acls (
    org_id uuid NOT NULL,
    target text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    source text NOT NULL COLLATE pg_catalog."C",
    sensitivity interlock.sensitivity DEFAULT 'moderate'::interlock.sensitivity NOT NULL,
    expires_at timestamp with time zone,
    version bigint NOT NULL,
    changed_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    changed_by text NOT NULL
);
CREATE TABLE interlock.bus_alert_emails (
    email_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    alert_id uuid NOT NULL,
    address text NOT NULL,
    status interlock.delivery_status DEFAULT 'Pending'::interlock.delivery_status NOT NULL,
    tries integer DEFAULT 0 NOT NULL,
    due_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    ended_at timestamp with time zone,
    reason text
);
CREATE TABLE interlock.bus_alert_settings (
    org_id uuid NOT NULL,
    event text NOT NULL,
    channels jsonb NOT NULL,
    changed_by text NOT NULL,
    changed_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
CREATE TABLE interlock.bus_alerts (
    alert_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    event text NOT NULL,
    opened_at timestamp with time zone NOT NULL,
    last_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    told bigint NOT NULL,
    sample json NOT NULL,
    critical boolean NOT NULL,
    shown boolean DEFAULT true NOT NULL,
    unrouted boolean DEFAULT false NOT NULL,
    resolved_at timestamp with time zone,
    resolved_by text
);
CREATE TABLE interlock.bus_archive (
    archive_id bigint NOT NULL,
    org_id uuid NOT NULL,
    commands_in integer NOT NULL,
    accepted_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    accepted bytea NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_threshold='-1', autovacuum_analyze_threshold='100000', autovacuum_analyze_scale_factor='1');
ALTER TABLE ONLY interlock.bus_archive ALTER COLUMN accepted SET STORAGE EXTERNAL;
ALTER TABLE interlock.bus_archive ALTER COLUMN archive_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.bus_archive_archive_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.bus_archives (
    org_id uuid NOT NULL,
    dataset_uuid uuid NOT NULL,
    dataset_version uuid NOT NULL,
    "position" bigint DEFAULT 0 NOT NULL,
    attempt integer DEFAULT 0 NOT NULL,
    taken_until timestamp with time zone
);
CREATE TABLE interlock.bus_bans (
    org_id uuid NOT NULL,
    source text NOT NULL,
    target text NOT NULL,
    name text NOT NULL,
    kind text NOT NULL,
    until timestamp with time zone NOT NULL,
    source_share double precision NOT NULL,
    competing_share double precision NOT NULL,
    dispatch_volume bigint NOT NULL,
    refused bigint DEFAULT 0 NOT NULL
);
CREATE TABLE interlock.bus_changes (
    change_id bigint NOT NULL,
    org_id uuid NOT NULL,
    kind interlock.bus_kind NOT NULL,
    action interlock.bus_action NOT NULL,
    subject text NOT NULL COLLATE pg_catalog."C",
    before jsonb,
    after jsonb,
    version bigint NOT NULL,
    changed_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    changed_by text NOT NULL,
    reverts bigint
);
ALTER TABLE interlock.bus_changes ALTER COLUMN change_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.bus_changes_change_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.bus_dedupe (
    org_id uuid NOT NULL,
    source text NOT NULL,
    command_id uuid NOT NULL,
    handoff_id bigint NOT NULL,
    expires_at timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000');
CREATE TABLE interlock.bus_fates (
    org_id uuid NOT NULL,
    source text NOT NULL,
    command_id uuid NOT NULL,
    outcome text NOT NULL,
    reason text NOT NULL,
    target text NOT NULL,
    name text NOT NULL,
    throttle_until timestamp with time zone,
    decided_at timestamp with time zone NOT NULL,
    CONSTRAINT bus_fates_outcome_check CHECK ((outcome = ANY (ARRAY['delivered'::text, 'duplicate'::text, 'failed'::text])))
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_insert_threshold='-1', autovacuum_analyze_threshold='100000', autovacuum_analyze_scale_factor='1');
CREATE TABLE interlock.bus_handoffs (
    handoff_id bigint NOT NULL,
    org_id uuid NOT NULL,
    source text NOT NULL,
    reason text NOT NULL,
    body text NOT NULL,
    facts json NOT NULL,
    received_at timestamp with time zone NOT NULL,
    due_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    tries integer DEFAULT 0 NOT NULL,
    command_id uuid NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_threshold='-1', autovacuum_analyze_threshold='100000', autovacuum_analyze_scale_factor='1');
ALTER TABLE interlock.bus_handoffs ALTER COLUMN handoff_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.bus_handoffs_handoff_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.bus_keys (
    org_id uuid NOT NULL,
    service text NOT NULL COLLATE pg_catalog."C",
    number integer NOT NULL,
    sealed bytea NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    created_by text NOT NULL,
    rotates_at timestamp with time zone,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone
);
CREATE TABLE interlock.bus_limits (
    org_id uuid NOT NULL,
    target text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    source text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    rate integer NOT NULL,
    window_seconds double precision DEFAULT 1 NOT NULL,
    burst integer DEFAULT 0 NOT NULL,
    cooldown_seconds double precision DEFAULT 0 NOT NULL,
    enforcement interlock.enforcement DEFAULT 'strict'::interlock.enforcement NOT NULL,
    version bigint NOT NULL,
    changed_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    changed_by text NOT NULL,
    target_service text GENERATED ALWAYS AS (NULLIF(target, ''::text)) STORED COLLATE pg_catalog."C",
    source_service text GENERATED ALWAYS AS (NULLIF(source, ''::text)) STORED COLLATE pg_catalog."C",
    CONSTRAINT bus_limits_check CHECK (((target = ''::text) = (name = ''::text))),
    CONSTRAINT bus_limits_check1 CHECK (((target <> ''::text) OR (source <> ''::text)))
);
CREATE TABLE interlock.bus_prefetches (
    org_id uuid NOT NULL,
    target text NOT NULL,
    name text NOT NULL,
    slot bigint NOT NULL,
    holders integer NOT NULL,
    source text DEFAULT ''::text NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');
CREATE TABLE interlock.bus_replay_items (
    replay_id uuid NOT NULL,
    "position" bigint NOT NULL,
    command_id uuid NOT NULL,
    source text NOT NULL,
    target text NOT NULL,
    name text NOT NULL,
    payload text NOT NULL,
    message_id bigint
);
CREATE TABLE interlock.bus_replays (
    replay_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    origin text NOT NULL,
    filters jsonb NOT NULL,
    reason text NOT NULL,
    operator text NOT NULL,
    dry_run boolean NOT NULL,
    rate double precision NOT NULL,
    most bigint NOT NULL,
    state interlock.replay_state DEFAULT 'Selecting'::interlock.replay_state NOT NULL,
    task_id uuid,
    selected bigint,
    sent bigint DEFAULT 0 NOT NULL,
    failed bigint DEFAULT 0 NOT NULL,
    detail text,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    due_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    ended_at timestamp with time zone
);
CREATE TABLE interlock.bus_route_health (
    org_id uuid NOT NULL,
    target text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    status interlock.route_status NOT NULL,
    since timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    checked_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    depth bigint DEFAULT 0 NOT NULL,
    in_flight bigint DEFAULT 0 NOT NULL,
    oldest_age double precision,
    dead_letters bigint DEFAULT 0 NOT NULL,
    rises integer DEFAULT 0 NOT NULL,
    idle_looks integer DEFAULT 0 NOT NULL,
    misroutes bigint DEFAULT 0 NOT NULL
);
CREATE TABLE interlock.bus_routes (
    org_id uuid NOT NULL,
    target text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    queue text,
    dlq text,
    dag_name text,
    job_name text,
    dedupe_mode interlock.dedupe_mode DEFAULT 'none'::interlock.dedupe_mode NOT NULL,
    dedupe_seconds double precision DEFAULT 300 NOT NULL,
    expected_drain_seconds double precision DEFAULT 300 NOT NULL,
    fairness jsonb DEFAULT '{}'::jsonb NOT NULL,
    expires_at timestamp with time zone,
    version bigint NOT NULL,
    changed_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    changed_by text NOT NULL,
    CONSTRAINT bus_routes_check CHECK (((queue IS NULL) <> (job_name IS NULL))),
    CONSTRAINT bus_routes_check1 CHECK (((queue IS NULL) = (dlq IS NULL)))
);
CREATE TABLE interlock.bus_shares (
    minute timestamp with time zone NOT NULL,
    org_id uuid NOT NULL,
    target text NOT NULL,
    name text NOT NULL,
    source text NOT NULL,
    dispatched bigint NOT NULL
);
CREATE TABLE interlock.bus_strikes (
    strike_id bigint NOT NULL,
    org_id uuid NOT NULL,
    source text NOT NULL,
    target text NOT NULL,
    name text NOT NULL,
    source_share double precision NOT NULL,
    competing_share double precision NOT NULL,
    dispatch_volume bigint NOT NULL,
    struck_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
ALTER TABLE interlock.bus_strikes ALTER COLUMN strike_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.bus_strikes_strike_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.bus_telemetry (
    batch_id bigint NOT NULL,
    org_id uuid NOT NULL,
    events json NOT NULL,
    events_in integer NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0', autovacuum_vacuum_insert_threshold='-1', autovacuum_analyze_threshold='100000', autovacuum_analyze_scale_factor='1');
ALTER TABLE ONLY interlock.bus_telemetry ALTER COLUMN events SET STORAGE EXTERNAL;
ALTER TABLE interlock.bus_telemetry ALTER COLUMN batch_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.bus_telemetry_batch_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.bus_telemetry_queues (
    org_id uuid NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    last_received_at timestamp with time zone
);
CREATE TABLE interlock.bus_versions (
    org_id uuid NOT NULL,
    kind interlock.bus_kind NOT NULL,
    version bigint NOT NULL
);
CREATE TABLE interlock.capabilities (
    capability_id uuid DEFAULT uuidv7() NOT NULL,
    task_id uuid NOT NULL,
    attempt integer NOT NULL,
    grants json NOT NULL,
    expires_at timestamp with time zone NOT NULL
);
CREATE SEQUENCE interlock.commits
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE interlock.cron_state (
    job_id uuid NOT NULL,
    source jsonb NOT NULL,
    last_at timestamp with time zone NOT NULL,
    next_at timestamp with time zone,
    covered_to timestamp with time zone
);
CREATE TABLE interlock.dag_version_jobs (
    dag_version uuid NOT NULL,
    job_id uuid NOT NULL
);
CREATE TABLE interlock.dag_versions (
    dag_version uuid DEFAULT uuidv7() NOT NULL,
    dag_id uuid NOT NULL,
    org_id uuid NOT NULL,
    content_hash text NOT NULL,
    document json NOT NULL,
    state interlock.dag_state NOT NULL,
    deployed_by text NOT NULL,
    deployed_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    current_at timestamp with time zone,
    build_mark bigint,
    build_round integer DEFAULT 0 NOT NULL,
    retired_at timestamp with time zone
);
CREATE TABLE interlock.dags (
    dag_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    name text NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    paused_at timestamp with time zone,
    paused_by text,
    pause_reason text,
    deleted_at timestamp with time zone,
    deleted_by text
);
CREATE TABLE interlock.dataset_events (
    event_id bigint NOT NULL,
    org_id uuid NOT NULL,
    dataset_uuid uuid NOT NULL,
    dataset_version uuid NOT NULL,
    scope text NOT NULL,
    cursor bigint,
    partition_key text,
    range_start bigint,
    range_end bigint,
    task_id uuid NOT NULL,
    attempt integer NOT NULL,
    accepted_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    commit_id bigint DEFAULT 0 NOT NULL
);
ALTER TABLE interlock.dataset_events ALTER COLUMN event_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.dataset_events_event_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.dataset_versions (
    dataset_version uuid NOT NULL,
    dataset_uuid uuid NOT NULL,
    org_id uuid NOT NULL,
    job_id uuid,
    output_index integer DEFAULT 0 NOT NULL,
    storage text DEFAULT 'parquet'::text NOT NULL,
    unique_key text[] DEFAULT '{}'::text[] NOT NULL,
    schema_hash text,
    schema json,
    progress text,
    cursor bigint,
    commit_id bigint DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    purged_at timestamp with time zone,
    replace_rows boolean DEFAULT false NOT NULL
);
CREATE TABLE interlock.datasets (
    dataset_uuid uuid NOT NULL,
    org_id uuid NOT NULL,
    current_version uuid NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    dag_name text,
    job_name text,
    output_name text
);
CREATE TABLE interlock.edges (
    job_id uuid NOT NULL,
    input_index integer NOT NULL,
    org_id uuid NOT NULL,
    dataset_uuid uuid NOT NULL,
    dataset_version uuid NOT NULL,
    floating boolean NOT NULL,
    condition text,
    active boolean DEFAULT true NOT NULL,
    reconciled_to bigint DEFAULT 0 NOT NULL,
    pointed_at bigint DEFAULT 0 NOT NULL
);
CREATE TABLE interlock.exports (
    export_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    job_id uuid NOT NULL,
    run_id uuid NOT NULL,
    format text NOT NULL,
    stretch integer NOT NULL,
    last_index bigint NOT NULL,
    next_index bigint DEFAULT 0 NOT NULL,
    task_id uuid,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
CREATE TABLE interlock.file_sweeps (
    place text NOT NULL,
    dataset_version uuid,
    task_id uuid,
    attempt integer,
    due_at timestamp with time zone NOT NULL,
    final_at timestamp with time zone NOT NULL,
    buffer boolean DEFAULT false NOT NULL
);
CREATE TABLE interlock.hooks (
    hook_id text NOT NULL,
    org_id uuid NOT NULL,
    dag_name text NOT NULL,
    job_name text NOT NULL,
    secret_hash bytea NOT NULL,
    secret text,
    previous_hash bytea,
    previous_secret text,
    previous_until timestamp with time zone,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    rotated_at timestamp with time zone,
    sealed bytea,
    previous_sealed bytea
);
CREATE TABLE interlock.idempotency_keys (
    org_id uuid NOT NULL,
    endpoint text NOT NULL,
    key text NOT NULL,
    request_hash bytea NOT NULL,
    status integer,
    response json,
    expires_at timestamp with time zone NOT NULL
);
CREATE TABLE interlock.ingest_chunks (
    run_id uuid NOT NULL,
    part integer NOT NULL,
    first_byte bigint NOT NULL,
    end_byte bigint NOT NULL,
    first_line bigint NOT NULL,
    lines bigint NOT NULL,
    rows bigint NOT NULL,
    reached json
);
CREATE TABLE interlock.ingests (
    run_id uuid NOT NULL,
    org_id uuid NOT NULL,
    source json NOT NULL,
    step interlock.ingest_step DEFAULT 'Loading'::interlock.ingest_step NOT NULL,
    load_task uuid,
    total bigint,
    last_index bigint,
    enqueued_index bigint DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    settled_at timestamp with time zone
);
CREATE TABLE interlock.invalidations (
    invalidation_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    dataset_uuid uuid NOT NULL,
    dataset_version uuid NOT NULL,
    range_start bigint NOT NULL,
    range_end bigint NOT NULL,
    reason text NOT NULL,
    asked_by text NOT NULL,
    scopes integer NOT NULL,
    commit_id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
CREATE TABLE interlock.job_cursors (
    job_id uuid NOT NULL,
    input_index integer NOT NULL,
    committed bigint DEFAULT '-1'::integer NOT NULL,
    upto bigint,
    input_commit bigint,
    task_id uuid
);
CREATE TABLE interlock.jobs (
    job_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    dag_name text,
    name text,
    operator text NOT NULL,
    runtime text NOT NULL,
    queue text,
    config json NOT NULL,
    priority smallint NOT NULL,
    max_attempts integer NOT NULL,
    backoff_seconds double precision NOT NULL,
    backoff_factor double precision NOT NULL,
    backoff_cap_seconds double precision NOT NULL,
    jitter double precision NOT NULL,
    non_retryable text[] NOT NULL,
    lease_seconds double precision NOT NULL,
    timeout_seconds double precision NOT NULL,
    max_concurrency integer,
    concurrency_key text,
    max_concurrency_per_key integer,
    outputs jsonb NOT NULL,
    definition_hash bytea NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    current boolean DEFAULT true NOT NULL,
    active boolean DEFAULT true NOT NULL,
    inputs jsonb DEFAULT '[]'::jsonb NOT NULL,
    wait_for_all boolean DEFAULT true NOT NULL,
    per_update boolean DEFAULT false NOT NULL,
    max_queue_depth integer,
    max_queue_age double precision,
    source jsonb,
    swapped_at timestamp with time zone,
    deleted_at timestamp with time zone,
    partition text,
    paused boolean DEFAULT false NOT NULL,
    wake_from uuid
);
CREATE TABLE interlock.lease_alarms (
    due_at timestamp with time zone NOT NULL,
    tasks integer NOT NULL,
    run_id uuid,
    first_index bigint,
    last_index bigint,
    task_ids uuid[],
    shard integer DEFAULT 0 NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');
CREATE TABLE interlock.materialisations (
    job_id uuid NOT NULL,
    input_index integer NOT NULL,
    range_start bigint NOT NULL,
    range_end bigint NOT NULL,
    input_commit bigint NOT NULL,
    done_commit bigint,
    undone_since bigint DEFAULT 0 NOT NULL,
    changed_start bigint,
    changed_end bigint,
    task_id uuid NOT NULL,
    task_shard integer DEFAULT 0 NOT NULL
)
WITH (fillfactor='80');
CREATE TABLE interlock.members (
    issuer text NOT NULL,
    subject text NOT NULL,
    org_id uuid NOT NULL,
    role interlock.role NOT NULL,
    since timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    by text NOT NULL
);
CREATE TABLE interlock.minute_counts (
    org_id uuid NOT NULL,
    minute timestamp with time zone NOT NULL,
    completed bigint DEFAULT 0 NOT NULL,
    failed bigint DEFAULT 0 NOT NULL,
    canceled bigint DEFAULT 0 NOT NULL
);
CREATE TABLE interlock.operator_state (
    job_id uuid NOT NULL,
    name text NOT NULL,
    state json NOT NULL,
    updated_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    version bigint DEFAULT 1 NOT NULL
);
CREATE TABLE interlock.operators (
    queue text NOT NULL,
    operator text NOT NULL,
    worker_id text NOT NULL,
    last_seen_at timestamp with time zone NOT NULL
);
COMMENT ON TABLE interlock.operators IS 'Functions that workers have declared, by the queue that they work on';
COMMENT ON COLUMN interlock.operators.worker_id IS 'The worker that reported it last';
CREATE TABLE interlock.org_secrets (
    org_id uuid NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    sealed bytea NOT NULL,
    hosts text[] NOT NULL,
    version integer DEFAULT 1 NOT NULL,
    set_by text NOT NULL,
    set_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
CREATE TABLE interlock.orgs (
    org_id uuid DEFAULT uuidv7() NOT NULL,
    name text NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    operators text[]
);
CREATE TABLE interlock.outbox (
    outbox_id bigint NOT NULL,
    kind text NOT NULL,
    target text NOT NULL,
    body json NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    dedupe_key text,
    due_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    tries integer DEFAULT 0 NOT NULL,
    org_id uuid,
    share_id uuid
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');
ALTER TABLE interlock.outbox ALTER COLUMN outbox_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.outbox_outbox_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.output_commits (
    task_id uuid NOT NULL,
    output_index integer NOT NULL,
    dataset_uuid uuid NOT NULL,
    dataset_version uuid NOT NULL,
    org_id uuid NOT NULL,
    attempt integer NOT NULL,
    body json NOT NULL,
    committed_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
CREATE TABLE interlock.partitions (
    dataset_version uuid NOT NULL,
    range_start bigint NOT NULL,
    range_end bigint NOT NULL,
    commit_id bigint NOT NULL,
    input_commit bigint DEFAULT 0 NOT NULL,
    task_id uuid NOT NULL,
    attempt integer NOT NULL,
    location text,
    row_count bigint,
    bytes bigint,
    schema_hash text,
    committed_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
)
WITH (fillfactor='80');
CREATE TABLE interlock.pauses (
    job_id uuid NOT NULL,
    cause_id uuid NOT NULL,
    bulk boolean NOT NULL,
    path uuid[] NOT NULL,
    reason text NOT NULL,
    since timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
CREATE TABLE interlock.publications (
    org_id uuid NOT NULL,
    name text NOT NULL,
    dataset_uuid uuid NOT NULL,
    dag_id uuid,
    read_roles interlock.role[] DEFAULT '{reader,writer,admin}'::interlock.role[] NOT NULL
);
CREATE TABLE interlock.query_audit (
    query_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    user_name text,
    key_id text,
    task_id uuid,
    attempt integer,
    mode text NOT NULL,
    sql_sha256 bytea NOT NULL,
    dataset_versions uuid[] DEFAULT '{}'::uuid[] NOT NULL,
    outcome text DEFAULT 'Running'::text NOT NULL,
    code text,
    row_count bigint,
    bytes bigint,
    truncated boolean DEFAULT false NOT NULL,
    batch_task_id uuid,
    export_prefix text,
    export_files json,
    started_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    ended_at timestamp with time zone,
    statement text
);
CREATE TABLE interlock.queue_messages (
    message_id bigint NOT NULL,
    queue text NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    visible_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    enqueued_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    receives integer DEFAULT 0 NOT NULL,
    receipt uuid,
    dead_at timestamp with time zone,
    dedupe_key text,
    body json NOT NULL,
    org_id uuid,
    share_id uuid
)
WITH (fillfactor='80', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0', toast_tuple_target='8160', autovacuum_vacuum_insert_threshold='-1', autovacuum_analyze_threshold='100000', autovacuum_analyze_scale_factor='1');
ALTER TABLE interlock.queue_messages ALTER COLUMN message_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.queue_messages_message_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.reruns (
    run_id uuid NOT NULL,
    org_id uuid NOT NULL,
    of_run uuid NOT NULL,
    statuses interlock.task_status[],
    error_class text,
    upload_id uuid NOT NULL,
    next_index bigint NOT NULL,
    last_index bigint NOT NULL,
    parts json DEFAULT '[]'::json NOT NULL,
    copied bigint DEFAULT 0 NOT NULL
);
CREATE TABLE interlock.run_deltas (
    run_id uuid NOT NULL,
    queued integer DEFAULT 0 NOT NULL,
    running integer DEFAULT 0 NOT NULL,
    completed integer DEFAULT 0 NOT NULL,
    failed integer DEFAULT 0 NOT NULL,
    dead integer DEFAULT 0 NOT NULL,
    canceled integer DEFAULT 0 NOT NULL,
    error_class text,
    errors integer DEFAULT 0 NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000');
CREATE TABLE interlock.run_origins (
    run_id uuid NOT NULL,
    first_index bigint NOT NULL,
    origins bigint[] NOT NULL
);
CREATE TABLE interlock.run_receipts (
    run_id uuid NOT NULL,
    org_id uuid NOT NULL,
    ended_at timestamp with time zone NOT NULL,
    next_index bigint DEFAULT 0 NOT NULL,
    completed bigint DEFAULT 0 NOT NULL,
    failed bigint DEFAULT 0 NOT NULL,
    canceled bigint DEFAULT 0 NOT NULL,
    ids bytea NOT NULL,
    outcomes bytea NOT NULL,
    signed text,
    key json
);
CREATE TABLE interlock.runs (
    run_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    job_id uuid NOT NULL,
    shard integer DEFAULT 0 NOT NULL,
    state interlock.run_state NOT NULL,
    total bigint,
    last_index bigint NOT NULL,
    range_size integer NOT NULL,
    latched boolean NOT NULL,
    swept_index bigint DEFAULT 0 NOT NULL,
    cancel_requested boolean DEFAULT false NOT NULL,
    queued bigint DEFAULT 0 NOT NULL,
    running bigint DEFAULT 0 NOT NULL,
    completed bigint DEFAULT 0 NOT NULL,
    failed bigint DEFAULT 0 NOT NULL,
    dead bigint DEFAULT 0 NOT NULL,
    canceled bigint DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    ended_at timestamp with time zone,
    cancel_index bigint DEFAULT 0 NOT NULL,
    paused boolean DEFAULT false NOT NULL,
    ingesting boolean DEFAULT false NOT NULL,
    wake_index bigint,
    reason text,
    max_concurrency integer,
    rate_key text,
    rate_per_second double precision,
    tolerated_share double precision,
    deadline_at timestamp with time zone,
    delete_requested boolean DEFAULT false NOT NULL,
    open boolean DEFAULT false NOT NULL,
    priority smallint,
    held_from bigint,
    retention_days double precision,
    deadline_seconds double precision,
    errors jsonb DEFAULT '{}'::jsonb NOT NULL,
    rerun_of uuid
);
CREATE TABLE interlock.seals (
    name text NOT NULL,
    sealed bytea NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT seals_name_check CHECK ((name = 'platform'::text))
);
CREATE TABLE interlock.service_polls (
    org_id uuid NOT NULL,
    service text NOT NULL COLLATE pg_catalog."C",
    polled_at timestamp with time zone NOT NULL
);
CREATE TABLE interlock.services (
    org_id uuid NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    description text DEFAULT ''::text NOT NULL,
    dispatch_mode interlock.dispatch_mode,
    version bigint NOT NULL,
    changed_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    changed_by text NOT NULL
);
CREATE TABLE interlock.sessions (
    session_id text NOT NULL,
    org_id uuid NOT NULL,
    key_id text,
    issuer text,
    subject text,
    csrf text NOT NULL,
    secret_hash bytea NOT NULL,
    previous_hash bytea,
    rotated_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    revoked_at timestamp with time zone,
    CONSTRAINT sessions_check CHECK ((((key_id IS NULL) = (subject IS NOT NULL)) AND ((issuer IS NULL) = (subject IS NULL))))
);
CREATE SEQUENCE interlock.shards
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE interlock.sign_in_links (
    token_hash bytea NOT NULL,
    key_id text NOT NULL,
    expires_at timestamp with time zone NOT NULL
);
CREATE TABLE interlock.signing_keys (
    kid text NOT NULL,
    public_jwk jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    retired_at timestamp with time zone,
    verify_until timestamp with time zone,
    kms_key text,
    made_here boolean DEFAULT true NOT NULL
);
CREATE TABLE interlock.slots (
    task_id uuid NOT NULL,
    job_id uuid NOT NULL,
    slot_key text
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');
CREATE TABLE interlock.source_tasks (
    job_id uuid NOT NULL,
    task_id uuid NOT NULL,
    restarts integer DEFAULT 0 NOT NULL,
    started_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
CREATE TABLE interlock.sweeps (
    name text NOT NULL,
    cursor uuid,
    "position" bigint,
    task_id uuid
);
CREATE TABLE interlock.task_logs (
    task_id uuid NOT NULL,
    attempt integer NOT NULL,
    lease_token uuid NOT NULL,
    start bigint NOT NULL,
    size integer NOT NULL,
    log_id bigint NOT NULL,
    org_id uuid NOT NULL,
    job_id uuid NOT NULL,
    run_id uuid,
    text text,
    pack uuid,
    pack_offset integer,
    written_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
);
COMMENT ON TABLE interlock.task_logs IS 'Chunks of the logs of attempts; deleted with their task';
ALTER TABLE interlock.task_logs ALTER COLUMN log_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.task_logs_log_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.tasks_0 (
    shard integer DEFAULT 0 CONSTRAINT tasks_shard_not_null NOT NULL,
    task_id uuid CONSTRAINT tasks_task_id_not_null NOT NULL,
    org_id uuid CONSTRAINT tasks_org_id_not_null NOT NULL,
    job_id uuid CONSTRAINT tasks_job_id_not_null NOT NULL,
    run_id uuid,
    task_index bigint,
    status interlock.task_status DEFAULT 'Queued'::interlock.task_status CONSTRAINT tasks_status_not_null NOT NULL,
    attempt integer DEFAULT 1 CONSTRAINT tasks_attempt_not_null NOT NULL,
    max_attempts integer CONSTRAINT tasks_max_attempts_not_null NOT NULL,
    priority smallint CONSTRAINT tasks_priority_not_null NOT NULL,
    cancel_requested boolean DEFAULT false CONSTRAINT tasks_cancel_requested_not_null NOT NULL,
    parked boolean DEFAULT false CONSTRAINT tasks_parked_not_null NOT NULL,
    late_reply boolean DEFAULT false CONSTRAINT tasks_late_reply_not_null NOT NULL,
    dead boolean DEFAULT false CONSTRAINT tasks_dead_not_null NOT NULL,
    lease_token uuid,
    lease_expires_at timestamp with time zone,
    timeout_at timestamp with time zone,
    retry_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT interlock.clock() CONSTRAINT tasks_created_at_not_null NOT NULL,
    queued_at timestamp with time zone DEFAULT interlock.clock() CONSTRAINT tasks_queued_at_not_null NOT NULL,
    started_at timestamp with time zone,
    ended_at timestamp with time zone,
    progress real,
    worker_id text,
    dedupe_key text,
    slot_key text,
    progress_text text,
    payload json CONSTRAINT tasks_payload_not_null NOT NULL,
    result json,
    listed_status interlock.task_status GENERATED ALWAYS AS (
CASE
    WHEN ((run_id IS NULL) OR (status = ANY (ARRAY['Failed'::interlock.task_status, 'Canceled'::interlock.task_status]))) THEN status
    ELSE NULL::interlock.task_status
END) STORED,
    pack uuid,
    pack_offset integer,
    pack_length integer
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_cost_delay='0', fillfactor='35');
CREATE TABLE interlock.triggers (
    trigger_id bigint NOT NULL,
    org_id uuid NOT NULL,
    job_id uuid NOT NULL,
    dedupe_key text NOT NULL,
    payload json NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');
ALTER TABLE interlock.triggers ALTER COLUMN trigger_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME interlock.triggers_trigger_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE interlock.uploads (
    upload_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    parts integer NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    sweep_at timestamp with time zone NOT NULL
);
CREATE TABLE interlock.webhook_crossings (
    run_id uuid NOT NULL,
    webhook_id uuid NOT NULL,
    event text NOT NULL
);
CREATE TABLE interlock.webhook_deliveries (
    delivery_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    webhook_id uuid NOT NULL,
    event text NOT NULL,
    run_id uuid,
    body text NOT NULL,
    status interlock.delivery_status DEFAULT 'Pending'::interlock.delivery_status NOT NULL,
    taken boolean DEFAULT false NOT NULL,
    tries integer DEFAULT 0 NOT NULL,
    due_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    waiting_since timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    ended_at timestamp with time zone,
    http_status integer,
    reason text
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000');
CREATE TABLE interlock.webhooks (
    webhook_id uuid DEFAULT uuidv7() NOT NULL,
    org_id uuid NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    url text NOT NULL,
    events text[] NOT NULL,
    dag_name text,
    job_name text,
    failed_share double precision,
    done_share double precision,
    secret text,
    key_version integer DEFAULT 1 NOT NULL,
    previous_secret text,
    previous_until timestamp with time zone,
    paused boolean DEFAULT false NOT NULL,
    failures integer DEFAULT 0 NOT NULL,
    resting_until timestamp with time zone,
    created_by text NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    sealed bytea,
    previous_sealed bytea
);
CREATE TABLE interlock.worker_tokens (
    token_id text NOT NULL,
    name text NOT NULL,
    runtimes text[],
    secret_hash bytea NOT NULL,
    created_at timestamp with time zone DEFAULT interlock.clock() NOT NULL,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone
);
CREATE TABLE interlock.workers (
    worker_id text NOT NULL,
    queue text NOT NULL,
    last_seen_at timestamp with time zone NOT NULL
);
CREATE TABLE public.interlock_migrations (
    version integer NOT NULL,
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);
ALTER TABLE ONLY interlock.tasks ATTACH PARTITION interlock.tasks_0 FOR VALUES IN (0);
ALTER TABLE ONLY interlock.api_keys
    ADD CONSTRAINT api_keys_pkey PRIMARY KEY (key_id);
ALTER TABLE ONLY interlock.attempts
    ADD CONSTRAINT attempts_pkey PRIMARY KEY (task_id, attempt, lease_token);
ALTER TABLE ONLY interlock.backfills
    ADD CONSTRAINT backfills_pkey PRIMARY KEY (run_id);
ALTER TABLE ONLY interlock.buffer_publishes
    ADD CONSTRAINT buffer_publishes_pkey PRIMARY KEY (publish_id);
ALTER TABLE ONLY interlock.buffer_publishes
    ADD CONSTRAINT buffer_publishes_task_id_attempt_dataset_uuid_batch_uri_key UNIQUE (task_id, attempt, dataset_uuid, batch_uri);
ALTER TABLE ONLY interlock.bulk_operations
    ADD CONSTRAINT bulk_operations_pkey PRIMARY KEY (operation_id);
ALTER TABLE ONLY interlock.bundle_names
    ADD CONSTRAINT bundle_names_pkey PRIMARY KEY (org_id, name);
ALTER TABLE ONLY interlock.bundle_sweeps
    ADD CONSTRAINT bundle_sweeps_pkey PRIMARY KEY (org_id, sha256);
ALTER TABLE ONLY interlock.bundles
    ADD CONSTRAINT bundles_pkey PRIMARY KEY (org_id, sha256);
ALTER TABLE ONLY interlock.bus_acls
    ADD CONSTRAINT bus_acls_pkey PRIMARY KEY (org_id, target, name, source);
ALTER TABLE ONLY interlock.bus_alert_emails
    ADD CONSTRAINT bus_alert_emails_pkey PRIMARY KEY (email_id);
ALTER TABLE ONLY interlock.bus_alert_settings
    ADD CONSTRAINT bus_alert_settings_pkey PRIMARY KEY (org_id, event);
ALTER TABLE ONLY interlock.bus_alerts
    ADD CONSTRAINT bus_alerts_org_id_event_opened_at_key UNIQUE (org_id, event, opened_at);
ALTER TABLE ONLY interlock.bus_alerts
    ADD CONSTRAINT bus_alerts_pkey PRIMARY KEY (alert_id);
ALTER TABLE ONLY interlock.bus_archive
    ADD CONSTRAINT bus_archive_pkey PRIMARY KEY (archive_id);
ALTER TABLE ONLY interlock.bus_archives
    ADD CONSTRAINT bus_archives_pkey PRIMARY KEY (org_id);
ALTER TABLE ONLY interlock.bus_bans
    ADD CONSTRAINT bus_bans_pkey PRIMARY KEY (org_id, source, target, name);
ALTER TABLE ONLY interlock.bus_changes
    ADD CONSTRAINT bus_changes_pkey PRIMARY KEY (change_id);
ALTER TABLE ONLY interlock.bus_dedupe
    ADD CONSTRAINT bus_dedupe_pkey PRIMARY KEY (org_id, source, command_id);
ALTER TABLE ONLY interlock.bus_fates
    ADD CONSTRAINT bus_fates_pkey PRIMARY KEY (org_id, source, command_id);
ALTER TABLE ONLY interlock.bus_handoffs
    ADD CONSTRAINT bus_handoffs_pkey PRIMARY KEY (handoff_id);
ALTER TABLE ONLY interlock.bus_keys
    ADD CONSTRAINT bus_keys_pkey PRIMARY KEY (org_id, service, number);
ALTER TABLE ONLY interlock.bus_limits
    ADD CONSTRAINT bus_limits_pkey PRIMARY KEY (org_id, target, name, source);
ALTER TABLE ONLY interlock.bus_prefetches
    ADD CONSTRAINT bus_prefetches_pkey PRIMARY KEY (org_id, target, name, source);
ALTER TABLE ONLY interlock.bus_replay_items
    ADD CONSTRAINT bus_replay_items_pkey PRIMARY KEY (replay_id, "position");
ALTER TABLE ONLY interlock.bus_replays
    ADD CONSTRAINT bus_replays_pkey PRIMARY KEY (replay_id);
ALTER TABLE ONLY interlock.bus_route_health
    ADD CONSTRAINT bus_route_health_pkey PRIMARY KEY (org_id, target, name);
ALTER TABLE ONLY interlock.bus_routes
    ADD CONSTRAINT bus_routes_pkey PRIMARY KEY (org_id, target, name);
ALTER TABLE ONLY interlock.bus_shares
    ADD CONSTRAINT bus_shares_pkey PRIMARY KEY (minute, org_id, target, name, source);
ALTER TABLE ONLY interlock.bus_strikes
    ADD CONSTRAINT bus_strikes_pkey PRIMARY KEY (strike_id);
ALTER TABLE ONLY interlock.bus_telemetry
    ADD CONSTRAINT bus_telemetry_pkey PRIMARY KEY (batch_id);
ALTER TABLE ONLY interlock.bus_telemetry_queues
    ADD CONSTRAINT bus_telemetry_queues_pkey PRIMARY KEY (org_id);
ALTER TABLE ONLY interlock.bus_versions
    ADD CONSTRAINT bus_versions_pkey PRIMARY KEY (org_id, kind);
ALTER TABLE ONLY interlock.bus_windows
    ADD CONSTRAINT bus_windows_pkey PRIMARY KEY (org_id, target, name, source);
ALTER TABLE ONLY interlock.capabilities
    ADD CONSTRAINT capabilities_pkey PRIMARY KEY (capability_id);
ALTER TABLE ONLY interlock.cron_state
    ADD CONSTRAINT cron_state_pkey PRIMARY KEY (job_id);
ALTER TABLE ONLY interlock.dag_version_jobs
    ADD CONSTRAINT dag_version_jobs_pkey PRIMARY KEY (dag_version, job_id);
ALTER TABLE ONLY interlock.dag_versions
    ADD CONSTRAINT dag_versions_pkey PRIMARY KEY (dag_version);
ALTER TABLE ONLY interlock.dags
    ADD CONSTRAINT dags_org_id_name_key UNIQUE (org_id, name);
ALTER TABLE ONLY interlock.dags
    ADD CONSTRAINT dags_pkey PRIMARY KEY (dag_id);
ALTER TABLE ONLY interlock.dataset_events
    ADD CONSTRAINT dataset_events_pkey PRIMARY KEY (event_id);
ALTER TABLE ONLY interlock.dataset_versions
    ADD CONSTRAINT dataset_versions_pkey PRIMARY KEY (dataset_version);
ALTER TABLE ONLY interlock.datasets
    ADD CONSTRAINT datasets_pkey PRIMARY KEY (dataset_uuid);
ALTER TABLE ONLY interlock.edges
    ADD CONSTRAINT edges_pkey PRIMARY KEY (job_id, input_index);
ALTER TABLE ONLY interlock.exports
    ADD CONSTRAINT exports_pkey PRIMARY KEY (export_id);
ALTER TABLE ONLY interlock.file_sweeps
    ADD CONSTRAINT file_sweeps_pkey PRIMARY KEY (place);
ALTER TABLE ONLY interlock.hooks
    ADD CONSTRAINT hooks_org_id_dag_name_job_name_key UNIQUE (org_id, dag_name, job_name);
ALTER TABLE ONLY interlock.hooks
    ADD CONSTRAINT hooks_pkey PRIMARY KEY (hook_id);
ALTER TABLE ONLY interlock.idempotency_keys
    ADD CONSTRAINT idempotency_keys_pkey PRIMARY KEY (org_id, endpoint, key);
ALTER TABLE ONLY interlock.ingest_chunks
    ADD CONSTRAINT ingest_chunks_pkey PRIMARY KEY (run_id, part, first_byte);
ALTER TABLE ONLY interlock.ingests
    ADD CONSTRAINT ingests_pkey PRIMARY KEY (run_id);
ALTER TABLE ONLY interlock.invalidations
    ADD CONSTRAINT invalidations_pkey PRIMARY KEY (invalidation_id);
ALTER TABLE ONLY interlock.job_cursors
    ADD CONSTRAINT job_cursors_pkey PRIMARY KEY (job_id, input_index);
ALTER TABLE ONLY interlock.jobs
    ADD CONSTRAINT jobs_pkey PRIMARY KEY (job_id);
ALTER TABLE ONLY interlock.materialisations
    ADD CONSTRAINT materialisations_pkey PRIMARY KEY (job_id, input_index, range_start, range_end);
ALTER TABLE ONLY interlock.members
    ADD CONSTRAINT members_pkey PRIMARY KEY (issuer, subject, org_id);
ALTER TABLE ONLY interlock.minute_counts
    ADD CONSTRAINT minute_counts_pkey PRIMARY KEY (org_id, minute);
ALTER TABLE ONLY interlock.operator_state
    ADD CONSTRAINT operator_state_pkey PRIMARY KEY (job_id, name);
ALTER TABLE ONLY interlock.operators
    ADD CONSTRAINT operators_pkey PRIMARY KEY (queue, operator);
ALTER TABLE ONLY interlock.org_secrets
    ADD CONSTRAINT org_secrets_pkey PRIMARY KEY (org_id, name);
ALTER TABLE ONLY interlock.orgs
    ADD CONSTRAINT orgs_name_key UNIQUE (name);
ALTER TABLE ONLY interlock.orgs
    ADD CONSTRAINT orgs_pkey PRIMARY KEY (org_id);
ALTER TABLE ONLY interlock.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (outbox_id);
ALTER TABLE ONLY interlock.output_commits
    ADD CONSTRAINT output_commits_pkey PRIMARY KEY (task_id, output_index, dataset_uuid);
ALTER TABLE ONLY interlock.partitions
    ADD CONSTRAINT partitions_pkey PRIMARY KEY (dataset_version, range_start);
ALTER TABLE ONLY interlock.pauses
    ADD CONSTRAINT pauses_pkey PRIMARY KEY (job_id, cause_id);
ALTER TABLE ONLY interlock.publications
    ADD CONSTRAINT publications_pkey PRIMARY KEY (org_id, name);
ALTER TABLE ONLY interlock.query_audit
    ADD CONSTRAINT query_audit_pkey PRIMARY KEY (query_id);
ALTER TABLE ONLY interlock.queue_messages
    ADD CONSTRAINT queue_messages_pkey PRIMARY KEY (message_id);
ALTER TABLE ONLY interlock.reruns
    ADD CONSTRAINT reruns_pkey PRIMARY KEY (run_id);
ALTER TABLE ONLY interlock.run_origins
    ADD CONSTRAINT run_origins_pkey PRIMARY KEY (run_id, first_index);
ALTER TABLE ONLY interlock.run_receipts
    ADD CONSTRAINT run_receipts_pkey PRIMARY KEY (run_id);
ALTER TABLE ONLY interlock.runs
    ADD CONSTRAINT runs_pkey PRIMARY KEY (run_id);
ALTER TABLE ONLY interlock.seals
    ADD CONSTRAINT seals_pkey PRIMARY KEY (name);
ALTER TABLE ONLY interlock.service_polls
    ADD CONSTRAINT service_polls_pkey PRIMARY KEY (org_id, service);
ALTER TABLE ONLY interlock.services
    ADD CONSTRAINT services_pkey PRIMARY KEY (org_id, name);
ALTER TABLE ONLY interlock.sessions
    ADD CONSTRAINT sessions_pkey PRIMARY KEY (session_id);
ALTER TABLE ONLY interlock.sign_in_links
    ADD CONSTRAINT sign_in_links_pkey PRIMARY KEY (token_hash);
ALTER TABLE ONLY interlock.signing_keys
    ADD CONSTRAINT signing_keys_pkey PRIMARY KEY (kid);
ALTER TABLE ONLY interlock.slots
    ADD CONSTRAINT slots_pkey PRIMARY KEY (task_id);
ALTER TABLE ONLY interlock.source_tasks
    ADD CONSTRAINT source_tasks_pkey PRIMARY KEY (job_id);
ALTER TABLE ONLY interlock.sweeps
    ADD CONSTRAINT sweeps_pkey PRIMARY KEY (name);
ALTER TABLE ONLY interlock.task_logs
    ADD CONSTRAINT task_logs_pkey PRIMARY KEY (task_id, attempt, lease_token, start);
ALTER TABLE ONLY interlock.tasks_0
    ADD CONSTRAINT tasks_0_pkey PRIMARY KEY (task_id);
ALTER TABLE ONLY interlock.triggers
    ADD CONSTRAINT triggers_pkey PRIMARY KEY (trigger_id);
ALTER TABLE ONLY interlock.uploads
    ADD CONSTRAINT uploads_pkey PRIMARY KEY (upload_id);
ALTER TABLE ONLY interlock.webhook_crossings
    ADD CONSTRAINT webhook_crossings_pkey PRIMARY KEY (run_id, webhook_id, event);
ALTER TABLE ONLY interlock.webhook_deliveries
    ADD CONSTRAINT webhook_deliveries_pkey PRIMARY KEY (delivery_id);
ALTER TABLE ONLY interlock.webhooks
    ADD CONSTRAINT webhooks_org_id_name_key UNIQUE (org_id, name);
ALTER TABLE ONLY interlock.webhooks
    ADD CONSTRAINT webhooks_pkey PRIMARY KEY (webhook_id);
ALTER TABLE ONLY interlock.worker_tokens
    ADD CONSTRAINT worker_tokens_pkey PRIMARY KEY (token_id);
ALTER TABLE ONLY interlock.workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (worker_id, queue);
ALTER TABLE ONLY public.interlock_migrations
    ADD CONSTRAINT interlock_migrations_pkey PRIMARY KEY (version);
CREATE INDEX api_keys_by_org ON interlock.api_keys USING btree (org_id, created_at);
CREATE INDEX api_keys_by_service ON interlock.api_keys USING btree (org_id, service) WHERE (service IS NOT NULL);
CREATE INDEX attempts_failed ON interlock.attempts USING btree (ended_at) WHERE (outcome = ANY (ARRAY['Failed'::interlock.outcome, 'LeaseExpired'::interlock.outcome, 'TimedOut'::interlock.outcome]));
CREATE INDEX attempts_of_shards ON interlock.attempts USING btree (shard) WHERE (shard <> 0);
CREATE INDEX backfills_by_org ON interlock.backfills USING btree (org_id, run_id);
CREATE INDEX buffer_publishes_by_load ON interlock.buffer_publishes USING btree (load_task) WHERE (load_task IS NOT NULL);
CREATE INDEX buffer_publishes_by_org ON interlock.buffer_publishes USING btree (org_id, publish_id);
CREATE INDEX buffer_publishes_by_status ON interlock.buffer_publishes USING btree (org_id, status, publish_id);
CREATE INDEX buffer_publishes_open ON interlock.buffer_publishes USING btree (publish_id) WHERE (status = ANY (ARRAY['Pending'::interlock.publish_status, 'Loading'::interlock.publish_status]));
CREATE INDEX buffer_publishes_sweep ON interlock.buffer_publishes USING btree (sweep_at) WHERE (sweep_at IS NOT NULL);
CREATE INDEX bulk_operations_by_org ON interlock.bulk_operations USING btree (org_id, operation_id);
CREATE INDEX bulk_operations_running ON interlock.bulk_operations USING btree (operation_id) WHERE (ended_at IS NULL);
CREATE INDEX bundle_names_by_bundle ON interlock.bundle_names USING btree (org_id, sha256);
CREATE INDEX bundle_sweeps_due ON interlock.bundle_sweeps USING btree (due_at);
CREATE INDEX bus_acls_by_source ON interlock.bus_acls USING btree (source, org_id, target, name);
CREATE INDEX bus_alert_emails_by_alert ON interlock.bus_alert_emails USING btree (alert_id);
CREATE INDEX bus_alert_emails_due ON interlock.bus_alert_emails USING btree (due_at) WHERE (status = 'Pending'::interlock.delivery_status);
CREATE INDEX bus_alerts_by_org ON interlock.bus_alerts USING btree (org_id, alert_id) WHERE shown;
CREATE INDEX bus_alerts_old ON interlock.bus_alerts USING btree (opened_at);
CREATE INDEX bus_alerts_unrouted ON interlock.bus_alerts USING btree (alert_id) WHERE (unrouted AND (resolved_at IS NULL));
CREATE INDEX bus_archive_by_org ON interlock.bus_archive USING btree (org_id, archive_id);
CREATE INDEX bus_bans_ended ON interlock.bus_bans USING btree (until);
CREATE INDEX bus_changes_by_kind ON interlock.bus_changes USING btree (org_id, interlock.kind_number(kind), change_id);
CREATE INDEX bus_changes_by_org ON interlock.bus_changes USING btree (org_id, change_id);
CREATE INDEX bus_changes_by_subject ON interlock.bus_changes USING btree (org_id, kind, subject, change_id);
CREATE INDEX bus_changes_revoked ON interlock.bus_changes USING btree (subject, changed_at) WHERE ((kind = 'acls'::interlock.bus_kind) AND (action = 'delete'::interlock.bus_action));
CREATE INDEX bus_dedupe_expiry ON interlock.bus_dedupe USING btree (expires_at);
CREATE INDEX bus_fates_age ON interlock.bus_fates USING btree (decided_at);
CREATE INDEX bus_handoffs_command ON interlock.bus_handoffs USING btree (org_id, source, command_id);
CREATE INDEX bus_handoffs_due ON interlock.bus_handoffs USING btree (due_at, handoff_id);
CREATE UNIQUE INDEX bus_keys_current ON interlock.bus_keys USING btree (org_id, service) WHERE (expires_at IS NULL);
CREATE INDEX bus_keys_expiring ON interlock.bus_keys USING btree (expires_at) WHERE (expires_at IS NOT NULL);
CREATE INDEX bus_keys_rotating ON interlock.bus_keys USING btree (rotates_at) WHERE (rotates_at IS NOT NULL);
CREATE INDEX bus_limits_by_source ON interlock.bus_limits USING btree (org_id, source_service) WHERE (source_service IS NOT NULL);
CREATE INDEX bus_limits_by_target ON interlock.bus_limits USING btree (org_id, target_service) WHERE (target_service IS NOT NULL);
CREATE INDEX bus_replays_by_org ON interlock.bus_replays USING btree (org_id, replay_id);
CREATE INDEX bus_replays_due ON interlock.bus_replays USING btree (due_at) WHERE (ended_at IS NULL);
CREATE INDEX bus_route_health_bad ON interlock.bus_route_health USING btree (org_id, target, name) WHERE (status <> 'healthy'::interlock.route_status);
CREATE INDEX bus_route_health_checked ON interlock.bus_route_health USING btree (checked_at);
CREATE INDEX bus_routes_by_dlq ON interlock.bus_routes USING btree (org_id, dlq, target, name) WHERE (dlq IS NOT NULL);
CREATE INDEX bus_routes_by_queue ON interlock.bus_routes USING btree (org_id, queue, target, name) WHERE (queue IS NOT NULL);
CREATE INDEX bus_strikes_by_time ON interlock.bus_strikes USING btree (struck_at);
CREATE INDEX bus_telemetry_by_org ON interlock.bus_telemetry USING btree (org_id, batch_id);
CREATE INDEX capabilities_expiry ON interlock.capabilities USING btree (expires_at);
CREATE INDEX cron_state_due ON interlock.cron_state USING btree (next_at);
CREATE INDEX dag_version_jobs_by_job ON interlock.dag_version_jobs USING btree (job_id);
CREATE UNIQUE INDEX dag_versions_building ON interlock.dag_versions USING btree (dag_id) WHERE (state = 'Building'::interlock.dag_state);
CREATE INDEX dag_versions_by_dag ON interlock.dag_versions USING btree (dag_id, dag_version);
CREATE UNIQUE INDEX dag_versions_by_hash ON interlock.dag_versions USING btree (dag_id, content_hash) WHERE (state = ANY (ARRAY['Building'::interlock.dag_state, 'Current'::interlock.dag_state, 'Retired'::interlock.dag_state]));
CREATE INDEX dag_versions_by_prefix ON interlock.dag_versions USING btree (dag_id, content_hash COLLATE "C");
CREATE UNIQUE INDEX dag_versions_current ON interlock.dag_versions USING btree (dag_id) WHERE (state = 'Current'::interlock.dag_state);
CREATE INDEX dag_versions_in_work ON interlock.dag_versions USING btree (dag_version) WHERE (state = 'Building'::interlock.dag_state);
CREATE INDEX dag_versions_retired ON interlock.dag_versions USING btree (dag_id, retired_at) WHERE (state = 'Retired'::interlock.dag_state);
CREATE INDEX dags_by_prefix ON interlock.dags USING btree (org_id, name COLLATE "C");
CREATE INDEX dataset_events_by_dataset ON interlock.dataset_events USING btree (dataset_uuid, event_id);
CREATE UNIQUE INDEX dataset_events_once ON interlock.dataset_events USING btree (task_id, dataset_uuid, dataset_version, scope);
CREATE INDEX dataset_versions_by_dataset ON interlock.dataset_versions USING btree (dataset_uuid, created_at);
CREATE INDEX dataset_versions_by_job ON interlock.dataset_versions USING btree (job_id, output_index);
CREATE INDEX datasets_by_org ON interlock.datasets USING btree (org_id, dataset_uuid);
CREATE UNIQUE INDEX datasets_by_output ON interlock.datasets USING btree (org_id, dag_name, job_name, output_name) WHERE (dag_name IS NOT NULL);
CREATE INDEX edges_active ON interlock.edges USING btree (job_id, input_index) WHERE active;
CREATE INDEX edges_by_dataset ON interlock.edges USING btree (dataset_uuid) WHERE active;
CREATE INDEX edges_by_version ON interlock.edges USING btree (dataset_version, job_id) WHERE active;
CREATE INDEX exports_by_run ON interlock.exports USING btree (run_id);
CREATE UNIQUE INDEX exports_by_task ON interlock.exports USING btree (task_id) WHERE (task_id IS NOT NULL);
CREATE INDEX exports_staging ON interlock.exports USING btree (export_id) WHERE (task_id IS NULL);
CREATE INDEX file_sweeps_due ON interlock.file_sweeps USING btree (due_at);
CREATE INDEX idempotency_keys_expiry ON interlock.idempotency_keys USING btree (expires_at);
CREATE INDEX ingests_on_spark ON interlock.ingests USING btree (load_task) WHERE ((load_task IS NOT NULL) AND (settled_at IS NULL));
CREATE INDEX ingests_open ON interlock.ingests USING btree (run_id) WHERE (settled_at IS NULL);
CREATE INDEX invalidations_by_dataset ON interlock.invalidations USING btree (dataset_uuid, invalidation_id);
CREATE INDEX job_cursors_by_task ON interlock.job_cursors USING btree (task_id) WHERE (task_id IS NOT NULL);
CREATE INDEX jobs_by_bundle ON interlock.jobs USING btree (org_id, ((config ->> 'bundle'::text))) WHERE (operator = 'udf'::text);
CREATE UNIQUE INDEX jobs_by_name ON interlock.jobs USING btree (org_id, COALESCE(dag_name, ''::text), name) WHERE ((name IS NOT NULL) AND current);
CREATE INDEX jobs_by_org ON interlock.jobs USING btree (org_id, job_id);
CREATE INDEX jobs_by_prefix ON interlock.jobs USING btree (((org_id)::text), name COLLATE "C") WHERE (deleted_at IS NULL);
CREATE INDEX jobs_in_dags ON interlock.jobs USING btree (job_id) WHERE (dag_name IS NOT NULL);
CREATE INDEX jobs_limited ON interlock.jobs USING btree (job_id) WHERE (active AND ((max_queue_depth IS NOT NULL) OR (max_queue_age IS NOT NULL)));
CREATE INDEX jobs_of_dag ON interlock.jobs USING btree (org_id, dag_name, name) WHERE (active AND (dag_name IS NOT NULL));
CREATE INDEX jobs_sources ON interlock.jobs USING btree (((source ->> 'kind'::text)), job_id) WHERE ((source IS NOT NULL) AND active);
CREATE INDEX jobs_swapped ON interlock.jobs USING btree (job_id) WHERE (swapped_at IS NOT NULL);
CREATE INDEX jobs_waking ON interlock.jobs USING btree (job_id) WHERE (wake_from IS NOT NULL);
CREATE INDEX lease_alarms_due ON interlock.lease_alarms USING btree (shard, due_at);
CREATE INDEX materialisations_by_task ON interlock.materialisations USING btree (task_id);
CREATE INDEX materialisations_undone ON interlock.materialisations USING btree (job_id) WHERE ((done_commit IS NULL) OR (done_commit < input_commit));
CREATE INDEX members_by_org ON interlock.members USING btree (org_id, issuer, subject);
CREATE INDEX minute_counts_age ON interlock.minute_counts USING btree ((minute AT TIME ZONE 'UTC'::text));
CREATE INDEX operators_by_last_seen ON interlock.operators USING btree (last_seen_at);
CREATE INDEX orgs_with_operators ON interlock.orgs USING btree (org_id) WHERE (operators IS NOT NULL);
CREATE INDEX outbox_by_key ON interlock.outbox USING btree (dedupe_key) WHERE (dedupe_key IS NOT NULL);
CREATE INDEX outbox_due ON interlock.outbox USING btree (due_at);
CREATE INDEX outbox_invocations ON interlock.outbox USING btree (target, priority, outbox_id) WHERE (kind = 'invoke'::text);
CREATE INDEX partitions_by_commit ON interlock.partitions USING btree (dataset_version, commit_id);
CREATE INDEX pauses_by_cause ON interlock.pauses USING btree (cause_id);
CREATE INDEX publications_by_dag ON interlock.publications USING btree (dag_id);
CREATE INDEX publications_by_dataset ON interlock.publications USING btree (dataset_uuid);
CREATE INDEX publications_by_prefix ON interlock.publications USING btree (org_id, name COLLATE "C");
CREATE INDEX query_audit_by_org ON interlock.query_audit USING btree (org_id, query_id);
CREATE INDEX query_audit_running ON interlock.query_audit USING btree (started_at) WHERE (outcome = 'Running'::text);
CREATE INDEX queue_messages_dead ON interlock.queue_messages USING btree (queue, message_id) WHERE (dead_at IS NOT NULL);
CREATE UNIQUE INDEX queue_messages_once ON interlock.queue_messages USING btree (queue, dedupe_key) WHERE (dedupe_key IS NOT NULL);
CREATE INDEX queue_messages_ready ON interlock.queue_messages USING btree (queue, priority, visible_at) WHERE (dead_at IS NULL);
CREATE INDEX queue_messages_shares ON interlock.queue_messages USING btree (((queue || ''::text)), priority, org_id, share_id, visible_at) WHERE ((dead_at IS NULL) AND (share_id IS NOT NULL));
CREATE INDEX runs_busy ON interlock.runs USING btree (job_id) WHERE (running <> 0);
CREATE INDEX runs_by_job ON interlock.runs USING btree (job_id, run_id);
CREATE INDEX runs_by_org ON interlock.runs USING btree (((org_id)::text), run_id);
CREATE UNIQUE INDEX runs_by_shard ON interlock.runs USING btree (shard) WHERE (shard <> 0);
CREATE INDEX runs_canceling ON interlock.runs USING btree (run_id) WHERE (cancel_requested AND (ended_at IS NULL) AND (cancel_index <= last_index));
CREATE INDEX runs_deadline ON interlock.runs USING btree (deadline_at) WHERE ((deadline_at IS NOT NULL) AND (ended_at IS NULL));
CREATE INDEX runs_deleting ON interlock.runs USING btree (run_id) WHERE delete_requested;
CREATE INDEX runs_ended ON interlock.runs USING btree (ended_at) WHERE ((ended_at IS NOT NULL) AND (retention_days IS NULL));
CREATE INDEX runs_held ON interlock.runs USING btree (job_id, run_id) WHERE ((held_from IS NOT NULL) AND (ended_at IS NULL));
CREATE INDEX runs_kept ON interlock.runs USING btree (interlock.kept_until(ended_at, retention_days)) WHERE ((ended_at IS NOT NULL) AND (retention_days IS NOT NULL));
CREATE INDEX runs_live ON interlock.runs USING btree (run_id) WHERE (ended_at IS NULL);
CREATE INDEX runs_live_by_job ON interlock.runs USING btree (job_id) WHERE (ended_at IS NULL);
CREATE INDEX runs_of_shards ON interlock.runs USING btree (shard) WHERE ((shard <> 0) AND (ended_at IS NULL));
CREATE INDEX runs_open_unwanted ON interlock.runs USING btree (run_id) WHERE (open AND cancel_requested AND (ended_at IS NULL));
CREATE INDEX runs_sharded ON interlock.runs USING btree (org_id, shard) WHERE (shard <> 0);
CREATE INDEX runs_waking ON interlock.runs USING btree (run_id) WHERE (wake_index IS NOT NULL);
CREATE INDEX sessions_by_org ON interlock.sessions USING btree (org_id, session_id) WHERE (revoked_at IS NULL);
CREATE INDEX sessions_expiry ON interlock.sessions USING btree (expires_at);
CREATE INDEX sign_in_links_expiry ON interlock.sign_in_links USING btree (expires_at);
CREATE UNIQUE INDEX signing_keys_active ON interlock.signing_keys USING btree ((true)) WHERE (retired_at IS NULL);
CREATE INDEX slots_by_job ON interlock.slots USING btree (job_id, slot_key);
CREATE INDEX task_logs_of_jobs ON interlock.task_logs USING btree (job_id, log_id) WHERE (run_id IS NULL);
CREATE INDEX task_logs_of_runs ON interlock.task_logs USING btree (run_id, log_id) WHERE (run_id IS NOT NULL);
CREATE INDEX tasks_0_by_job ON interlock.tasks_0 USING btree (listed_status, job_id, task_id) WHERE (run_id IS NULL);
CREATE UNIQUE INDEX tasks_0_by_run ON interlock.tasks_0 USING btree (run_id, task_index) WHERE (run_id IS NOT NULL);
CREATE INDEX tasks_0_by_run_status ON interlock.tasks_0 USING btree (run_id, listed_status, task_index) WHERE ((run_id IS NOT NULL) AND (listed_status IS NOT NULL));
CREATE UNIQUE INDEX tasks_0_dedupe ON interlock.tasks_0 USING btree (job_id, dedupe_key) WHERE (dedupe_key IS NOT NULL);
CREATE INDEX tasks_0_parked ON interlock.tasks_0 USING btree (job_id, priority, queued_at) WHERE parked;
CREATE INDEX tasks_0_parked_by_key ON interlock.tasks_0 USING btree (job_id, slot_key, priority, queued_at) WHERE parked;
CREATE INDEX tasks_0_retries ON interlock.tasks_0 USING btree (retry_at) WHERE (retry_at IS NOT NULL);
CREATE INDEX tasks_0_retrying ON interlock.tasks_0 USING btree (job_id) WHERE ((retry_at IS NOT NULL) AND (run_id IS NULL));
CREATE INDEX triggers_by_job ON interlock.triggers USING btree (job_id, trigger_id);
CREATE UNIQUE INDEX triggers_once ON interlock.triggers USING btree (job_id, dedupe_key);
CREATE INDEX uploads_due ON interlock.uploads USING btree (sweep_at);
CREATE INDEX webhook_deliveries_by_status ON interlock.webhook_deliveries USING btree (webhook_id, status, delivery_id);
CREATE INDEX webhook_deliveries_due ON interlock.webhook_deliveries USING btree (webhook_id, due_at) WHERE (status = 'Pending'::interlock.delivery_status);
CREATE INDEX webhook_deliveries_ended ON interlock.webhook_deliveries USING btree (ended_at) WHERE (ended_at IS NOT NULL);
CREATE INDEX webhook_deliveries_listed ON interlock.webhook_deliveries USING btree (webhook_id, delivery_id);
CREATE INDEX webhook_deliveries_taken ON interlock.webhook_deliveries USING btree (webhook_id) WHERE taken;
CREATE INDEX webhook_deliveries_waiting ON interlock.webhook_deliveries USING btree (waiting_since) WHERE (status = 'Pending'::interlock.delivery_status);
CREATE INDEX workers_by_queue ON interlock.workers USING btree (queue, last_seen_at);
ALTER TABLE ONLY interlock.api_keys
    ADD CONSTRAINT api_keys_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.backfills
    ADD CONSTRAINT backfills_run_id_fkey FOREIGN KEY (run_id) REFERENCES interlock.runs(run_id) ON DELETE CASCADE;
ALTER TABLE ONLY interlock.bulk_operations
    ADD CONSTRAINT bulk_operations_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.bundle_names
    ADD CONSTRAINT bundle_names_org_id_sha256_fkey FOREIGN KEY (org_id, sha256) REFERENCES interlock.bundles(org_id, sha256);
ALTER TABLE ONLY interlock.bundles
    ADD CONSTRAINT bundles_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.bus_acls
    ADD CONSTRAINT bus_acls_org_id_source_fkey FOREIGN KEY (org_id, source) REFERENCES interlock.services(org_id, name);
ALTER TABLE ONLY interlock.bus_acls
    ADD CONSTRAINT bus_acls_org_id_target_fkey FOREIGN KEY (org_id, target) REFERENCES interlock.services(org_id, name);
ALTER TABLE ONLY interlock.bus_alert_emails
    ADD CONSTRAINT bus_alert_emails_alert_id_fkey FOREIGN KEY (alert_id) REFERENCES interlock.bus_alerts(alert_id) ON DELETE CASCADE;
ALTER TABLE ONLY interlock.bus_alert_settings
    ADD CONSTRAINT bus_alert_settings_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.bus_alerts
    ADD CONSTRAINT bus_alerts_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.bus_archives
    ADD CONSTRAINT bus_archives_dataset_uuid_fkey FOREIGN KEY (dataset_uuid) REFERENCES interlock.datasets(dataset_uuid);
ALTER TABLE ONLY interlock.bus_archives
    ADD CONSTRAINT bus_archives_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.bus_changes
    ADD CONSTRAINT bus_changes_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.bus_keys
    ADD CONSTRAINT bus_keys_org_id_service_fkey FOREIGN KEY (org_id, service) REFERENCES interlock.services(org_id, name);
ALTER TABLE ONLY interlock.bus_limits
    ADD CONSTRAINT bus_limits_org_id_source_service_fkey FOREIGN KEY (org_id, source_service) REFERENCES interlock.services(org_id, name);
ALTER TABLE ONLY interlock.bus_limits
    ADD CONSTRAINT bus_limits_org_id_target_service_fkey FOREIGN KEY (org_id, target_service) REFERENCES interlock.services(org_id, name);
ALTER TABLE ONLY interlock.bus_replay_items
    ADD CONSTRAINT bus_replay_items_replay_id_fkey FOREIGN KEY (replay_id) REFERENCES interlock.bus_replays(replay_id) ON DELETE CASCADE;
ALTER TABLE ONLY interlock.bus_replays
    ADD CONSTRAINT bus_replays_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.bus_route_health
    ADD CONSTRAINT bus_route_health_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.bus_routes
    ADD CONSTRAINT bus_routes_org_id_target_fkey FOREIGN KEY (org_id, target) REFERENCES interlock.services(org_id, name);
ALTER TABLE ONLY interlock.bus_telemetry_queues
    ADD CONSTRAINT bus_telemetry_queues_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.bus_versions
    ADD CONSTRAINT bus_versions_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.dag_version_jobs
    ADD CONSTRAINT dag_version_jobs_dag_version_fkey FOREIGN KEY (dag_version) REFERENCES interlock.dag_versions(dag_version);
ALTER TABLE ONLY interlock.dag_version_jobs
    ADD CONSTRAINT dag_version_jobs_job_id_fkey FOREIGN KEY (job_id) REFERENCES interlock.jobs(job_id);
ALTER TABLE ONLY interlock.dag_versions
    ADD CONSTRAINT dag_versions_dag_id_fkey FOREIGN KEY (dag_id) REFERENCES interlock.dags(dag_id);
ALTER TABLE ONLY interlock.dags
    ADD CONSTRAINT dags_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.dataset_versions
    ADD CONSTRAINT dataset_versions_dataset_uuid_fkey FOREIGN KEY (dataset_uuid) REFERENCES interlock.datasets(dataset_uuid);
ALTER TABLE ONLY interlock.dataset_versions
    ADD CONSTRAINT dataset_versions_job_id_fkey FOREIGN KEY (job_id) REFERENCES interlock.jobs(job_id);
ALTER TABLE ONLY interlock.datasets
    ADD CONSTRAINT datasets_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.edges
    ADD CONSTRAINT edges_dataset_uuid_fkey FOREIGN KEY (dataset_uuid) REFERENCES interlock.datasets(dataset_uuid);
ALTER TABLE ONLY interlock.edges
    ADD CONSTRAINT edges_job_id_fkey FOREIGN KEY (job_id) REFERENCES interlock.jobs(job_id);
ALTER TABLE ONLY interlock.exports
    ADD CONSTRAINT exports_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.ingest_chunks
    ADD CONSTRAINT ingest_chunks_run_id_fkey FOREIGN KEY (run_id) REFERENCES interlock.ingests(run_id) ON DELETE CASCADE;
ALTER TABLE ONLY interlock.ingests
    ADD CONSTRAINT ingests_run_id_fkey FOREIGN KEY (run_id) REFERENCES interlock.runs(run_id) ON DELETE CASCADE;
ALTER TABLE ONLY interlock.invalidations
    ADD CONSTRAINT invalidations_dataset_uuid_fkey FOREIGN KEY (dataset_uuid) REFERENCES interlock.datasets(dataset_uuid);
ALTER TABLE ONLY interlock.jobs
    ADD CONSTRAINT jobs_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.members
    ADD CONSTRAINT members_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.org_secrets
    ADD CONSTRAINT org_secrets_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.publications
    ADD CONSTRAINT publications_dag_id_fkey FOREIGN KEY (dag_id) REFERENCES interlock.dags(dag_id);
ALTER TABLE ONLY interlock.publications
    ADD CONSTRAINT publications_dataset_uuid_fkey FOREIGN KEY (dataset_uuid) REFERENCES interlock.datasets(dataset_uuid);
ALTER TABLE ONLY interlock.query_audit
    ADD CONSTRAINT query_audit_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.reruns
    ADD CONSTRAINT reruns_run_id_fkey FOREIGN KEY (run_id) REFERENCES interlock.runs(run_id) ON DELETE CASCADE;
ALTER TABLE ONLY interlock.run_origins
    ADD CONSTRAINT run_origins_run_id_fkey FOREIGN KEY (run_id) REFERENCES interlock.runs(run_id) ON DELETE CASCADE;
ALTER TABLE ONLY interlock.runs
    ADD CONSTRAINT runs_job_id_fkey FOREIGN KEY (job_id) REFERENCES interlock.jobs(job_id);
ALTER TABLE ONLY interlock.service_polls
    ADD CONSTRAINT service_polls_org_id_service_fkey FOREIGN KEY (org_id, service) REFERENCES interlock.services(org_id, name) ON DELETE CASCADE;
ALTER TABLE ONLY interlock.services
    ADD CONSTRAINT services_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.sessions
    ADD CONSTRAINT sessions_key_id_fkey FOREIGN KEY (key_id) REFERENCES interlock.api_keys(key_id);
ALTER TABLE ONLY interlock.sessions
    ADD CONSTRAINT sessions_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
ALTER TABLE ONLY interlock.sign_in_links
    ADD CONSTRAINT sign_in_links_key_id_fkey FOREIGN KEY (key_id) REFERENCES interlock.api_keys(key_id);
ALTER TABLE ONLY interlock.webhook_crossings
    ADD CONSTRAINT webhook_crossings_run_id_fkey FOREIGN KEY (run_id) REFERENCES interlock.runs(run_id) ON DELETE CASCADE;
ALTER TABLE ONLY interlock.webhooks
    ADD CONSTRAINT webhooks_org_id_fkey FOREIGN KEY (org_id) REFERENCES interlock.orgs(org_id);
