"""HS256 tokens: accepted only if the development setting is on, and only with the secret on disk."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from interlock.access import keyring
from interlock.access.jwt import FILE, SharedSecret
from interlock.access.tokens import CapabilityVerifier
from interlock.apps.app import open_app
from interlock.errors import ConfigurationError, Unauthenticated
from interlock.settings import load
from tests.support.system import System, fence, running
from tests.support.token_parts import b64, es256, part, raw

_ENCODINGS = (serialization.Encoding.PEM, serialization.Encoding.DER)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the wait before an unknown kid causes a database read."""
    monkeypatch.setattr(keyring, "_REFRESH_SECONDS", 0.0)


@pytest.fixture
async def developing(state_url: str, tmp_path: Path) -> AsyncIterator[System]:
    async with running(state_url, tmp_path, development_tokens=True) as started:
        yield started


async def held(system: System) -> dict[str, Any]:
    return await system.claim(await system.one(policy={"lease_seconds": 3600}))


async def status(system: System, claim: dict[str, Any], token: str) -> int:
    return (await system.attempt("/v1/task/heartbeat", token, fence(claim))).status_code


def keyed(token: str, secret: bytes, *, claims: dict[str, Any] | None = None, **header: Any) -> str:
    text = f"{b64(json.dumps(part(token, 0) | header).encode())}.{b64(json.dumps(claims or part(token, 1)).encode())}"
    return f"{text}.{b64(hmac.digest(secret, text.encode(), hashlib.sha256))}"


def public_forms(system: System, kid: str) -> list[bytes]:
    public = system.kernel.access.keyring.signers.pem.private(kid).public_key()
    return [public.public_bytes(how, serialization.PublicFormat.SubjectPublicKeyInfo) for how in _ENCODINGS]


async def active_kid(system: System) -> str:
    return str((await system.kernel.access.keyring.active())["kid"])


async def test_development_token_is_hs256_and_accepted(developing: System) -> None:
    claim = await held(developing)
    token = str(claim["capability_token"])
    assert part(token, 0)["alg"] == "HS256"
    assert part(token, 0)["kid"].startswith("development-")
    assert await status(developing, claim, token) == 200


async def test_secret_file_is_readable_only_by_its_owner(developing: System) -> None:
    await held(developing)
    path = developing.kernel.settings.signing_keys_dir / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == 32
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(f".{FILE}")] == []


async def test_jwks_contains_neither_the_secret_nor_its_name(developing: System) -> None:
    claim = await held(developing)
    reply = await developing.http.get(f"{developing.internal_url}/internal/jwks/task")
    assert {key["kty"] for key in reply.json()["keys"]} == {"EC"}
    assert part(str(claim["capability_token"]), 0)["kid"] not in reply.text
    secret = (developing.kernel.settings.signing_keys_dir / FILE).read_bytes()
    assert b64(secret) not in reply.text
    assert secret.hex() not in reply.text


async def test_token_is_accepted_by_another_process_of_the_machine(developing: System) -> None:
    claim = await held(developing)
    async with open_app(developing.kernel.settings, process="query", signs=False) as parts:
        assert type(parts.access.capabilities) is CapabilityVerifier
        claims = await parts.access.capabilities.verify(str(claim["capability_token"]))
    assert str(claims.task_id) == claim["task_id"]


async def test_without_the_setting_hs256_is_refused_with_any_key(state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path, development_tokens=True) as developing:
        claim = await held(developing)
    token = str(claim["capability_token"])
    settings = developing.kernel.settings.model_copy(update={"development_tokens": False})
    async with open_app(settings, process="test") as parts:
        for verifier in (parts.access.tokens, parts.access.capabilities):
            with pytest.raises(Unauthenticated):
                await verifier.verify(token)
    async with open_app(settings, process="query", signs=False) as parts:
        with pytest.raises(Unauthenticated):
            await parts.access.capabilities.verify(token)


async def test_without_the_setting_there_is_no_secret(system: System) -> None:
    claim = await held(system)
    assert part(str(claim["capability_token"]), 0)["alg"] == "ES256"
    assert not (system.kernel.settings.signing_keys_dir / FILE).exists()


async def test_hs256_token_keyed_with_a_public_key_is_refused(developing: System) -> None:
    claim = await held(developing)
    token, kid = str(claim["capability_token"]), await active_kid(developing)
    for public in public_forms(developing, kid):
        for named in (kid, part(token, 0)["kid"]):
            assert await status(developing, claim, keyed(token, public, kid=named)) == 401


async def test_algorithm_is_decided_by_the_key_and_not_the_token(developing: System) -> None:
    claim = await held(developing)
    token, kid = str(claim["capability_token"]), await active_kid(developing)
    secret = (developing.kernel.settings.signing_keys_dir / FILE).read_bytes()
    # The right secret with the kid of an ES256 key, and with the names of other algorithms.
    assert await status(developing, claim, keyed(token, secret)) == 200
    headers: list[dict[str, Any]]
    headers = [{"kid": kid}, {"alg": "ES256"}, {"alg": "ES256", "kid": kid}, {"alg": "HS384"}, {"alg": "none"}]
    for header in headers:
        assert await status(developing, claim, keyed(token, secret, **header)) == 401, header
    # The ES256 key of this installation with the kid of the secret.
    private = developing.kernel.access.keyring.signers.pem.private(kid)
    for algorithm in ("ES256", "HS256"):
        text = f"{b64(json.dumps(part(token, 0) | {'alg': algorithm}).encode())}.{token.split('.')[1]}"
        assert await status(developing, claim, f"{text}.{es256(private, text)}") == 401, algorithm


async def test_development_accepts_own_es256_tokens_and_no_foreign_ones(developing: System) -> None:
    claim = await held(developing)
    token, kid = str(claim["capability_token"]), await active_kid(developing)
    head = b64(json.dumps({"alg": "ES256", "kid": kid, "typ": "JWT"}).encode())
    text = f"{head}.{token.split('.')[1]}"
    ours, theirs = developing.kernel.access.keyring.signers.pem.private(kid), ec.generate_private_key(ec.SECP256R1())
    assert await status(developing, claim, f"{text}.{es256(ours, text)}") == 200
    assert await status(developing, claim, f"{text}.{es256(theirs, text)}") == 401


SPOILED: dict[str, Callable[[str], str]] = {
    "another secret": lambda token: keyed(token, bytes(32)),
    "an empty secret": lambda token: keyed(token, b""),
    "no signature": lambda token: token.rpartition(".")[0] + ".",
    "a cut signature": lambda token: token[:-1],
    "a padded signature": lambda token: token + "=",
    "another payload": lambda token: ".".join(
        (token.split(".")[0], b64(json.dumps(part(token, 1) | {"attempt": 2}).encode()), token.split(".")[2])
    ),
    "a header with more in it": lambda token: keyed(token, bytes(32), jku="https://attacker.example/"),
}


@pytest.mark.parametrize("how", SPOILED)
async def test_damaged_development_token_is_refused(developing: System, how: str) -> None:
    claim = await held(developing)
    assert await status(developing, claim, SPOILED[how](str(claim["capability_token"]))) == 401


async def test_claims_of_a_development_token_are_checked(developing: System) -> None:
    claim = await held(developing)
    token = str(claim["capability_token"])
    secret = (developing.kernel.settings.signing_keys_dir / FILE).read_bytes()
    claims = part(token, 1)
    for change in ({"aud": "trace.objects"}, {"iss": "another"}, {"attempt": "1"}, {"exp": 1}, {"more": 1}):
        assert await status(developing, claim, keyed(token, secret, claims=claims | change)) == 401, change


def test_secret_readable_by_others_stops_the_start(tmp_path: Path) -> None:
    secret = SharedSecret(tmp_path)
    assert secret.kid == SharedSecret(tmp_path).kid
    (tmp_path / FILE).chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        SharedSecret(tmp_path).sign(b"message")


def test_too_short_secret_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / FILE).touch(mode=0o600)
    with pytest.raises(ConfigurationError, match="delete it"):
        SharedSecret(tmp_path).sign(b"message")


def test_hs256_signature_has_one_spelling(tmp_path: Path) -> None:
    secret = SharedSecret(tmp_path)
    assert secret.verifies(b"message", raw(b64(secret.sign(b"message"))))
    assert not secret.verifies(b"another", secret.sign(b"message"))


@pytest.mark.parametrize("listener", ["gateway", "internal", "query", "runner"])
@pytest.mark.parametrize("address", ["0.0.0.0:7070", "10.1.2.3:7070", "interlock.example:7070", "[::]:7070"])
def test_non_loopback_listener_refuses_development_tokens(listener: str, address: str) -> None:
    with pytest.raises(ConfigurationError, match=f"development_tokens works on one machine only, and {listener} ="):
        load(development_tokens=True, **{listener: address})


OF_AWS = [{"signing": "kms"}, {"objects_url": "s3://bucket/prefix"}, {"runner_lambda": "runner"}]


@pytest.mark.parametrize("of_aws", OF_AWS)
def test_installation_on_aws_refuses_development_tokens(of_aws: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="development_tokens works on one machine only"):
        load(development_tokens=True, **of_aws)


def test_loopback_listener_allows_development_tokens() -> None:
    assert load(development_tokens=True, gateway="localhost:0", internal="[::1]:0").development_tokens
    assert not load().development_tokens
