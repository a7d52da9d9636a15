"""Cost limits of the statements about staged lists; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Exempt, Expectation, Live

_ORG = {"org_id": "seed.id('org 0')"}
_RUN = {"run_id": "seed.id('run running')"}
_INGEST = _ORG | {"run_id": "seed.id('run running')"}
_UPLOADS = {"upload_ids": "array(select seed.id('upload ' || n) from generate_series(0, 49) n)"}
_QUEUE = {"queue": "'platform'", "priority": "0"}
_NEW_RUN = {
    "job_id": "seed.id('job 0')",
    "range_size": "100",
    "open": "true",
    "max_concurrency": "null",
    "rate_key": "null",
    "rate_per_second": "null",
    "tolerated_share": "0",
    "deadline_seconds": "60",
    "retention_days": "null",
}
_TABLE = "a table of its own is made, indexed or attached: its cost is that of the run, once"

INGEST: dict[str, list[Expectation]] = {
    "insert_upload": [Bounded(1, _ORG | {"parts": "1", "seconds": "60"}, pages=20)],
    "keep_upload": [Bounded(1, _ORG | {"upload_id": "seed.id('upload 0')", "seconds": "60"}, pages=30)],
    "known_upload": [Bounded(1, _ORG | {"upload_id": "seed.id('upload 0')"})],
    "uploads_to_sweep": [Bounded(50, {"limit": "50"})],
    "uploads_in_use": [
        Live("select 50 * count(*) from interlock.ingests where settled_at is null", "open ingests", _UPLOADS)
    ],
    "postpone_uploads": [Bounded(50, _UPLOADS | {"seconds": "60"}, pages=30)],
    "delete_uploads": [Bounded(50, _UPLOADS, pages=20)],
    "insert_ingest": [Bounded(1, _ORG | {"run_id": "seed.id('run dead')"} | {"source": "'{}'"}, pages=30)],
    "announce": [
        Bounded(10, {"queue": "'ingest'", "run_ids": "seed.tasks('running', 10)", "direct": direct}, pages=30)
        for direct in ("true", "false")
    ],
    "ingest_of": [Bounded(1, {"run_id": "seed.id('run running')"}, rows=5, pages=20)],
    "lock_loading": [Bounded(1, _INGEST)],
    "shard_of_run": [Bounded(1, _RUN)],
    "give_shard": [Bounded(1, _ORG | _RUN, pages=40)],
    "create_shard": [Exempt(_TABLE)],
    "finish_shard": [Exempt(_TABLE)],
    "begin_chunk": [
        Bounded(
            1,
            {"run_id": "seed.id('run running')::text", "part": "1", "load_task": "''"}
            | dict.fromkeys(("first_byte", "end_byte", "first_line", "lines", "rows"), "9")
            | {"reached": "''"},
            rows=6,
            pages=30,
        )
    ],
    "last_chunk": [Bounded(1, {"run_id": "seed.id('run running')"})],
    "sum_of_chunks": [Exempt("all chunks of one run, once, when the last of them is loaded")],
    "set_loaded": [Bounded(1, _INGEST | {"total": "1", "last_index": "0"}, pages=30)],
    "set_run_total": [Bounded(1, _INGEST, pages=40)],
    "enqueue_run_ranges": [
        Bounded(10, _INGEST | _QUEUE | {"limit": "10", "direct": direct}, pages=40) for direct in ("true", "false")
    ],
    "latch_ingested": [Bounded(1, _INGEST, pages=40)],
    "end_ingest": [Bounded(1, _INGEST | {"step": "'Failed'", "state": "'Failed'", "reason": "'bad'"}, pages=60)],
    "forget_chunks": [Bounded(1, {"run_id": "seed.id('run running')"}, pages=20)],
    "set_chunk_rows": [
        Bounded(
            1,
            {"run_id": "seed.id('run running')::text", "part": "1", "first_byte": "0", "rows": "1", "lines": "1"},
            pages=20,
        )
    ],
    "loads_on_spark": [Bounded(100, {"limit": "100"})],
    "set_load_task": [Bounded(1, _INGEST | {"load_task": "seed.id('load')"}, pages=30)],
    "clear_load_task": [Bounded(1, _INGEST | {"load_task": "seed.id('load')"}, pages=30)],
    "load_task_state": [Bounded(1, {"task_id": "seed.task('failed', 0)"}, rows=6)],
    "ingest_of_load": [Bounded(1, {"task_id": "seed.id('load')"})],
    "stuck_ingests": [
        Live(
            "select count(*) from interlock.ingests where settled_at is null",
            "a page of runs whose tasks are being made",
            {"after": "'00000000-0000-0000-0000-000000000000'", "limit": "100", "queue": "'ingest'", "grace": "0"},
            rows=6,
            pages=20,
        )
    ],
    "insert_ingested": [
        Bounded(
            50,
            _ORG
            | _RUN
            | {
                "job_id": "seed.id('job 0')",
                "max_attempts": "3",
                "priority": "0",
                "indexes": "array(select 900000000 + n from generate_series(1, 50) n)",
                "payloads": "array_fill('{}'::text, array[50])",
                "slot_keys": "array_fill(null::text, array[50])",
            },
            pages=40,
        )
    ],
    "insert_ingesting_run": [
        Bounded(
            1,
            _ORG
            | {
                "job_id": "seed.id('job 0')",
                "range_size": "100",
                "open": "true",
                "max_concurrency": "null",
                "rate_key": "null",
                "rate_per_second": "null",
                "tolerated_share": "0",
                "deadline_seconds": "60",
                "retention_days": "null",
            },
            pages=40,
        )
    ],
    "newest_run": [Bounded(1, _ORG | {"job_id": "seed.id('job 0')"}, rows=5)],
    "extend_open_run": [Bounded(1, _ORG | _RUN | {"added": "1"}, pages=40)],
    "add_tasks": [
        Bounded(
            50,
            _ORG
            | _RUN
            | {
                "shard": "0",
                "job_id": "seed.id('job 0')",
                "first_index": "910000000",
                "max_attempts": "3",
                "priority": "0",
                "payloads": "array_fill('{}'::text, array[50])",
                "slot_keys": "array_fill(null::text, array[50])",
            },
            pages=40,
        )
    ],
    "add_ranges": [
        Bounded(
            10,
            _INGEST
            | _QUEUE
            | {"job_id": "seed.id('job 0')", "first": "900", "last": "1899", "range_size": "100", "direct": direct},
            pages=40,
        )
        for direct in ("true", "false")
    ],
    "unwanted_open_runs": [Bounded(100, {"limit": "100"})],
    "close_run": [Bounded(1, _ORG | _RUN, pages=40)],
    "has_spark_worker": [Bounded(1, {"queue": "'spark'"}, rows=20)],
}
EXPECTED: dict[str, list[Expectation]] = {f"ingest.{name}": cases for name, cases in INGEST.items()}
