"""Tokens of an identity provider that serves its keys over HTTP: which tokens are accepted, and for which user."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from interlock.access import oidc
from interlock.access.jwks import Documents
from interlock.access.oidc import FRESH_SECONDS, MAX_TOKEN_BYTES, SKEW_SECONDS, STALE_SECONDS, Issuer
from interlock.clock import ManualClock, SystemClock
from interlock.errors import InterlockError, Unauthenticated, Unavailable
from interlock.settings import load
from tests.support.identity_provider import (
    AUDIENCE,
    BY_ALGORITHM,
    DISCOVERY_PATH,
    EC_KEY,
    KEYS_PATH,
    RSA_KEY,
    Answer,
    IdentityProvider,
    compact,
    jwk,
    publishing,
)
from tests.support.token_parts import b64, es256


@pytest.fixture
async def provider() -> AsyncIterator[IdentityProvider]:
    async with publishing() as publisher:
        yield IdentityProvider(publisher)


@pytest.fixture
def issuer(provider: IdentityProvider) -> Issuer:
    return Issuer(provider.url, AUDIENCE, Documents(), SystemClock(), jwks_url=None)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "PAUSE_SECONDS", 0.0)


async def refused(issuer: Issuer, token: str) -> str:
    with pytest.raises(Unauthenticated) as caught:
        await issuer.subject(token)
    return caught.value.code


@pytest.mark.parametrize("alg", BY_ALGORITHM)
async def test_token_of_each_allowed_algorithm_yields_its_subject(
    provider: IdentityProvider, issuer: Issuer, alg: str
) -> None:
    assert await issuer.subject(provider.token("auth0|ada", alg=alg)) == "auth0|ada"


async def test_keys_are_discovered_and_fetched_once(provider: IdentityProvider, issuer: Issuer) -> None:
    for alg in BY_ALGORITHM:
        await issuer.subject(provider.token(alg=alg))
    assert provider.publisher.asked == [DISCOVERY_PATH, KEYS_PATH]


async def test_configured_jwks_url_skips_discovery(provider: IdentityProvider) -> None:
    named = Issuer(provider.url, AUDIENCE, Documents(), SystemClock(), jwks_url=provider.url + KEYS_PATH)
    assert await named.subject(provider.token()) == "ada"
    assert provider.publisher.asked == [KEYS_PATH]


async def test_several_audiences_and_access_token_type_are_accepted(provider: IdentityProvider, issuer: Issuer) -> None:
    token = provider.token(aud=["other", AUDIENCE], nbf=int(time.time()), headers={"typ": "at+jwt"}, roles=["admin"])
    assert await issuer.subject(token) == "ada"


NOW = int(time.time())
WRONG_CLAIMS: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "https://elsewhere.example"},
    "an issuer with a slash": {"iss": "http://127.0.0.1/"},
    "another audience": {"aud": "other"},
    "an audience that has ours in it": {"aud": f"{AUDIENCE}.example"},
    "no audience in the list": {"aud": []},
    "issued in the future": {"iat": NOW + 3600},
    "not yet": {"nbf": NOW + 3600},
    "an expiry in text": {"exp": str(NOW + 300)},
    "a subject that is a number": {"sub": 7},
    "an empty subject": {"sub": ""},
    "a subject over the limit": {"sub": "a" * 256},
    "a subject with a line feed": {"sub": "ada\nadmin"},
    "a subject with NUL": {"sub": "ada\0"},
    **{f"no {name}": {name: None} for name in ("iss", "aud", "sub", "exp", "iat")},
}


@pytest.mark.parametrize("claims", WRONG_CLAIMS.values(), ids=WRONG_CLAIMS)
async def test_oidc_token_with_a_wrong_or_missing_claim_is_refused(
    provider: IdentityProvider, issuer: Issuer, claims: dict[str, Any]
) -> None:
    said = {name: value for name, value in (provider.claims("ada") | claims).items() if value is not None}
    token = jwt.PyJWS().encode(json.dumps(said).encode(), EC_KEY, "ES256", {"kid": "ES256"})
    assert await refused(issuer, token) == "bad_token"


async def test_expired_oidc_token_is_refused_with_its_own_code(provider: IdentityProvider, issuer: Issuer) -> None:
    assert await refused(issuer, provider.token(exp=int(time.time()))) == "token_expired"


async def test_small_clock_skew_of_the_issuer_is_accepted(provider: IdentityProvider, issuer: Issuer) -> None:
    ahead = int(time.time()) + SKEW_SECONDS - 5
    assert await issuer.subject(provider.token(iat=ahead, nbf=ahead)) == "ada"


@pytest.mark.parametrize("exp", [b"NaN", b"Infinity", b"1e999"])
async def test_token_with_non_finite_expiry_is_refused(provider: IdentityProvider, issuer: Issuer, exp: bytes) -> None:
    said = json.dumps(provider.claims("ada", exp="EXP")).encode().replace(b'"EXP"', exp)
    token = jwt.PyJWS().encode(said, EC_KEY, "ES256", {"kid": "ES256"})
    assert await refused(issuer, token) == "bad_token"


async def test_duplicate_claim_is_refused(provider: IdentityProvider, issuer: Issuer) -> None:
    said = json.dumps(provider.claims("ada")).encode().replace(b"{", b'{"sub": "eve", ', 1)
    token = jwt.PyJWS().encode(said, EC_KEY, "ES256", {"kid": "ES256"})
    assert await refused(issuer, token) == "bad_token"


async def test_missing_and_symmetric_signatures_are_refused(provider: IdentityProvider, issuer: Issuer) -> None:
    await issuer.subject(provider.token())
    claims = provider.claims("ada")
    for alg in ("none", "None", "HS256", "HS512", ""):
        assert await refused(issuer, compact({"alg": alg, "kid": "RS256", "typ": "JWT"}, claims, b"x")) == "bad_token"
    # The classic attack: the public key, which everyone can read, as the HMAC secret.
    pem = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signed = compact({"alg": "HS256", "kid": "RS256", "typ": "JWT"}, claims).rpartition(".")[0]
    tag = b64(hmac.digest(pem, signed.encode(), "sha256"))
    assert await refused(issuer, f"{signed}.{tag}") == "bad_token"


async def test_key_is_valid_only_for_its_own_algorithm(provider: IdentityProvider, issuer: Issuer) -> None:
    provider.publishes(jwk(RSA_KEY, "only", alg="RS256"))
    assert await issuer.subject(provider.token(alg="RS256", kid="only")) == "ada"
    assert await refused(issuer, provider.token(alg="PS256", kid="only")) == "bad_token"
    assert await refused(issuer, provider.token(alg="ES256", kid="only")) == "bad_token"


async def test_signature_by_another_key_is_refused(provider: IdentityProvider, issuer: Issuer) -> None:
    assert await refused(issuer, provider.token(key=ec.generate_private_key(ec.SECP256R1()))) == "bad_token"
    assert await refused(issuer, provider.token(alg="RS256", kid="ES256")) == "bad_token"


@pytest.mark.parametrize(
    "headers",
    [
        {"kid": 7},
        {"kid": None},
        {"crit": ["exp"], "exp": 1},
        {"typ": "JOSE"},
        {"typ": "secevent+jwt"},
    ],
    ids=str,
)
async def test_unsupported_token_header_is_refused(
    provider: IdentityProvider, issuer: Issuer, headers: dict[str, Any]
) -> None:
    header = {"alg": "ES256", "kid": "ES256", "typ": "JWT"} | headers
    signed = compact(header, provider.claims("ada")).rpartition(".")[0]
    assert await refused(issuer, f"{signed}.{es256(EC_KEY, signed)}") == "bad_token"


async def test_key_embedded_in_a_token_is_ignored(provider: IdentityProvider, issuer: Issuer) -> None:
    mine = ec.generate_private_key(ec.SECP256R1())
    token = provider.token(key=mine, headers={"jwk": jwk(mine, "ES256"), "jku": "http://127.0.0.1:9/keys"})
    assert await refused(issuer, token) == "bad_token"
    assert provider.publisher.asked == [DISCOVERY_PATH, KEYS_PATH]


async def test_unusable_keys_are_skipped(provider: IdentityProvider, issuer: Issuer) -> None:
    small = rsa.generate_private_key(65537, 1024)  # noqa: S505 - what is refused
    provider.publishes(
        jwk(small, "small"),
        jwk(ec.generate_private_key(ec.SECP384R1()), "another curve"),
        {"kty": "oct", "k": "AAAA", "kid": "symmetric"},
        {"kty": "RSA", "n": "%", "e": "AQAB", "kid": "garbage"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "no point"},
        jwk(EC_KEY, "for encryption", use="enc"),
        jwk(EC_KEY, "good"),
    )
    for kid in ("small", "another curve", "symmetric", "garbage", "no point", "for encryption"):
        assert await refused(issuer, provider.token(kid=kid)) == "bad_token"
    assert await issuer.subject(provider.token(kid="good")) == "ada"


async def test_new_issuer_key_is_found_and_forged_kids_cause_no_fetches(
    provider: IdentityProvider, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await issuer.subject(provider.token())
    provider.publishes(jwk(EC_KEY, "new"))
    assert await issuer.subject(provider.token(kid="new")) == "ada"
    monkeypatch.setattr(oidc, "PAUSE_SECONDS", 3600.0)
    asked = len(provider.publisher.asked)
    codes = await asyncio.gather(*(refused(issuer, provider.token(kid=f"forged {n}")) for n in range(100)))
    assert set(codes) == {"bad_token"}
    assert len(provider.publisher.asked) == asked


async def test_cached_keys_stay_valid_while_the_issuer_is_unavailable(
    provider: IdentityProvider, clock: ManualClock
) -> None:
    issuer = Issuer(provider.url, AUDIENCE, Documents(), clock, jwks_url=None)

    def token(kid: str = "ES256") -> str:
        now = int(clock.now().timestamp())
        return provider.token(kid=kid, iat=now, exp=now + 300)

    assert await issuer.subject(token()) == "ada"
    provider.publisher.away = True
    clock.advance(FRESH_SECONDS)
    assert await issuer.subject(token()) == "ada"
    with pytest.raises(Unavailable):
        await issuer.subject(token("new"))
    clock.advance(STALE_SECONDS)
    with pytest.raises(Unavailable):
        await issuer.subject(token())


@pytest.mark.parametrize(
    "document",
    [
        b"<html>",
        {},
        {"issuer": "https://elsewhere.example", "jwks_uri": "https://elsewhere.example/keys"},
        {"issuer": "URL", "jwks_uri": "file:///etc/passwd"},
        {"issuer": "URL", "jwks_uri": 7},
    ],
    ids=str,
)
async def test_invalid_discovery_document_is_refused(provider: IdentityProvider, issuer: Issuer, document: Any) -> None:
    if isinstance(document, dict) and document.get("issuer") == "URL":
        document = document | {"issuer": provider.url}
    provider.publisher.says(DISCOVERY_PATH, document)
    with pytest.raises(Unavailable):
        await issuer.subject(provider.token())
    assert provider.publisher.asked == [DISCOVERY_PATH]


async def test_discovery_over_tls_requires_keys_over_tls() -> None:
    url, asked = "https://issuer.example", []

    class Told:
        async def fetch(self, url: str) -> bytes:
            asked.append(url)
            return json.dumps({"issuer": "https://issuer.example", "jwks_uri": "http://issuer.example/keys"}).encode()

    token = jwt.encode({"sub": "ada"}, EC_KEY, "ES256", {"kid": "ES256"})
    with pytest.raises(Unavailable):
        await Issuer(url, AUDIENCE, Told(), SystemClock(), jwks_url=None).subject(token)
    assert asked == [url + DISCOVERY_PATH]


async def test_redirects_of_the_issuer_are_not_followed(provider: IdentityProvider, issuer: Issuer) -> None:
    provider.publisher.answers[DISCOVERY_PATH] = Answer(status=302, headers={"Location": provider.url + KEYS_PATH})
    with pytest.raises(Unavailable):
        await issuer.subject(provider.token())


async def test_oversized_token_is_refused_without_a_key_fetch(provider: IdentityProvider, issuer: Issuer) -> None:
    assert await refused(issuer, provider.token(padding="a" * MAX_TOKEN_BYTES)) == "bad_token"
    assert provider.publisher.asked == []


async def test_any_change_to_a_token_is_refused(provider: IdentityProvider, issuer: Issuer) -> None:
    token = provider.token()
    loop = asyncio.get_running_loop()

    @hypothesis_settings(max_examples=150, database=None)
    @given(st.data())
    def tampered(data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(token) - 1))
        letter = data.draw(st.sampled_from("AQgw.-_=é{"))
        changed = token[:at] + letter + token[at + 1 :]
        if changed == token or (at == len(token) - 1 and letter in "AQgw"):
            return
        outcome = asyncio.run_coroutine_threadsafe(_outcome(issuer, changed), loop).result(10)
        assert isinstance(outcome, Unauthenticated), outcome

    await asyncio.to_thread(tampered)


async def _outcome(issuer: Issuer, token: str) -> str | InterlockError:
    try:
        return await issuer.subject(token)
    except InterlockError as error:
        return error


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"oidc_issuer": "https://issuer.example"}, "must be set together"),
        ({"oidc_audience": "interlock"}, "must be set together"),
        ({"oidc_issuer": "http://issuer.example", "oidc_audience": "interlock"}, "https://"),
        ({"oidc_issuer": "issuer.example", "oidc_audience": "interlock"}, "https://"),
        ({"oidc_jwks_url": "file:///keys"}, "https://"),
    ],
)
def test_unsafe_oidc_settings_stop_the_start(given: dict[str, str], words: str) -> None:
    with pytest.raises(InterlockError, match=words):
        load(**given)
