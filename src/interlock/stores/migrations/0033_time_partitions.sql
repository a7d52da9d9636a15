-- Partitions by time: jobs whose scopes are hours, days or months of a time zone.

alter table interlock.jobs add column partition text;              -- such as `daily Europe/Berlin`; null: integer ranges

-- Of schedules of such jobs: partitions that end before this instant have had their start.
alter table interlock.cron_state add column covered_to timestamptz;
