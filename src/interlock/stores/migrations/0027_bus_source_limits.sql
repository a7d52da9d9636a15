-- A limit on a source alone: all that a service sends, to whatever target. It is an entry of bus_limits whose target and
-- name are '', and its window is the row of bus_windows of that key.

-- '' names no service: the references look at columns that are null then. A quota of a service that is gone binds nobody.
delete from interlock.bus_limits l
where l.source <> '' and not exists (select from interlock.services s where s.org_id = l.org_id and s.name = l.source);
alter table interlock.bus_limits
    drop constraint bus_limits_org_id_target_fkey,
    add column target_service text collate "C" generated always as (nullif(target, '')) stored,
    add column source_service text collate "C" generated always as (nullif(source, '')) stored,
    add foreign key (org_id, target_service) references interlock.services,
    add foreign key (org_id, source_service) references interlock.services,
    add check ((target = '') = (name = '')),
    add check (target <> '' or source <> '');
create index bus_limits_by_target on interlock.bus_limits (org_id, target_service) where target_service is not null;
create index bus_limits_by_source on interlock.bus_limits (org_id, source_service) where source_service is not null;

-- Who may prefetch tokens in this second, now of any limit.
alter table interlock.bus_prefetches
    add column source text not null default '',
    drop constraint bus_prefetches_pkey,
    add primary key (org_id, target, name, source);
