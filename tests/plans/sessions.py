"""Cost limits of the statements about sessions of the dashboard; see expectations.py."""

from __future__ import annotations

from tests.plans.expectations import Bounded, Expectation

_ORG = {"org_id": "seed.id('org 0')"}
_IDLE = {"idle_seconds": "43200"}
_ONE = {"session_id": "'session 7'"}
_EVERYBODY = {"key_id": "null", "subject": "null"}

SESSIONS: dict[str, list[Expectation]] = {
    "insert_session": [
        Bounded(
            1,
            _ORG
            | {
                "session_id": "'new'",
                "key_id": "null",
                "issuer": "'https://issuer'",
                "subject": "'ada'",
                "csrf": "'csrf'",
                "secret_hash": "'\\x00'",
                "seconds": "60",
            },
        )
    ],
    "find_session": [Bounded(1, _ONE | _IDLE | {"grace_seconds": "60", "rotate_seconds": "600"}, rows=5)],
    "live_sessions": [
        Bounded(100, _ORG | _IDLE | {"session_ids": "array(select 'session ' || n from generate_series(1, 100) n)"})
    ],
    "rotate_session": [Bounded(1, _ONE | {"known": "'\\x00'", "fresh": "'\\x01'"})],
    "revoke_session": [Bounded(1, _ONE | _ORG | _EVERYBODY, rows=5)],
    "sessions_of": [Bounded(100, _ORG | _IDLE | _EVERYBODY | {"after": "''", "limit": "100"}, rows=4)],
    "insert_link": [Bounded(1, {"token_hash": "'\\x00'", "key_id": "'key 1'", "seconds": "60"}, rows=4)],
    "use_link": [Bounded(1, {"token_hash": "'\\x07'"}, rows=4)],
    "delete_expired_sessions": [Bounded(100, {"limit": "100"}, rows=4)],
    "delete_expired_links": [Bounded(100, {"limit": "100"}, rows=4)],
}

EXPECTED: dict[str, list[Expectation]] = {f"sessions.{name}": cases for name, cases in SESSIONS.items()}
