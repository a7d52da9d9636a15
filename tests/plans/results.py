"""What statements about results and receipts may touch; as in expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation

_RUN = {"run_id": "seed.id('run running')"}
_ORG = {"org_id": "seed.id('org 0')"}
_ZEROS = "decode(repeat('00', 32), 'hex')"

RESULTS: dict[str, list[Expectation]] = {
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
    "expect_packs": [Bounded(1, {"place": "'file:///o/runs/1/results/'"}, pages=30)],
    "condemn_packs": [Bounded(1, _RUN | {"place": "'file:///o/runs/1/results/'", "grace": "0", "keep": "0"}, pages=30)],
}
EXPECTED: dict[str, list[Expectation]] = {f"results.{name}": cases for name, cases in RESULTS.items()}
