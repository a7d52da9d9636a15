"""Cost limits of the statements about published batches; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation, Live

_ORG = {"org_id": "seed.id('org 0')"}
_ONE = _ORG | {"publish_id": "seed.id('publish 0')"}
_MANY = "array(select seed.id('publish ' || n * 100) from generate_series(0, 49) n)"
_TASKS = "array(select seed.task('completed', n * 100) from generate_series(0, 49) n)"
_PAGE = _ORG | {"cursor": "null", "limit": "100"}
_MESSAGES = {
    "queue": "'buffer'",
    "bodies": "array_fill('{}'::text, array[50])",
    "dedupe_keys": "array(select 'publish ' || n from generate_series(0, 49) n)",
}
_OPEN = {"after": "'00000000-0000-0000-0000-000000000000'", "limit": "100"}
_WAITING = "select count(*) from interlock.buffer_publishes where status in ('Pending', 'Loading')"

BUFFERS: dict[str, list[Expectation]] = {
    "pointed_at": [
        Bounded(
            50,
            {
                "task_ids": _TASKS,
                "attempts": "array_fill(1, array[50])",
                "uuids": "array_fill(seed.id('dataset 0'), array[50])",
                "uris": "array_fill('batch'::text, array[50])",
            },
        )
    ],
    "lock_open": [Bounded(50, _ORG | {"publish_ids": _MANY})],
    "set_loaded": [
        Bounded(
            50,
            _ORG
            | {"publish_ids": _MANY, "keep_seconds": "60"}
            | dict.fromkeys(("batches", "rows", "bytes"), "array_fill(1, array[50])::bigint[]"),
            pages=40,
        )
    ],
    "set_settled": [Bounded(1, _ONE | {"status": "'Refused'", "refusal": "'{}'", "keep_seconds": "60"}, pages=40)],
    "list_publishes": [Bounded(100, _PAGE)],
    "list_publishes_by_status": [Bounded(100, _PAGE | {"status": "'Loaded'"})],
    "publish_by_id": [Bounded(1, _ONE)],
    "redrive": [Bounded(1, _ONE | {"publish_id": "seed.id('publish 100')"}, pages=40)],
    "rearm": [Bounded(50, _MESSAGES | {"direct": direct}, pages=30) for direct in ("true", "false")],
    "without_message": [
        Live(_WAITING, "a page of batches that wait", _OPEN | {"queue": "'buffer'", "grace": "0"}, rows=6, pages=20)
    ],
    "open_page": [Bounded(100, _OPEN)],
    "take_sweeps": [Bounded(100, {"limit": "100", "again": "60"}, pages=40)],
    "swept": [Bounded(50, {"publish_ids": _MANY}, pages=40)],
    "batches_of_loads": [Bounded(1, {"task_ids": "array[seed.id('load')]"})],
    "set_loading": [Bounded(50, _ORG | {"task_id": "seed.id('load')", "publish_ids": _MANY}, pages=40)],
    "ended_loads": [Bounded(100, {"limit": "100"})],
    "loads_over": [Bounded(1, {"task_ids": "array[seed.id('load')]"})],
    "publishes_of_load": [Bounded(1, {"load_task": "seed.id('load')"})],
    "waiting_long": [Live(_WAITING, "the doctor counts them up to `limit`", {"seconds": "0", "limit": "1000"})],
}

EXPECTED: dict[str, list[Expectation]] = {f"buffers.{name}": cases for name, cases in BUFFERS.items()}
