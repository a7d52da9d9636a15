-- ACLs that were taken away, by name: whether a command went out after that is asked of a history that only grows.
create index bus_changes_revoked on interlock.bus_changes (subject, changed_at) where kind = 'acls' and action = 'delete';
