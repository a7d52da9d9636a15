-- Packs: the objects with the long results of a run, and their deletion with the run.

-- name: expect_packs!
-- Recorded before the first pack of a run is written. Nothing is due before the run itself is deleted.
insert into interlock.file_sweeps (place, due_at, final_at) values (:place, 'infinity', 'infinity')
on conflict (place) do nothing;

-- name: condemn_packs!
with receipt as (
    delete from interlock.run_receipts where run_id = :run_id
)
update interlock.file_sweeps
set due_at = interlock.clock() + make_interval(secs => :grace::float8),
    final_at = interlock.clock() + make_interval(secs => :grace::float8 - :keep::float8)
where place = :place;

-- name: forget_exports!
-- Their files are swept when they expire.
delete from interlock.exports where run_id = :run_id;
