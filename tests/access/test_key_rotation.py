"""Signing keys: a new key signs immediately, and an old key verifies until its last token has expired."""

from __future__ import annotations

import asyncio
from typing import Any

from interlock.apps.app import open_app
from interlock.clock import ManualClock
from tests.support.system import System, fence
from tests.support.token_parts import part


async def rotate(system: System) -> str:
    reply = await system.user("POST", "/v1/signing-keys/rotate")
    assert reply.status_code == 201, reply.text
    return str(reply.json()["kid"])


async def listed(system: System) -> list[dict[str, Any]]:
    reply = await system.http.get(system.internal_url + "/internal/jwks/task")
    assert reply.status_code == 200
    keys: list[dict[str, Any]] = reply.json()["keys"]
    return keys


async def test_after_a_rotation_new_tokens_use_the_new_key_and_old_ones_still_verify(
    still: System, clock: ManualClock
) -> None:
    old = await still.claim(await still.one(policy={"lease_seconds": 3600}))
    clock.advance(1)
    kid = await rotate(still)
    new = await still.claim(await still.one())
    assert part(new["capability_token"], 0)["kid"] == kid
    assert part(old["capability_token"], 0)["kid"] != kid
    assert [key["kid"] for key in await listed(still)] == [kid, part(old["capability_token"], 0)["kid"]]
    clock.advance(250)
    reply = await still.attempt("/v1/task/heartbeat", old["capability_token"], fence(old))
    assert reply.status_code == 200, reply.text
    assert part(reply.json()["capability_token"], 0)["kid"] == kid


async def test_retired_key_leaves_the_jwks_after_its_last_token(still: System, clock: ManualClock) -> None:
    old = (await listed(still))[0]["kid"]
    pem = still.kernel.settings.signing_keys_dir / f"{old}.pem"
    assert pem.stat().st_mode & 0o777 == 0o600
    kid = await rotate(still)
    clock.advance(599)
    await still.pass_of("retention")
    assert {key["kid"] for key in await listed(still)} == {old, kid}
    assert pem.exists()
    clock.advance(2)
    assert [key["kid"] for key in await listed(still)] == [kid]
    assert await still.pass_of("retention") == 1
    assert not pem.exists()
    assert [key["kid"] for key in (await still.user("GET", "/v1/signing-keys")).json()] == [kid]


async def test_jwks_contains_only_public_keys(shared: System) -> None:
    for key in await listed(shared):
        assert set(key) == {"kty", "crv", "x", "y", "kid", "alg", "use"}
        assert (key["kty"], key["crv"], key["alg"], key["use"]) == ("EC", "P-256", "ES256", "sig")


async def test_key_rotated_by_another_process_is_used_immediately(still: System, clock: ManualClock) -> None:
    await listed(still)
    async with open_app(still.kernel.settings, process="second", clock=clock) as second:
        kid = (await second.access.keyring.rotate()).kid
        claim = await still.claim(await still.one())
        token = claim["capability_token"]
        assert part(token, 0)["kid"] == kid
        assert (await second.access.tokens.verify(token)).attempt == 1
    assert (await still.attempt("/v1/task/heartbeat", token, fence(claim))).status_code == 200


async def test_concurrent_rotations_leave_one_signing_key(still: System) -> None:
    replies = await asyncio.gather(*(still.user("POST", "/v1/signing-keys/rotate") for _ in range(8)))
    assert {reply.status_code for reply in replies} <= {201, 409}
    assert any(reply.status_code == 201 for reply in replies)
    keys = (await still.user("GET", "/v1/signing-keys")).json()
    assert [key["retired_at"] is None for key in keys].count(True) == 1
    claim = await still.claim(await still.one())
    assert (await still.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim))).status_code == 200
    pems = {path.stem for path in still.kernel.settings.signing_keys_dir.glob("*.pem")}
    assert pems == {key["kid"] for key in keys}
