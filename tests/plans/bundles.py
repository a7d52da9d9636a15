"""Cost limits of the statements about bundles and invocations; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation

_ORG = {"org_id": "seed.id('org 0')"}
_DIGEST = "encode(sha256('bundle 0'), 'hex')"
_FREE = "encode(sha256('bundle 1'), 'hex')"
_ONE = _ORG | {"sha256": _DIGEST}
_TEN = "array(select encode(sha256(('bundle ' || n)::bytea), 'hex') from generate_series(0, 9) n)"

BUNDLES: dict[str, list[Expectation]] = {
    "expect_zip": [Bounded(1, _ONE | {"seconds": "60"}, pages=30)],
    "lock_bundles": [Bounded(10, _ORG | {"digests": _TEN})],
    "insert_bundle": [
        Bounded(
            1,
            _ORG
            | {"sha256": "'new'", "size_bytes": "1", "files": "1", "unpacked_bytes": "1"}
            | {"modules": "'{}'", "uploaded_by": "'root'"},
            pages=30,
        )
    ],
    "keep_zip": [Bounded(1, _ONE, pages=30)],
    "name_bundle": [Bounded(1, _ONE | {"name": "'name 0'"}, pages=40)],
    "bundle": [Bounded(1, _ONE)],
    "bundles_named": [
        Bounded(20, _ORG | {"names": "array(select 'name ' || n from generate_series(0, 9) n)", "digests": _TEN})
    ],
    "bundles_by_prefix": [Bounded(1, _ORG | {"prefix": f"left({_DIGEST}, 12)"})],
    "digest_of_name": [Bounded(1, _ORG | {"name": "'name 0'"})],
    "list_bundles": [Bounded(100, _ORG | {"after": "''", "limit": "100"}, pages=20)],
    "lock_bundle": [Bounded(1, _ONE)],
    "job_using": [Bounded(1, _ONE)],
    "delete_names": [Bounded(1, _ORG | {"sha256": _FREE}, pages=30)],
    "delete_bundle": [Bounded(1, _ORG | {"sha256": "'nowhere'"}, pages=30)],
    "due_sweeps": [Bounded(100, {"limit": "100"}, rows=4)],
    "swept": [Bounded(10, {"org_ids": "array_fill(seed.id('org 0'), array[10])", "digests": _TEN}, pages=30)],
}

EXPECTED: dict[str, list[Expectation]] = {
    **{f"bundles.{name}": cases for name, cases in BUNDLES.items()},
    "effects.make_due": [Bounded(8, {"targets": "'{lambda}'", "orgs": "null", "limit": "8"}, rows=4, pages=40)],
}
