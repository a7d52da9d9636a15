"""Capability tokens over HTTP: every invalid token gets a 401 that reveals nothing about the task."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.access import keyring as keyring_module
from interlock.access.jwt import MAX_TOKEN_BYTES
from interlock.apps.app import open_app
from interlock.clock import ManualClock
from interlock.errors import Unauthenticated
from tests.support.system import System, fence, running
from tests.support.token_parts import b64, es256, part

Claims = dict[str, Any]
TASK_PATHS = ["/v1/task/heartbeat", "/v1/task/complete", "/v1/task/events", "/v1/task/buffer-publish"]
TASK_PATHS += ["/v1/task/credentials"]
CLAIMS = ["iss", "aud", "sub", "exp", "iat", "jti", "org_id", "task_id", "attempt", "datasets", "s3"]


@dataclass
class Held:
    """A running attempt, with everything needed to create tokens that are almost its own."""

    system: System
    claim: dict[str, Any]

    @property
    def token(self) -> str:
        return str(self.claim["capability_token"])

    @property
    def key(self) -> ec.EllipticCurvePrivateKey:
        return self.system.kernel.access.keyring.signers.pem.private(part(self.token, 0)["kid"])

    def signed(self, claims: Any, header: dict[str, Any] | None = None) -> str:
        """Signs other claims with the dispatcher's own key."""
        head = part(self.token, 0) if header is None else header
        text = f"{b64(json.dumps(head).encode())}.{b64(json.dumps(claims).encode())}"
        return f"{text}.{es256(self.key, text)}"

    def body(self, path: str = "/v1/task/heartbeat", **more: Any) -> dict[str, Any]:
        dataset = {"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())}
        extra: dict[str, dict[str, Any]] = {
            "/v1/task/heartbeat": {},
            "/v1/task/complete": {"status": "Completed"},
            "/v1/task/events": {"events": [dataset | {"cursor": 1}]},
            "/v1/task/buffer-publish": dataset | {"batch_uri": "s3://b/x", "record_count": 1},
            "/v1/task/credentials": {},
        }
        return fence(self.claim) | extra[path] | more

    async def refused(self, token: str, code: str = "bad_token") -> None:
        """Checks that a heartbeat with the token is refused, with the same message for any task in the body."""
        reply = await self.system.attempt("/v1/task/heartbeat", token, self.body())
        unknown = await self.system.attempt("/v1/task/heartbeat", token, self.body(task_id=str(uuid4())))
        for answer in (reply, unknown):
            assert answer.status_code == 401, answer.text
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["code"] == code
        assert same_words(reply.json()) == same_words(unknown.json())


def same_words(problem: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in problem.items() if name != "request_id"}


@pytest.fixture(scope="module")
async def held(shared: System) -> Held:
    task_id = await shared.one(policy={"lease_seconds": 3600})
    return Held(shared, await shared.claim(task_id))


@pytest.fixture(autouse=True, scope="module")
def _impatient() -> Iterator[None]:
    """Removes the wait before an unknown kid causes a database read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyring_module, "_REFRESH_SECONDS", 0.0)
        yield


async def test_token_carries_exactly_the_claims_of_the_contract(held: Held) -> None:
    header, claims = part(held.token, 0), part(held.token, 1)
    assert header == {"alg": "ES256", "typ": "JWT", "kid": header["kid"]}
    assert set(claims) == set(CLAIMS)
    assert (claims["iss"], claims["aud"]) == ("interlock", "trace.task")
    assert claims["sub"] == f"task:{held.claim['task_id']}"
    assert (claims["task_id"], claims["attempt"]) == (held.claim["task_id"], 1)
    assert claims["org_id"] == str(held.system.org_id)
    assert (claims["datasets"], claims["s3"]) == ([], {"read_prefixes": [], "write_prefixes": []})
    assert claims["exp"] - claims["iat"] == 300


async def test_same_claims_signed_again_by_our_key_are_accepted(held: Held) -> None:
    """The baseline of the refusals below, which proves that the changed part causes each refusal."""
    token = held.signed(part(held.token, 1))
    reply = await held.system.attempt("/v1/task/heartbeat", token, held.body())
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("name", CLAIMS)
async def test_token_without_one_of_its_claims_is_refused(held: Held, name: str) -> None:
    claims = part(held.token, 1)
    del claims[name]
    await held.refused(held.signed(claims))


@pytest.mark.parametrize("name", CLAIMS)
async def test_claim_of_another_type_is_refused(held: Held, name: str) -> None:
    claims = part(held.token, 1)
    values: list[Any] = [None, True, 1.5, "x", ["x"], {"x": 1}, [[]]]
    for wrong in values:
        if type(wrong) is not type(claims[name]) or isinstance(wrong, list):
            await held.refused(held.signed(claims | {name: wrong}))


NOBODY = "00000000-0000-4000-8000-00000000000f"
YEAR_2100 = 4_102_444_800


def dataset(scheme: str, prefix: str, glob: str = "*.parquet") -> dict[str, Any]:
    place = {"scheme": scheme, "prefix": prefix, "glob": glob}
    return {"dataset_uuid": NOBODY, "dataset_version": NOBODY, "storage_ref": place}


WRONG_VALUES: list[tuple[str, Any]] = [
    ("iss", "another-interlock"),
    ("iss", ""),
    ("aud", "trace.query"),
    ("aud", ["trace.task"]),
    ("aud", ["trace.task", "other"]),
    ("sub", f"task:{NOBODY}"),
    ("sub", "task:"),
    ("exp", str(YEAR_2100)),
    ("iat", YEAR_2100),
    ("iat", YEAR_2100 * 1000),
    ("task_id", NOBODY),
    ("task_id", "not-a-uuid"),
    ("org_id", "not-a-uuid"),
    ("attempt", "1"),
    ("attempt", 0),
    ("attempt", -1),
    ("attempt", [1]),
    ("datasets", [1]),
    ("datasets", [{}]),
    ("datasets", [{"dataset_uuid": "x", "dataset_version": NOBODY}]),
    ("datasets", [{"dataset_uuid": NOBODY, "dataset_version": NOBODY, "admin": True}]),
    ("datasets", [dataset("file", "/")]),
    ("datasets", [dataset("file", "/etc/", glob="**/*")]),
    ("datasets", [dataset("s3", "a/")]),
    ("datasets", [dataset("gs", "a/")]),
    ("s3", {}),
    ("s3", {"read_prefixes": []}),
    ("s3", {"read_prefixes": [], "write_prefixes": [], "admin": []}),
    ("s3", {"read_prefixes": [1], "write_prefixes": []}),
    ("capability_id", "x"),
    ("capability_id", NOBODY),
]


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES, ids=[f"{n}={v}"[:40] for n, v in WRONG_VALUES])
async def test_claim_with_a_wrong_value_is_refused(held: Held, name: str, value: Any) -> None:
    await held.refused(held.signed(part(held.token, 1) | {name: value}))


async def test_expired_token_says_that_it_has_expired(held: Held) -> None:
    now = int(time.time())
    claims = part(held.token, 1) | {"iat": now - 600, "exp": now - 1}
    await held.refused(held.signed(claims), code="token_expired")


@pytest.mark.parametrize("payload", [None, [], "text", 7])
async def test_signed_payload_must_be_an_object(held: Held, payload: Any) -> None:
    await held.refused(held.signed(payload))


def unsigned(held: Held) -> str:
    head = part(held.token, 0) | {"alg": "none"}
    return f"{b64(json.dumps(head).encode())}.{held.token.split('.')[1]}."


def none_with_signature(held: Held) -> str:
    return held.signed(part(held.token, 1), part(held.token, 0) | {"alg": "none"})


def keyed_with_public_pem(held: Held) -> str:
    """The classic algorithm confusion: HS256 with the public key as the secret."""
    pem = held.key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return keyed(held, pem)


def keyed_with_public_der(held: Held) -> str:
    der = held.key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return keyed(held, der)


def keyed(held: Held, secret: bytes) -> str:
    head = part(held.token, 0) | {"alg": "HS256"}
    text = f"{b64(json.dumps(head).encode())}.{held.token.split('.')[1]}"
    return f"{text}.{b64(hmac.digest(secret, text.encode(), hashlib.sha256))}"


def signed_by_a_stranger(held: Held) -> str:
    text = held.token.rpartition(".")[0]
    return f"{text}.{es256(ec.generate_private_key(ec.SECP256R1()), text)}"


def bringing_its_own_key(held: Held) -> str:
    """`jwk` and `jku` in the header name a key that the sender chose; a verifier must ignore them."""
    key = ec.generate_private_key(ec.SECP256R1())
    numbers = key.public_key().public_numbers()
    jwk = {
        "kty": "EC",
        "crv": "P-256",
        "x": b64(numbers.x.to_bytes(32, "big")),
        "y": b64(numbers.y.to_bytes(32, "big")),
    }
    head = part(held.token, 0) | {"jwk": jwk, "jku": "https://attacker.example/jwks"}
    text = f"{b64(json.dumps(head).encode())}.{held.token.split('.')[1]}"
    return f"{text}.{es256(key, text)}"


def tampered_payload(held: Held) -> str:
    head, _, signature = held.token.split(".")
    return f"{head}.{b64(json.dumps(part(held.token, 1) | {'attempt': 2}).encode())}.{signature}"


def tampered_header(held: Held) -> str:
    _, payload, signature = held.token.split(".")
    return f"{b64(json.dumps(part(held.token, 0) | {'typ': 'at+jwt'}).encode())}.{payload}.{signature}"


def signature_of_zeros(held: Held) -> str:
    return f"{held.token.rpartition('.')[0]}.{b64(bytes(64))}"


def flipped_signature(held: Held) -> str:
    text, _, signature = held.token.rpartition(".")
    return f"{text}.{'B' if signature[0] == 'A' else 'A'}{signature[1:]}"


def padded_signature(held: Held) -> str:
    return f"{held.token}=="


def spilled_last_bits(held: Held) -> str:
    """The last base64 character has four bits that decode to nothing: a signature must have exactly one spelling."""
    return held.token[:-1] + chr(ord(held.token[-1]) + 1)


def with_header(**header: Any) -> Callable[[Held], str]:
    def make(held: Held) -> str:
        given = {name: value for name, value in (part(held.token, 0) | header).items() if value is not ...}
        return held.signed(part(held.token, 1), given)

    return make


def deep_header(held: Held) -> str:
    head = '{"alg":"ES256","kid":' + "[" * 5000 + "]" * 5000 + "}"
    return f"{b64(head.encode())}.{held.token.split('.')[1]}.{held.token.split('.')[2]}"


def oversized(held: Held) -> str:
    return held.signed(part(held.token, 1) | {"datasets": [{"dataset_uuid": "x" * 200}] * 80})


FORGERIES: dict[str, Callable[[Held], str]] = {
    "unsigned": unsigned,
    "alg none with our signature": none_with_signature,
    "HS256 with the public PEM": keyed_with_public_pem,
    "HS256 with the public DER": keyed_with_public_der,
    "HS256 with an empty secret": lambda held: keyed(held, b""),
    "signed by a stranger": signed_by_a_stranger,
    "bringing its own key": bringing_its_own_key,
    "tampered payload": tampered_payload,
    "tampered header": tampered_header,
    "signature of zeros": signature_of_zeros,
    "flipped signature": flipped_signature,
    "padded signature": padded_signature,
    "spilled last bits": spilled_last_bits,
    "signature missing": lambda held: held.token.rpartition(".")[0],
    "signature empty": lambda held: held.token.rpartition(".")[0] + ".",
    "signature cut": lambda held: held.token[:-2],
    "alg ES384": with_header(alg="ES384"),
    "alg in lower case": with_header(alg="es256"),
    "alg missing": with_header(alg=...),
    "alg a list": with_header(alg=["ES256"]),
    "kid missing": with_header(kid=...),
    "kid unknown": with_header(kid="nobody"),
    "kid a number": with_header(kid=7),
    "kid null": with_header(kid=None),
    "kid a path": with_header(kid="../../etc/passwd"),
    "kid with a NUL": with_header(kid="a\x00b"),
    "crit": with_header(crit=["exp"]),
    "unencoded payload": with_header(b64=False, crit=["b64"]),
    "deeply nested header": deep_header,
    "oversized": oversized,
    "four parts": lambda held: f"{held.token}.x",
    "no parts": lambda held: "token",
    "only dots": lambda held: "..",
    "a worker token": lambda held: held.system.worker_token,
    "an API key": lambda held: held.system.admin_key,
    "spaces inside": lambda held: held.token.replace(".", ". "),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_forged_token_is_refused(held: Held, forgery: str) -> None:
    await held.refused(FORGERIES[forgery](held))


async def test_missing_token_is_refused_on_every_task_endpoint(held: Held) -> None:
    for path in TASK_PATHS:
        url = held.system.internal_url + path
        for headers in ({}, {"X-Trace-Task-Capability": ""}, {"X-Trace-Worker-Token": held.system.worker_token}):
            reply = await held.system.http.post(url, json=held.body(path), headers=headers)
            assert (reply.status_code, reply.json()["code"]) == (401, "unauthenticated")


async def test_token_with_bytes_beyond_ascii_is_refused(held: Held) -> None:
    for raw in (b"\xff\xfe.\xff.\xff", held.token.encode() + b"\xe9"):
        reply = await held.system.http.post(
            held.system.internal_url + "/v1/task/heartbeat",
            json=held.body(),
            headers={b"X-Trace-Task-Capability": raw},
        )
        assert (reply.status_code, reply.json()["code"]) == (401, "bad_token")


def mutations(token: str) -> st.SearchStrategy[str]:
    """Strings close to a valid token: one character changed, removed or inserted, or two neighbours swapped."""
    alphabet = st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.=+/ \n\x00é")
    place = st.integers(0, len(token) - 1)
    changed = st.builds(lambda i, c: token[:i] + c + token[i + 1 :], place, alphabet)
    added = st.builds(lambda i, c: token[:i] + c + token[i:], place, alphabet)
    dropped = st.builds(lambda i, n: token[:i] + token[i + n :], place, st.integers(1, 3))
    swapped = st.builds(lambda i: token[:i] + token[i + 1 : i + 2] + token[i] + token[i + 2 :], place)
    cut = st.builds(lambda i: token[:i], place)
    return st.one_of(changed, added, dropped, swapped, cut).filter(lambda mutated: mutated != token)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_no_mutation_of_a_valid_token_verifies(held: Held, data: st.DataObject) -> None:
    mutated = data.draw(mutations(held.token))
    with pytest.raises(Unauthenticated):
        await held.system.kernel.access.tokens.verify(mutated)


# Token and body, token and lease


@pytest.mark.parametrize("path", TASK_PATHS)
async def test_body_that_names_another_task_or_attempt_is_refused(held: Held, path: str) -> None:
    other = await held.system.one()
    answers = [
        await held.system.attempt(path, held.token, held.body(path, **wrong))
        for wrong in ({"task_id": other}, {"task_id": str(uuid4())}, {"attempt": 2})
    ]
    for reply in answers:
        assert (reply.status_code, reply.json()["code"]) == (403, "token_mismatch"), reply.text
    assert len({json.dumps(same_words(reply.json())) for reply in answers}) == 1
    assert (await held.system.task(other))["status"] == "Queued"


@pytest.mark.parametrize("path", TASK_PATHS)
async def test_stale_lease_is_fenced(held: Held, path: str) -> None:
    reply = await held.system.attempt(path, held.token, held.body(path, lease_token=str(uuid4())))
    assert (reply.status_code, reply.json()["code"], reply.json()["stale"]) == (409, "fenced", "lease_token")
    assert (await held.system.task(held.claim["task_id"]))["status"] == "Running"


@pytest.mark.parametrize("path", TASK_PATHS)
async def test_stale_attempt_is_fenced_off_and_changes_nothing(still: System, clock: ManualClock, path: str) -> None:
    task_id = await still.one(policy={"lease_seconds": 30, "backoff_seconds": 0, "jitter": 0})
    stale = Held(still, await still.claim(task_id))
    clock.advance(31)
    await still.settle()
    fresh = await still.claim(task_id, "second")
    reply = await still.attempt(path, stale.token, stale.body(path))
    assert (reply.status_code, reply.json()["code"], reply.json()["stale"]) == (409, "fenced", "attempt")
    task = await still.task(task_id)
    assert (task["status"], task["attempt"], task["worker_id"]) == ("Running", 2, "second")
    assert task["lease_expires_at"] == fresh["lease_expires_at"]


@pytest.mark.parametrize("path", TASK_PATHS)
async def test_token_of_ours_for_an_unknown_task_is_fenced_off(held: Held, path: str) -> None:
    """The task is missing as it is after retention: the attempt learns only that it is over."""
    nobody = str(uuid4())
    token = held.signed(part(held.token, 1) | {"task_id": nobody, "sub": f"task:{nobody}"})
    reply = await held.system.attempt(path, token, held.body(path, task_id=nobody))
    assert (reply.status_code, reply.json()["code"], reply.json()["stale"]) == (409, "fenced", "task")


async def test_token_of_another_installation_is_refused(held: Held, state_url: str, tmp_path: Path) -> None:
    async with running(state_url, tmp_path) as elsewhere:
        claim = await elsewhere.claim(await elsewhere.one())
        await held.refused(claim["capability_token"])
        reply = await elsewhere.attempt("/v1/task/heartbeat", held.token, held.body())
        assert (reply.status_code, reply.json()["code"]) == (401, "bad_token")


# Renewal


async def test_heartbeat_renews_a_token_only_near_its_expiry(still: System, clock: ManualClock) -> None:
    claim = await still.claim(await still.one(policy={"lease_seconds": 250, "timeout_seconds": 3600}))
    old = claim["capability_token"]
    clock.advance(199)
    reply = await still.attempt("/v1/task/heartbeat", old, fence(claim))
    assert "capability_token" not in reply.json()
    clock.advance(2)
    reply = await still.attempt("/v1/task/heartbeat", old, fence(claim))
    fresh = reply.json()["capability_token"]
    before, after = part(old, 1), part(fresh, 1)
    assert after["exp"] == before["exp"] + 201
    assert after["jti"] != before["jti"]
    assert {k: after[k] for k in after if k not in ("exp", "iat", "jti")} == {
        k: before[k] for k in before if k not in ("exp", "iat", "jti")
    }
    clock.advance(100)
    assert (await still.attempt("/v1/task/heartbeat", old, fence(claim))).json()["code"] == "token_expired"
    assert (await still.attempt("/v1/task/heartbeat", fresh, fence(claim))).status_code == 200
    assert (await still.complete(claim | {"capability_token": fresh})).status_code == 200


async def test_token_is_not_renewed_once_the_lease_is_lost(still: System, clock: ManualClock) -> None:
    claim = await still.claim(await still.one(policy={"lease_seconds": 60}))
    clock.advance(290)
    await still.settle()
    reply = await still.attempt("/v1/task/heartbeat", claim["capability_token"], fence(claim))
    assert reply.status_code == 409
    assert "capability_token" not in reply.json()


async def test_any_heartbeat_may_request_a_token(still: System, clock: ManualClock) -> None:
    claim = await still.claim(await still.one())
    clock.advance(10)
    body = fence(claim) | {"token": True}
    fresh = (await still.attempt("/v1/task/heartbeat", claim["capability_token"], body)).json()["capability_token"]
    assert part(fresh, 1)["iat"] == part(claim["capability_token"], 1)["iat"] + 10
    batch = await still.worker("POST", "/internal/task-heartbeat", json={"items": [body]})
    assert part(batch.json()["items"][0]["capability_token"], 1)["task_id"] == claim["task_id"]


async def test_claim_without_tokens_signs_nothing(still: System) -> None:
    task_id = await still.one()
    reply = await still.worker(
        "POST", "/internal/task-claim", json={"task_id": task_id, "worker_id": "w", "tokens": False}
    )
    assert reply.json()["status"] == "Claimed"
    assert "capability_token" not in reply.json()


# Grants too large for a token


def outputs(count: int) -> list[dict[str, str]]:
    return [{"dataset_uuid": str(uuid4()), "dataset_version": str(uuid4())} for _ in range(count)]


async def test_grants_beyond_8_kb_are_looked_up_by_capability_id(still: System, clock: ManualClock) -> None:
    claim = await still.claim(await still.one(outputs=outputs(40), policy={"lease_seconds": 3600}))
    token = claim["capability_token"]
    assert len(token) <= MAX_TOKEN_BYTES
    claims = part(token, 1)
    assert str(UUID(claims["capability_id"])) == claims["capability_id"]
    assert (claims["datasets"], claims["s3"]) == ([], {"read_prefixes": [], "write_prefixes": []})
    granted = (await still.kernel.access.tokens.verify(token)).s3.write_prefixes
    expected = [p for o in claim["task"]["outputs"] for p in (o["write_prefix"], o["buffer_prefix"])]
    assert granted == expected
    assert len(granted) == 80
    assert (await still.attempt("/v1/task/heartbeat", token, fence(claim))).status_code == 200


async def test_renewed_reference_outlives_the_first_and_ends_with_retention(still: System, clock: ManualClock) -> None:
    claim = await still.claim(await still.one(outputs=outputs(40), policy={"lease_seconds": 3600}))
    token = claim["capability_token"]
    for _ in range(4):
        clock.advance(250)
        reply = await still.attempt("/v1/task/heartbeat", token, fence(claim))
        token = reply.json()["capability_token"]
        await still.pass_of("retention")
    assert part(token, 1)["capability_id"] == part(claim["capability_token"], 1)["capability_id"]
    assert len((await still.kernel.access.tokens.verify(token)).s3.write_prefixes) == 80
    async with open_app(still.kernel.settings, process="second", clock=clock) as second:
        assert len((await second.access.tokens.verify(token)).s3.write_prefixes) == 80
    clock.advance(601)
    assert await still.pass_of("retention") == 1


async def test_reference_to_another_tasks_grants_is_refused(held: Held) -> None:
    mine = await held.system.claim(await held.system.one(outputs=outputs(40)))
    reference = part(mine["capability_token"], 1)["capability_id"]
    await held.refused(held.signed(part(held.token, 1) | {"capability_id": reference}))


async def test_forged_key_ids_cause_few_database_reads(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring, looks = held.system.kernel.access.keyring, 0
    refresh = keyring.refresh

    async def counted() -> None:
        nonlocal looks
        looks += 1
        await refresh()

    monkeypatch.setattr(keyring_module, "_REFRESH_SECONDS", 0.2)
    monkeypatch.setattr(keyring, "refresh", counted)
    forged = [with_header(kid=f"nobody-{n}")(held) for n in range(40)]
    replies = await asyncio.gather(*(held.system.attempt("/v1/task/heartbeat", token, held.body()) for token in forged))
    assert {reply.status_code for reply in replies} == {401}
    assert 1 <= looks <= 5
