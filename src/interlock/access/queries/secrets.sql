-- Secrets of orgs: sealed values that configs refer to.

-- name: lock_org
-- Serialises admins who set secrets concurrently, so that the count is right.
select 1 from interlock.orgs where org_id = :org_id for update;

-- name: count_others$
select count(*) from interlock.org_secrets where org_id = :org_id and name <> :name;

-- name: set_secret^
insert into interlock.org_secrets as s (org_id, name, sealed, hosts, set_by)
values (:org_id, :name, :sealed, :hosts, :set_by)
on conflict (org_id, name) do update
set sealed = excluded.sealed, hosts = excluded.hosts, version = s.version + 1,
    set_by = excluded.set_by, set_at = interlock.clock()
returning name, hosts, version, set_by, set_at;

-- name: remove_secret^
delete from interlock.org_secrets where org_id = :org_id and name = :name
returning name, hosts, version, set_by, set_at;

-- name: list_secrets
select name, hosts, version, set_by, set_at from interlock.org_secrets
where org_id = :org_id and name > :after order by name limit :limit;

-- name: known_secrets
select name from interlock.org_secrets where org_id = :org_id and name = any(:names);

-- name: sealed_secrets
select name, sealed, hosts from interlock.org_secrets where org_id = :org_id and name = any(:names);
