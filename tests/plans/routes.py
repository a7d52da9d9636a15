"""Cost limits of the statements that turn dataset changes into tasks; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation

_SCOPES = {
    "starts": "array(select generate_series(20000, 20990, 10))::bigint[]",
    "ends": "array(select generate_series(20009, 20999, 10))::bigint[]",
}
_PIPE = {"versions": "array_fill(seed.id('pipe version 0'), array[100])"}
_READERS = {"job_ids": "array(select seed.id('reader ' || n) from generate_series(0, 99) n)"}
_EDGE = {"job_id": "seed.id('pipe 1')", "input_index": "0", "dataset_version": "seed.id('pipe version 0')"}
_WHO = {
    "task_ids": "array_fill(seed.task('running', 0), array[100])",
    "attempts": "array_fill(1, array[100])",
    "org_ids": "array_fill(seed.id('org 0'), array[100])",
    "uuids": "array_fill(seed.id('pipe dataset 0'), array[100])",
}


def _nulls(kind: str) -> str:
    return f"array_fill(null::{kind}, array[100])"


ROUTING: dict[str, list[Expectation]] = {
    "take_routes": [Bounded(100, {"since": "'epoch'", "limit": "100"}, rows=20)],
    "changed_scopes": [Bounded(100, {"event_ids": "seed.series(100)"})],
    # New tasks with messages for the one job that reads the scopes, and none for scopes that are known.
    "give_scopes": [
        *(
            Bounded(
                100,
                _PIPE
                | _SCOPES
                | {"commits": f"array_fill({commit}::bigint, array[100])", "job_id": "null", "direct": "true"},
                rows=30,
                pages=150,
            )
            for commit in ("1000000000", "1")
        ),
        # A rewritten part of a stream: touches the scopes in it that each of its readers has made.
        Bounded(
            200,
            {
                "versions": "array[seed.id('stream version')]",
                "starts": "array[20000]::bigint[]",
                "ends": "array[20999]::bigint[]",
                "commits": "array[1000000000]::bigint[]",
                "job_id": "null",
                "direct": "true",
            },
            rows=30,
            pages=150,
        ),
    ],
    "wake_builds": [
        Bounded(
            100, {"event_ids": "array(select generate_series(1, 100))", "job_ids": "array[seed.id('job 0')]"}, rows=8
        )
    ],
    "readers_of": [Bounded(100, {"versions": "array[seed.id('stream version')]"}, rows=5)],
    "start_streams": [Bounded(100, _READERS | {"direct": "true"}, rows=30, pages=150)],
    "open_gates": [Bounded(1000, _READERS | {"limit": "1000"}, rows=8)],
    "set_gates": [
        Bounded(
            1,
            {
                "job_ids": "array[seed.id('reader 0')]",
                "input_indexes": "array[0]",
                "streams": "array[seed.id('stream version')]",
                "positions": "array[50000]::bigint[]",
            },
            pages=30,
        )
    ],
    "edges_behind": [
        Bounded(100, {"job_id": "'00000000-0000-0000-0000-000000000000'", "input_index": "-1", "limit": "100"}, rows=8)
    ],
    "room_of": [Bounded(1000, {"job_ids": "array[seed.id('pipe 2')]"})],
    "keep_pauses": [Bounded()],
    "changes_since": [Bounded(1000, _EDGE | {"since": "100", "pointed_at": "0", "limit": "1000"}, rows=4)],
    "set_reconciled": [Bounded(1, _EDGE | {"reconciled_to": "7"}, pages=30)],
}

DATASETS: dict[str, list[Expectation]] = {
    "lock_versions": [Bounded(1, {"versions": "array[seed.id('pipe version 0')]"})],
    "examine_scopes": [Bounded(100, _PIPE | _SCOPES)],
    "write_changes": [
        Bounded(
            100,
            _PIPE
            | _SCOPES
            | _WHO
            | {
                "commit_id": "1000000000",
                "shard": "0",
                "partitioned_versions": "array[seed.id('pipe version 0')]",
                "cursors": _nulls("bigint"),
                "sequences": _nulls("bigint"),
                "o_task_ids": _WHO["task_ids"],
                "o_attempts": _WHO["attempts"],
                "o_versions": _PIPE["versions"],
                "o_cursors": _nulls("bigint"),
                "o_starts": _SCOPES["starts"],
                "o_ends": _SCOPES["ends"],
                "o_locations": _nulls("text"),
                "o_row_counts": _nulls("bigint"),
                "o_bytes": _nulls("bigint"),
                "o_schema_hashes": _nulls("text"),
            },
            rows=15,
            pages=60,
        )
    ],
}

EXPECTED: dict[str, list[Expectation]] = {
    f"{area}.{name}": cases
    for area, table in {"routing": ROUTING, "datasets": DATASETS}.items()
    for name, cases in table.items()
}
