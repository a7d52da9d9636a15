-- Accepted commands are owed to the archive as the bodies that their targets get, all of a write as one array, longer ones
-- compressed (bus/packed.py). What is there for seconds is not worth the server's own compression.
alter table interlock.bus_telemetry alter column events set storage external;

alter table interlock.bus_archive add column accepted bytea;
alter table interlock.bus_archive alter column accepted set storage external;
update interlock.bus_archive a set accepted = convert_to((
    select coalesce(json_agg(json_build_object(
        'metadata', json_strip_nulls(json_build_object(
            'id', c -> 'command_id', 'timestamp', c -> 'timestamp', 'version_id', c -> 'version_id',
            'replay_id', c -> 'replay_id', 'replay_reason', c -> 'replay_reason')),
        'command', json_build_object(
            'source', c -> 'source', 'target', c -> 'target', 'name', c -> 'name', 'payload', c -> 'payload')))::text, '[]')
    from json_array_elements(a.commands) c), 'UTF8');
alter table interlock.bus_archive
    alter column accepted set not null,
    drop column commands;

-- Queues are emptied: what is inserted there will be deleted, and is cleaned up after that. To go through all of it because
-- it was inserted, or for statistics that no statement here needs, holds up who waits for the disk.
alter table interlock.queue_messages set (
    toast_tuple_target = 8160,                      -- a message of ten events is not worth compressing either
    autovacuum_vacuum_insert_threshold = -1, autovacuum_analyze_threshold = 100000, autovacuum_analyze_scale_factor = 1);
alter table interlock.bus_telemetry set (
    autovacuum_vacuum_insert_threshold = -1, autovacuum_analyze_threshold = 100000, autovacuum_analyze_scale_factor = 1);
alter table interlock.bus_archive set (
    autovacuum_vacuum_insert_threshold = -1, autovacuum_analyze_threshold = 100000, autovacuum_analyze_scale_factor = 1);
alter table interlock.bus_handoffs set (
    autovacuum_vacuum_insert_threshold = -1, autovacuum_analyze_threshold = 100000, autovacuum_analyze_scale_factor = 1);
