"""Cost limits of the statements about queries; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Exempt, Expectation

_ORG = {"org_id": "seed.id('org 0')"}
_ONE = _ORG | {"query_id": "seed.id('query 7')"}
_VERSIONS = "array[seed.id('pipe version 0'), seed.id('version 1')]"
_LAST = "'ffffffff-ffff-ffff-ffff-ffffffffffff'"
_ZERO = "'00000000-0000-0000-0000-000000000000'"
_TASK = _ORG | {"shard": "0", "task_id": "seed.task('running', 1)"}

QUERIES: dict[str, list[Expectation]] = {
    "attempt_of": [Bounded(1, _TASK)],
    "granted_versions": [Bounded(2, _ORG | {"versions": _VERSIONS}, rows=6)],
    "published_among": [
        Bounded(10, _ORG | {"names": "array(select 'name ' || n from generate_series(1, 10) n)", "limit": "101"})
    ],
    "readable_relations": [
        Bounded(
            130, _ORG | {"role": "'reader'", "limit": "100", "after": "'00000000-0000-0000-0000-000000000000'"}, rows=6
        )
    ],
    "behind_ranges": [
        Bounded(2, _ORG | {"versions": _VERSIONS, "range_operators": "'{range_splitter}'"}, rows=12, pages=30)
    ],
    "committed_files": [Exempt("names every file that a query is about to read, up to the query's limit")],
    "open_query": [
        Bounded(
            1,
            _ORG
            | {"user_name": "'ada'", "key_id": "'key'", "task_id": "null", "attempt": "null", "mode": "'interactive'"}
            | {"sql_sha256": "sha256('select 1')", "statement": "'select 1'"},
            pages=40,
        )
    ],
    "note_export": [
        Bounded(1, _ONE | {"prefix": "'file:///exports/1/'", "seconds": "3600", "keep": "60"}, rows=6, pages=40)
    ],
    "close_query": [
        Bounded(
            1,
            _ORG
            | {"query_id": "seed.id('query 5')", "outcome": "'Completed'", "code": "null", "versions": "'{}'"}
            | {"row_count": "1", "bytes": "1", "truncated": "false", "batch_task_id": "null", "export_files": "null"},
            pages=40,
        )
    ],
    "find_query": [Bounded(1, _ONE)],
    "list_queries": [Bounded(100, _ORG | {"before": _LAST, "limit": "100"}, pages=20)],
    "lose_queries": [Bounded(2, {"seconds": "600", "limit": "2"}, rows=6, pages=60)],
    "delete_old_queries": [Bounded(100, {"since": _ZERO, "age_seconds": "86400", "limit": "100"}, rows=6, pages=60)],
    "insert_query_edges": [
        Bounded(
            2,
            _ORG | {"job_id": "seed.id('dag job 149')", "versions": f"(array[{_ZERO}::uuid] || {_VERSIONS})"},
            rows=8,
            pages=60,
        )
    ],
    "batch_task": [Bounded(1, _TASK, rows=4, pages=20)],
}

EXPECTED: dict[str, list[Expectation]] = {f"queries.{name}": cases for name, cases in QUERIES.items()}
