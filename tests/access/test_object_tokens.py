"""Object tokens: whatever is wrong with one, it is refused in the same words; a good one allows what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.access import keyring as keyring_module
from interlock.access.object_tokens import ObjectGrant, Place
from interlock.access.prefixes import canonical
from interlock.errors import Unauthenticated
from tests.forging import ORDER, b64, part, raw
from tests.system import System, fence

CLAIMS = ["iss", "aud", "sub", "exp", "iat", "jti", "org_id", "task_id", "attempt", "lease"]
CLAIMS += ["read_prefixes", "write_prefixes"]


@dataclass
class Minted:
    """An attempt with its tokens, and all that is needed to make others that are almost the same."""

    system: System
    claim: dict[str, Any]
    token: str

    async def signed(self, claims: Any, header: dict[str, Any] | None = None) -> str:
        head = part(self.token, 0) if header is None else header
        text = f"{b64(json.dumps(head).encode())}.{b64(json.dumps(claims).encode())}"
        signature = await self.system.kernel.keyring.sign(part(self.token, 0)["kid"], text.encode())
        return f"{text}.{b64(signature)}"

    async def changed(self, **claims: Any) -> str:
        return await self.signed(part(self.token, 1) | claims)

    async def refused(self, token: str, code: str = "bad_token") -> None:
        with pytest.raises(Unauthenticated) as refusal:
            await self.system.kernel.object_tokens.verify(token)
        assert refusal.value.code == code
        if code == "bad_token":
            assert refusal.value.detail == "The object token does not verify."

    @property
    def written(self) -> str:
        return str(self.claim["task"]["outputs"][0]["write_prefix"])


async def _minted(system: System) -> Minted:
    outputs = [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}]
    claim = await system.claim(await system.one(outputs=outputs, policy={"lease_seconds": 3600}))
    reply = await system.attempt("/v1/task/credentials", claim["capability_token"], fence(claim))
    assert reply.status_code == 200, reply.text
    return Minted(system, claim, reply.json()["object_token"])


@pytest.fixture(scope="module")
async def minted(shared: System) -> Minted:
    return await _minted(shared)


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    """An unknown kid may wait for the next look at the database; here it looks at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyring_module, "_REFRESH_SECONDS", 0.0)
        yield


async def test_a_token_carries_exactly_its_claims(minted: Minted) -> None:
    assert sorted(part(minted.token, 1)) == sorted(CLAIMS)
    assert part(minted.token, 0).keys() == {"alg", "typ", "kid"}


async def test_the_same_claims_signed_again_are_good(minted: Minted) -> None:
    """What the refusals below differ from: so it is the difference that is refused."""
    grant = await minted.system.kernel.object_tokens.verify(await minted.changed())
    assert (str(grant.task_id), grant.attempt, grant.org_id) == (minted.claim["task_id"], 1, minted.system.org_id)


@pytest.mark.parametrize("name", CLAIMS)
async def test_a_token_without_one_of_its_claims_is_refused(minted: Minted, name: str) -> None:
    claims = part(minted.token, 1)
    del claims[name]
    await minted.refused(await minted.signed(claims))


WRONG: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "somebody"},
    "the audience of capability tokens": {"aud": "trace.task"},
    "several audiences": {"aud": ["trace.objects"]},
    "another subject": {"sub": f"task:{UUID(int=1)}"},
    "a task that is not the subject": {"task_id": str(UUID(int=1))},
    "an attempt that is text": {"attempt": "1"},
    "attempt 0": {"attempt": 0},
    "a time that is text": {"exp": "9999999999"},
    "a time of the future": {"iat": 2**40, "exp": 2**41},
    "an end before its beginning": {"exp": 1},
    "one claim more": {"admin": True},
    "a prefix that is no list": {"read_prefixes": "file:///"},
    "everything": {"read_prefixes": ["file:///"]},
    "a prefix outside the root": {"write_prefixes": ["file:///etc/"]},
    "a prefix that leaves the root": {"write_prefixes": ["file:///tmp/../etc/"]},
    "a prefix in S3": {"read_prefixes": ["s3://bucket/a/"]},
    "a capability of nobody": {"capability_id": str(UUID(int=1))},
}


@pytest.mark.parametrize("claims", WRONG.values(), ids=WRONG)
async def test_a_token_of_our_key_with_wrong_claims_is_refused(minted: Minted, claims: dict[str, Any]) -> None:
    await minted.refused(await minted.changed(**claims))


STALE: dict[str, dict[str, Any]] = {
    "another attempt": {"attempt": 2},
    "another lease": {"lease": "0" * 64},
    "another org": {"org_id": str(UUID(int=1))},
}


@pytest.mark.parametrize("claims", STALE.values(), ids=STALE)
async def test_a_token_of_somebody_who_does_not_hold_the_task_is_no_longer_good(
    minted: Minted, claims: dict[str, Any]
) -> None:
    await minted.refused(await minted.changed(**claims), "token_expired")


HEADERS: dict[str, dict[str, Any]] = {
    "no algorithm": {"alg": "none"},
    "a shared secret": {"alg": "HS256"},
    "another curve": {"alg": "ES384"},
    "an unknown key": {"kid": "nobody"},
    "no key": {"kid": None},
    "a key of its own": {"jwk": {"kty": "EC"}},
    "an address of keys": {"jku": "https://example.org/keys"},
    "an extension": {"crit": ["exp"]},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
async def test_a_header_that_says_anything_else_is_refused(minted: Minted, header: dict[str, Any]) -> None:
    await minted.refused(await minted.signed(part(minted.token, 1), part(minted.token, 0) | header))


async def test_a_token_is_spelled_and_signed_in_one_way(minted: Minted) -> None:
    header, payload, signature = minted.token.split(".")
    r, s = raw(signature)[:32], int.from_bytes(raw(signature)[32:])
    other_s = b64(r + (ORDER - s).to_bytes(32, "big"))
    for token in (
        "",
        ".",
        f"{header}.{payload}.",
        f"{header}.{payload}.{other_s}",
        f"{minted.token}=",
        f"{minted.token}\n",
        f" {minted.token}",
        minted.token * 200,
        f"{header}.{payload[:-2]}.{signature}",
        str(minted.claim["capability_token"]),
    ):
        await minted.refused(token)


async def test_an_object_token_is_no_capability_token(minted: Minted) -> None:
    for path, body in (("heartbeat", {}), ("complete", {"status": "Completed"}), ("credentials", {})):
        reply = await minted.system.attempt(f"/v1/task/{path}", minted.token, fence(minted.claim) | body)
        assert (reply.status_code, reply.json()["code"]) == (401, "bad_token")


async def test_a_capability_of_another_attempt_is_nobodys(minted: Minted) -> None:
    outputs = [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())} for _ in range(60)]
    other = await minted.system.claim(await minted.system.one(outputs=outputs))
    foreign = part(other["capability_token"], 1)["capability_id"]
    await minted.refused(await minted.changed(capability_id=foreign))


async def test_a_token_stays_good_while_its_key_is_retired_and_ends_with_it(shared: System) -> None:
    one = await _minted(shared)
    await shared.kernel.keyring.rotate()
    await shared.kernel.object_tokens.verify(one.token)
    await shared.value(
        "update interlock.signing_keys set verify_until = now() - interval '1 second' where kid = $1",
        part(one.token, 0)["kid"],
    )
    await shared.kernel.keyring.refresh()
    await one.refused(one.token)


# What a grant allows

ROOT = "file:///objects"
READ, WRITE = f"{ROOT}/dataset/d/version/v/", f"{ROOT}/dataset/e/version/w/_attempts/{UUID(int=7)}/1/"
OTHERS = f"{READ}_attempts/{UUID(int=8)}/2/"


def _grant(*hidden: str, asked: list[str] | None = None) -> ObjectGrant:
    async def uncommitted(_org: UUID, places: Sequence[Place]) -> set[str]:
        if asked is not None:
            asked.extend(place for place, _, _ in places)
        return {place for place, _, _ in places} & set(hidden)

    return ObjectGrant(UUID(int=1), UUID(int=7), 1, [canonical(READ)], [canonical(WRITE)], uncommitted)


@given(st.sampled_from([READ, WRITE, f"{ROOT}/", "s3://objects/"]), st.text("ab/._-%*\0", max_size=8))
def test_only_the_holders_own_prefix_is_written(prefix: str, rest: str) -> None:
    grant, uri = _grant(), prefix + rest
    inside = prefix == WRITE and canonical(WRITE).has(uri)
    assert {grant.may(method, uri) for method in ("PUT", "POST", "DELETE")} == {inside}
    below = inside or (prefix == READ and canonical(READ).has(uri))
    assert {grant.may(method, uri) for method in ("GET", "HEAD")} == {below}


@pytest.mark.parametrize("method", ["PATCH", "OPTIONS", "get", "", "*"])
def test_a_method_that_nobody_thought_of_is_not_allowed(method: Any) -> None:
    assert not _grant().may(method, f"{WRITE}x")


@pytest.mark.parametrize(
    ("prefix", "listed"),
    [
        (READ, True),
        (OTHERS, True),
        (WRITE, True),
        (f"{WRITE}deep/", True),
        (READ[:-1], False),
        (f"{READ}../", False),
        (f"{READ}/", False),
        (f"{READ}*/", False),
        (f"{READ[:-1]}v/", False),
        (f"{ROOT}/", False),
        ("", False),
    ],
)
def test_a_listing_is_of_a_prefix_below_those_of_the_grant(prefix: str, listed: bool) -> None:
    assert _grant().may("LIST", prefix) is listed


async def test_others_files_are_looked_up_by_attempt_and_ones_own_are_not() -> None:
    asked: list[str] = []
    grant = _grant(OTHERS, asked=asked)
    seen = f"{READ}_attempts/{UUID(int=9)}/1/a"
    uris = [f"{OTHERS}a", f"{OTHERS}b", seen, f"{WRITE}own", f"{READ}stray", f"{READ}_attempts/x/1/a", f"{ROOT}/x"]
    assert await grant.visible(uris) == [seen, f"{WRITE}own"]
    assert asked == [OTHERS, f"{READ}_attempts/{UUID(int=9)}/1/"]
    assert not await grant.allows("GET", f"{OTHERS}a")
    assert await grant.allows("GET", seen)
    assert not await grant.allows("PUT", seen)
    assert await grant.allows("PUT", f"{WRITE}own")


@pytest.mark.parametrize("odd", [f"_attempts/{UUID(int=8)}/0/a", f"_attempts/{UUID(int=8)}/02/a", "_attempts/8/1/a"])
async def test_what_is_no_file_of_an_attempt_is_not_read(odd: str) -> None:
    assert not await _grant().allows("GET", READ + odd)
