"""Tokens of an identity provider, which really publishes its keys: which are believed, and about whom."""

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
from interlock.access.oidc import FRESH_SECONDS, MAX_TOKEN_BYTES, SKEW_SECONDS, STALE_SECONDS, Issuer
from interlock.adapters.documents import Documents
from interlock.clock import ManualClock, SystemClock
from interlock.errors import InterlockError, Unauthenticated, Unavailable
from interlock.settings import load
from tests.forging import b64, es256
from tests.issuer import (
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
async def test_a_token_of_each_allowed_algorithm_says_who_its_bearer_is(
    provider: IdentityProvider, issuer: Issuer, alg: str
) -> None:
    assert await issuer.subject(provider.token("auth0|ada", alg=alg)) == "auth0|ada"


async def test_the_keys_are_found_by_discovery_and_asked_for_once(provider: IdentityProvider, issuer: Issuer) -> None:
    for alg in BY_ALGORITHM:
        await issuer.subject(provider.token(alg=alg))
    assert provider.publisher.asked == [DISCOVERY_PATH, KEYS_PATH]


async def test_a_given_address_of_the_keys_needs_no_discovery(provider: IdentityProvider) -> None:
    named = Issuer(provider.url, AUDIENCE, Documents(), SystemClock(), jwks_url=provider.url + KEYS_PATH)
    assert await named.subject(provider.token()) == "ada"
    assert provider.publisher.asked == [KEYS_PATH]


async def test_an_audience_among_several_and_the_type_of_an_access_token_are_fine(
    provider: IdentityProvider, issuer: Issuer
) -> None:
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
async def test_a_token_with_a_wrong_or_missing_claim_is_refused(
    provider: IdentityProvider, issuer: Issuer, claims: dict[str, Any]
) -> None:
    said = {name: value for name, value in (provider.claims("ada") | claims).items() if value is not None}
    token = jwt.PyJWS().encode(json.dumps(said).encode(), EC_KEY, "ES256", {"kid": "ES256"})
    assert await refused(issuer, token) == "bad_token"


async def test_an_expired_token_is_refused_with_what_to_do(provider: IdentityProvider, issuer: Issuer) -> None:
    assert await refused(issuer, provider.token(exp=int(time.time()))) == "token_expired"


async def test_the_issuers_clock_may_be_a_little_ahead(provider: IdentityProvider, issuer: Issuer) -> None:
    ahead = int(time.time()) + SKEW_SECONDS - 5
    assert await issuer.subject(provider.token(iat=ahead, nbf=ahead)) == "ada"


@pytest.mark.parametrize("exp", [b"NaN", b"Infinity", b"1e999"])
async def test_a_token_cannot_expire_never(provider: IdentityProvider, issuer: Issuer, exp: bytes) -> None:
    said = json.dumps(provider.claims("ada", exp="EXP")).encode().replace(b'"EXP"', exp)
    token = jwt.PyJWS().encode(said, EC_KEY, "ES256", {"kid": "ES256"})
    assert await refused(issuer, token) == "bad_token"


async def test_a_claim_that_is_there_twice_is_refused(provider: IdentityProvider, issuer: Issuer) -> None:
    said = json.dumps(provider.claims("ada")).encode().replace(b"{", b'{"sub": "eve", ', 1)
    token = jwt.PyJWS().encode(said, EC_KEY, "ES256", {"kid": "ES256"})
    assert await refused(issuer, token) == "bad_token"


async def test_no_signature_and_symmetric_ones_are_refused(provider: IdentityProvider, issuer: Issuer) -> None:
    await issuer.subject(provider.token())
    claims = provider.claims("ada")
    for alg in ("none", "None", "HS256", "HS512", ""):
        assert await refused(issuer, compact({"alg": alg, "kid": "RS256", "typ": "JWT"}, claims, b"x")) == "bad_token"
    # The classic: the public key, which everybody has, as the secret of an HMAC.
    pem = RSA_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signed = compact({"alg": "HS256", "kid": "RS256", "typ": "JWT"}, claims).rpartition(".")[0]
    tag = b64(hmac.digest(pem, signed.encode(), "sha256"))
    assert await refused(issuer, f"{signed}.{tag}") == "bad_token"


async def test_a_key_is_good_for_its_own_algorithm_alone(provider: IdentityProvider, issuer: Issuer) -> None:
    provider.publishes(jwk(RSA_KEY, "only", alg="RS256"))
    assert await issuer.subject(provider.token(alg="RS256", kid="only")) == "ada"
    assert await refused(issuer, provider.token(alg="PS256", kid="only")) == "bad_token"
    assert await refused(issuer, provider.token(alg="ES256", kid="only")) == "bad_token"


async def test_a_signature_by_another_key_is_refused(provider: IdentityProvider, issuer: Issuer) -> None:
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
async def test_a_header_that_cannot_be_followed_is_refused(
    provider: IdentityProvider, issuer: Issuer, headers: dict[str, Any]
) -> None:
    header = {"alg": "ES256", "kid": "ES256", "typ": "JWT"} | headers
    signed = compact(header, provider.claims("ada")).rpartition(".")[0]
    assert await refused(issuer, f"{signed}.{es256(EC_KEY, signed)}") == "bad_token"


async def test_a_key_that_the_token_brings_along_means_nothing(provider: IdentityProvider, issuer: Issuer) -> None:
    mine = ec.generate_private_key(ec.SECP256R1())
    token = provider.token(key=mine, headers={"jwk": jwk(mine, "ES256"), "jku": "http://127.0.0.1:9/keys"})
    assert await refused(issuer, token) == "bad_token"
    assert provider.publisher.asked == [DISCOVERY_PATH, KEYS_PATH]


async def test_unfit_keys_are_left_out_and_the_rest_is_good(provider: IdentityProvider, issuer: Issuer) -> None:
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


async def test_a_new_key_of_the_issuer_is_found_and_a_flood_of_forged_ones_costs_one_look(
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


async def test_while_the_issuer_is_away_known_keys_are_good_for_a_while(
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
async def test_a_discovery_document_that_is_not_the_issuers_leads_nowhere(
    provider: IdentityProvider, issuer: Issuer, document: Any
) -> None:
    if isinstance(document, dict) and document.get("issuer") == "URL":
        document = document | {"issuer": provider.url}
    provider.publisher.says(DISCOVERY_PATH, document)
    with pytest.raises(Unavailable):
        await issuer.subject(provider.token())
    assert provider.publisher.asked == [DISCOVERY_PATH]


async def test_discovery_over_tls_leads_to_keys_over_tls_alone() -> None:
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


async def test_a_huge_token_is_refused_unread(provider: IdentityProvider, issuer: Issuer) -> None:
    assert await refused(issuer, provider.token(padding="a" * MAX_TOKEN_BYTES)) == "bad_token"
    assert provider.publisher.asked == []


async def test_whatever_is_changed_in_a_token_it_is_refused(provider: IdentityProvider, issuer: Issuer) -> None:
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
        ({"oidc_issuer": "https://issuer.example"}, "go together"),
        ({"oidc_audience": "interlock"}, "go together"),
        ({"oidc_issuer": "http://issuer.example", "oidc_audience": "interlock"}, "https://"),
        ({"oidc_issuer": "issuer.example", "oidc_audience": "interlock"}, "https://"),
        ({"oidc_jwks_url": "file:///keys"}, "https://"),
    ],
)
def test_settings_that_would_believe_anybody_stop_the_start(given: dict[str, str], words: str) -> None:
    with pytest.raises(InterlockError, match=words):
        load(**given)
