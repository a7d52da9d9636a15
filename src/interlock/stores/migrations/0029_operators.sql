-- Operators that workers can run, as they report them, and orgs that may use some of these only.

create table interlock.operators (
    queue        text not null,
    operator     text not null,
    worker_id    text not null,
    last_seen_at timestamptz not null,
    primary key (queue, operator)
);
comment on table interlock.operators is 'Functions that workers have declared, by the queue that they work on';
comment on column interlock.operators.worker_id is 'The worker that reported it last';
-- For those that are forgotten.
create index operators_by_last_seen on interlock.operators (last_seen_at);

-- Null: any operator. A name, or the beginning of names with * behind it.
alter table interlock.orgs add column operators text[];
-- Read every few seconds by each process that claims.
create index orgs_with_operators on interlock.orgs (org_id) where operators is not null;
