"""Limit of the rows and pages that each statement may touch, however much is stored. A statement without one fails.

Arguments are SQL; the functions of seed_names.sql name the seeded rows. `items` is the size of one call in the product:
a batch, a page, a range.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bounded:
    """Touches a few rows per item, and about as many pages as in an almost empty database."""

    items: int = 1
    arguments: dict[str, str] = field(default_factory=dict)
    rows: float = 3
    """Maximum rows read per item."""
    pages: float = 12
    """Maximum pages touched per item, including those of the indexes it writes to."""


@dataclass(frozen=True)
class Live:
    """Touches everything that is running or waiting, but nothing that has ended."""

    count: str
    """SQL for the number of such items."""
    reason: str
    arguments: dict[str, str] = field(default_factory=dict)
    rows: float = 3
    pages: float = 12


@dataclass(frozen=True)
class Exempt:
    reason: str


Expectation = Bounded | Live | Exempt

_ORG = {"org_id": "seed.id('org 0')"}
_SMALL = {"shard": "0"}
_FOCUS = {"job_id": "seed.id('job 0')"}
_ALONE = {"job_id": "seed.id('job 3')"}
_EPOCH = "'epoch'"
_ANY_JOB = {"dag": "null", "operator": "null"}
_LIMITS = dict.fromkeys(
    ("max_concurrency", "rate_key", "rate_per_second", "tolerated_share", "deadline_seconds", "retention_days"),
    "null",
)
_RUNS_OF_ONE = "select count(*) from interlock.runs where job_id = seed.id('job 0')"
_ZERO = "'00000000-0000-0000-0000-000000000000'"
_HALFWAY = "'7fffffff-0000-0000-0000-000000000000'"
_BUSY = (
    "select (select count(*) from interlock.runs where running <> 0) + (select count(*) from interlock.run_deltas)"
    " + (select count(*) from interlock.tasks where run_id is null and status = 'Running')"
)
_FAILED_ALONE = "select count(*) from interlock.tasks where run_id is null and status = 'Failed'"


def _run(name: str) -> dict[str, str]:
    return {"run_id": f"seed.id('run {name}')"}


def _run_ids(name: str) -> dict[str, str]:
    return {"run_ids": f"array[seed.id('run {name}')]"}


def _nulls(count: int) -> str:
    return f"array_fill(null::text, array[{count}])"


# tasks.sql

_WHO = _SMALL | {"worker_id": "'worker'", "runtimes": "null"}
_FENCES = _SMALL | {
    "task_ids": "seed.tasks('running', 100)",
    "attempts": "array_fill(1, array[100])",
    "leases": "seed.leases('running', 100)",
}
_UNPACKED = {"packs": "'{}'", "offsets": "'{}'", "lengths": "'{}'"}
_REPORT = _FENCES | _UNPACKED | dict.fromkeys(("crashes", "results", "error_classes", "error_messages"), _nulls(100))

TASKS: dict[str, list[Expectation]] = {
    "claim": [Bounded(100, _WHO | {"task_ids": "seed.tasks('queued', 100)"}, pages=25)],
    "claim_ranges": [
        Bounded(100, _WHO | {"run_ids": "array[seed.id('run queued')]", "firsts": "'{0}'", "lasts": "'{99}'"}, pages=25)
    ],
    "claim_range_start": [Bounded(20, _WHO | _run("queued") | {"first": "0", "last": "99", "limit": "20"}, pages=30)],
    "next_queued": [
        Bounded(20, _SMALL | _run("queued") | {"first": "0", "last": "99", "runtimes": "null"}),
        Bounded(100, _SMALL | _run("running") | {"first": "0", "last": "99", "runtimes": "null"}),
    ],
    "fail_unclaimable": [Bounded(10, _SMALL | {"task_ids": "seed.tasks('parked', 10)"}, pages=60)],
    "claim_capped": [
        Bounded(
            100,
            _WHO | {"job_ids": "array[seed.id('job 2')]", "task_ids": "seed.tasks('parked', 100)", "limit": "null"},
            rows=6,
            pages=40,
        )
    ],
    "lock_capped_jobs": [Bounded(4, {"job_ids": "seed.job_ids(4)"})],
    "claim_states": [Bounded(100, _SMALL | {"runtimes": "null", "task_ids": "seed.tasks('queued', 100)"})],
    "claimed_jobs": [Bounded(4, {"job_ids": "seed.job_ids(4)"})],
    "readers_among": [Bounded(100, _SMALL | {"task_ids": "seed.tasks('running', 100)"})],
    "fetch_task": [Bounded(1, _SMALL | {"runtimes": "null", "task_id": "seed.task('queued', 0)"})],
    "operator_of": [
        Bounded(1, _ORG | {"task_id": "seed.task('queued', 0)", "run_id": "null"}),
        Bounded(1, _ORG | {"task_id": "null", "run_id": "seed.id('run queued')"}),
    ],
    "heartbeat": [
        Bounded(100, _FENCES | {"progresses": "array_fill(0.5, array[100])", "texts": _nulls(100)}, pages=25)
    ],
    "complete_by_index": [
        Bounded(
            100,
            _SMALL
            | {"run_ids": "array[seed.id('run running')]", "leases": "array[seed.lease(seed.task('running', 0))]"}
            | {"attempts": "'{1}'", "firsts": "'{1}'", "lasts": "'{100}'"}
            | {"indexes": "seed.series(100)", "results": _nulls(100)}
            | packs,
        )
        for packs in (
            _UNPACKED,
            {
                "packs": "array[gen_random_uuid()]",
                "offsets": "seed.series(100)::int[]",
                "lengths": "seed.series(100)::int[]",
            },
        )
    ],
    "complete": [
        Bounded(100, _REPORT | {"statuses": f"seed.repeat('{status}', 100)"}, pages=40)
        for status in ("Completed", "Failed", "Canceled")
    ],
    "runs_of": [Bounded(100, _SMALL | {"task_ids": "seed.tasks('running', 100)"})],
    "fence_states": [Bounded(100, _SMALL | {"task_ids": "seed.tasks('running', 100)"})],
    "lock_attempt": [
        Bounded(
            1,
            _SMALL
            | {"task_id": "seed.task('running', 0)", "attempt": "1"}
            | {"lease_token": "seed.lease(seed.task('running', 0))"},
        )
    ],
    "outputs_of": [Bounded(100, _SMALL | {"task_ids": "seed.tasks('running', 100)"})],
    "release": [Bounded(100, _FENCES, pages=30)],
    "reap": [Bounded(500, _SMALL | {"limit": "500", "since": _EPOCH}, rows=5, pages=40)],
    "requeue_due": [Bounded(1000, _SMALL | {"limit": "1000", "since": _EPOCH}, pages=25)],
    "cancel": [Bounded(2000, _SMALL | _ORG | {"task_ids": "seed.tasks('canceling', 2000)"}, pages=25)],
    "redrive": [Bounded(2000, _SMALL | _ORG | {"task_ids": "seed.tasks('dead', 2000)"}, rows=6, pages=30)],
    "unpark": [
        Bounded(1000, {"job_ids": "array[seed.id('job 2')]", "keys": "'{7}'"}),
        Bounded(1000, {"job_ids": "array[seed.id('job 103')]", "keys": "'{}'"}),
    ],
}

# shards.sql

SHARDS: dict[str, list[Expectation]] = {
    "next_shard": [Bounded(1)],
    "shards_of_runs": [Bounded(1, _run_ids("queued"))],
    "live_shards": [
        Live("select count(*) from interlock.runs where shard <> 0 and ended_at is null", "runs with a shard")
    ],
    "alarmed_shards": [
        Live("select count(distinct shard) from interlock.lease_alarms where shard > 0", "shards that have an alarm")
    ],
    "shards_of_jobs": [
        Live(
            "select count(*) from interlock.runs where shard <> 0 and ended_at is null",
            "runs with a shard",
            {"job_ids": "seed.job_ids(4)"},
        )
    ],
    "shard_of_task": [
        Live(
            "select 1 + count(*) from interlock.runs where shard <> 0",
            "shards",
            {"task_id": "seed.task('dead', 7)", "org_id": "null"},
        )
    ],
    "queued_payloads": [Bounded(100, _SMALL | _run("queued") | {"first": "0", "last": "99", "limit": "100"})],
    "running_of": [Live("select count(*) from interlock.run_deltas", "deltas not yet folded", _run("running"))],
    "limited_runs": [
        Live("select count(*) from interlock.runs where ended_at is null", "unfinished runs", {"limit": "1000"})
    ],
    "send_again": [Bounded(1, _run("queued"), pages=20)],
    "run_address": [Bounded(1, _run("running"))],
    "attachment": [Exempt("reads the catalog, once per shard that is dropped")],
    "drop_shard": [Exempt("drops a table")],
}

# queue.sql

_PLATFORM = {"queue": "'platform'"}
_SINCE = {"normal_since": _EPOCH, "bulk_since": _EPOCH}
_HELD = {"queue": "'other'", "ids": "seed.messages(100)", "receipts": "array[seed.id('receipt')]"}
_WORKERS = "select count(*) from interlock.workers"

QUEUE: dict[str, list[Expectation]] = {
    "send": [
        Bounded(
            500,
            _PLATFORM
            | {"bodies": "seed.repeat('{}', 500)", "priorities": "array_fill(0, array[500])"}
            | {"org_ids": "array_fill(seed.id('org 0'), array[500])"}
            | {"share_ids": "array_fill(seed.id('run queued'), array[500])"}
            | {"dedupe_keys": "seed.series(500)::text[]", "delays": "array_fill(0, array[500])"},
            pages=20,
        )
    ],
    "notify": [Bounded(1, _PLATFORM)],
    "receive": [
        Bounded(
            10,
            _PLATFORM | _SINCE | {"reserved": "1", "limit": "10", "visibility": "60", "max_receives": "20"},
            pages=30,
        )
    ],
    "waiting_shares": [
        Bounded(
            1000,
            {"queue": "'shared'", "lane": "1", "limit": "1000"}
            | dict.fromkeys(("after_org", "after_share"), "'00000000-0000-0000-0000-000000000000'"),
            pages=16,
        )
    ],
    "receive_in_turn": [
        Bounded(
            16,
            {"queue": "'shared'", "visibility": "60", "max_receives": "20", "lanes": "array_fill(1, array[8])"}
            | {"limit": "16", "normal_most": "14", "normal_since": _EPOCH}
            | {"org_ids": "array(select seed.id('org ' || n % 4) from generate_series(0, 7) n)"}
            | {"share_ids": "array(select seed.id('share ' || n) from generate_series(0, 7) n)"}
            | {"sinces": f"array_fill({_EPOCH}::timestamptz, array[8])", "mosts": "array_fill(2, array[8])"},
            pages=40,
        )
    ],
    "next_visible": [Bounded(1, _PLATFORM | _SINCE)],
    "extend": [Bounded(100, _HELD | {"visibility": "60"}, pages=20)],
    "ack": [Bounded(100, _HELD)],
    "nack": [Bounded(100, _HELD | {"delay": "0"}, pages=20)],
    "bury": [Bounded(100, _HELD, pages=20)],
    "replace": [
        Bounded(
            1,
            {
                "queue": "'other'",
                "body": "'{}'",
                "delay": "0",
                "message_id": "(seed.messages(1))[1]",
                "receipt": "seed.id('receipt')",
            },
            pages=30,
        )
    ],
    "stats": [
        Live(
            "select count(*) from interlock.queue_messages where queue = 'platform'",
            "a gauge; it stops counting at `limit`",
            _PLATFORM | {"limit": "100000"},
        )
    ],
    "dead_letters": [Bounded(100, _PLATFORM | {"limit": "100"})],
    "dead_by_queue": [Bounded(100, {"queues": "'{platform,other}'", "limit": "100"})],
    "redrive_messages": [Bounded(1000, _PLATFORM | {"limit": "1000"}, pages=20)],
    "worker_seen": [Bounded(1, {"worker_id": "'worker 1'", "queue": "'other'"}, pages=20)],
    "live_workers": [Live(_WORKERS, "one row per worker of the last day")],
}

# jobs.sql

_REQUEST = _ORG | {"endpoint": "'POST /v1/jobs'"}
_JOB = _ORG | {
    "name": "'job 0'",
    "operator": "'echo'",
    "runtime": "'platform'",
    "queue": "'platform'",
    "config": "'{}'",
    "priority": "0",
    "max_attempts": "3",
    "backoff_seconds": "1",
    "backoff_factor": "2",
    "backoff_cap_seconds": "60",
    "jitter": "0.1",
    "non_retryable": "'{}'",
    "lease_seconds": "60",
    "timeout_seconds": "3600",
    "max_concurrency": "null",
    "concurrency_key": "null",
    "max_concurrency_per_key": "null",
    "outputs": "'[]'",
    "definition_hash": "sha256('definition')",
}
_NEW = _ORG | {
    "run_id": "seed.id('run new')",
    "job_id": "seed.id('job 1')",
    "max_attempts": "3",
    "priority": "0",
    "payloads": "seed.repeat('{}', 1000)",
    "slot_keys": _nulls(1000),
}
_RANGES = _FOCUS | {
    "run_id": "seed.id('run new')",
    "queue": "'platform'",
    "priority": "0",
    "range_size": "100",
    "indexes": "seed.series(1000)",
    "last": "999",
}

JOBS: dict[str, list[Expectation]] = {
    "remember_request": [
        Bounded(1, _REQUEST | {"key": key, "request_hash": "sha256('body')", "seconds": "60"}, pages=20)
        for key in ("'new'", "'key 0'")
    ],
    "remembered_request": [Bounded(1, _REQUEST | {"key": "'key 100'"})],
    "remember_response": [Bounded(1, _REQUEST | {"key": "'key 100'", "status": "201", "response": "'{}'"}, pages=20)],
    "job_by_name": [Bounded(1, _ORG | {"dag_name": "''", "name": "'job 0'"})],
    "enqueue_tasks": [
        Bounded(1000, _SMALL | {"task_ids": "seed.tasks('queued', 1000)", "direct": direct}, pages=30)
        for direct in ("true", "false")
    ],
}

SUBMISSION: dict[str, list[Expectation]] = {
    "insert_job": [Bounded(1, _JOB, pages=30), Bounded(1, _JOB | {"name": "'new'"}, pages=30)],
    "replace_job": [Bounded(1, _JOB, pages=30)],
    "register_datasets": [
        Bounded(
            2,
            _ORG
            | {"uuids": "array[seed.id('new'), seed.id('dataset 0')]", "versions": "array_fill(seed.id('new'), '{2}')"},
        )
    ],
    "register_versions": [
        Bounded(
            2,
            _ORG
            | {
                "uuids": "array[seed.id('dataset 0'), seed.id('dataset 1')]",
                "versions": "array[seed.id('new version'), seed.id('version 1')]",
            },
            pages=40,
        )
    ],
    "foreign_datasets": [
        Bounded(
            2,
            _ORG
            | {
                "uuids": "array[seed.id('dataset 0'), seed.id('dataset 1')]",
                "versions": "array[seed.id('version 0'), seed.id('version 1')]",
            },
        )
    ],
    "insert_run": [
        Bounded(1, _ORG | _FOCUS | {"last_index": "999", "range_size": "100", "total": "1000"} | _LIMITS, pages=30)
    ],
    "insert_tasks": [Bounded(1000, _NEW | {"dedupe_keys": "seed.series(1000)::text[]"}, pages=20)],
    "insert_all_tasks": [Bounded(1000, _NEW, pages=20)],
    "latch_run": [Bounded(1, _run("queued") | {"total": "1000"}, pages=30)],
    "enqueue_ranges": [Bounded(10, _ORG | _RANGES | {"direct": direct}, pages=20) for direct in ("true", "false")],
}

# runs.sql

RUNS: dict[str, list[Expectation]] = {
    "fold_deltas": [Bounded(5000, {"limit": "5000", "since": "'(0,0)'"})],
    "end_runs": [Bounded(1, {"run_ids": "array[seed.id('run queued')]"}, pages=30)],
    "request_run_cancel": [Bounded(1, _ORG | _run("queued"), pages=30)],
    "stop_intolerable": [Bounded(1, _run_ids("running"), pages=30)],
    "request_deletion": [Bounded(1, _run("dead"))],
    "deleting_runs": [Bounded(10, {"limit": "10"})],
    "take_turn": [Exempt("an advisory lock")],
    "end_turn": [Exempt("an advisory lock")],
    "delete_shard_attempts": [Bounded(5000, {"number": "1", "limit": "5000"})],
    "ids_of_range": [Bounded(5000, _run("dead") | {"first": "0", "last": "4999"})],
    "lock_runs_of": [Bounded(2000, _ORG | {"task_ids": "seed.tasks('dead', 2000)"})],
    "canceling_runs": [Bounded(20, {"limit": "20"})],
    "cancelable_of_run": [
        Bounded(5000, run | {"first": "0", "last": "4999"}, rows=1) for run in (_run("canceling"), _run("big"))
    ],
    "cancel_walked": [Bounded(1, _run("canceling") | {"walked_from": "0", "walked_to": "5000"}, pages=30)],
    "expired_run": [Bounded(1, {"age_seconds": "14 * 86400", "since": _EPOCH})],
    "expired_kept_run": [Bounded(1, {"since": _EPOCH})],
    "delete_run_tasks": [Bounded(5000, _run("sweep") | {"first": "0", "last": "4999"})],
    "set_swept": [Bounded(1, _run("sweep") | {"swept": "5000"}, pages=30)],
    "delete_task_traces": [Bounded(5000, {"task_ids": "seed.tasks('sweep', 5000)"})],
    "delete_run": [Bounded(1, _run("sweep"))],
    "delete_nameless_job": [Bounded(1, {"job_id": "seed.id('job 104')"})],
    "delete_expired_requests": [Bounded(5000, {"limit": "5000"})],
    "delete_stale_workers": [Live(_WORKERS, "one row per worker of the last day")],
    "sweep_place": [Bounded(1, {"name": "'runs'"})],
    "set_sweep_place": [Bounded(1, {"name": "'runs'", "cursor": "null", "position": "7", "task_id": "null"})],
    "live_runs_from": [
        Bounded(100, {"cursor": cursor, "limit": "100"})
        for cursor in ("null", "'00ffffff-0000-0000-0000-000000000000'")
    ],
    # Ranges with and without a message.
    "lost_run_tasks": [
        Bounded(items, _run_ids(run) | {"firsts": "'{0}'", "lasts": f"'{{{last}}}'", "grace": "60"})
        for run, last, items in (("queued", 999, 10), ("big", 19_999, 200), ("running", 999, 1000))
    ],
    "jobs_after": [Bounded(100, {"cursor": cursor, "limit": "100"}) for cursor in ("null", _HALFWAY)],
    "lost_job_tasks": [
        Bounded(1000, {"from_job": job, "after": _ZERO, "grace": "60", "limit": "1000"})
        for job in (_ZERO, "seed.id('job 3')")
    ],
    "stranded_jobs": [Bounded(100, {"job_ids": "seed.job_ids(100)"})],
    "capped_jobs_of": [Bounded(2000, {"task_ids": "seed.tasks('dead', 2000)"})],
    "parked_keys": [Bounded(50, {"job_ids": "array[seed.id('job 2'), seed.id('job 103')]", "limit": "1000"})],
}

RUN_CONTROL: dict[str, list[Expectation]] = {
    "stop_overdue": [
        Live(
            "select count(*) from interlock.runs where deadline_at is not null and ended_at is null",
            "runs with a deadline",
            {"limit": "20"},
        )
    ],
    "pause_runs": [Live(_RUNS_OF_ONE, "runs of a job", _ORG | _FOCUS, pages=30)],
    "resume_runs": [Live(_RUNS_OF_ONE, "runs of a job", _ORG | _FOCUS, pages=30)],
    "live_runs_of": [Live(_RUNS_OF_ONE, "runs of a job", _ORG | _FOCUS | {"limit": "10000"})],
    "delete_job": [Live(_RUNS_OF_ONE, "runs of a job", _ORG | _FOCUS, pages=30)],
    "waking_runs": [Bounded(20, {"limit": "20"})],
    "wake_ranges": [
        Bounded(200, _SMALL | _run("queued") | {"first": "0", "last": "19999", "direct": "true"}, rows=110, pages=120)
    ],
    "queued_of_range": [Bounded(20_000, _SMALL | _run("big") | {"first": "0", "last": "19999"})],
    "woken_to": [Bounded(1, _run("queued") | {"walked_from": "0", "walked_to": "20000"}, pages=30)],
}

# reads.sql

_PAGE = {"limit": "1000"}
_LAST = "'ffffffff-ffff-ffff-ffff-ffffffffffff'"
_QUEUE = _ORG | {"queue": "'platform'"}
_ALL_IDS = {"low": _ZERO, "high": _LAST}
_ONE = _ORG | {"task_id": "seed.task('dead', 7)"}
_BIG = _ORG | _run("big") | _PAGE
_DEEP = {"first": "seed.big() - 1000", "last": "seed.big() - 1"}
_FILTER = _ORG | {"error_class": "null", "limit": "2000"}
_CANCELABLE = _FILTER | {"statuses": "'{Queued,Running,Failed}'", "dead": "false"}
_DEAD = _FILTER | {"statuses": "'{Failed}'", "dead": "true"}

READS: dict[str, list[Expectation]] = {
    "job_by_id": [Bounded(1, _ORG | _FOCUS)],
    "list_jobs": [Bounded(100, _ORG | {"cursor": cursor, "limit": "100"}, pages=20) for cursor in ("null", _HALFWAY)],
    "newest_run": [Bounded(1, _ORG | _FOCUS)],
    "run_by_id": [Bounded(1, _ORG | _run("queued"))],
    "list_runs": [
        Bounded(100, _ORG | _FOCUS | {"cursor": cursor, "state": state, "walked": "100"})
        for cursor in ("null", _HALFWAY)
        for state in ("null", "'Failed'")
    ],
    "list_org_runs": [
        Bounded(100, _ORG | {"cursor": cursor, "state": state, "walked": "100"})
        for cursor in ("null", _HALFWAY)
        for state in ("null", "'Failed'")
    ],
    "runs_by_prefix": [Bounded(11, _ORG | _ALL_IDS | {"limit": "11"})],
    "jobs_by_prefix": [Bounded(11, _ORG | _ALL_IDS | {"limit": "11"})],
    "tasks_by_prefix": [Bounded(1000, _ORG | _ALL_IDS | {"limit": "11", "walked": "1000"})],
    "runs_from": [Bounded(51, _ORG | _FOCUS | {"cursor": cursor, "limit": "51"}) for cursor in ("null", _HALFWAY)],
    "jobs_from": [Bounded(51, _ORG | _ANY_JOB | {"cursor": cursor, "limit": "51"}) for cursor in ("null", _HALFWAY)],
    "task_by_id": [Bounded(1, _ONE, rows=5, pages=20)],
    "tasks_of_range": [
        Bounded(1000, _BIG | {"first": "0", "last": "999", "status": "null"}),
        Bounded(1000, _BIG | _DEEP | {"status": "null"}),
        Bounded(1000, _BIG | _DEEP | {"status": "'Completed'"}),
    ],
    "tasks_of_run_by_status": [
        Bounded(20, _BIG | {"status": status, "after": after, "limit": "20"}, rows=4, pages=20)
        for status in ("'Failed'", "'Canceled'")
        for after in ("-1", "seed.big() - 1001")
    ],
    "tasks_of_job_by_status": [
        Bounded(1000, _ORG | _ALONE | _PAGE | {"status": status, "after": after, "inline_bytes": "1024"}, rows=4)
        for status in ("'Completed'", "'Failed'")
        for after in (_LAST, _HALFWAY)
    ],
    "attempts_of": [Bounded(3, {"task_id": "seed.task('dead', 7)"})],
    "busy_jobs": [
        Live(
            _BUSY, "counts what runs, up to a limit", _ORG | {"queue": "'platform'", "limit": "1000"}, rows=4, pages=20
        )
    ],
    "slot_holders": [Bounded(5, _FOCUS | {"slot_key": key, "limit": "5"}, rows=30) for key in ("null", "'key 1'")],
    "explain_facts": [
        # Besides its own rows: the task's job may have a hundred slots, and its queue a hundred workers.
        Bounded(200, _ORG | {"task_id": f"seed.task('{run}', 7)"})
        for run in ("queued", "dead", "running", "parked")
    ],
    "unended_of_run": [
        Bounded(5000, _ORG | run | {"first": "0", "last": "4999", "statuses": "'{Queued,Running}'"}, rows=1)
        for run in (_run("canceling"), _run("big"))
    ],
    "failed_of_run": [
        Bounded(2000, _FILTER | _run("dead") | {"dead": "true"}, rows=4),
        Bounded(2000, _FILTER | _run("dead") | {"dead": "true", "error_class": "'ValueError'"}, rows=4),
        Live(
            "select seed.big() / 50",
            "waiting tasks of a run are looked for among its dead letters",
            _FILTER | _run("big") | {"dead": "false"},
        ),
    ],
    "matching_job_tasks": [
        Bounded(2000, _CANCELABLE | _ALONE),
        Live(
            _FAILED_ALONE,
            "waiting tasks of no run are looked for among the job's dead letters",
            _CANCELABLE | _ALONE | {"statuses": "'{Failed}'"},
        ),
        Bounded(2000, _DEAD | _ALONE, rows=4),
    ],
    "in_flight_by_operator": [
        Live(_BUSY, "a gauge: runs with running tasks, pending deltas, running tasks without a run", rows=4)
    ],
}

# effects.sql

_OUTPUT = {
    "task_ids": "array[seed.task('running', 0)]",
    "attempts": "'{1}'",
    "org_ids": "array[seed.id('org 0')]",
    "uuids": "array[seed.id('dataset 0')]",
    "versions": "array[seed.id('version 0')]",
}
_PUBLISH = {"attempt": "1", "dataset_uuid": "seed.id('dataset 0')", "batch_uri": "'batch'"}

EFFECTS: dict[str, list[Expectation]] = {
    "insert_outputs": [Bounded(1, _OUTPUT | {"indexes": "'{0}'", "bodies": "array['{}']"}, pages=30)],
    "insert_publish": [
        Bounded(
            1,
            _ORG
            | _PUBLISH
            | {"task_id": "seed.task('running', 0)", "dataset_version": "seed.id('version 0')", "record_count": "1"},
            pages=30,
        )
    ],
    "existing_publish": [Bounded(1, _PUBLISH | {"task_id": "seed.task('sweep', 0)"})],
    "send_message": [
        Bounded(1, {"queue": "'other'", "body": "'{}'", "dedupe_key": "'new'", "direct": direct}, pages=30)
        for direct in ("true", "false")
    ],
    "take_outbox": [
        Bounded(500, {"limit": "500", "retry_seconds": "5", "since": _EPOCH, "kinds": "'{send,invoke}'"}, pages=20)
    ],
    "delete_outbox": [Bounded(500, {"ids": "seed.series(501)"})],
    "outbox_stats": [
        Live("select count(*) from interlock.outbox", "a gauge; it stops counting at `limit`", {"limit": "100000"})
    ],
}

# principals.sql

_SIGNING_KEYS = "select count(*) from interlock.signing_keys"
_BY_HAND = Exempt("an administrator's list or change of a few keys")

PRINCIPALS: dict[str, list[Expectation]] = {
    "find_key": [Bounded(1, {"key_id": "'key 7'"})],
    "find_worker_token": [Bounded(1, {"token_id": "'token 7'"})],
    "signing_key": [Bounded(1, {"kid": "'kid 7'"})],
    "active_signing_key": [Bounded(1)],
    "verifying_keys": [Live(_SIGNING_KEYS, "keys whose tokens may still be in use")],
    "delete_dead_signing_keys": [Live(_SIGNING_KEYS, "keys whose tokens may still be in use")],
    "insert_capability": [
        Bounded(1, {"task_id": "seed.id('task')", "attempt": "1", "grants": "'[]'", "seconds": "60"})
    ],
    "renew_capability": [Bounded(1, {"capability_id": "seed.id('capability 7')", "seconds": "60"}, pages=20)],
    "find_capability": [Bounded(1, {"capability_id": "seed.id('capability 5150')"})],
    "insert_org": [_BY_HAND],
    "org_by_name": [_BY_HAND],
    "insert_key": [_BY_HAND],
    "list_keys": [_BY_HAND],
    "revoke_key": [_BY_HAND],
    "insert_worker_token": [_BY_HAND],
    "list_worker_tokens": [_BY_HAND],
    "revoke_worker_token": [_BY_HAND],
    "retire_signing_keys": [_BY_HAND],
    "insert_signing_key": [_BY_HAND],
}

# members.sql

_MEMBER = {"issuer": "'issuer'", "subject": "'user 7'"}

MEMBERS: dict[str, list[Expectation]] = {
    "roles_of": [Bounded(1, _MEMBER, rows=4)],
    "allow_member": [
        Bounded(1, _MEMBER | {"org_id": "seed.id('org 3')", "role": "'writer'", "by": "'root'"}, pages=20)
    ],
    "disallow_member": [Bounded(1, _MEMBER | {"org_id": "seed.id('org 3')"}, pages=20)],
    "members_of": [
        Bounded(100, {"org_id": "seed.id('org 3')", "issuer": "'issuer'", "after": "'user 1'", "limit": "100"}, rows=4)
    ],
}

# operators.sql

_TEN_OPERATORS = "array(select 'module:operator_' || n from generate_series(0, 9) n)"
_DAY = {"seconds": "86400"}

OPERATORS: dict[str, list[Expectation]] = {
    "report_operators": [
        Bounded(
            10,
            {"queue": "'platform'", "worker_id": "'worker 1'", "operators": _TEN_OPERATORS},
            pages=30,
        )
    ],
    "forget_operators": [Bounded(1, _DAY)],
    "declared_operators": [Bounded(10, {"queue": "'platform'", "names": _TEN_OPERATORS} | _DAY)],
    "some_operators": [Bounded(100, {"queue": "'platform'", "limit": "100"} | _DAY)],
    "short_operators": [Exempt("reads the names of all declared operators, when a DAG is checked")],
    "limited_orgs": [Bounded(1)],
    "limit_org": [_BY_HAND],
}

# secrets.sql, seals.sql

_TEN_SECRETS = _ORG | {"names": "array(select 'secret_' || n from generate_series(0, 9) n)"}

SECRETS: dict[str, list[Expectation]] = {
    "lock_org": [_BY_HAND],
    "count_others": [Exempt("counts the secrets of one org, of which it has at most 200")],
    "set_secret": [_BY_HAND],
    "remove_secret": [_BY_HAND],
    "list_secrets": [Bounded(100, _ORG | {"after": "''", "limit": "100"})],
    "known_secrets": [Bounded(10, _TEN_SECRETS)],
    "sealed_secrets": [Bounded(10, _TEN_SECRETS)],
}
_AT_START = Exempt("one row, read when a process starts")
SEALS: dict[str, list[Expectation]] = {name: [_AT_START] for name in ("check_value", "first_key", "keep_check_value")}

_LOG_OF = _ORG | {"scope_id": "seed.id('run running')", "limit": "100"}
LOGS: dict[str, list[Expectation]] = {
    "keep_logs": [
        Bounded(
            100,
            _FENCES
            | {"run_ids": "array_fill(seed.id('run running'), array[100])", "half": "131072"}
            | {"starts": "array_fill(0::bigint, array[100])", "sizes": "array_fill(20, array[100])"}
            | {"texts": "seed.repeat('0000000000000oline', 100)", "packs": "array_fill(null::uuid, array[100])"}
            | {"offsets": "array_fill(null::int, array[100])"},
            rows=8,
            pages=60,
        )
    ],
    "logs_of_attempt": [
        Bounded(100, _ORG | {"task_id": "seed.task('running', 7)", "attempt": "1", "after": "0", "limit": "100"})
    ],
    "newest_logs_of_run": [Bounded(100, _LOG_OF)],
    "next_logs_of_run": [Bounded(100, _LOG_OF | {"after": "1"})],
    "newest_logs_of_job": [Bounded(100, _LOG_OF | {"scope_id": "seed.id('job 3')"})],
    "next_logs_of_job": [Bounded(100, _LOG_OF | {"scope_id": "seed.id('job 3')", "after": "1"})],
    "delete_logs_of_run": [Bounded(5000, _run("sweep") | {"limit": "5000"})],
}

STATISTICS: dict[str, list[Expectation]] = {
    "tables_counted_empty": [Exempt("reads one catalog row per table")],
    "wait_briefly": [Exempt("touches no table")],
    "forget_count": [Exempt("changes one catalog row")],
}

EXPECTED: dict[str, list[Expectation]] = {
    f"{area}.{name}": cases
    for area, table in {
        "effects": EFFECTS,
        "jobs": JOBS,
        "logs": LOGS,
        "members": MEMBERS,
        "operators": OPERATORS,
        "principals": PRINCIPALS,
        "queue": QUEUE,
        "reads": READS,
        "run_control": RUN_CONTROL,
        "runs": RUNS,
        "seals": SEALS,
        "secrets": SECRETS,
        "shards": SHARDS,
        "statistics": STATISTICS,
        "submission": SUBMISSION,
        "tasks": TASKS,
    }.items()
    for name, cases in table.items()
}
