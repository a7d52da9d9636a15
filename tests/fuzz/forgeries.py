"""Capability tokens that are almost valid: everything listed or generated here must be refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import strategies as st

from tests.support.token_parts import ORDER, b64, es256, part

Strategy = st.SearchStrategy[str]
MISSING = object()


@dataclass(frozen=True)
class Genuine:
    """A valid token, with the key that signed it and another key."""

    token: str
    key: ec.EllipticCurvePrivateKey
    stranger: ec.EllipticCurvePrivateKey

    @property
    def text(self) -> str:
        return self.token.rpartition(".")[0]

    @property
    def header(self) -> dict[str, Any]:
        return part(self.token, 0)

    @property
    def claims(self) -> dict[str, Any]:
        return part(self.token, 1)

    @property
    def signature(self) -> bytes:
        return base64.urlsafe_b64decode(self.token.rpartition(".")[2] + "==")


def listed(genuine: Genuine) -> list[str]:
    """Returns the attacks that can be enumerated."""
    return [*signed_by_us_but_wrong(genuine), *other_signatures(genuine), *other_spellings(genuine)]


def drawn(genuine: Genuine) -> Strategy:
    """Returns a strategy for the attacks that cannot be enumerated."""
    return st.one_of(signed_by_somebody_else(genuine), noise_for_a_signature(genuine), nearly_the_same(genuine))


# Claims that our own key never signs: the token is refused even if it did.

_WRONG_HEADERS: dict[str, list[Any]] = {
    "alg": [MISSING, "none", "None", "", "HS256", "RS256", "ES384", "ES256K", "EdDSA", "es256", ["ES256"], None, 7],
    "kid": [
        MISSING,
        "",
        "nobody",
        None,
        7,
        ["x"],
        {"a": 1},
        "../../etc/passwd",
        "/dev/null",
        "' or '1'='1",
        "a\0b",
        "é",
    ],
    "typ": [MISSING, "jwt", "at+jwt", None, ["JWT"]],
    "jku": ["https://attacker.example/jwks"],
    "jwk": [{"kty": "oct", "k": "AA"}, None],
    "x5u": ["https://attacker.example/cert.pem"],
    "x5c": [["MIIB"]],
    "crit": [[], ["exp"], ["b64"], "exp"],
    "b64": [True, False],
    "cty": ["JWT"],
    "zip": ["DEF"],
    "enc": ["A128GCM"],
}
_ANYTHING: list[Any] = [MISSING, None, True, False, 1.5, -1, 10**30, "", "x", "1", "é", [], ["x"], [[]], {}, {"x": 1}]
_WRONG_CLAIMS: dict[str, list[Any]] = {
    "iss": [*_ANYTHING, "Interlock", "interlock "],
    "aud": [*_ANYTHING, "trace.query", ["trace.task"], ["trace.task", "x"], "trace.task "],
    "sub": [*_ANYTHING, "task:", f"task:{uuid4()}", f"org:{uuid4()}"],
    "exp": [v for v in _ANYTHING if v != 10**30] + [0, 1, 2**53 + 1, "4102444800", 4102444800.5],
    "iat": [*_ANYTHING, 4102444800, 2**53 + 1, "1"],
    "jti": [v for v in _ANYTHING if not isinstance(v, str)],
    "org_id": [*_ANYTHING, "not-a-uuid", 0],
    "task_id": [*_ANYTHING, str(uuid4())],
    "attempt": [*_ANYTHING, 0, 2**31, "1", [1], 1.0],
    "datasets": [v for v in _ANYTHING if v != []] + [[1], ["x"], [None]],
    "s3": [*_ANYTHING, {"read_prefixes": []}, {"read_prefixes": [], "write_prefixes": [], "admin": []}],
    "capability_id": ["x", 7, [], str(uuid4()), True],
    "nbf": [0, 4102444800, None],
    "scope": ["admin"],
    "admin": [True],
    "": [1],
}


def _wrong(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def _changed(content: dict[str, Any], change: tuple[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (content | {change[0]: change[1]}).items() if value is not MISSING}


def _segment(content: Any) -> str:
    return b64(json.dumps(content, ensure_ascii=False).encode())


def _twice(content: dict[str, Any], name: str) -> str:
    """Encodes a duplicate member; the expected value comes last."""
    return b64((json.dumps({name: content[name]})[:-1] + ", " + json.dumps(content)[1:]).encode())


def signed_by_us_but_wrong(genuine: Genuine) -> Iterator[str]:
    good_head, good_payload = genuine.text.split(".")
    heads = [_segment(_changed(genuine.header, change)) for change in _wrong(_WRONG_HEADERS)]
    payloads = [_segment(_changed(genuine.claims, change)) for change in _wrong(_WRONG_CLAIMS)]
    payloads.append(_segment(genuine.claims | {"iat": 4102444800, "exp": 4102444900}))  # issued in the year 2100
    payloads += [_twice(genuine.claims, name) for name in genuine.claims]
    payloads += [_segment(wrong) for wrong in (None, [], "x", 7, [genuine.claims])]
    payloads += [b64(raw) for raw in (b"\xff", b"{", b"{}{}", b"[" * 5000, json.dumps(genuine.claims).encode("utf-16"))]
    for text in [*(f"{head}.{good_payload}" for head in heads), *(f"{good_head}.{payload}" for payload in payloads)]:
        yield f"{text}.{es256(genuine.key, text)}"


# Attacks with public information: our public key, and tokens of ours.


def _public(genuine: Genuine) -> list[bytes]:
    """Returns all encodings of our public key that could be misused as a shared secret."""
    key, spki = genuine.key.public_key(), serialization.PublicFormat.SubjectPublicKeyInfo
    encoded = [
        key.public_bytes(encoding, spki) for encoding in (serialization.Encoding.PEM, serialization.Encoding.DER)
    ]
    points = [
        key.public_bytes(serialization.Encoding.X962, form)
        for form in (serialization.PublicFormat.UncompressedPoint, serialization.PublicFormat.CompressedPoint)
    ]
    numbers = key.public_numbers()
    x, y = (b64(n.to_bytes(32, "big")) for n in (numbers.x, numbers.y))
    jwk = json.dumps({"kty": "EC", "crv": "P-256", "x": x, "y": y}).encode()
    return [*encoded, encoded[0].strip(), *points, jwk, x.encode(), genuine.header["kid"].encode(), b"", b"secret"]


def signed_by_somebody_else(genuine: Genuine) -> Strategy:
    """Generates tokens with any header and claims, and every signature that is possible without the private key."""

    def build(head: dict[str, Any], claims: dict[str, Any], sign: str, secret: bytes) -> str:
        text = f"{_segment(head)}.{_segment(claims)}"
        if sign == "stranger":
            return f"{text}.{es256(genuine.stranger, text)}"
        if sign == "secret":
            return f"{text}.{b64(hmac.digest(secret, text.encode(), hashlib.sha256))}"
        return f"{text}." + {"none": "", "ours": b64(genuine.signature), "zeros": b64(bytes(64))}[sign]

    jwk = {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}
    heads = st.one_of(
        st.just(genuine.header),
        st.sampled_from(["none", "HS256", "HS512", "ES256"]).map(lambda alg: genuine.header | {"alg": alg}),
        st.just(genuine.header | {"jwk": jwk, "jku": "https://attacker.example/jwks"}),
        st.sampled_from(_wrong(_WRONG_HEADERS)).map(lambda change: _changed(genuine.header, change)),
    )
    claims = st.one_of(
        st.just(genuine.claims | {"jti": "another"}),
        st.integers(2, 9).map(lambda attempt: genuine.claims | {"attempt": attempt}),
        st.just(genuine.claims | {"exp": 4102444800}),
        st.uuids().map(lambda task: genuine.claims | {"task_id": str(task), "sub": f"task:{task}"}),
        st.just(genuine.claims | {"s3": {"read_prefixes": ["s3://"], "write_prefixes": ["s3://"]}}),
    )
    signs = st.sampled_from(["stranger", "secret", "secret", "none", "ours", "zeros"])
    return st.builds(build, heads, claims, signs, st.sampled_from(_public(genuine)))


# The same text with another signature


def other_signatures(genuine: Genuine) -> Iterator[str]:
    raw = genuine.signature
    r, s = raw[:32], raw[32:]
    zero, order, one = bytes(32), ORDER.to_bytes(32, "big"), (1).to_bytes(32, "big")
    mirrored = (ORDER - int.from_bytes(s, "big")).to_bytes(32, "big")
    der = encode_dss_signature(int.from_bytes(r, "big"), int.from_bytes(s, "big"))
    wrong = [r, s, r + mirrored, s + r, zero + s, r + zero, zero + zero, order + s, r + order, one + one, order + order]
    wrong += [b"", der, der.ljust(72, b"\0"), raw + raw, raw + b"\0", b"\0" + raw, raw[:-1], b"\xff" * 64]
    wrong += [genuine.key.sign(genuine.text.encode(), ec.ECDSA(hashes.SHA384()))]
    for signature in wrong:
        yield f"{genuine.text}.{b64(signature)}"


def noise_for_a_signature(genuine: Genuine) -> Strategy:
    raw = genuine.signature
    flipped = st.integers(0, 511).map(
        lambda bit: bytes(b ^ (1 << bit % 8 if n == bit // 8 else 0) for n, b in enumerate(raw))
    )
    signatures = st.one_of(flipped, st.binary(min_size=64, max_size=64), st.binary(max_size=80))
    return signatures.filter(lambda made: made != raw).map(lambda made: f"{genuine.text}.{b64(made)}")


# The same token in another spelling

_TAILS = ["=", "==", ".", "..", ".x", "\n", "\r\n", "\0", "%", "é", "\u200b", ",", ";q=1", " x", "A" * 20_000]
_HEADS = ["Bearer ", "JWT ", ".", '"', "=", "\ufeff", "x."]
_DOTS = [". ", " .", "..", "%2E", "\u3002", "\uff0e", "/", ""]
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def other_spellings(genuine: Genuine) -> Iterator[str]:
    token, (head, payload, signature) = genuine.token, genuine.token.split(".")
    yield from (token + tail for tail in _TAILS)
    yield from (start + token for start in _HEADS)
    yield from (token.replace(".", dot) for dot in _DOTS)
    yield from (f"{head}.{payload}", head, "..", ".", "", "null", "{}", "a.b.c", token.lower(), token.upper())
    yield from (
        f"{head}=.{payload}.{signature}",
        f"{head}.{payload}=.{signature}",
        f"{token},{token}",
        f"{token} {token}",
    )
    yield from (f"{signature}.{payload}.{head}", f'"{token}"', json.dumps({"payload": payload, "signature": signature}))
    # The last character of a segment may have unused bits: only one spelling is valid.
    for character in _ALPHABET:
        yield from (f"{head[:-1]}{character}.{payload}.{signature}", f"{head}.{payload[:-1]}{character}.{signature}")
        yield token[:-1] + character


def nearly_the_same(genuine: Genuine) -> Strategy:
    token = genuine.token
    place, character = st.integers(0, len(token) - 1), st.sampled_from("ABCXYZabcxyz0189-_.=+/ \t\n\0é,;\"'\\%")
    replaced = st.builds(lambda i, c: token[:i] + c + token[i + 1 :], place, character)
    inserted = st.builds(lambda i, c: token[:i] + c + token[i:], place, character)
    moved = st.builds(lambda i, j: token[i:] + token[:i] if i else token[:j], place, place)
    return st.one_of(replaced, inserted, moved).filter(lambda made: made != token)
