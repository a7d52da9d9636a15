"""Cost limits of the statements behind the dashboard; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Exempt, Expectation

_ORG = {"org_id": "seed.id('org 0')"}
_SMALL = {"shard": "0"}
_BIG = {"run_id": "seed.id('run big')"}
_INDEXES = "array(select n * 50 from generate_series(0, 199) n)::bigint[]"
_TASKS = {"task_ids": "seed.tasks('dead', 100)"}

OVERVIEW: dict[str, list[Expectation]] = {
    "add_minute_counts": [
        Bounded(
            1,
            {
                "org_ids": "array[seed.id('org 0')]",
                "completed": "'{1}'",
                "failed": "'{1}'",
                "canceled": "'{1}'",
            },
            rows=4,
        )
    ],
    "minute_counts": [Bounded(60, _ORG | {"minutes": "60"})],
    "delete_old_minutes": [Bounded(200, {"limit": "100"})],
    "recent_failed_attempts": [Bounded(300, {"since": "'epoch'", "limit": "300"})],
    "tasks_of_org": [Bounded(100, _SMALL | _ORG | _TASKS)],
    "live_runs": [Bounded(500, _ORG | {"looked_at": "500", "limit": "50"})],
    "processes": [Exempt("the connections of this database, not its tables")],
    "sampled_tasks": [
        Bounded(
            200, _SMALL | _ORG | _BIG | {"indexes": "array(select n * 50 from generate_series(0, 199) n)::bigint[]"}
        )
    ],
    "attempts_of_tasks": [Bounded(100, _TASKS)],
    "failed_sample": [
        # Each task has two attempts.
        Bounded(2000, _SMALL | _ORG | {"run_id": f"seed.id('run {run}')"} | {"first": "0", "limit": "1000"})
        for run in ("dead", "big")
    ],
}

_ID = _ORG | {"id": "seed.id('run big')"}
_NAMED = _ORG | {"prefix": "'name'", "limit": "8"}

SEARCH: dict[str, list[Expectation]] = {
    "run_by_id": [Bounded(1, _ID, rows=5)],
    "job_of_id": [Bounded(1, _ORG | {"id": "seed.id('job 0')"})],
    "jobs_by_name": [Bounded(8, _NAMED)],
    "dags_by_name": [Bounded(8, _NAMED)],
    "publications_by_name": [Bounded(8, _NAMED | {"role": "'reader'"})],
    "dataset_by_id": [Bounded(1, _ORG | {"id": "seed.id('dataset 0')"})],
    "query_by_id": [Bounded(1, _ID)],
    "operation_by_id": [Bounded(1, _ORG | {"id": "seed.id('operation 0')"})],
    "workers_by_name": [Bounded(8, {"prefix": "'worker'", "limit": "8"}, rows=40)],
}

EXPECTED: dict[str, list[Expectation]] = {
    f"{area}.{name}": cases
    for area, table in {"overview": OVERVIEW, "search": SEARCH}.items()
    for name, cases in table.items()
}
