-- The registry as dispatchers read it: all of one org, or the part for one decision.

-- name: read_versions
select kind, version from interlock.bus_versions where org_id = :org_id;

-- name: read_services
select name, dispatch_mode from interlock.services where org_id = :org_id order by name;

-- name: read_routes
-- Without expired routes.
select target, name, queue, dlq, dag_name, job_name, dedupe_mode, dedupe_seconds, expected_drain_seconds, fairness,
       expires_at, version
from interlock.bus_routes
where org_id = :org_id and (expires_at is null or expires_at > interlock.clock())
order by target, name;

-- name: read_acls
select source, target, name, sensitivity, expires_at, version
from interlock.bus_acls
where org_id = :org_id and (expires_at is null or expires_at > interlock.clock())
order by target, name, source;

-- name: read_limits
-- Empty strings for what a limit does not name. A limit with neither target nor name applies to a source alone.
select target, name, source_service as source, rate, window_seconds, burst, cooldown_seconds, enforcement, version
from interlock.bus_limits l where org_id = :org_id order by l.target, l.name, l.source;

-- name: read_keys
-- The current version of each service and, while it is valid, the previous one.
select k.service, k.number, k.sealed, k.expires_at, k.rotates_at, p.polled_at
from interlock.bus_keys k
left join interlock.service_polls p on p.org_id = k.org_id and p.service = k.service
where k.org_id = :org_id and k.revoked_at is null and (k.expires_at is null or k.expires_at > interlock.clock())
order by k.service, k.number;

-- name: read_one_route^
select target, name, queue, dlq, dag_name, job_name, dedupe_mode, dedupe_seconds, expected_drain_seconds, fairness,
       expires_at, version
from interlock.bus_routes
where org_id = :org_id and target = :target and name = :name
  and (expires_at is null or expires_at > interlock.clock());

-- name: read_one_acl^
select source, target, name, sensitivity, expires_at, version
from interlock.bus_acls
where org_id = :org_id and target = :target and name = :name and source = :source
  and (expires_at is null or expires_at > interlock.clock());
