"""Cost limits of the statements on the path of a command; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Exempt, Expectation, Live

_ORG = {"org_id": "seed.id('org 0')"}
_ORGS = "array_fill(seed.id('org 0'), array[50])"
_TARGETS = "array(select 'service-' || n % 10 from generate_series(0, 49) n)"
_NAMES = "array(select 'command-' || n from generate_series(0, 49) n)"
_SOURCES = "seed.repeat('org 0/service-0', 50)"
_IDS = "array(select seed.id('command ' || n * 10) from generate_series(0, 49) n)"
_FRESH_IDS = "array(select seed.id('fresh ' || n) from generate_series(0, 49) n)"
_LANES = {"org_ids": _ORGS, "targets": _TARGETS, "names": _NAMES}
_LIMITS = _LANES | {
    "sources": "seed.repeat('', 50)",
    "rates": "array_fill(100::bigint, array[50])",
    "seconds": "array_fill(1::float8, array[50])",
    "bursts": "array_fill(0::bigint, array[50])",
    "cooldowns": "array_fill(0::float8, array[50])",
    "asked": "array_fill(1::bigint, array[50])",
}
_JSON = "seed.repeat('{}', 50)"
_TIMES = "array_fill(now(), array[50])"
_HANDOFFS = {
    "handoff_org_ids": _ORGS,
    "handoff_sources": _SOURCES,
    "handoff_command_ids": _FRESH_IDS,
    "handoff_reasons": "seed.repeat('cache_miss', 50)",
    "handoff_bodies": _JSON,
    "handoff_facts": _JSON,
    "handoff_received": _TIMES,
}
_RECENT = "select 100"

PATH: dict[str, list[Expectation]] = {
    "write_effects": [
        Bounded(
            150,
            _HANDOFFS
            | {"queues": "array['bus:1:q']", "bodies": "array[repeat(E'{}\\n', 99) || '{}']"}
            | {"event_org_ids": "array[seed.id('org 0')]", "events": "array['[]']", "events_in": "array[1]"}
            | {"accepted_org_ids": "array[seed.id('org 0')]", "accepted": "array['[]'::bytea]", "accepted_at": "now()"}
            | {"accepted_in": "array[1]"},
        )
    ],
    "wake": [Bounded(1, {"queues": "array['bus:1:q']"})],
    "take_handoffs": [Bounded(200, {"since": "'epoch'", "limit": "200"})],
    "put_back_handoffs": [
        Bounded(
            50,
            {"org_ids": _ORGS, "sources": _SOURCES, "command_ids": _FRESH_IDS}
            | {"reasons": "seed.repeat('cache_miss', 50)", "bodies": _JSON}
            | {"facts": _JSON, "received": _TIMES, "tries": "array_fill(1, array[50])"},
        )
    ],
    "resolve": [Bounded(50, _LANES | {"services": "seed.repeat('service-0', 50)"}, rows=6, pages=20)],
    "claim_ids": [
        Bounded(
            50,
            {"org_ids": _ORGS, "sources": _SOURCES, "command_ids": ids, "seconds": "array_fill(300::float8, array[50])"}
            | {"handoff_ids": "array(select n::bigint from generate_series(0, 49) n)"},
            pages=20,
        )
        for ids in (_IDS, _FRESH_IDS)
    ],
    "release_ids": [Bounded(50, {"org_ids": _ORGS, "sources": _SOURCES, "command_ids": _IDS})],
    "delivered_ids": [Bounded(50, _ORG | {"sources": _SOURCES, "command_ids": _IDS})],
    "forget_ids": [Bounded(1000, {"limit": "1000"}, rows=6, pages=20)],
    "record_fates": [
        Bounded(
            50,
            {"org_ids": _ORGS, "sources": _SOURCES, "command_ids": ids}
            | {"outcomes": "seed.repeat('failed', 50)", "reasons": "seed.repeat('acl-deny', 50)", "throttled": _TIMES}
            | {"targets": _TARGETS, "names": _NAMES},
            pages=20,
        )
        for ids in (_IDS, _FRESH_IDS)
    ],
    "find_fates": [
        Bounded(50, {"org_ids": _ORGS, "sources": _SOURCES, "command_ids": ids}) for ids in (_IDS, _FRESH_IDS)
    ],
    "forget_fates": [Bounded(1000, {"limit": "1000", "seconds": "3600"}, rows=6, pages=20)],
    "revoked_at": [
        Bounded(
            50,
            {"org_ids": _ORGS}
            | {
                "subjects": "array(select 'service-' || n % 10 || '/command-' || n || '/service-0'"
                " from generate_series(0, 49) n)"
            },
        )
    ],
    "org_name": [Bounded(1, _ORG)],
    "jobs_of_route": [Bounded(1, _ORG | {"dag_name": "'feeds manual'", "name": "'manual 7'"})],
}
LIMITS: dict[str, list[Expectation]] = {
    "take_tokens": [Bounded(50, _LIMITS, pages=20)],
    "count_used": [Bounded(50, _LIMITS, pages=20)],
    "may_prefetch": [Bounded(50, _LANES | {"sources": "seed.repeat('', 50)", "limit": "5"}, pages=20)],
    "give_back": [
        Bounded(
            50,
            _LANES | {"sources": "seed.repeat('', 50)", "amounts": "array_fill(0::bigint, array[50])"},
            pages=20,
        )
    ],
}
FAIRNESS: dict[str, list[Expectation]] = {
    "read_bans": [Exempt("reads the active and the recently ended bans of an org")],
    "report": [
        Bounded(
            100,
            {"strike_org_ids": _ORGS, "strike_sources": _SOURCES, "strike_targets": _TARGETS, "strike_names": _NAMES}
            | dict.fromkeys(("source_shares", "competing_shares"), "array_fill(0.9::float8, array[50])")
            | dict.fromkeys(("volumes", "dispatched"), "array_fill(1::bigint, array[50])")
            | _LANES
            | {"sources": _SOURCES},
        )
    ],
    "ban_repeat_offenders": [
        Live(_RECENT, "strikes that still count", {"within_seconds": "600", "strikes": "1", "ban_seconds": "60"}, 8, 30)
    ],
    "ban_dominant": [
        Live(
            _RECENT,
            "shares of the last minutes",
            {"within_seconds": "120", "volume": "1", "lane_share": "0.8", "share": "0.7", "competing": "0.1"}
            | {"ban_seconds": "60"},
            20,
            30,
        )
    ],
    "note_refusals": [
        Bounded(
            50, _LANES | {"sources": _SOURCES, "refused": "array_fill(1::bigint, array[50])", "limit": "100"}, pages=20
        )
    ],
    "forget_fairness": [Bounded(300, {"keep_seconds": "600", "limit": "100"}, rows=8, pages=30)],
}

EXPECTED: dict[str, list[Expectation]] = (
    {f"bus_path.{name}": cases for name, cases in PATH.items()}
    | {f"bus_limits.{name}": cases for name, cases in LIMITS.items()}
    | {f"bus_fairness.{name}": cases for name, cases in FAIRNESS.items()}
)
