"""Cost limits of the statements about webhooks; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Exempt, Expectation, Live

_ORG = {"org_id": "seed.id('org 0')"}
_ONE = _ORG | {"webhook_id": "seed.id('webhook 0')"}
_ZERO = "'00000000-0000-0000-0000-000000000000'"
_LAST = "'ffffffff-ffff-ffff-ffff-ffffffffffff'"
_TAKEN = _ORG | {"delivery_id": "seed.id('delivery 0')", "tries": "0"}
_HUNDRED = "array(select seed.id('webhook ' || n) from generate_series(0, 99) n)"
_PAGE = _ONE | {"before": _LAST, "limit": "100"}
_PENDING = "select count(distinct webhook_id) from interlock.webhook_deliveries where status = 'Pending'"

WEBHOOKS: dict[str, list[Expectation]] = {
    "lock_org": [Exempt("touches no table")],
    "new_delivery_id": [Exempt("touches no table")],
    "count_webhooks": [Bounded(100, _ORG)],
    "insert_webhook": [
        Bounded(
            1,
            _ORG
            | {"name": "'new'", "url": "'https://hooks.example/'", "events": "'{}'", "dag_name": "null"}
            | {"job_name": "null", "failed_share": "null", "done_share": "null", "sealed": "'s'", "paused": "false"}
            | {"created_by": "'root'"},
            pages=40,
        )
    ],
    "list_webhooks": [Bounded(100, _ORG | {"after": "''", "limit": "100"})],
    "find_webhook": [Bounded(1, _ORG | {"name": "'webhook 0'"})],
    "webhook_by_id": [Bounded(1, _ONE)],
    "set_paused": [Bounded(1, _ONE | {"paused": "true"}, pages=30)],
    "rotate_secret": [Bounded(1, _ONE | {"sealed": "'s'", "overlap_seconds": "60"}, pages=30)],
    "delete_webhook": [Bounded(1, _ONE, pages=30)],
    "clear_secrets": [Exempt("once when a process starts; finds rows of an older version only")],
    "seal_secrets": [Exempt("once when a process starts, for rows of an older version, by their primary key")],
    # Ten runs, each with news for a hundred webhooks.
    "news_of_runs": [
        Bounded(1000, {"run_ids": "seed.run_ids(10)", "ended": "seed.run_ids(10)"}, rows=6, pages=12),
    ],
    "insert_deliveries": [
        Bounded(
            10,
            {"ids": "array(select uuidv7() from generate_series(1, 10))"}
            | {
                name: f"array_fill(seed.id('{of} 0'), array[10])"
                for name, of in (("org_ids", "org"), ("run_ids", "run"))
            }
            | {"webhook_ids": "array_fill(seed.id('webhook 0'), array[10])"}
            | {"events": "seed.repeat('run.completed', 10)", "bodies": "seed.repeat('{}', 10)"},
            pages=60,
        )
    ],
    "waiting_webhooks": [
        Live(_PENDING, "one lookup per webhook with pending deliveries", {"after": _ZERO, "limit": "1000"}, rows=4)
    ],
    "take_deliveries": [
        Bounded(
            100,
            {"webhook_ids": _HUNDRED, "each": "4", "failing": "false", "limit": "100", "hold_seconds": "12"},
            rows=20,
            pages=60,
        )
    ],
    "set_delivered": [Bounded(1, _TAKEN | {"http_status": "204"}, rows=6, pages=60)],
    "set_failed": [
        Bounded(
            1,
            _TAKEN
            | {"http_status": "500", "reason": "'no'", "final": "false", "wait_seconds": "0", "most_tries": "15"}
            | {"base": "5", "cap": "3600", "rest_after": "5", "rest_cap": "600"},
            rows=6,
            pages=60,
        )
    ],
    "list_deliveries": [Bounded(100, _PAGE)],
    "list_deliveries_by_status": [Bounded(100, _PAGE | {"status": "'Dead'"})],
    "find_delivery": [Bounded(1, _ONE | {"delivery_id": "seed.id('delivery 0')"})],
    "redrive_deliveries": [Bounded(5, _ONE | {"delivery_ids": "null", "limit": "5"}, rows=8, pages=60)],
    "expire_deliveries": [Bounded(1, {"age_seconds": "3600", "limit": "100"}, pages=30)],
    "delete_old_deliveries": [Bounded(200, {"age_seconds": "1209600", "limit": "200"}, rows=4, pages=40)],
    "webhooks_with_history": [Bounded(10, {"after": _ZERO, "limit": "10"}, rows=8, pages=30)],
    "trim_deliveries": [
        Bounded(20, _webhook | {"there": there, "keep": "10", "limit": "10"}, rows=8, pages=60)
        for there in ("true", "false")
        for _webhook in ({"webhook_id": "seed.id('webhook 0')"},)
    ],
}

EXPECTED: dict[str, list[Expectation]] = {f"webhooks.{name}": cases for name, cases in WEBHOOKS.items()}
