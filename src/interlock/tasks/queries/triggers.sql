-- Triggers of source jobs: webhook calls, schedules, commands and manual payloads. The DAGs capability makes tasks of them.

-- name: accept_triggers^
-- Accepts only payloads that can be parsed later: an invalid one would fail its whole batch then.
with given as materialized (
    select i.*, i.payload::jsonb is not null as fit
    from unnest(:job_ids::uuid[], :dedupe_keys::text[], :payloads::text[]) with ordinality
        as i(job_id, dedupe_key, payload, n)
), fresh as (
    insert into interlock.triggers (org_id, job_id, dedupe_key, payload)
    select j.org_id, g.job_id, g.dedupe_key, g.payload::json
    from given g join interlock.jobs j on j.job_id = g.job_id
    where g.fit and not exists (select 1 from interlock.tasks t
                                where t.shard = 0 and t.job_id = g.job_id and t.dedupe_key = g.dedupe_key)
    order by g.n
    on conflict (job_id, dedupe_key) do nothing
    returning job_id
), owed as (
    insert into interlock.outbox (kind, target, body)
    select 'trigger', '', json_build_object('jobs', array_agg(distinct job_id)) from fresh having count(*) > 0
    returning 1
)
select (select count(*) from fresh) as accepted, (select count(pg_notify('interlock_outbox', 'trigger')) from owed) as told;
