"""Users of an identity provider: who a bearer JWT says they are. What they may do is in `members`, never in the token.

Of a token only its issuer, audience, times and subject count. Whatever is missing, malformed or unknown is refused, in
the same words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from msgspec import Meta, Struct

from interlock.access.compact import once_each
from interlock.access.jwks import Fetches, KeySet, entries
from interlock.clock import Clock
from interlock.errors import Unauthenticated, Unavailable

ALGORITHMS: Final = ("RS256", "PS256", "ES256", "EdDSA")
"""Signatures by a key pair, and nothing else: no `none`, and no HS256 that would take a public key for a secret."""
MAX_TOKEN_BYTES: Final = 16_384
MAX_SUBJECT: Final = 255
LEAST_RSA_BITS: Final = 2048
SKEW_SECONDS: Final = 60
PAUSE_SECONDS = 10.0
"""Between two looks at the issuer's keys. Issuers publish a key before they sign with it: nobody needs to wait."""
FRESH_SECONDS: Final = 600.0
STALE_SECONDS: Final = 4 * 3600.0
"""How long known keys are good while the issuer is away."""

_COMPACT: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_jws: Final = jwt.PyJWS(algorithms=list(ALGORITHMS))

_Time = Annotated[float, Meta(ge=0, le=2**53)]

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


@dataclass(frozen=True)
class IssuerKey:
    key: PublicKey
    algorithms: frozenset[str]
    """What may be signed with it: the key's kind decides, and the issuer may say less."""


class _Claims(Struct, frozen=True):
    """Others may be there: they are the issuer's business."""

    iss: str
    sub: str
    aud: str | list[str]
    exp: _Time
    iat: _Time
    nbf: _Time | None = None


class _Discovery(Struct, frozen=True):
    issuer: str
    jwks_uri: str


class Issuer:
    """One identity provider. `jwks_url` None: its discovery document says where its keys are."""

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
        """Whom the token is about. Unauthenticated when it does not verify."""
        header = _header_of(token)
        found = await self._keys.get(header["kid"])
        if found is None or header["alg"] not in found.algorithms:
            raise _refused()
        claims = _claims_of(token, found.key, header["alg"])
        self._check(claims)
        return claims.sub

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
    """Keys come the way the issuer itself does: a document fetched over TLS must not lead to one that is not."""
    try:
        found = msgspec.json.decode(document, type=_Discovery)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Unavailable("The issuer's discovery document is not one.", code="no_document") from None
    if found.issuer != issuer:
        raise Unavailable("The discovery document names another issuer than oidc_issuer.", code="no_document")
    if not found.jwks_uri.startswith("https://" if issuer.startswith("https://") else ("http://", "https://")):
        raise Unavailable("The discovery document leads to keys at an address without TLS.", code="no_document")
    return found.jwks_uri


def issuer_keys(document: bytes) -> Mapping[str, IssuerKey]:
    found = {kid: _issuer_key(jwk) for kid, jwk in entries(document).items()}
    return {kid: key for kid, key in found.items() if key is not None}


def _issuer_key(jwk: Mapping[str, Any]) -> IssuerKey | None:
    """None for a key that cannot be used here; issuers may publish such for others."""
    algorithms = _by_kind(jwk)
    if "alg" in jwk:
        algorithms &= {str(jwk["alg"])}
    if not algorithms or "d" in jwk or "k" in jwk:
        return None
    try:
        key = jwt.PyJWK(dict(jwk), algorithm=min(algorithms)).key
    except (jwt.PyJWTError, KeyError, TypeError, ValueError):
        return None
    weak = isinstance(key, rsa.RSAPublicKey) and key.key_size < LEAST_RSA_BITS
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
    # A key or an address of one that the token brings along means nothing; what it calls critical must be understood,
    # and nothing is.
    known = algorithm in ALGORITHMS and str(header.get("typ", "JWT")).lower() in _TYPES and "crit" not in header
    if not known or not isinstance(kid, str):
        raise _refused()
    return {"alg": str(algorithm), "kid": kid}


def _claims_of(token: str, key: PublicKey, algorithm: str) -> _Claims:
    try:
        payload = _jws.decode_complete(token, key, algorithms=[algorithm])["payload"]
        claims = json.loads(payload.decode(), object_pairs_hook=once_each, parse_constant=_no_number)
        return msgspec.convert(claims, _Claims, strict=True)
    except (jwt.PyJWTError, msgspec.ValidationError, ValueError, RecursionError):
        raise _refused() from None


def _no_number(name: str) -> float:
    """Python reads NaN and Infinity, which JSON does not have: a token that expired at NaN never would."""
    raise ValueError(name)


def _refused() -> Unauthenticated:
    return Unauthenticated("The token does not verify.", code="bad_token")
