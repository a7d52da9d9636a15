-- Events of runs for webhooks. The webhooks capability delivers them.

-- name: news_of_runs
-- The webhooks to notify about these runs: of the end of those in :ended, and of a share that any of them has passed,
-- once. A task that waits for another attempt has not failed.
with watched as materialized (
    select w.webhook_id, w.org_id, w.name as webhook, w.events, w.failed_share, w.done_share, o.name as org,
           j.dag_name, j.name as job_name, j.name,
           r.run_id, r.job_id, r.state, r.reason, r.total, r.queued, r.running, r.completed, r.failed, r.dead, r.canceled, r.errors, r.rerun_of,
           r.cancel_requested, r.created_at, r.ended_at, r.retention_days
    from interlock.runs r
    join interlock.webhooks w on w.org_id = r.org_id
    join interlock.orgs o on o.org_id = r.org_id
    join interlock.jobs j on j.job_id = r.job_id
    where r.run_id = any(:run_ids::uuid[])
      and (w.job_name is null or w.job_name = j.name) and (w.dag_name is null or w.dag_name = j.dag_name)
), passed as (
    insert into interlock.webhook_crossings (run_id, webhook_id, event)
    select w.run_id, w.webhook_id, s.event
    from watched w
    cross join lateral (values ('run.failed_share', w.failed_share, w.dead),
                               ('run.done_share', w.done_share, w.completed + w.dead + w.canceled))
        as s(event, share, tasks)
    where w.total > 0 and s.tasks >= s.share * w.total
    on conflict do nothing
    returning run_id, webhook_id, event
), news as (
    select run_id, webhook_id, event from passed
    union all
    select w.run_id, w.webhook_id, e.event
    from watched w
    cross join lateral (select case w.state when 'Completed' then 'run.completed'
                                            when 'CompletedWithFailures' then 'run.completed_with_failures'
                                            when 'Failed' then 'run.failed'
                                            when 'Canceled' then 'run.canceled' end as event) e
    where w.run_id = any(:ended::uuid[]) and e.event = any(w.events)
)
select uuidv7() as delivery_id, n.event, w.*
from news n join watched w on w.run_id = n.run_id and w.webhook_id = n.webhook_id;

-- name: insert_deliveries
insert into interlock.webhook_deliveries (delivery_id, org_id, webhook_id, event, run_id, body)
select * from unnest(:ids::uuid[], :org_ids::uuid[], :webhook_ids::uuid[], :events::text[], :run_ids::uuid[],
                     :bodies::text[])
returning pg_notify('interlock_outbox', 'webhooks');
