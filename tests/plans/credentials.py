"""Cost limits of the statements about credentials for objects; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation

_ATTEMPT = {"task_id": "seed.task('running', 0)", "org_id": "seed.id('org 0')", "attempt": "1"}
_GONE = "array(select seed.id('gone ' || n) from generate_series(1, 50) n)"

CREDENTIALS: dict[str, list[Expectation]] = {
    "minting": [Bounded(1, _ATTEMPT | {"lease_token": "seed.lease(seed.task('running', 0))", "issued_at": "0"})],
    "lease_held": [Bounded(1, _ATTEMPT)],
    # Half of them belong to existing tasks, half to deleted ones.
    "uncommitted_among": [
        Bounded(
            100,
            {
                "org_id": "seed.id('org 0')",
                "places": "array(select 'file:///objects/' || n || '/' from generate_series(0, 99) n)",
                "task_ids": f"seed.tasks('running', 50) || {_GONE}",
                "attempts": "array_fill(1, array[100])",
            },
        )
    ],
}

EXPECTED: dict[str, list[Expectation]] = {f"credentials.{name}": cases for name, cases in CREDENTIALS.items()}
