-- Names for the rows of seed.sql: ids derive from them, both for the seed and for the measured statements.

create schema seed;
create function seed.mass() returns int language sql stable as $$ select current_setting('seed.mass')::int $$;
create function seed.id(name text) returns uuid language sql immutable as $$ select md5(name)::uuid $$;
create function seed.task(run text, index int) returns uuid language sql immutable as
$$ select case when run like '% alone' then seed.id(run || ' ' || index)
               else interlock.run_task_id(seed.id('run ' || run), index) end $$;
create function seed.lease(task_id uuid) returns uuid language sql immutable as $$ select seed.id('lease ' || task_id) $$;
create function seed.tasks(run text, count int) returns uuid[] language sql stable as
$$ select array_agg(seed.task(run, i)) from generate_series(0, count - 1) i $$;
create function seed.leases(run text, count int) returns uuid[] language sql stable as
$$ select array_agg(seed.lease(seed.task(run, i))) from generate_series(0, count - 1) i $$;
create function seed.job_ids(count int) returns uuid[] language sql stable as
$$ select array_agg(seed.id('job ' || n)) from generate_series(0, count - 1) n $$;
create function seed.run_ids(count int) returns uuid[] language sql stable as
$$ select array(select run_id from interlock.runs where ended_at is null order by last_index desc, run_id limit count) $$;
create function seed.messages(count int) returns bigint[] language sql stable as
$$ select array(select message_id from interlock.queue_messages where queue = 'other' order by message_id limit count) $$;
create function seed.repeat(value text, count int) returns text[] language sql immutable as
$$ select array_fill(value, array[count]) $$;
create function seed.series(count int) returns int[] language sql immutable as
$$ select array_agg(n) from generate_series(0, count - 1) n $$;
-- The length of the only long run.
create function seed.big() returns int language sql stable as $$ select greatest(4000, seed.mass() / 5) $$;
