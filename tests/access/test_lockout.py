"""Forged credentials: the work that they cause, and the clients that they lock out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest

from interlock.bus.registry.loader import RegistryReads
from interlock.clock import ManualClock
from interlock.dags.webhook_sources import OVERLAP_SECONDS, signature
from interlock.http.request_limits import Lockout
from interlock.stores.postgres import Database
from interlock.wire.access import KeyRequest, Role
from tests.support.bus_services import opened
from tests.support.source_dags import deploy, source_job
from tests.support.system import System, running


@pytest.fixture
async def guarded(state_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[System]:
    async with running(state_url, tmp_path, clock, auth_failures_per_second=0.001) as started:
        yield started


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records each request for a connection to the state database."""
    seen: list[str] = []
    original = Database.connection

    def counted(self: Database) -> object:
        seen.append("connection")
        return original(self)

    monkeypatch.setattr(Database, "connection", counted)
    return seen


def forged(kind: str, number: int) -> str:
    return f"{kind}_{number:016x}_{'x' * 43}"


async def test_forged_credentials_cause_few_lookups(guarded: System, looked_up: list[str]) -> None:
    statuses = [(await guarded.user("GET", "/v1/keys", key=forged("ilk", number))).status_code for number in range(20)]
    assert statuses == [401] + [429] * 19
    assert len(looked_up) == 1
    reply = await guarded.worker("POST", "/internal/queue/receive", token=forged("ilw", 1), json={})
    assert (reply.status_code, reply.json()["code"]) == (429, "too_many_failures")
    assert int(reply.headers["retry-after"]) >= 1


async def test_known_caller_is_not_locked_out_by_its_neighbour(guarded: System) -> None:
    key = guarded.admin_key
    assert (await guarded.user("GET", "/v1/keys")).status_code == 200
    await guarded.user("GET", "/v1/keys", key=forged("ilk", 1))
    assert (await guarded.user("GET", "/v1/keys", key=forged("ilk", 2))).status_code == 429
    assert (await guarded.user("GET", "/v1/keys", key=key)).status_code == 200
    assert (await guarded.http.get(f"{guarded.gateway_url}/healthz")).status_code == 200


async def test_open_route_does_not_count_as_proof_of_a_credential(guarded: System) -> None:
    fake = {"Authorization": f"Bearer {forged('ilk', 3)}"}
    assert (await guarded.http.get(f"{guarded.gateway_url}/healthz", headers=fake)).status_code == 200
    assert [(await guarded.user("GET", "/v1/keys", headers=fake)).status_code for _ in range(2)] == [401, 429]


async def test_repeated_refused_credential_is_looked_up_once(still: System, looked_up: list[str]) -> None:
    for kind in ("ilk", "ilw"):
        looked_up.clear()
        for _ in range(5):
            if kind == "ilk":
                reply = await still.user("GET", "/v1/keys", key=forged(kind, 7))
            else:
                reply = await still.worker("POST", "/internal/queue/receive", token=forged(kind, 7), json={})
            assert reply.status_code == 401
        assert len(looked_up) == 1


async def test_key_created_after_a_failed_lookup_works_immediately(still: System) -> None:
    by = await still.kernel.access.principals.authenticate(still.admin_key)
    for _ in range(3):
        await still.user("GET", "/v1/jobs", key=forged("ilk", 9))
        made = await still.kernel.access.principals.create_key(
            KeyRequest(user="new", role=Role.READER), still.org_id, granted_by=by
        )
        assert (await still.user("GET", "/v1/jobs", key=made.key)).status_code == 200


@pytest.mark.parametrize("auth", ["hmac", "token"])
async def test_forged_webhook_calls_cause_few_lookups(
    guarded: System, looked_up: list[str], clock: ManualClock, auth: str
) -> None:
    await deploy(guarded, source_job(kind="webhook", auth=auth))
    made = (await guarded.user("POST", "/v1/dags/feeds/jobs/src/secret", json={})).json()
    moment = int(clock.now().timestamp())

    async def call(secret: str, path: str = made["path"]) -> int:
        name, value = (
            ("X-Interlock-Token", secret)
            if auth == "token"
            else ("X-Interlock-Signature", signature(secret, b"1", moment))
        )
        reply = await guarded.http.post(guarded.gateway_url + path, content=b"1", headers={name: value})
        return reply.status_code

    assert await call(made["secret"]) == 200
    looked_up.clear()
    assert [await call(f"forged {number}") for number in range(20)] == [401] + [429] * 19
    assert await call(made["secret"], f"/v1/hooks/{'x' * 32}") == 429
    assert len(looked_up) == 1
    # All credentials share the bucket, and a hook that was used before remains usable from the same address.
    assert (await guarded.user("GET", "/v1/keys", key=forged("ilk", 1))).status_code == 429
    assert await call(made["secret"]) == 200


async def test_malformed_webhook_calls_cause_no_lookup(still: System, looked_up: list[str]) -> None:
    await deploy(still, source_job(kind="webhook"))
    made = (await still.user("POST", "/v1/dags/feeds/jobs/src/secret", json={})).json()
    looked_up.clear()
    wrong = {"X-Interlock-Signature": f"t={int(still.kernel.stores.clock.now().timestamp())},v1={'0' * 64}"}
    assert (await still.http.post(still.gateway_url + made["path"], content=b"1")).status_code == 401
    assert (await still.http.post(f"{still.gateway_url}/v1/hooks/short", headers=wrong)).status_code == 401
    assert looked_up == []
    for _ in range(5):
        reply = await still.http.post(still.gateway_url + made["path"], content=b"1", headers=wrong)
        assert reply.status_code == 401
    assert len(looked_up) == 1


async def test_ended_webhook_secret_is_no_longer_trusted(
    guarded: System, looked_up: list[str], clock: ManualClock
) -> None:
    await deploy(guarded, source_job(kind="webhook", auth="token"))
    secret = "/v1/dags/feeds/jobs/src/secret"
    old = (await guarded.user("POST", secret, json={})).json()

    async def call(token: str) -> int:
        url = guarded.gateway_url + old["path"]
        return (await guarded.http.post(url, content=b"1", headers={"X-Interlock-Token": token})).status_code

    assert await call(old["secret"]) == 200
    assert (await guarded.user("POST", secret, json={"rotate": True})).status_code == 201
    clock.advance(OVERLAP_SECONDS + 1)
    assert await call("forged") == 401
    looked_up.clear()
    assert [await call(old["secret"]) for _ in range(5)] == [429] * 5
    assert looked_up == []


async def test_forged_service_keys_cause_few_lookups(still: System, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = await opened(still)
    assert (await bus.send(bus.message()))["outcome"] == "delivered"
    asked: list[str] = []
    original = RegistryReads.versions

    async def counted(self: RegistryReads, org_id: UUID) -> object:
        asked.append("versions")
        return await original(self, org_id)

    monkeypatch.setattr(RegistryReads, "versions", counted)
    still.kernel.stores.clock.advance(10.0)  # type: ignore[attr-defined]
    for number in range(2, 22):
        verdict = await bus.send(bus.message(version_id=f"hmac-v{number}"))
        assert (verdict["outcome"], verdict["reason"]) == ("invalid", "unknown_key")
        verdict = await bus.send(bus.message(secret=f"guess {number}".encode()))
        assert (verdict["outcome"], verdict["reason"]) == ("invalid", "invalid_hmac")
    assert len(asked) == 1
    assert (await bus.send(bus.message()))["outcome"] == "delivered"


async def test_forged_producer_keys_cause_few_lookups(guarded: System, looked_up: list[str]) -> None:
    bus = await opened(guarded)
    assert (await bus.send(bus.message()))["outcome"] == "delivered"
    looked_up.clear()
    statuses = [
        (await guarded.user("POST", "/v1/commands", key=forged("ilk", number), content=bus.message())).status_code
        for number in range(20)
    ]
    assert statuses == [401] + [429] * 19
    assert len(looked_up) == 1
    assert (await bus.send(bus.message()))["outcome"] == "delivered"


def test_lockout_bucket_refills_and_is_per_peer() -> None:
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


def test_number_of_peers_and_proofs_is_limited() -> None:
    lockout = Lockout(1.0)
    for number in range(30_000):
        lockout.failed(str(number))
        lockout.proved(str(number))
    assert (len(lockout._left), len(lockout._proved)) == (10_000, 10_000)
