-- The content of a snapshot: the registry of many orgs, as registry.sql reads it for one. For the platform only.

-- name: snapshot_orgs
-- Orgs that have a registry, by id.
select o.org_id, o.name from interlock.orgs o
where o.org_id > :after and exists (select from interlock.bus_versions v where v.org_id = o.org_id)
order by o.org_id limit :limit;

-- name: snapshot_versions
select org_id, kind, version from interlock.bus_versions where org_id = any(:org_ids::uuid[]);

-- name: snapshot_services
select org_id, name, description, dispatch_mode from interlock.services where org_id = any(:org_ids::uuid[]);

-- name: snapshot_routes
select org_id, target, name, queue, dlq, dag_name, job_name, dedupe_mode, dedupe_seconds, expected_drain_seconds,
       fairness, expires_at
from interlock.bus_routes
where org_id = any(:org_ids::uuid[]) and (expires_at is null or expires_at > interlock.clock());

-- name: snapshot_acls
select org_id, source, target, name, sensitivity, expires_at from interlock.bus_acls
where org_id = any(:org_ids::uuid[]) and (expires_at is null or expires_at > interlock.clock());

-- name: snapshot_limits
select org_id, target_service as target, nullif(name, '') as name, source_service as source, rate, window_seconds, burst,
       cooldown_seconds, enforcement
from interlock.bus_limits where org_id = any(:org_ids::uuid[]);

-- name: snapshot_keys
-- Sealed: a leaked snapshot cannot be used for signing.
select k.org_id, k.service, k.number, encode(k.sealed, 'base64') as sealed, k.expires_at, p.polled_at
from interlock.bus_keys k
left join interlock.service_polls p on p.org_id = k.org_id and p.service = k.service
where k.org_id = any(:org_ids::uuid[]) and k.revoked_at is null
  and (k.expires_at is null or k.expires_at > interlock.clock());
