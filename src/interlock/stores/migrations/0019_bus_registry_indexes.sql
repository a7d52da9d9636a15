-- Indexes of the registry that cannot be mistaken for each other. Without statistics, an index that begins with two of the
-- columns of a look-up seems as good as the one that has them all, and reads a whole registry or history.

-- All columns of the key, in another order: whichever of the two is taken finds one row.
drop index interlock.bus_acls_by_source;
create index bus_acls_by_source on interlock.bus_acls (source, org_id, target, name);

-- By a number and not by the kind itself: nothing but a list of one kind asks like that.
create function interlock.kind_number(kind interlock.bus_kind) returns int language sql immutable parallel safe as
$$ select case kind when 'services' then 1 when 'routes' then 2 when 'acls' then 3 when 'limits' then 4 else 5 end $$;
drop index interlock.bus_changes_by_kind;
create index bus_changes_by_kind on interlock.bus_changes (org_id, interlock.kind_number(kind), change_id);

-- A service that is removed ends the API keys that speak for it: they are found without reading those of all users.
create index api_keys_by_service on interlock.api_keys (org_id, service) where service is not null;
