-- The archive of accepted commands: a dataset per tenant, and how far it is written.
--
--   bus_archive ── taken under a lease, a range of positions ──► a file under _attempts/ ── one commit ──► a partition
--
-- A process that dies in between leaves a file that the sweep of attempts finds, and rows that the next one takes.

create table interlock.bus_archives (
    org_id          uuid primary key references interlock.orgs,
    dataset_uuid    uuid not null references interlock.datasets,
    dataset_version uuid not null,
    position        bigint not null default 0,      -- of the next command
    attempt         int not null default 0,         -- the fence: what an older one commits changes nothing
    taken_until     timestamptz
);

-- What the platform publishes by itself belongs to no DAG.
alter table interlock.publications alter column dag_id drop not null;
