-- The registry as its owners read and change it. Every change first increments the version: changes of one kind in one
-- org wait for each other there, and what is read after that stays unchanged until the commit.

-- name: raise_version$
insert into interlock.bus_versions (org_id, kind, version) values (:org_id, :kind, 1)
on conflict (org_id, kind) do update set version = bus_versions.version + 1
returning version;

-- name: announce!
-- Lets caches refresh sooner. A notification may be lost; the lifetime of cache entries covers that.
select pg_notify('interlock_outbox', 'bus-registry');

-- name: record_change^
insert into interlock.bus_changes (org_id, kind, action, subject, before, after, version, changed_by, reverts)
values (:org_id, :kind, :action, :subject, :before::text::jsonb, :after::text::jsonb, :version, :changed_by, :reverts)
returning change_id, changed_at;

-- name: list_changes
select change_id, kind, action, subject, before, after, changed_at, changed_by, reverts
from interlock.bus_changes
where org_id = :org_id and change_id < :before order by change_id desc limit :limit;

-- name: list_changes_of_kind
select change_id, kind, action, subject, before, after, changed_at, changed_by, reverts
from interlock.bus_changes
where org_id = :org_id and interlock.kind_number(kind) = interlock.kind_number(:kind) and change_id < :before
order by change_id desc limit :limit;

-- name: find_change^
select change_id, kind, action, subject, before, after, changed_at, changed_by, reverts
from interlock.bus_changes where org_id = :org_id and change_id = :change_id;

-- name: newest_change$
-- The newest change of one object: only that one can be reverted.
select change_id from interlock.bus_changes
where org_id = :org_id and kind = :kind and subject = :subject order by change_id desc limit 1;

-- Services

-- name: find_service^
select name, description, dispatch_mode, changed_at, changed_by from interlock.services
where org_id = :org_id and name = :name;

-- name: list_services
select name, description, dispatch_mode, changed_at, changed_by from interlock.services
where org_id = :org_id and name > :after order by name limit :limit;

-- name: put_service!
insert into interlock.services (org_id, name, description, dispatch_mode, version, changed_by)
values (:org_id, :name, :description, :dispatch_mode, :version, :changed_by)
on conflict (org_id, name) do update
set description = excluded.description, dispatch_mode = excluded.dispatch_mode, version = excluded.version,
    changed_at = interlock.clock(), changed_by = excluded.changed_by;

-- name: known_services
-- Locked, so that none is deleted while an object that refers to it is created.
select name from interlock.services where org_id = :org_id and name = any(:names::text[]) for key share;

-- name: holds_service^
-- The parts of the registry that refer to a service and prevent its deletion.
select exists (select from interlock.bus_routes where org_id = :org_id and target = :name) as routes,
       exists (select from interlock.bus_acls where org_id = :org_id and target = :name)
       or exists (select from interlock.bus_acls where org_id = :org_id and source = :name) as acls,
       exists (select from interlock.bus_limits where org_id = :org_id and target = :name)
       or exists (select from interlock.bus_limits where org_id = :org_id and source_service = :name) as limits;

-- name: revoke_api_keys!
-- Revokes API keys of a deleted service.
update interlock.api_keys set revoked_at = coalesce(revoked_at, interlock.clock())
where org_id = :org_id and service = :name;

-- name: drop_secrets!
delete from interlock.bus_keys where org_id = :org_id and service = :name;

-- name: drop_service!
delete from interlock.services where org_id = :org_id and name = :name;

-- Routes

-- name: find_route^
select target, name, queue, dlq, dag_name, job_name, dedupe_mode, dedupe_seconds, expected_drain_seconds, fairness,
       expires_at, changed_at, changed_by
from interlock.bus_routes where org_id = :org_id and target = :target and name = :name;

-- name: list_routes
select target, name, queue, dlq, dag_name, job_name, dedupe_mode, dedupe_seconds, expected_drain_seconds, fairness,
       expires_at, changed_at, changed_by
from interlock.bus_routes
where org_id = :org_id and (target, name) > (:after_target, :after_name) order by target, name limit :limit;

-- name: list_routes_of_target
select target, name, queue, dlq, dag_name, job_name, dedupe_mode, dedupe_seconds, expected_drain_seconds, fairness,
       expires_at, changed_at, changed_by
from interlock.bus_routes
where org_id = :org_id and target = :target and name > :after_name order by name limit :limit;

-- name: put_route!
insert into interlock.bus_routes (org_id, target, name, queue, dlq, dag_name, job_name, dedupe_mode, dedupe_seconds,
    expected_drain_seconds, fairness, expires_at, version, changed_by)
values (:org_id, :target, :name, :queue, :dlq, :dag_name, :job_name, :dedupe_mode, :dedupe_seconds,
    :expected_drain_seconds, :fairness::text::jsonb, :expires_at, :version, :changed_by)
on conflict (org_id, target, name) do update
set queue = excluded.queue, dlq = excluded.dlq, dag_name = excluded.dag_name, job_name = excluded.job_name,
    dedupe_mode = excluded.dedupe_mode, dedupe_seconds = excluded.dedupe_seconds,
    expected_drain_seconds = excluded.expected_drain_seconds, fairness = excluded.fairness,
    expires_at = excluded.expires_at, version = excluded.version, changed_at = interlock.clock(),
    changed_by = excluded.changed_by;

-- name: drop_route!
delete from interlock.bus_routes where org_id = :org_id and target = :target and name = :name;

-- name: other_routes_of_queue^
-- A queue belongs to one target, because a receiver receives all of it, and its dead letters have one name. Reads the
-- routes of the queue.
select target, name, dlq from interlock.bus_routes
where org_id = :org_id and queue = :queue and (target <> :target or (dlq <> :dlq and name <> :name))
order by target, name limit 1;

-- name: queue_named^
-- A dead-letter queue must not have the name of a queue, nor share one with another queue.
(select target, name from interlock.bus_routes where org_id = :org_id and queue = :dlq order by target, name limit 1)
union all
(select target, name from interlock.bus_routes where org_id = :org_id and dlq = :queue order by target, name limit 1)
union all
(select target, name from interlock.bus_routes
 where org_id = :org_id and dlq = :dlq and queue <> :queue order by target, name limit 1)
limit 1;

-- name: job_exists$
select exists (select from interlock.jobs
               where org_id = :org_id and coalesce(dag_name, '') = coalesce(:dag::text, '') and name = :job and current);

-- ACLs

-- name: find_acl^
select source, target, name, sensitivity, expires_at, changed_at, changed_by
from interlock.bus_acls where org_id = :org_id and target = :target and name = :name and source = :source;

-- name: list_acls
select source, target, name, sensitivity, expires_at, changed_at, changed_by
from interlock.bus_acls
where org_id = :org_id and (target, name, source) > (:after_target, :after_name, :after_source)
order by target, name, source limit :limit;

-- name: list_acls_of_target
select source, target, name, sensitivity, expires_at, changed_at, changed_by
from interlock.bus_acls
where org_id = :org_id and target = :target and (name, source) > (:after_name, :after_source)
order by name, source limit :limit;

-- name: put_acl!
insert into interlock.bus_acls (org_id, source, target, name, sensitivity, expires_at, version, changed_by)
values (:org_id, :source, :target, :name, :sensitivity, :expires_at, :version, :changed_by)
on conflict (org_id, target, name, source) do update
set sensitivity = excluded.sensitivity, expires_at = excluded.expires_at, version = excluded.version,
    changed_at = interlock.clock(), changed_by = excluded.changed_by;

-- name: drop_acl!
delete from interlock.bus_acls
where org_id = :org_id and target = :target and name = :name and source = :source;

-- Limits

-- name: find_limit^
select target_service as target, nullif(name, '') as name, source_service as source, rate, window_seconds, burst,
       cooldown_seconds, enforcement, changed_at, changed_by
from interlock.bus_limits
where org_id = :org_id and target = coalesce(:target::text, '') and name = coalesce(:name::text, '')
  and source = coalesce(:source::text, '');

-- name: list_limits
-- Ordered by the raw columns, which hold empty strings for what a limit does not name. The output columns of the same
-- names hold nulls. Limits on a source alone come first.
select target_service as target, nullif(name, '') as name, source_service as source, rate, window_seconds, burst,
       cooldown_seconds, enforcement, changed_at, changed_by
from interlock.bus_limits l
where org_id = :org_id and (l.target, l.name, l.source) > (:after_target, :after_name, :after_source)
order by l.target, l.name, l.source limit :limit;

-- name: list_limits_of_target
select target_service as target, nullif(name, '') as name, source_service as source, rate, window_seconds, burst,
       cooldown_seconds, enforcement, changed_at, changed_by
from interlock.bus_limits l
where org_id = :org_id and l.target = :target and (l.name, l.source) > (:after_name, :after_source)
order by l.name, l.source limit :limit;

-- name: put_limit!
insert into interlock.bus_limits (org_id, target, name, source, rate, window_seconds, burst, cooldown_seconds,
    enforcement, version, changed_by)
values (:org_id, coalesce(:target::text, ''), coalesce(:name::text, ''), coalesce(:source::text, ''), :rate,
    :window_seconds, :burst, :cooldown_seconds, :enforcement, :version, :changed_by)
on conflict (org_id, target, name, source) do update
set rate = excluded.rate, window_seconds = excluded.window_seconds, burst = excluded.burst,
    cooldown_seconds = excluded.cooldown_seconds, enforcement = excluded.enforcement, version = excluded.version,
    changed_at = interlock.clock(), changed_by = excluded.changed_by;

-- name: drop_limit!
delete from interlock.bus_limits
where org_id = :org_id and target = coalesce(:target::text, '') and name = coalesce(:name::text, '')
  and source = coalesce(:source::text, '');
