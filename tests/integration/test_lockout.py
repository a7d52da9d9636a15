"""Forged credentials: what they cost, and whom they lock out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from interlock.access.lockout import Lockout
from interlock.adapters.postgres import Database
from interlock.clock import ManualClock
from interlock.wire import KeyRequest, Role
from tests.system import System, running


@pytest.fixture
async def guarded(state_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[System]:
    async with running(state_url, tmp_path, clock, auth_failures_per_second=0.001) as started:
        yield started


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Connections of the state database that were asked for."""
    seen: list[str] = []
    original = Database.connection

    def counted(self: Database) -> object:
        seen.append("connection")
        return original(self)

    monkeypatch.setattr(Database, "connection", counted)
    return seen


def forged(kind: str, number: int) -> str:
    return f"{kind}_{number:016x}_{'x' * 43}"


async def test_forged_credentials_cost_no_look_up_each(guarded: System, looked_up: list[str]) -> None:
    statuses = [(await guarded.user("GET", "/v1/keys", key=forged("ilk", number))).status_code for number in range(20)]
    assert statuses == [401] + [429] * 19
    assert len(looked_up) == 1
    reply = await guarded.worker("POST", "/internal/queue/receive", token=forged("ilw", 1), json={})
    assert (reply.status_code, reply.json()["code"]) == (429, "too_many_failures")
    assert int(reply.headers["retry-after"]) >= 1


async def test_who_was_let_in_before_is_not_locked_out_by_a_neighbour(guarded: System) -> None:
    key = guarded.admin_key
    assert (await guarded.user("GET", "/v1/keys")).status_code == 200
    await guarded.user("GET", "/v1/keys", key=forged("ilk", 1))
    assert (await guarded.user("GET", "/v1/keys", key=forged("ilk", 2))).status_code == 429
    assert (await guarded.user("GET", "/v1/keys", key=key)).status_code == 200
    assert (await guarded.http.get(f"{guarded.gateway_url}/healthz")).status_code == 200


async def test_what_needs_no_credential_proves_none(guarded: System) -> None:
    fake = {"Authorization": f"Bearer {forged('ilk', 3)}"}
    assert (await guarded.http.get(f"{guarded.gateway_url}/healthz", headers=fake)).status_code == 200
    assert [(await guarded.user("GET", "/v1/keys", headers=fake)).status_code for _ in range(2)] == [401, 429]


async def test_the_same_refused_credential_is_looked_up_once(still: System, looked_up: list[str]) -> None:
    for kind in ("ilk", "ilw"):
        looked_up.clear()
        for _ in range(5):
            if kind == "ilk":
                reply = await still.user("GET", "/v1/keys", key=forged(kind, 7))
            else:
                reply = await still.worker("POST", "/internal/queue/receive", token=forged(kind, 7), json={})
            assert reply.status_code == 401
        assert len(looked_up) == 1


async def test_a_key_made_after_a_failed_look_up_works_at_once(still: System) -> None:
    by = await still.kernel.principals.authenticate(still.admin_key)
    for _ in range(3):
        await still.user("GET", "/v1/jobs", key=forged("ilk", 9))
        made = await still.kernel.principals.create_key(
            KeyRequest(user="new", role=Role.READER), still.org_id, granted_by=by
        )
        assert (await still.user("GET", "/v1/jobs", key=made.key)).status_code == 200


def test_a_bucket_fills_again_and_is_each_peers_own() -> None:
    now = 0.0
    lockout = Lockout(1.0, lambda: now)
    for _ in range(20):
        assert lockout.wait("a", ["x"]) is None
        lockout.failed("a")
    assert lockout.wait("a", ["x"]) == 1.0
    assert lockout.wait("b", ["x"]) is None
    lockout.proved("good")
    assert lockout.wait("a", ["good"]) is None
    now = 1.0
    assert lockout.wait("a", ["x"]) is None


def test_peers_and_proofs_are_bounded() -> None:
    lockout = Lockout(1.0)
    for number in range(30_000):
        lockout.failed(str(number))
        lockout.proved(str(number))
    assert (len(lockout._left), len(lockout._proved)) == (10_000, 10_000)
