-- The archive of accepted commands: what is owed to it, and how it becomes partitions of a dataset.

-- name: keep!
insert into interlock.bus_archive (org_id, commands, commands_in)
select a.org_id, a.commands::json, a.commands_in
from unnest(:org_ids::uuid[], :commands::text[], :commands_in::int[]) as a(org_id, commands, commands_in);
