"""Cost limits of the statements about results and receipts; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation

_RUN = {"run_id": "seed.id('run running')"}
_ORG = {"org_id": "seed.id('org 0')"}
_ZEROS = "decode(repeat('00', 32), 'hex')"

RESULTS: dict[str, list[Expectation]] = {
    "expect_packs": [Bounded(1, {"place": "'file:///o/runs/1/results/'"}, pages=30)],
    "condemn_packs": [Bounded(1, _RUN | {"place": "'file:///o/runs/1/results/'", "grace": "0", "keep": "0"}, pages=30)],
    "forget_exports": [Bounded(1, _RUN, pages=30)],
}

RECEIPTS: dict[str, list[Expectation]] = {
    "result_place": [Bounded(1, _RUN | _ORG | {"shard": "0", "index": "0"})],
    "begin_receipt": [Bounded(1, _RUN | _ORG | {"start": _ZEROS}, pages=30)],
    "receipt_so_far": [Bounded(1, _RUN | _ORG)],
    "receipt_block": [Bounded(100, _RUN | {"shard": "0", "first": "0", "last": "99"})],
    "keep_receipt": [
        Bounded(
            1,
            _RUN
            | _ORG
            | dict.fromkeys(("next_index", "completed", "failed", "canceled"), "0")
            | {"ids": _ZEROS, "outcomes": _ZEROS, "signed": "null", "key": "null"},
            pages=30,
        )
    ],
}
EXPORTS: dict[str, list[Expectation]] = {
    "insert_export": [
        Bounded(
            1,
            _RUN | _ORG | {"job_id": "seed.id('job 0')", "format": "'zip'", "stretch": "10", "last_index": "99"},
            pages=40,
        )
    ],
    "expect_export": [Bounded(1, {"place": "'file:///o/exports/1/'", "seconds": "60", "keep": "0"}, pages=30)],
    "find_export": [Bounded(1, _ORG | {"export_id": "seed.id('export 0')", "job_id": "seed.id('job 0')"})],
    "next_export": [Bounded(1)],
    "rows_of_stretch": [Bounded(100, _RUN | {"shard": "0", "first": "0", "last": "99"})],
    "staged": [Bounded(1, {"export_id": "seed.id('export 0')", "next_index": "0", "task_id": "null"}, pages=30)],
    "exports_of_tasks": [Bounded(10, {"task_ids": "seed.tasks('running', 10)"})],
}
_STRETCH = (
    _RUN
    | _ORG
    | {"shard": "0", "first": "0", "last": "99", "error_class": "null", "limit": "100"}
    | {"of_rerun": "true"}
)

RERUNS: dict[str, list[Expectation]] = {
    "payloads_in_stretch": [
        Bounded(100, _STRETCH | {"statuses": statuses}) for statuses in ("null", "'{Running,Completed}'")
    ],
    "payloads_by_status": [
        Bounded(100, _STRETCH | {"run_id": "seed.id('run failed')", "statuses": "'{Failed,Canceled}'"}, rows=4)
    ],
    "unmade_ingest": [Bounded(1, _RUN | _ORG)],
    "insert_rerun": [
        Bounded(
            1,
            _RUN
            | _ORG
            | {"of_run": "seed.id('run running')", "statuses": "null", "error_class": "null"}
            | {"upload_id": "gen_random_uuid()", "first": "0", "last": "9"},
            pages=40,
        )
    ],
    "next_rerun": [Bounded(1)],
    "insert_origins": [
        Bounded(
            1000,
            _RUN | {"first_index": "0", "origins": "array(select generate_series(1, 1000))", "stretch": "500"},
        )
    ],
    "set_rerun_of": [Bounded(1, _ORG | _RUN | {"rerun_of": "null"}, pages=30)],
    "rerun_copied": [Bounded(1, _RUN | {"next_index": "0", "parts": "'[]'", "copied": "10"}, pages=30)],
    "set_parts": [Bounded(1, {"upload_id": "gen_random_uuid()", "parts": "1"}, pages=30)],
    "end_rerun": [Bounded(1, _RUN, pages=30)],
}
EXPECTED: dict[str, list[Expectation]] = {
    f"{file}.{name}": cases
    for file, statements in (("results", RESULTS), ("receipts", RECEIPTS), ("exports", EXPORTS), ("reruns", RERUNS))
    for name, cases in statements.items()
}
