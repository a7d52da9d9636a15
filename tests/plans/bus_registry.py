"""Cost limits of the statements about the registry of the command bus; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation, Live

_ORG = {"org_id": "seed.id('org 0')"}
_ORGS = {"org_ids": "array[seed.id('org 0')]"}
_SERVICE = _ORG | {"service": "'service-0'"}
_NAME = _ORG | {"name": "'service-0'"}
_LANE = _ORG | {"target": "'service-0'", "name": "'command-0'"}
_ENTRY = _LANE | {"source": "'service-0'"}
_WRITTEN = {"version": "2", "changed_by": "'root'"}
_PAGE = {"limit": "100"}
_AFTER = {"after_target": "'service-3'", "after_name": "'command-3'", "after_source": "''"}
_AFTER_NAME = {"target": "'service-3'", "after_name": "'command-3'", "after_source": "''"}
_PLACE = {"queue": "'queue'", "dlq": "'dead'"}
_SHARED = "the routes that share a queue, when one is registered: here all of them do"
_WHOLE = "the whole registry of an org is read after it has changed"


def _all(table: str) -> str:
    return f"select count(*) from interlock.{table} where org_id = seed.id('org 0')"


def _whole(table: str, arguments: dict[str, str], *, rows: float = 3) -> list[Expectation]:
    return [Live(_all(table), _WHOLE, arguments, rows=rows)]


REGISTRY: dict[str, list[Expectation]] = {
    "read_versions": [Bounded(5, _ORG)],
    "read_services": _whole("services", _ORG),
    "read_routes": _whole("bus_routes", _ORG),
    "read_acls": _whole("bus_acls", _ORG),
    "read_limits": _whole("bus_limits", _ORG),
    "read_keys": _whole("bus_keys", _ORG, rows=5),
    "read_one_route": [Bounded(1, _LANE)],
    "read_one_acl": [Bounded(1, _ENTRY)],
}
SNAPSHOTS: dict[str, list[Expectation]] = {
    "snapshot_orgs": [
        Bounded(10, {"after": "'00000000-0000-0000-0000-000000000000'", "limit": "10"}, rows=8, pages=20)
    ],
    "snapshot_versions": [Bounded(5, _ORGS)],
    "snapshot_services": _whole("services", _ORGS),
    "snapshot_routes": _whole("bus_routes", _ORGS),
    "snapshot_acls": _whole("bus_acls", _ORGS),
    "snapshot_limits": _whole("bus_limits", _ORGS),
    "snapshot_keys": _whole("bus_keys", _ORGS, rows=5),
}
WRITES: dict[str, list[Expectation]] = {
    "raise_version": [Bounded(1, _ORG | {"kind": "'routes'"}, pages=30)],
    "announce": [Bounded(1)],
    "record_change": [
        Bounded(
            1,
            _ORG
            | {"kind": "'acls'", "action": "'create'", "subject": "'a/b/c'", "before": "null", "after": "'{}'"}
            | _WRITTEN
            | {"reverts": "null"},
            pages=60,
        )
    ],
    "list_changes": [Bounded(100, _ORG | _PAGE | {"before": "9999999"})],
    "list_changes_of_kind": [Bounded(100, _ORG | _PAGE | {"kind": "'acls'", "before": "9999999"})],
    "find_change": [Bounded(1, _ORG | {"change_id": "1"})],
    "newest_change": [Bounded(1, _ORG | {"kind": "'acls'", "subject": "'service-0/command-0/service-0'"})],
    "find_service": [Bounded(1, _NAME)],
    "list_services": [Bounded(10, _ORG | _PAGE | {"after": "''"})],
    "put_service": [
        Bounded(1, _NAME | _WRITTEN | {"description": "''", "dispatch_mode": "'cold-only'"}, pages=60),
    ],
    "known_services": [Bounded(2, _ORG | {"names": "array['service-0', 'service-1']"}, pages=30)],
    "holds_service": [Bounded(1, _NAME, rows=8, pages=40)],
    "revoke_api_keys": [Bounded(10, _NAME, rows=5, pages=30)],
    "drop_secrets": [Bounded(10, _NAME, rows=5, pages=30)],
    "drop_service": [Bounded(1, _ORG | {"name": "'service-none'"})],
    "find_route": [Bounded(1, _LANE)],
    "list_routes": [Bounded(100, _ORG | _PAGE | {k: v for k, v in _AFTER.items() if k != "after_source"})],
    "list_routes_of_target": [
        Bounded(100, _ORG | _PAGE | {k: v for k, v in _AFTER_NAME.items() if k != "after_source"})
    ],
    "put_route": [
        Bounded(
            1,
            _LANE
            | _PLACE
            | _WRITTEN
            | {"dag_name": "null", "job_name": "null", "dedupe_mode": "'none'", "dedupe_seconds": "300"}
            | {"expected_drain_seconds": "300", "fairness": "'{}'", "expires_at": "null"},
            pages=60,
        )
    ],
    "drop_route": [Bounded(1, _LANE, pages=30)],
    "other_routes_of_queue": [Live(_all("bus_routes"), _SHARED, _LANE | _PLACE)],
    "queue_named": [Live(_all("bus_routes"), _SHARED, _ORG | _PLACE)],
    "job_exists": [Bounded(1, _ORG | {"dag": "null", "job": "'nobody'"})],
    "find_acl": [Bounded(1, _ENTRY)],
    "list_acls": [Bounded(100, _ORG | _PAGE | _AFTER)],
    "list_acls_of_target": [Bounded(100, _ORG | _PAGE | _AFTER_NAME)],
    "put_acl": [Bounded(1, _ENTRY | _WRITTEN | {"sensitivity": "'low'", "expires_at": "null"}, pages=60)],
    "drop_acl": [Bounded(1, _ENTRY, pages=30)],
    "find_limit": [Bounded(1, _LANE | {"source": "null"})],
    "list_limits": [Bounded(100, _ORG | _PAGE | _AFTER)],
    "list_limits_of_target": [Bounded(100, _ORG | _PAGE | _AFTER_NAME)],
    "put_limit": [
        Bounded(
            1,
            _LANE
            | _WRITTEN
            | {"source": "null", "rate": "5", "window_seconds": "1", "burst": "0", "cooldown_seconds": "0"}
            | {"enforcement": "'strict'"},
            pages=60,
        )
    ],
    "drop_limit": [Bounded(1, _LANE | {"source": "null"}, pages=30)],
}
KEYS: dict[str, list[Expectation]] = {
    "next_number": [Bounded(1, _SERVICE)],
    "retire_current": [Bounded(1, _SERVICE | {"overlap_seconds": "60"}, pages=60)],
    "end_older": [Bounded(10, _SERVICE | {"number": "5"}, pages=30)],
    "insert_key": [
        Bounded(
            1,
            _ORG
            | {"service": "'service-without'", "number": "1000", "sealed": "'x'", "created_by": "'root'"}
            | {"rotation_seconds": "60"},
            pages=60,
        )
    ],
    "find_key": [Bounded(1, _SERVICE | {"number": "1"})],
    "revoke_key": [Bounded(1, _SERVICE | {"number": "1"}, pages=60)],
    "list_keys": [Bounded(30, _ORG | _PAGE | {"after_service": "''", "after_number": "0"})],
    "list_keys_of_service": [Bounded(10, _SERVICE | _PAGE | {"after_number": "0"})],
    "good_keys": [Bounded(10, _SERVICE)],
    "note_poll": [Bounded(1, _SERVICE, pages=40)],
    "due_rotations": [Bounded(10, {"limit": "100"})],
    "still_due": [Bounded(1, _SERVICE)],
    "forget_keys": [Bounded(100, {"keep_seconds": "7776000", "limit": "100"}, rows=5)],
}
EXPECTED: dict[str, list[Expectation]] = (
    {f"bus_registry.{name}": cases for name, cases in REGISTRY.items()}
    | {f"bus_snapshots.{name}": cases for name, cases in SNAPSHOTS.items()}
    | {f"bus_writes.{name}": cases for name, cases in WRITES.items()}
    | {f"bus_keys.{name}": cases for name, cases in KEYS.items()}
)
