"""Cost limits of the statements for operating the command bus; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Exempt, Expectation, Live

_ORG = {"org_id": "seed.id('org 0')"}
_ZERO = "'00000000-0000-0000-0000-000000000000'"
_LAST = "'ffffffff-ffff-ffff-ffff-ffffffffffff'"
_ORGS = "array(select seed.id('org ' || n) from generate_series(0, 3) n)"
_TENANTS = "select 4"
_QUEUE = {"queue": "'bus:' || seed.id('org 0') || ':monitored'"}
_DEAD = (
    "array(select message_id from interlock.queue_messages where queue = 'bus:' || seed.id('org 0') || ':monitored'"
    " and dead_at is not null order by message_id limit 100)"
)
_REPLAY = {"replay_id": "seed.id('replay 0')"}


def _ten(value: str) -> str:
    return f"array_fill({value}, array[10])"


_TOLD = {"org_ids": _ten("seed.id('org 0')"), "events": _ten("'[]'::text"), "events_in": _ten("1")}

TELEMETRY: dict[str, list[Expectation]] = {
    "emit": [Bounded(10, _TOLD, pages=30)],
    "tenants_due": [
        Live(
            _TENANTS,
            "one look per tenant that something is owed to, and ten events of each",
            {"after": _ZERO, "wait_seconds": "1", "full": "10", "limit": "500"},
            rows=16,
            pages=30,
        )
    ],
    "take": [Bounded(400, {"org_ids": _ORGS, "each": "100"}, rows=5, pages=20)],
    "hand_over": [
        Bounded(
            10,
            {"queues": _ten("'telemetry:x'::text"), "bodies": _ten("'{}'::text")},
            rows=4,
            pages=60,
        )
    ],
    "age_out": [
        Bounded(
            200,
            {"after": _ZERO, "tenants": "500", "age_seconds": "1209600", "limit": "50"},
            rows=12,
            pages=30,
        )
    ],
    "received": [Bounded(1, _ORG, pages=30)],
}

ARCHIVE: dict[str, list[Expectation]] = {
    "tenants_due": [
        Live(
            "select 2000",
            "one look per tenant that something is owed to, and no more of each than a file holds",
            {"after": _ZERO, "wait_seconds": "300", "rows": "2000", "commands": "50000", "limit": "50"},
            rows=4,
        )
    ],
    "make_archive": [
        Bounded(
            1,
            {"org_id": f"seed.id('org {org}')", "name": "'bus_commands'"}
            | {"dataset_uuid": "seed.id('new')", "dataset_version": "seed.id('newer')"},
            rows=10,
            pages=60,
        )
        for org in (0, 3)
    ],
    "take_archive": [Bounded(1, _ORG | {"lease_seconds": "60"}, pages=30)],
    "waiting": [Bounded(2000, _ORG | {"rows": "2000", "commands": "50000", "bytes": "1000000"})],
    "owes": [Bounded(1, _ORG | {"moment": "now()"})],
    "release_archive": [Bounded(1, _ORG | {"attempt": "0"}, pages=30)],
    "settle_archive": [
        Bounded(
            100,
            _ORG
            | {"attempt": "0", "position": "7"}
            | {"ids": "array(select archive_id from interlock.bus_archive order by archive_id limit 100)"},
            rows=6,
            pages=30,
        )
    ],
    "drop_old": [
        Bounded(50, {"after": _ZERO, "tenants": "50", "age_seconds": "2592000", "limit": "50"}, rows=8, pages=40)
    ],
    "last_of_page": [Bounded(4, {"after": _ZERO, "tenants": "50"})],
}

INBOX: dict[str, list[Expectation]] = {
    "receives_from": [Bounded(1, _ORG | {"queue": "'monitored'", "service": "'monitored'"})],
    "dead": [Bounded(100, _QUEUE | {"after": "0", "limit": "100"})],
    "redrive": [Bounded(100, _QUEUE | {"limit": "100"}, rows=4, pages=40)],
    "redrive_named": [Bounded(100, _QUEUE | {"ids": _DEAD}, rows=4, pages=40)],
    "discard": [Bounded(100, _QUEUE | {"limit": "100"}, rows=4, pages=30)],
    "discard_named": [Bounded(100, _QUEUE | {"ids": _DEAD}, rows=4, pages=30)],
}

ALERTS: dict[str, list[Expectation]] = {
    "raise_alerts": [
        Bounded(
            1,
            {"seconds": "300", "org_ids": "array[seed.id('org 0')]", "events": "'{snavio.command.invalid}'"}
            | {"told": "'{1}'", "samples": "array['{}']", "criticals": "'{true}'"},
            rows=20,
            pages=80,
        )
    ],
    "webhooks_named": [Bounded(10, {"org_ids": _ten("seed.id('org 0')"), "names": _ten("'webhook 1'::text")})],
    "settings_of": [Bounded(10, _ORG)],
    "set_channels": [
        Bounded(1, _ORG | {"event": "'e'", "channels": "'[]'", "changed_by": "'root'"}, pages=40),
    ],
    "unknown_webhooks": [Bounded(10, _ORG | {"names": _ten("'webhook 1'::text")})],
    "feed": [Bounded(100, _ORG | {"before": _LAST, "limit": "100"}, rows=4)],
    "operations": [Bounded(12, {"after": _ZERO, "limit": "100"}, rows=4)],
    "resolve": [Bounded(1, {"alert_id": "seed.id('alert 0')", "resolved_by": "'root'"}, pages=40)],
    "take_emails": [Bounded(20, {"hold_seconds": "60", "limit": "20"}, rows=10, pages=60)],
    "settle_email": [
        Bounded(
            1,
            {"email_id": "seed.id('email 0')", "tries": "0", "status": "'Delivered'", "reason": "null"},
            pages=30,
        )
    ],
    "delete_old": [Bounded(10, {"age_seconds": "0", "limit": "10"}, rows=6, pages=60)],
}

MONITOR: dict[str, list[Expectation]] = {
    "dead_letters": [Bounded(100, {"queues": "'{platform,other}'", "seconds": "60", "limit": "100"})],
    # Counts a limited number of messages per queue; here, those of one queue.
    "look": [
        Bounded(
            200,
            _ORG
            | {"org_id": _ZERO, "target": "''", "name": "''", "limit": "200", "bound": "100"}
            | {"looks": "5", "idle_seconds": "30"},
            rows=14,
            pages=60,
        )
    ],
    "count_misroutes": [
        Bounded(
            1,
            {"org_ids": "array[seed.id('org 0')]", "targets": "'{nobody}'", "names": "'{x}'", "misroutes": "'{3}'"},
            pages=40,
        )
    ],
    "forget": [Bounded(10, {"age_seconds": "86400", "limit": "200"}, rows=8, pages=60)],
    "health_of": [Bounded(100, _ORG | {"target": "''", "name": "''", "limit": "100"})],
    "bad_health_of": [Bounded(3, _ORG | {"target": "''", "name": "''", "limit": "3"})],
}

REPLAYS: dict[str, list[Expectation]] = {
    "insert_replay": [
        Bounded(
            1,
            _ORG
            | {"origin": "'archive'", "filters": "'{}'", "reason": "'why'", "operator": "'root'"}
            | {"dry_run": "false", "rate": "50", "limit": "10"},
            pages=30,
        )
    ],
    "list_replays": [Bounded(100, _ORG | {"before": _LAST, "limit": "100"})],
    "find_replay": [Bounded(1, _ORG | _REPLAY)],
    "cancel_replay": [Exempt("deletes all commands that the replay has not sent yet, once")],
    "take_replay": [Bounded(1, {"lease_seconds": "60"}, rows=6, pages=30)],
    "org_name": [Bounded(1, _ORG)],
    "archive_of": [Bounded(1, _ORG)],
    "set_task": [Bounded(1, _REPLAY | {"task_id": "seed.id('task')", "pause": "1"}, pages=30)],
    "look_later": [Bounded(1, _REPLAY | {"pause": "1"}, pages=30)],
    "dead_letters": [Bounded(200, _QUEUE | {"after": "0", "limit": "200"})],
    "insert_letters": [
        Bounded(
            10,
            {"replay_id": "seed.id('replay 1')", "command_ids": _ten("seed.id('command')")}
            | {"message_ids": "array(select generate_series(1000001, 1000010))"}
            | {name: _ten("'x'::text") for name in ("sources", "targets", "names", "payloads")},
            pages=30,
        )
    ],
    "clear_items": [Exempt("deletes the items of an interrupted selection, once")],
    "insert_items": [
        Bounded(
            10,
            {"replay_id": "seed.id('replay 1')", "start": "0"}
            | {"command_ids": _ten("seed.id('command')")}
            | {name: _ten("'x'::text") for name in ("sources", "targets", "names", "payloads")},
            pages=30,
        )
    ],
    "set_selected": [Bounded(1, _REPLAY | {"selected": "5"}, pages=30)],
    "next_items": [Bounded(200, _REPLAY | {"limit": "200"})],
    "settle_items": [
        Bounded(
            100,
            _REPLAY
            | _QUEUE
            | {"positions": "seed.series(100)::bigint[]", "letters": _DEAD}
            | {"sent": "100", "failed": "0"},
            rows=6,
            pages=30,
        )
    ],
    "end_replay": [Bounded(1, _REPLAY | {"state": "'Completed'", "detail": "null"}, pages=30)],
}

EXPECTED: dict[str, list[Expectation]] = {
    f"{area}.{name}": cases
    for area, statements in (
        ("bus_telemetry", TELEMETRY),
        ("bus_archive", ARCHIVE),
        ("bus_inbox", INBOX),
        ("bus_alerts", ALERTS),
        ("bus_monitor", MONITOR),
        ("bus_replays", REPLAYS),
    )
    for name, cases in statements.items()
}
