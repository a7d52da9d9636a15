"""Cost limits of the statements about the files of datasets; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation

_HELD = {
    "shard": "0",
    "task_ids": "seed.tasks('running', 100)",
    "attempts": "array_fill(1, array[100])",
    "leases": "seed.leases('running', 100)",
}
_SCOPES = {
    "versions": "array_fill(seed.id('pipe version 0'), array[10])",
    "starts": "array(select generate_series(20000, 20900, 100))::bigint[]",
    "ends": "array(select generate_series(20099, 20999, 100))::bigint[]",
}
_PLACES = "array(select 'file:///objects/new/' || n || '/' from generate_series(1, 100) n)"

FILES: dict[str, list[Expectation]] = {
    "held_attempts": [Bounded(100, _HELD)],
    # Ten partitions in each of ten ranges.
    "files_of": [Bounded(100, _SCOPES | {"limit": "10001"})],
    "versions_written": [Bounded(2, {"versions": "array[seed.id('pipe version 0'), seed.id('version 1')]"})],
    "expect_files": [
        Bounded(
            100,
            {
                "places": _PLACES,
                "versions": "array_fill(seed.id('pipe version 0'), array[100])",
                "task_ids": "seed.tasks('running', 100)",
                "attempts": "array_fill(1, array[100])",
                "timeouts": "array_fill(now(), array[100])",
                "grace": "600",
                "buffers": "array_fill(false, array[100])",
            },
            pages=30,
        )
    ],
    "expect_exports": [
        Bounded(
            100,
            {
                "places": _PLACES.replace("new", "exports"),
                "timeouts": "array_fill(now(), array[100])",
                "seconds": "3600",
                "keep": "60",
            },
            pages=30,
        )
    ],
    "condemn": [Bounded(100, {"limit": "100", "keep": "60", "again": "60"}, rows=12, pages=60)],
    "swept": [
        Bounded(100, {"places": "array(select 'file:///objects/' || n || '/' from generate_series(0, 99) n)"}, pages=30)
    ],
}

DATASETS: dict[str, list[Expectation]] = {
    "data_of_inputs": [
        Bounded(10, {"job_ids": "array[seed.id('pipe 1'), seed.id('pipe 2')]", "range_operators": "'{range_splitter}'"})
    ],
    "partitions_at": [
        Bounded(
            10,
            _SCOPES | {"ends": "array(select generate_series(20009, 20909, 100))::bigint[]"},
        )
    ],
    "set_schemas": [
        Bounded(
            1,
            {"versions": "array[seed.id('pipe version 0')]", "schemas": "array['{}']", "hashes": "array['h']"},
            pages=30,
        )
    ],
}

EXPECTED: dict[str, list[Expectation]] = {
    f"{area}.{name}": cases
    for area, table in {"datasets": DATASETS, "files": FILES}.items()
    for name, cases in table.items()
}
