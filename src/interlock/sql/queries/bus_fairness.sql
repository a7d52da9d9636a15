-- Fairness across dispatchers: what each has seen, and what follows from all of it.

-- name: read_bans
select source, kind, extract(epoch from until)::float8 as until, nullif(target, '') as target, nullif(name, '') as name,
       source_share, competing_share, dispatch_volume
from interlock.bus_bans where org_id = :org_id and until > interlock.clock();
