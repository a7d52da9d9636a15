"""Cost limits of the statements of sources, backpressure, backfills and operator state; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Exempt, Expectation, Live

_EPOCH = "'epoch'"
_ORG = {"org_id": "seed.id('org 0')"}
_ZERO = "'00000000-0000-0000-0000-000000000000'"

# sources.sql

_ALL_SOURCES = "select count(*) from interlock.jobs where source is not null"
_MANUAL = {"job_ids": "array(select seed.id('manual ' || n) from generate_series(0, 9) n)"}
_SOURCE = _ORG | {"dag_name": "'feeds manual'", "name": "'manual 7'"}
_HOOK = _ORG | {"dag_name": "'feeds webhook'", "name": "'webhook 7'", "secret_hash": "sha256('new')", "sealed": "null"}
_RESTART = {"limit": "1000", "steady_seconds": "300", "most_seconds": "300", "kept": "100"}

SOURCES: dict[str, list[Expectation]] = {
    "source_generations": [Bounded(1, _SOURCE)],
    "take_trigger_notes": [
        Live(
            "select count(*) from interlock.outbox",
            "others' rows that are due as well",
            {"limit": "100", "since": _EPOCH},
        )
    ],
    "jobs_with_triggers": [Bounded(11, {"after": _ZERO, "limit": "1000"})],
    "fire_triggers": [Bounded(1000, _MANUAL | {"each": "200", "limit": "1000", "direct": "true"}, rows=6, pages=60)],
    "hand_on_triggers": [Bounded(10, _MANUAL | {"each": "1000"})],
    "forget_triggers": [Bounded(10, _MANUAL | {"each": "1000", "age_seconds": "60"})],
    "start_sources": [Live(_ALL_SOURCES, "checks every always_on source", {"limit": "1000"}, rows=4, pages=20)],
    "restart_sources": [Live(_ALL_SOURCES, "checks every always_on source", _RESTART, rows=6, pages=30)],
    "stop_sources": [Live(_ALL_SOURCES, "checks the task of every always_on source", {"limit": "1000"})],
    "forget_sources": [Live(_ALL_SOURCES, "checks the task of every always_on source")],
    "list_sources": [
        # Up to a thousand triggers are counted per source.
        Bounded(100, _ORG | {"dag_name": f"'feeds {kind}'", "limit": "1000"}, rows=30, pages=30)
        for kind in ("manual", "webhook", "always_on")
    ],
    "dag_exists": [Bounded(1, _ORG | {"dag_name": "'feeds manual'"})],
    "follow_schedules": [Live(_ALL_SOURCES, "compares every schedule with its source", rows=4)],
    "due_schedules": [Bounded(10, {"limit": "100"})],
    "set_schedules": [
        Bounded(
            1,
            {
                "job_ids": "array[seed.id('cron 0')]",
                "last_ats": "array[now()]",
                "next_ats": "array[now() + interval '1 day']",
                "covered_tos": "array[null]",
            },
            pages=20,
        )
    ],
    "insert_hook": [Bounded(1, _HOOK | {"hook_id": "'new'"})],
    "rotate_hook": [Bounded(1, _HOOK | {"overlap_seconds": "3600"}, pages=20)],
    "clear_secrets": [Exempt("once when a process starts; finds rows of an older version only")],
    "seal_secrets": [Exempt("once when a process starts, for rows of an older version, by their primary key")],
    "find_hook": [Bounded(1, {"hook_id": "'hook 7'"})],
}

TRIGGERS: dict[str, list[Expectation]] = {
    "accept_triggers": [
        Bounded(
            100,
            {
                "job_ids": "array_fill(seed.id('manual 7'), array[100])",
                "dedupe_keys": "array(select 'new ' || n from generate_series(1, 100) n)",
                "payloads": "array_fill('{}'::text, array[100])",
            },
            pages=30,
        )
    ],
}

# pressure.sql

_PIPE = {"job_id": "seed.id('pipe 1')"}
_ALL_PAUSES = "select count(*) from interlock.pauses"
_HELD = {"job_ids": "array[seed.id('pipe 0')]", "cause_ids": "array[seed.id('pipe 2')]"}

PRESSURE: dict[str, list[Expectation]] = {
    # One of the jobs has one task more than its limit allows, and all of those are counted.
    "measure": [Bounded(1000, {"after": _ZERO, "limit": "1000"}, rows=6)],
    "count_waiting": [Bounded(1001, {"job_id": "seed.id('pipe 2')", "limit": "1001"})],
    "all_pauses": [Live(_ALL_PAUSES, "compares all pauses with the required ones")],
    "upstream": [Bounded(2, {"job_ids": "array[seed.id('pipe 2')]"}, rows=20, pages=60)],
    "lock_pauses": [Bounded(1)],
    "hold": [Bounded(1, _HELD | {"bulks": "array[false]", "paths": f"array[{_ZERO}]", "reasons": "array['full']"})],
    "release": [Bounded(1, _HELD, rows=6, pages=30)],
    "list_pauses": [
        Live(
            _ALL_PAUSES,
            "a page of them is looked for among all",
            _ORG | {"after_job": _ZERO, "after_cause": _ZERO, "limit": "100"},
            rows=8,
            pages=30,
        )
    ],
    "pause_levels": [Live(_ALL_PAUSES, "counts all pauses")],
}

# backfills.sql

_PIPE_RUN = {"run_id": "seed.id('pipe run 0')"}
_HUNDRED = "generate_series(1, 100) n"
_PLACE = {"place_input": "0", "place_start": "50000", "place_end": "50009"}

BACKFILLS: dict[str, list[Expectation]] = {
    "job_of_dag": [Bounded(1, _ORG | {"dag_name": "'pipe'", "name": "'pipe 1'"})],
    "sources_upstream": [Bounded(2, {"job_id": "seed.id('pipe 2')"}, rows=20, pages=60)],
    "scopes_after": [
        Bounded(1000, _PIPE | place | {"range_start": "5", "range_end": "150000", "limit": "1000"})
        for place in (_PLACE, {"place_input": "-1", "place_start": "0", "place_end": "0"})
    ],
    "start_backfill": [
        Bounded(
            1,
            _ORG
            | _PIPE
            | {
                "range_size": "100",
                "source": "'{}'",
                "range_start": "0",
                "range_end": "9",
                "priority": "1",
                "reason": "null",
                "requested_by": "'user'",
                "total": "1",
            },
            pages=40,
        )
    ],
    "held_runs": [Bounded(10, {"after_job": _ZERO, "after_run": _ZERO, "limit": "100"})],
    # Sums up the live runs of the job.
    "take_held": [Bounded(10, _PIPE_RUN | {"most_waiting": "10000"})],
    "undone_scopes": [
        Bounded(100, _PIPE | {"run_id": "seed.id('run queued')", "shard": "0", "first": "0", "last": "99"}, rows=6)
    ],
    "may_end": [Bounded(100, {"shard": "0", "task_ids": "seed.tasks('queued', 100)"})],
    "take_over_scopes": [
        Bounded(
            100,
            _PIPE
            | {
                "task_shard": "0",
                "inputs": "array_fill(0, array[100])",
                "starts": f"array(select n * 10 from {_HUNDRED})",
                "ends": f"array(select n * 10 + 9 from {_HUNDRED})",
                "left_by": "seed.tasks('dead', 100)",
                "task_ids": "seed.tasks('queued', 100)",
            },
            rows=6,
            pages=40,
        )
    ],
    "send_ranges": [
        Bounded(
            10,
            _ORG
            | _PIPE
            | _PIPE_RUN
            | {"first": "0", "last": "999", "range_size": "100", "queue": "'platform'", "lane": "1", "direct": direct},
            pages=40,
        )
        for direct in ("true", "false")
    ],
    "hold_from": [Bounded(1, _PIPE_RUN | {"held_from": "100"}, pages=40)],
    "pause_backfill": [Bounded(1, _ORG | _PIPE_RUN, pages=40)],
    "resume_backfill": [Bounded(1, _ORG | _PIPE_RUN, pages=40)],
    "list_backfills": [Bounded(100, _ORG | {"cursor": "null", "limit": "100"})],
    "backfill_by_id": [Bounded(1, _ORG | _PIPE_RUN)],
}

# operator_state.sql

_STATE = _PIPE | {"name": "'range_aggregator'"}

OPERATOR_STATE: dict[str, list[Expectation]] = {
    "read_state": [Bounded(1, _STATE)],
    "keep_state": [Bounded(1, _STATE | {"state": "'{}'", "version": "1"})],
}

EXPECTED: dict[str, list[Expectation]] = {
    f"{area}.{name}": cases
    for area, table in {
        "backfills": BACKFILLS,
        "operator_state": OPERATOR_STATE,
        "pressure": PRESSURE,
        "sources": SOURCES,
        "triggers": TRIGGERS,
    }.items()
    for name, cases in table.items()
}
