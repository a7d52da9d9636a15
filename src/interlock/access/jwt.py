"""Compact JWTs signed by Interlock: ES256, or HS256 with a shared secret for development.

The header contains nothing that a verifier would have to trust. In development there is also HS256, which a verifier
accepts only if it has the secret. Verification returns None without a reason, so that callers cannot leak one.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from interlock.errors import ConfigurationError
from interlock.stores.signers import ORDER

ALGORITHM: Final = "ES256"
SHARED_ALGORITHM: Final = "HS256"
MAX_TOKEN_BYTES: Final = 8192
MAX_PRESENTED_BYTES: Final = 2 * MAX_TOKEN_BYTES

# One encoding per token: 64 bytes of signature leave four bits of the last character unused, which must be zero.
_COMPACT: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{85}[AQgw]")
_COMPACT_SHARED: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048]")
"""32 bytes of signature leave two bits of the last character unused."""


class _OneSignature(ECAlgorithm):
    """ES256 that accepts only the smaller `s` of the two that verify, so nobody can derive a second valid token."""

    def verify(self, msg: bytes, key: Any, sig: bytes) -> bool:
        return 2 * int.from_bytes(sig[32:]) < ORDER and super().verify(msg, key, sig)


_jws: Final = jwt.PyJWS(algorithms=[])
_jws.register_algorithm(ALGORITHM, _OneSignature(ECAlgorithm.SHA256, ec.SECP256R1))


class PublicKeys(Protocol):
    """Access to public keys, which is all that a verifier needs."""

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
    """Returns the id of the ES256 key that a well-formed token names, or None."""
    return _kid_of(token, ALGORITHM, _COMPACT)


def _kid_of(token: str, algorithm: str, form: re.Pattern[str]) -> str | None:
    if len(token) > MAX_PRESENTED_BYTES or not form.fullmatch(token):
        return None
    try:
        header = _jws.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        return None
    kid = header.get("kid")
    # We choose the algorithm, not the token: no `none`, and no HS256 keyed with a public key. Other header fields are
    # rejected: embedded keys, URLs of keys, extensions.
    return kid if isinstance(kid, str) and header == {"alg": algorithm, "typ": "JWT", "kid": kid} else None


def payload_of(token: str, key: ec.EllipticCurvePublicKey) -> dict[str, Any] | None:
    """Returns the claims if the key signed them, otherwise None."""
    try:
        return _claims(_jws.decode_complete(token, key, algorithms=[ALGORITHM])["payload"])
    except (jwt.PyJWTError, ValueError, RecursionError):
        return None


def payload_of_secret(token: str, secret: SharedSecret) -> dict[str, Any] | None:
    """Returns the claims if the secret signed them. A token that names an ES256 key is always rejected."""
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
    claims: dict[str, Any] = json.loads(payload.decode(), object_pairs_hook=reject_duplicates)
    return claims


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Rejects duplicate claims, because different readers would use different values."""
    claims = dict(pairs)
    if len(claims) != len(pairs):
        raise ValueError
    return claims


FILE: Final = "development.hs256"
_BYTES: Final = 32


class SharedSecret:
    """A secret in the folder of signing keys. The first process that needs it creates it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    @cached_property
    def kid(self) -> str:
        """Identifies the secret without revealing it. No ES256 key has such an id."""
        return f"development-{hashlib.sha256(b'kid of ' + self._secret).hexdigest()[:32]}"

    def sign(self, message: bytes) -> bytes:
        return hmac.digest(self._secret, message, "sha256")

    def verifies(self, message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(message), signature)

    @cached_property
    def _secret(self) -> bytes:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._path.exists():
            self._make()
        return self._read()

    def _make(self) -> None:
        """Creates the file atomically. If two processes create it, the first one wins."""
        draft = self._path.with_name(f".{FILE}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_BYTES))
            with suppress(FileExistsError):
                os.link(draft, self._path)
        finally:
            draft.unlink()

    def _read(self) -> bytes:
        if stat.S_IMODE(self._path.stat().st_mode) & 0o077:
            raise ConfigurationError(f"{self._path} is readable by other users; run `chmod 600` on it.")
        secret = self._path.read_bytes()
        if len(secret) != _BYTES:
            raise ConfigurationError(
                f"{self._path} must have {_BYTES} bytes, got {len(secret)}; delete it to create a new one."
            )
        return secret
