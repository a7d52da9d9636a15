-- Table statistics of the planner.

-- name: tables_counted_empty
-- Tables whose last VACUUM or ANALYZE counted hardly any rows in existing pages.
select c.relname::text as name from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'interlock' and c.relkind = 'r' and c.relpages > 0 and c.reltuples between 0 and :rows
  and has_table_privilege(c.oid, 'maintain')
order by c.relname;

-- name: wait_briefly!
-- For a VACUUM that works on the table: a longer wait would cancel it.
select set_config('lock_timeout', '50ms', true);

-- name: forget_count!
select pg_clear_relation_stats('interlock', :name::text);
