"""Object tokens: all invalid ones are refused with the same message; a valid one grants exactly its claims."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.access import keyring
from interlock.access.object_tokens import ObjectGrant, Place
from interlock.access.prefixes import canonical
from interlock.errors import Unauthenticated
from tests.support.system import System, fence
from tests.support.token_parts import ORDER, b64, part, raw

CLAIMS = ["iss", "aud", "sub", "exp", "iat", "jti", "org_id", "task_id", "attempt", "lease"]
CLAIMS += ["read_prefixes", "write_prefixes"]


@dataclass
class Minted:
    """An attempt with its tokens, and helpers to create tokens that are almost the same."""

    system: System
    claim: dict[str, Any]
    token: str

    async def signed(self, claims: Any, header: dict[str, Any] | None = None) -> str:
        head = part(self.token, 0) if header is None else header
        text = f"{b64(json.dumps(head).encode())}.{b64(json.dumps(claims).encode())}"
        signature = await self.system.kernel.access.keyring.sign(part(self.token, 0)["kid"], text.encode())
        return f"{text}.{b64(signature)}"

    async def changed(self, **claims: Any) -> str:
        return await self.signed(part(self.token, 1) | claims)

    async def refused(self, token: str, code: str = "bad_token") -> None:
        with pytest.raises(Unauthenticated) as refusal:
            await self.system.kernel.access.object_tokens.verify(token)
        assert refusal.value.code == code
        if code == "bad_token":
            assert refusal.value.detail == "The object token is invalid."

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
    """Removes the wait before an unknown kid causes a database read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyring, "_REFRESH_SECONDS", 0.0)
        yield


async def test_object_token_has_exactly_its_claims(minted: Minted) -> None:
    assert sorted(part(minted.token, 1)) == sorted(CLAIMS)
    assert part(minted.token, 0).keys() == {"alg", "typ", "kid"}


async def test_same_claims_signed_again_verify(minted: Minted) -> None:
    """The baseline of the refusals below, which proves that the changed part causes each refusal."""
    grant = await minted.system.kernel.access.object_tokens.verify(await minted.changed())
    assert (str(grant.task_id), grant.attempt, grant.org_id) == (minted.claim["task_id"], 1, minted.system.org_id)


@pytest.mark.parametrize("name", CLAIMS)
async def test_object_token_with_a_missing_claim_is_refused(minted: Minted, name: str) -> None:
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
async def test_object_token_with_a_wrong_claim_is_refused(minted: Minted, claims: dict[str, Any]) -> None:
    await minted.refused(await minted.changed(**claims))


STALE: dict[str, dict[str, Any]] = {
    "another attempt": {"attempt": 2},
    "another lease": {"lease": "0" * 64},
    "another org": {"org_id": str(UUID(int=1))},
}


@pytest.mark.parametrize("claims", STALE.values(), ids=STALE)
async def test_object_token_without_the_current_lease_is_expired(minted: Minted, claims: dict[str, Any]) -> None:
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
async def test_object_token_with_another_header_is_refused(minted: Minted, header: dict[str, Any]) -> None:
    await minted.refused(await minted.signed(part(minted.token, 1), part(minted.token, 0) | header))


async def test_object_token_has_one_spelling_and_one_signature(minted: Minted) -> None:
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


async def test_object_token_is_refused_as_capability_token(minted: Minted) -> None:
    for path, body in (("heartbeat", {}), ("complete", {"status": "Completed"}), ("credentials", {})):
        reply = await minted.system.attempt(f"/v1/task/{path}", minted.token, fence(minted.claim) | body)
        assert (reply.status_code, reply.json()["code"]) == (401, "bad_token")


async def test_capability_of_another_attempt_is_refused(minted: Minted) -> None:
    outputs = [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())} for _ in range(60)]
    other = await minted.system.claim(await minted.system.one(outputs=outputs))
    foreign = part(other["capability_token"], 1)["capability_id"]
    await minted.refused(await minted.changed(capability_id=foreign))


async def test_object_token_is_valid_until_its_retired_key_expires(shared: System) -> None:
    one = await _minted(shared)
    await shared.kernel.access.keyring.rotate()
    await shared.kernel.access.object_tokens.verify(one.token)
    await shared.value(
        "update interlock.signing_keys set verify_until = now() - interval '1 second' where kid = $1",
        part(one.token, 0)["kid"],
    )
    await shared.kernel.access.keyring.refresh()
    await one.refused(one.token)


# Access of a grant

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
def test_grant_allows_writes_only_below_its_own_prefix(prefix: str, rest: str) -> None:
    grant, uri = _grant(), prefix + rest
    inside = prefix == WRITE and canonical(WRITE).has(uri)
    assert {grant.may(method, uri) for method in ("PUT", "POST", "DELETE")} == {inside}
    below = inside or (prefix == READ and canonical(READ).has(uri))
    assert {grant.may(method, uri) for method in ("GET", "HEAD")} == {below}


@pytest.mark.parametrize("method", ["PATCH", "OPTIONS", "get", "", "*"])
def test_unknown_method_is_not_allowed(method: Any) -> None:
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
def test_only_prefixes_below_the_grant_can_be_listed(prefix: str, listed: bool) -> None:
    assert _grant().may("LIST", prefix) is listed


async def test_only_files_of_other_attempts_are_looked_up() -> None:
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
async def test_file_outside_attempts_is_not_readable(odd: str) -> None:
    assert not await _grant().allows("GET", READ + odd)
