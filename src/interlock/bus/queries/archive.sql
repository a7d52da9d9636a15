-- The archive of accepted commands: pending rows, and how they become partitions of a dataset.

-- name: tenants_due
-- A loose index scan from tenant to tenant, as for telemetry. A tenant is due when its oldest command has waited long
-- enough, or when it has enough commands for a file; counting stops there.
with recursive tenants as (
    (select org_id from interlock.bus_archive where org_id > :after order by org_id limit 1)
    union all
    select (select a.org_id from interlock.bus_archive a where a.org_id > w.org_id order by a.org_id limit 1)
    from tenants w where w.org_id is not null
)
select w.org_id from tenants w
where w.org_id is not null
  and ((select a.accepted_at from interlock.bus_archive a where a.org_id between w.org_id and w.org_id
        order by a.org_id, a.archive_id limit 1)
           <= interlock.clock() - make_interval(secs => :wait_seconds::float8)
       or (select count(*) = :rows::int or sum(f.commands_in) >= :commands::int
           from (select a.commands_in from interlock.bus_archive a where a.org_id between w.org_id and w.org_id
                 order by a.org_id, a.archive_id limit :rows::int) f))
limit :limit;

-- name: make_archive!
-- A dataset that no DAG writes, published under a name that DAGs may read.
with made as (
    insert into interlock.datasets (dataset_uuid, org_id, current_version)
    select :dataset_uuid, :org_id, :dataset_version
    where not exists (select 1 from interlock.bus_archives where org_id = :org_id)
    returning dataset_uuid
), version as (
    insert into interlock.dataset_versions (dataset_version, dataset_uuid, org_id)
    select :dataset_version, dataset_uuid, :org_id from made
), published as (
    insert into interlock.publications (org_id, name, dataset_uuid, dag_id, read_roles)
    select :org_id, :name, dataset_uuid, null, '{writer,admin}' from made
    on conflict do nothing
)
insert into interlock.bus_archives (org_id, dataset_uuid, dataset_version)
select :org_id, dataset_uuid, :dataset_version from made;

-- name: take_archive^
-- One process at a time writes a tenant's archive, because positions are consecutive.
update interlock.bus_archives
set attempt = attempt + 1, taken_until = interlock.clock() + make_interval(secs => :lease_seconds::float8)
where org_id = :org_id and (taken_until is null or taken_until <= interlock.clock())
returning org_id, dataset_uuid, dataset_version, position, attempt, interlock.clock() as now;

-- name: waiting
-- The rows for one file, at least one: up to the limit of rows, commands or bytes, whichever comes first.
select w.archive_id, w.accepted, w.accepted_at, w.commands_in
from (select a.*, sum(a.commands_in) over so_far as commands, sum(octet_length(a.accepted)) over so_far as bytes
      from (select archive_id, accepted, accepted_at, commands_in from interlock.bus_archive
            where org_id between :org_id::uuid and :org_id::uuid order by org_id, archive_id limit :rows::int) a
      window so_far as (order by a.archive_id)) w
where w.commands - w.commands_in < :commands::int and w.bytes - octet_length(w.accepted) < :bytes::int
order by w.archive_id;

-- name: owes$
-- True if something accepted by that time is not in the archive yet. The oldest row decides.
select coalesce((select a.accepted_at from interlock.bus_archive a where a.org_id between :org_id::uuid and :org_id::uuid
                 order by a.org_id, a.archive_id limit 1) <= :moment, false);

-- name: release_archive!
update interlock.bus_archives set taken_until = null where org_id = :org_id and attempt = :attempt;

-- name: settle_archive^
-- Fence and deletion in one statement: a late process finds another attempt and deletes nothing.
with held as materialized (
    select org_id from interlock.bus_archives where org_id = :org_id and attempt = :attempt for no key update
), gone as (
    delete from interlock.bus_archive
    where archive_id = any(:ids::bigint[]) and org_id in (select org_id from held)
    returning archive_id
)
update interlock.bus_archives a set position = :position, taken_until = null
from held where a.org_id = held.org_id
returning (select count(*) from gone) as settled;

-- name: drop_old$
-- The oldest partitions of each archive. Their files are deleted when no reader uses them any more.
with old as materialized (
    select a.org_id, p.dataset_version, p.range_start, p.location
    from (select * from interlock.bus_archives where org_id > :after order by org_id limit :tenants) a
    cross join lateral (select p.dataset_version, p.range_start, p.location, p.committed_at
                        from interlock.partitions p where p.dataset_version = a.dataset_version
                        order by p.range_start limit :limit) p
    where p.committed_at <= interlock.clock() - make_interval(secs => :age_seconds::float8)
), gone as (
    delete from interlock.partitions p using old o
    where p.dataset_version = o.dataset_version and p.range_start = o.range_start
    returning p.location, p.dataset_version
), swept as (
    insert into interlock.file_sweeps (place, dataset_version, due_at, final_at)
    select location, dataset_version, interlock.clock(), interlock.clock() from gone where location is not null
    on conflict (place) do nothing
)
select count(*) from gone;

-- name: last_of_page$
select max(org_id::text)::uuid from (select org_id from interlock.bus_archives where org_id > :after
                                     order by org_id limit :tenants) a;
