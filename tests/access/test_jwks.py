"""A verifier that has only the keys that the dispatcher publishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from interlock.access import jwks
from interlock.access.jwks import FRESH_SECONDS, MAX_BYTES, MAX_KEYS, STALE_SECONDS, Documents, PublishedKeys
from interlock.access.tokens import CapabilityVerifier
from interlock.apps.app import with_published_keys
from interlock.clock import ManualClock
from interlock.errors import Unauthenticated, Unavailable
from interlock.stores.signers import jwk_of
from tests.support.identity_provider import Answer, Publisher, jwk, publishing
from tests.support.polls import answered
from tests.support.system import System

PATH = "/internal/jwks/task"
KEY = ec.generate_private_key(ec.SECP256R1())
PUBLIC = jwk_of(KEY.public_key())
KID = PUBLIC["kid"]


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    async with publishing() as started:
        started.says(PATH, {"keys": [PUBLIC]})
        yield started


@pytest.fixture
def keys(publisher: Publisher, clock: ManualClock) -> PublishedKeys:
    return PublishedKeys(publisher.url, Documents(), clock)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks, "PAUSE_SECONDS", 0.0)


async def test_token_verifies_with_published_keys_through_a_rotation(still: System) -> None:
    settings = still.kernel.settings.model_copy(update={"internal_url": still.internal_url})
    verifier = with_published_keys(replace(still.kernel, settings=settings)).access.capabilities
    assert type(verifier) is CapabilityVerifier
    old = (await still.claim(await still.one()))["capability_token"]
    assert (await verifier.verify(old)).attempt == 1
    await still.kernel.access.keyring.rotate()
    new = (await still.claim(await still.one()))["capability_token"]
    assert (await verifier.verify(new)).attempt == 1
    assert (await verifier.verify(old)).attempt == 1
    with pytest.raises(Unauthenticated):
        await verifier.verify(new[:-2] + ("AA" if new[-2:] != "AA" else "QA"))


async def test_retired_key_verifies_until_its_last_token_expires(still: System, clock: ManualClock) -> None:
    keys = PublishedKeys(still.internal_url, Documents(), clock)
    kid = await still.value("select kid from interlock.signing_keys")
    assert await keys.public(kid) is not None
    await still.kernel.access.keyring.rotate()
    clock.advance(599)
    assert await keys.public(kid) is not None
    clock.advance(2)
    assert await PublishedKeys(still.internal_url, Documents(), clock).public(kid) is None


async def test_known_keys_are_fetched_once(publisher: Publisher, keys: PublishedKeys) -> None:
    for _ in range(10):
        assert await keys.public(KID) is not None
    assert publisher.asked == [PATH]


async def test_flood_of_unknown_kids_causes_one_fetch_per_interval(
    publisher: Publisher, keys: PublishedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "PAUSE_SECONDS", 0.3)
    found = await asyncio.gather(*(keys.public(f"forged {n}") for n in range(200)))
    assert found == [None] * 200
    assert len(publisher.asked) == 1
    await asyncio.gather(*(keys.public(f"again {n}") for n in range(200)), keys.public(KID))
    assert len(publisher.asked) <= 2


async def test_known_keys_outlive_a_dispatcher_outage_for_a_limited_time(
    publisher: Publisher, keys: PublishedKeys, clock: ManualClock
) -> None:
    assert await keys.public(KID) is not None
    publisher.away = True
    clock.advance(STALE_SECONDS)
    assert await keys.public(KID) is not None
    with pytest.raises(Unavailable):
        await keys.public("another")
    clock.advance(1)
    with pytest.raises(Unavailable):
        await keys.public(KID)
    publisher.away = False
    assert await keys.public(KID) is not None


async def test_key_removed_from_the_jwks_is_forgotten(
    publisher: Publisher, keys: PublishedKeys, clock: ManualClock
) -> None:
    assert await keys.public(KID) is not None
    publisher.says(PATH, {"keys": []})
    clock.advance(FRESH_SECONDS)

    async def forgotten() -> bool:
        return await keys.public(KID) is None

    await answered(forgotten)


async def test_no_token_verifies_before_the_first_fetch(clock: ManualClock) -> None:
    with pytest.raises(Unavailable):
        await PublishedKeys("http://127.0.0.1:9", Documents(), clock).public(KID)


def _document(*entries: Any) -> dict[str, Any]:
    return {"keys": list(entries)}


GARBAGE = {
    "no JSON": b"<html>",
    "not UTF-8": b'{"keys": [{"kid": "\xff"}]}',
    "a list": [PUBLIC],
    "no keys": {},
    "keys that are none": {"keys": "all"},
    "a key that is none": _document("key"),
    "the same kid twice": _document(PUBLIC, PUBLIC),
    "too many keys": _document(*(PUBLIC | {"kid": str(n)} for n in range(MAX_KEYS + 1))),
    "a huge document": b" " * (MAX_BYTES + 1),
    "endless brackets": b"[" * 100_000,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_invalid_jwks_is_ignored_and_known_keys_stay(
    publisher: Publisher, keys: PublishedKeys, clock: ManualClock, garbage: Any
) -> None:
    assert await keys.public(KID) is not None
    publisher.says(PATH, garbage)
    clock.advance(FRESH_SECONDS)
    with pytest.raises(Unavailable):
        await keys.public("another")
    assert await keys.public(KID) is not None


OTHERS = {
    "RSA": jwk(rsa.generate_private_key(65537, 2048), KID, alg="ES256"),
    "another curve": jwk(ec.generate_private_key(ec.SECP384R1()), KID, alg="ES256"),
    "another algorithm": PUBLIC | {"alg": "ES384"},
    "no algorithm": {name: value for name, value in PUBLIC.items() if name != "alg"},
    "for encryption": PUBLIC | {"use": "enc"},
    "no point of the curve": PUBLIC | {"y": PUBLIC["x"]},
    "no base64": PUBLIC | {"x": "ä"},
    "a number": PUBLIC | {"x": 7},
    "no coordinate": {name: value for name, value in PUBLIC.items() if name != "y"},
    "a private key": PUBLIC | {"d": "AQ"},
    "symmetric": {"kty": "oct", "k": "AAAA", "kid": KID, "alg": "ES256"},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
async def test_key_of_an_unsupported_type_is_ignored(publisher: Publisher, keys: PublishedKeys, other: Any) -> None:
    publisher.says(PATH, _document(other, PUBLIC | {"kid": "good"}))
    assert await keys.public(KID) is None
    assert await keys.public("good") is not None


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_jwks_redirect_is_not_followed(publisher: Publisher, keys: PublishedKeys, status: int) -> None:
    publisher.says("/elsewhere", {"keys": [PUBLIC]})
    publisher.answers[PATH] = Answer(status=status, headers={"Location": f"{publisher.url}/elsewhere"})
    with pytest.raises(Unavailable):
        await keys.public(KID)
    assert publisher.asked == [PATH]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "http://", "127.0.0.1"])
async def test_jwks_url_must_be_http(url: str) -> None:
    with pytest.raises(Unavailable):
        await Documents().fetch(url)


@pytest.mark.parametrize("status", [204, 401, 404, 500])
async def test_jwks_reply_other_than_200_is_ignored(publisher: Publisher, keys: PublishedKeys, status: int) -> None:
    publisher.answers[PATH] = Answer(b"{}", status=status)
    with pytest.raises(Unavailable):
        await keys.public(KID)
