-- Versions of the keys that services sign with.

-- name: next_number$
-- Runs under the lock of the registry's version, so that two rotations get different numbers.
select coalesce(max(number), 0) + 1 from interlock.bus_keys where org_id = :org_id and service = :service;

-- name: retire_current!
update interlock.bus_keys
set rotates_at = null, expires_at = interlock.clock() + make_interval(secs => :overlap_seconds::float8)
where org_id = :org_id and service = :service and expires_at is null;

-- name: end_older!
-- Ends the version before the previous one with this rotation: at most two versions are valid, never three.
update interlock.bus_keys set expires_at = interlock.clock()
where org_id = :org_id and service = :service and number < :number - 1 and expires_at > interlock.clock();

-- name: insert_key^
insert into interlock.bus_keys (org_id, service, number, sealed, created_by, rotates_at)
values (:org_id, :service, :number, :sealed, :created_by,
        interlock.clock() + make_interval(secs => :rotation_seconds::float8))
returning service, number, created_at, created_by, rotates_at, expires_at, revoked_at, 'current' as state;

-- name: find_key^
select service, number, created_at, created_by, rotates_at, expires_at, revoked_at, expires_at is null as current
from interlock.bus_keys where org_id = :org_id and service = :service and number = :number;

-- name: revoke_key^
update interlock.bus_keys
set revoked_at = coalesce(revoked_at, interlock.clock()), rotates_at = null,
    expires_at = least(expires_at, interlock.clock())
where org_id = :org_id and service = :service and number = :number
returning service, number, created_at, created_by, rotates_at, expires_at, revoked_at, 'revoked' as state;

-- name: list_keys
select service, number, created_at, created_by, rotates_at, expires_at, revoked_at,
       case when revoked_at is not null then 'revoked' when expires_at is null then 'current'
            when expires_at > interlock.clock() then 'previous' else 'expired' end as state
from interlock.bus_keys
where org_id = :org_id and (service, number) > (:after_service, :after_number)
order by service, number limit :limit;

-- name: list_keys_of_service
select service, number, created_at, created_by, rotates_at, expires_at, revoked_at,
       case when revoked_at is not null then 'revoked' when expires_at is null then 'current'
            when expires_at > interlock.clock() then 'previous' else 'expired' end as state
from interlock.bus_keys
where org_id = :org_id and service = :service and number > :after_number
order by number limit :limit;

-- name: good_keys
-- The current version and, while it is valid, the previous one, newest first.
select number, sealed, created_at, rotates_at, expires_at
from interlock.bus_keys
where org_id = :org_id and service = :service and revoked_at is null
  and (expires_at is null or expires_at > interlock.clock())
order by number desc limit 2;

-- name: note_poll$
-- Returns when the service last polled.
with before as (select polled_at from interlock.service_polls where org_id = :org_id and service = :service)
insert into interlock.service_polls (org_id, service, polled_at) values (:org_id, :service, interlock.clock())
on conflict (org_id, service) do update set polled_at = excluded.polled_at
returning (select polled_at from before);

-- name: due_rotations
-- Across all orgs: the platform rotates keys. Each is processed under the lock of its org's version, and checked again
-- there.
select k.org_id, o.name as org, k.service
from interlock.bus_keys k join interlock.orgs o on o.org_id = k.org_id
where k.rotates_at <= interlock.clock() order by k.rotates_at limit :limit;

-- name: still_due$
select exists (select from interlock.bus_keys
               where org_id = :org_id and service = :service and expires_at is null and rotates_at <= interlock.clock());

-- name: forget_keys
-- Expired secrets have no use; the changelog keeps their history.
delete from interlock.bus_keys
where (org_id, service, number) in (
    select org_id, service, number from interlock.bus_keys
    where expires_at <= interlock.clock() - make_interval(secs => :keep_seconds::float8)
    order by expires_at limit :limit)
returning service;
