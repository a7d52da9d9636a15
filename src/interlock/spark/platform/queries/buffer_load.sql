-- Staging tables of the sink, as a task on Spark fills them. The sink merges and drops them.

-- name: staging!
select datasets.sink_staging(:name, :columns::text::json);

-- name: unstage!
select datasets.sink_unstage(:name, :number);

-- name: keep_staged!
insert into datasets.sink_staged (staging, publish_id, rows, bytes, refusal)
select :name, s.publish_id, s.rows, s.bytes, s.refusal
from json_to_recordset(:found::text::json) as s(publish_id uuid, rows bigint, bytes bigint, refusal json)
on conflict (staging, publish_id) do update
    set rows = excluded.rows, bytes = excluded.bytes, refusal = excluded.refusal;
