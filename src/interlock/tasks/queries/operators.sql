-- Operators that workers report, and those that an org is limited to.

-- name: report_operators!
-- Workers with the same code report the same names. A row is written at most once in ten seconds, not once per worker.
insert into interlock.operators as o (queue, operator, worker_id, last_seen_at)
select :queue, n.operator, :worker_id, interlock.clock() from unnest(:operators::text[]) as n(operator)
order by n.operator
on conflict (queue, operator) do update set worker_id = excluded.worker_id, last_seen_at = excluded.last_seen_at
where o.last_seen_at < interlock.clock() - interval '10 seconds';

-- name: forget_operators!
delete from interlock.operators where last_seen_at < interlock.clock() - make_interval(secs => :seconds::float8);

-- name: declared_operators
select operator from interlock.operators
where queue = :queue and operator = any(:names::text[])
  and last_seen_at >= interlock.clock() - make_interval(secs => :seconds::float8);

-- name: some_operators
select operator from interlock.operators
where queue = :queue and last_seen_at >= interlock.clock() - make_interval(secs => :seconds::float8)
order by operator limit :limit;

-- name: short_operators
-- Names without a module, from any queue. A DAG may use them instead of module:function.
select distinct operator from interlock.operators
where operator not like '%:%' and last_seen_at >= interlock.clock() - make_interval(secs => :seconds::float8)
order by operator limit :limit;

-- name: limited_orgs
select org_id, operators from interlock.orgs where operators is not null;

-- name: limit_org^
update interlock.orgs set operators = :operators::text[] where name = :name returning org_id, name, operators;
