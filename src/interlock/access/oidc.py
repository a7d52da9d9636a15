"""Authenticates users of an identity provider by bearer JWT. Permissions come from `members`, never from the token.

Only issuer, audience, times and subject of a token are used. Anything missing, malformed or unknown is rejected with
the same message.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from msgspec import Meta, Struct

from interlock.access.jwks import Fetches, KeySet, entries
from interlock.access.jwt import reject_duplicates
from interlock.clock import Clock
from interlock.errors import Unauthenticated, Unavailable

ALGORITHMS: Final = ("RS256", "PS256", "ES256", "EdDSA")
"""Asymmetric signatures only: no `none`, and no HS256, which could use a public key as the secret."""
MAX_TOKEN_BYTES: Final = 16_384
MAX_SUBJECT: Final = 255
MIN_RSA_BITS: Final = 2048
SKEW_SECONDS: Final = 60
PAUSE_SECONDS = 10.0
"""Minimum interval between two fetches of keys. Issuers publish a key before they use it, so callers need not wait."""
FRESH_SECONDS: Final = 600.0
STALE_SECONDS: Final = 4 * 3600.0
"""Time for which cached keys are used while the issuer is unavailable."""

_COMPACT: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_jws: Final = jwt.PyJWS(algorithms=list(ALGORITHMS))

_Time = Annotated[float, Meta(ge=0, le=2**53)]

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


@dataclass(frozen=True)
class IssuerKey:
    key: PublicKey
    algorithms: frozenset[str]
    """Algorithms that may be used with the key: determined by its type, and optionally restricted by the issuer."""


class _Claims(Struct, frozen=True):
    """The claims that are used; tokens may contain others."""

    iss: str
    sub: str
    aud: str | list[str]
    exp: _Time
    iat: _Time
    nbf: _Time | None = None
    nonce: str | None = None


class _Discovery(Struct, frozen=True):
    issuer: str
    jwks_uri: str


class Issuer:
    """One identity provider. Without `jwks_url`, the URL of its keys comes from its discovery document."""

    def __init__(self, issuer: str, audience: str, http: Fetches, clock: Clock, *, jwks_url: str | None) -> None:
        self.name = issuer
        self._audience = audience
        self._http = http
        self._clock = clock
        self._jwks_url = jwks_url
        self._keys: KeySet[IssuerKey] = KeySet(
            self._document,
            issuer_keys,
            clock,
            pause=lambda: PAUSE_SECONDS,
            fresh_seconds=FRESH_SECONDS,
            stale_seconds=STALE_SECONDS,
            patient=False,
        )

    async def subject(self, token: str) -> str:
        """Returns the subject of a token. Raises Unauthenticated if the token is invalid."""
        return (await self._verified(token)).sub

    async def subject_of_sign_in(self, token: str, nonce: str) -> str:
        """Returns the subject of an ID token that was issued for the sign-in with this nonce."""
        claims = await self._verified(token)
        if claims.nonce is None or not hmac.compare_digest(claims.nonce.encode(), nonce.encode()):
            raise _refused()
        return claims.sub

    async def _verified(self, token: str) -> _Claims:
        header = _header_of(token)
        found = await self._keys.get(header["kid"])
        if found is None or header["alg"] not in found.algorithms:
            raise _refused()
        claims = _claims_of(token, found.key, header["alg"])
        self._check(claims)
        return claims

    def _check(self, claims: _Claims) -> None:
        now = self._clock.now().timestamp()
        audiences = [claims.aud] if isinstance(claims.aud, str) else claims.aud
        good = (
            claims.iss == self.name
            and self._audience in audiences
            and claims.iat <= now + SKEW_SECONDS
            and (claims.nbf is None or claims.nbf <= now + SKEW_SECONDS)
            and 0 < len(claims.sub) <= MAX_SUBJECT
            and claims.sub.isprintable()
        )
        if not good:
            raise _refused()
        if claims.exp <= now:
            raise Unauthenticated(
                "The token has expired; get a new one from your identity provider.", code="token_expired"
            )

    async def _document(self) -> bytes:
        url = self._jwks_url or _jwks_uri(
            await self._http.fetch(f"{self.name.rstrip('/')}/.well-known/openid-configuration"), self.name
        )
        return await self._http.fetch(url)


def _jwks_uri(document: bytes, issuer: str) -> str:
    """Returns the URL of the keys. A document fetched over TLS must not point to a URL without TLS."""
    try:
        found = msgspec.json.decode(document, type=_Discovery)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Unavailable("The discovery document of the issuer is invalid.", code="no_document") from None
    if found.issuer != issuer:
        raise Unavailable("The issuer in the discovery document differs from oidc_issuer.", code="no_document")
    if not found.jwks_uri.startswith("https://" if issuer.startswith("https://") else ("http://", "https://")):
        raise Unavailable("The jwks_uri in the discovery document does not use TLS.", code="no_document")
    return found.jwks_uri


def issuer_keys(document: bytes) -> Mapping[str, IssuerKey]:
    found = {kid: _issuer_key(jwk) for kid, jwk in entries(document).items()}
    return {kid: key for kid, key in found.items() if key is not None}


def _issuer_key(jwk: Mapping[str, Any]) -> IssuerKey | None:
    """Returns a key, or None if it cannot be used here; issuers may publish such keys for other clients."""
    algorithms = _by_kind(jwk)
    if "alg" in jwk:
        algorithms &= {str(jwk["alg"])}
    if not algorithms or "d" in jwk or "k" in jwk:
        return None
    try:
        key = jwt.PyJWK(dict(jwk), algorithm=min(algorithms)).key
    except (jwt.PyJWTError, KeyError, TypeError, ValueError):
        return None
    weak = isinstance(key, rsa.RSAPublicKey) and key.key_size < MIN_RSA_BITS
    return None if weak or not isinstance(key, PublicKey) else IssuerKey(key, frozenset(algorithms))


def _by_kind(jwk: Mapping[str, Any]) -> set[str]:
    match jwk.get("kty"), jwk.get("crv"):
        case "RSA", None:
            return {"RS256", "PS256"}
        case "EC", "P-256":
            return {"ES256"}
        case "OKP", "Ed25519":
            return {"EdDSA"}
        case _:
            return set()


def _header_of(token: str) -> dict[str, str]:
    if len(token) > MAX_TOKEN_BYTES or not _COMPACT.fullmatch(token):
        raise _refused()
    try:
        header = _jws.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError, RecursionError):
        raise _refused() from None
    algorithm, kid = header.get("alg"), header.get("kid")
    # Keys and URLs of keys in the header are ignored. Critical extensions must be understood, and we support none.
    known = algorithm in ALGORITHMS and str(header.get("typ", "JWT")).lower() in _TYPES and "crit" not in header
    if not known or not isinstance(kid, str):
        raise _refused()
    return {"alg": str(algorithm), "kid": kid}


def _claims_of(token: str, key: PublicKey, algorithm: str) -> _Claims:
    try:
        payload = _jws.decode_complete(token, key, algorithms=[algorithm])["payload"]
        claims = json.loads(payload.decode(), object_pairs_hook=reject_duplicates, parse_constant=_no_number)
        return msgspec.convert(claims, _Claims, strict=True)
    except (jwt.PyJWTError, msgspec.ValidationError, ValueError, RecursionError):
        raise _refused() from None


def _no_number(name: str) -> float:
    """Rejects NaN and Infinity, which Python accepts although JSON does not have them: NaN would never expire."""
    raise ValueError(name)


def _refused() -> Unauthenticated:
    return Unauthenticated("The token is invalid.", code="bad_token")
