-- Partitions by time: jobs whose scopes are hours, days or months of a time zone.

alter table interlock.jobs add column partition text;              -- such as `daily Europe/Berlin`; null: integer ranges

-- Of schedules of such jobs: partitions that end before this instant have had their start.
alter table interlock.cron_state add column covered_to timestamptz;

-- The first and the last position of a dataset version.
create function interlock.extent(version uuid, out range_start bigint, out range_end bigint)
language sql stable as $$
    select (select p.range_start from interlock.partitions p where p.dataset_version = version order by p.range_start limit 1),
           (select p.range_end from interlock.partitions p where p.dataset_version = version order by p.range_start desc limit 1)
$$;
