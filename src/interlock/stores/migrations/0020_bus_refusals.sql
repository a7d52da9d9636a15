-- How often a banned source went on asking for what its target had no room for: so often, and it is refused outright.
alter table interlock.bus_bans add column refused bigint not null default 0;
