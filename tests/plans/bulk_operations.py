"""Cost limits of the statements of bulk operations; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation

_ORG = {"org_id": "seed.id('org 0')"}
_SMALL = {"shard": "0"}
_JOB = {"job_id": "seed.id('job 0')"}
_RUN = {"run_id": "seed.id('run running')"}
_ZERO = "'00000000-0000-0000-0000-000000000000'"
_ONE = {"operation_id": "seed.id('operation 0')"}
_BETWEEN = {"created_after": "null", "created_before": "null"}
_NARROW = _BETWEEN | {"error_class": "null", "worker": "null"}
_NEW = {"kind": "'retry'", "filter": "'{}'", "priority": "null", "reason": "null", "requested_by": "'ada'"}

BULK: dict[str, list[Expectation]] = {
    "insert_operation": [Bounded(1, _ORG | _NEW | {"job_id": "null", "expected": "null"})],
    "operation": [Bounded(1, _ORG | _ONE)],
    "operations": [Bounded(100, _ORG | {"cursor": "null", "limit": "100"})],
    "running_operations": [Bounded(20, _ORG | {"limit": "20"})],
    "request_operation_cancel": [Bounded(1, _ORG | _ONE)],
    "next_operation": [Bounded(1, {"after": _ZERO})],
    "advance_operation": [Bounded(1, _ONE | {"place": "'{}'", "matched": "1", "changed": "1", "walked": "0.5"})],
    "end_operation": [Bounded(1, _ONE | {"state": "'Completed'"})],
    "jobs_to_walk": [Bounded(100, _ORG | {"dag": "null", "operator": "'echo'", "after": _ZERO, "limit": "100"})],
    "runs_to_walk": [Bounded(100, _ORG | _JOB | _BETWEEN | {"after": _ZERO, "limit": "100"})],
    "run_to_walk": [Bounded(1, _ORG | _RUN)],
    "failed_in_run": [
        Bounded(
            100,
            _SMALL
            | _ORG
            | _NARROW
            | {"run_id": f"seed.id('run {run}')", "dead": "true", "requested_at": "interlock.clock()"}
            | {"after": "-1", "limit": "100"},
            rows=4,
        )
        for run in ("dead", "big")
    ],
    "live_in_run": [
        Bounded(100, _SMALL | _ORG | run | _NARROW | {"first": "0", "last": "99", "statuses": "'{Queued,Running}'"})
        for run in (_RUN, {"run_id": "seed.id('run big')"})
    ],
    "without_run": [
        Bounded(
            100,
            _ORG
            | _NARROW
            | {
                "job_id": "seed.id('job 3')",
                "status": "'Failed'",
                "dead": "null",
                "requested_at": "interlock.clock()",
                "after": _ZERO,
                "limit": "100",
            },
            rows=4,
        )
    ],
    "pause_run": [Bounded(1, _ORG | _RUN)],
    "resume_run": [Bounded(1, _ORG | _RUN, rows=5)],
    "set_run_priority": [Bounded(1, _ORG | _RUN | {"priority": "0"})],
    "move_messages": [
        Bounded(100, _ORG | _RUN | {"priority": "1", "queue": "'platform'", "limit": "100"}, rows=4, pages=40)
    ],
}

EXPECTED: dict[str, list[Expectation]] = {f"bulk_operations.{name}": cases for name, cases in BULK.items()}
