-- State that inline operators keep between tasks.

-- name: read_state^
select state, version from interlock.operator_state where job_id = :job_id and name = :name;

-- name: keep_state$
-- Returns no row if another task has written the state since it was read.
insert into interlock.operator_state (job_id, name, state)
select :job_id, :name, :state::text::json where :version::bigint = 0
    or exists (select 1 from interlock.operator_state where job_id = :job_id and name = :name)
on conflict (job_id, name) do update
    set state = excluded.state, version = interlock.operator_state.version + 1, updated_at = interlock.clock()
    where interlock.operator_state.version = :version
returning version;
