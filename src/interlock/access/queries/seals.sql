-- The check value of the key that seals secrets.

-- name: check_value$
select sealed from interlock.seals where name = 'platform';

-- name: first_key^
-- Any sealed secret, for an installation older than the check value. There are few: one per service and version.
select org_id, service, number, sealed from interlock.bus_keys limit 1;

-- name: keep_check_value!
-- The first of several starting processes wins; the others must be able to open its value.
insert into interlock.seals (name, sealed) values ('platform', :sealed) on conflict do nothing;
