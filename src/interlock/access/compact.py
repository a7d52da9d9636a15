"""Compact JWTs as Interlock signs them: ES256, one spelling and one signature for each, and nothing in the header that
a verifier would have to believe. For development there is HS256, which a verifier reads only if it holds the secret.

What is wrong with a token is nobody's business but ours: there are no reasons here, only None.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from typing import Any, Final, Protocol

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from interlock.access.development import SharedSecret
from interlock.adapters.signers import ORDER

ALGORITHM: Final = "ES256"
SHARED_ALGORITHM: Final = "HS256"
MAX_TOKEN_BYTES: Final = 8192
MAX_PRESENTED_BYTES: Final = 2 * MAX_TOKEN_BYTES

# One spelling per token. 64 bytes of signature leave four bits of the last character unused: they must be zero.
_COMPACT: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{85}[AQgw]")
_COMPACT_SHARED: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]")
"""With 32 bytes of signature, which leave two bits unused."""


class _OneSignature(ECAlgorithm):
    """ES256 with the smaller `s` of the two that verify: nobody can turn a token into another one that is as good."""

    def verify(self, msg: bytes, key: Any, sig: bytes) -> bool:
        return 2 * int.from_bytes(sig[32:]) < ORDER and super().verify(msg, key, sig)


_jws: Final = jwt.PyJWS(algorithms=[])
_jws.register_algorithm(ALGORITHM, _OneSignature(ECAlgorithm.SHA256, ec.SECP256R1))


class PublicKeys(Protocol):
    """All that a verifier needs."""

    async def public(self, kid: str) -> ec.EllipticCurvePublicKey | None: ...


class SigningKeys(PublicKeys, Protocol):
    async def sign(self, kid: str, message: bytes) -> bytes: ...
    async def signs_elsewhere(self, kid: str) -> bool: ...
    async def require_signing(self) -> None: ...


async def signed(payload: bytes, kid: str, keys: SigningKeys) -> str:
    message = b".".join((_header(ALGORITHM, kid), _base64(payload)))
    return b".".join((message, _base64(await keys.sign(kid, message)))).decode()


def signed_with_secret(payload: bytes, secret: SharedSecret) -> str:
    message = b".".join((_header(SHARED_ALGORITHM, secret.kid), _base64(payload)))
    return b".".join((message, _base64(secret.sign(message)))).decode()


@functools.lru_cache(maxsize=64)
def _header(algorithm: str, kid: str) -> bytes:
    return _base64(json.dumps({"alg": algorithm, "kid": kid, "typ": "JWT"}, separators=(",", ":")).encode())


def _base64(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def kid_of(token: str) -> str | None:
    """The ES256 key that a well-formed token says it is signed with."""
    return _kid_of(token, ALGORITHM, _COMPACT)


def _kid_of(token: str, algorithm: str, form: re.Pattern[str]) -> str | None:
    if len(token) > MAX_PRESENTED_BYTES or not form.fullmatch(token):
        return None
    try:
        header = _jws.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        return None
    kid = header.get("kid")
    # The algorithm is ours to choose, not the token's: no `none`, no HS256 keyed with a public key. Nothing else in
    # there means anything to us: no key that the token brings along, no address of one, no extension.
    return kid if isinstance(kid, str) and header == {"alg": algorithm, "typ": "JWT", "kid": kid} else None


def payload_of(token: str, key: ec.EllipticCurvePublicKey) -> dict[str, Any] | None:
    """What the key has signed."""
    try:
        return _claims(_jws.decode_complete(token, key, algorithms=[ALGORITHM])["payload"])
    except (jwt.PyJWTError, ValueError, RecursionError):
        return None


def payload_of_secret(token: str, secret: SharedSecret) -> dict[str, Any] | None:
    """What the secret has signed. A token that names an ES256 key is none of these, whatever it is signed with."""
    if _kid_of(token, SHARED_ALGORITHM, _COMPACT_SHARED) != secret.kid:
        return None
    message, _, signature = token.rpartition(".")
    try:
        if not secret.verifies(message.encode(), _raw(signature)):
            return None
        return _claims(_raw(message.partition(".")[2]))
    except (ValueError, RecursionError):
        return None


def _raw(segment: str) -> bytes:
    return base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))


def _claims(payload: bytes) -> dict[str, Any]:
    claims: dict[str, Any] = json.loads(payload.decode(), object_pairs_hook=once_each)
    return claims


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A claim that is there twice says two things; which one counts would depend on the reader."""
    claims = dict(pairs)
    if len(claims) != len(pairs):
        raise ValueError
    return claims
