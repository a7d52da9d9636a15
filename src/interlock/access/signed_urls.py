"""Signed URLs, which grant their holder one operation on one object of a directory until they expire.

    {gateway}/v1/objects/{key}?expires=…&kid=…&signature=…

The signature is ES256 with a key of the keyring, over method, key, expiry and all other query parameters: a URL for one
part of an upload is valid for that part only. It also becomes invalid when its key is retired and no longer verifies.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, urlencode

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from interlock.access.keyring import Keyring
from interlock.clock import Clock
from interlock.errors import Unauthenticated
from interlock.stores.signers import ORDER

PATH: Final = "/v1/objects"
RESULTS: Final = "/v1/results"
"""The key of a result is `{run_id}/{index}`."""
_PROOF: Final = ("expires", "kid", "signature")
# No token starts like this: a signature of a URL can never be used as a signature of a token or vice versa, nor a
# signature for an object as one for a result.
_PURPOSES: Final = {PATH: "interlock object url 1", RESULTS: "interlock result url 1"}
_ALGORITHM: Final = ec.ECDSA(SHA256())
_EXPIRES: Final = re.compile(r"[1-9][0-9]{0,11}")
# One encoding per signature, as for tokens.
_SIGNATURE: Final = re.compile(r"[A-Za-z0-9_-]{85}[AQgw]")

Query = Iterable[tuple[str, str]]
"""Names and values as received, including duplicates."""


class SignedUrls:
    def __init__(self, keyring: Keyring, clock: Clock, *, base_url: str, path: str = PATH) -> None:
        self._path, self._purpose = path, _PURPOSES[path]
        self._keyring = keyring
        self._clock = clock
        self._base_url = base_url

    async def sign(self, method: str, key: str, seconds: float, more: Query = ()) -> str:
        """Signs a URL. `more` are further required query parameters, for example the upload and part of a PUT."""
        expires = str(math.ceil(self._clock.now().timestamp() + seconds))
        kid = (await self._keyring.active())["kid"]
        query = [*more, ("expires", expires), ("kid", kid)]
        signature = _text(await self._keyring.sign(kid, self._message(method, key, query)))
        return f"{self._base_url}{self._path}/{quote(key)}?{urlencode([*query, ('signature', signature)])}"

    async def verify(self, method: str, key: str, query: Query) -> None:
        """Raises Unauthenticated unless exactly this request was signed and has not expired."""
        given = list(query)
        named = dict(given)
        if len(named) != len(given) or not all(named.get(name) for name in _PROOF):
            raise _refused()
        signature, expires = named.pop("signature"), named["expires"]
        public = await self._keyring.public(named["kid"])
        if public is None or not _EXPIRES.fullmatch(expires):
            raise _refused()
        _require_signature(public, signature, self._message(method, key, named.items()))
        if int(expires) <= self._clock.now().timestamp():
            raise Unauthenticated("The signed URL has expired; request a new one.", code="url_expired")

    def _message(self, method: str, key: str, query: Query) -> bytes:
        """Returns the message to sign. Lines are unambiguous, because keys and encoded values contain no newlines."""
        return "\n".join([self._purpose, method, quote(key), urlencode(sorted(query))]).encode()


def is_signed(query: Query) -> bool:
    """Returns True if the query of a request contains a signature or parts of one."""
    return any(name in _PROOF for name, _ in query)


def _text(signature: bytes) -> str:
    return base64.urlsafe_b64encode(signature).rstrip(b"=").decode()


def _require_signature(key: ec.EllipticCurvePublicKey, signature: str, message: bytes) -> None:
    """Verifies, with only the smaller `s` of the two that verify, so that nobody can derive a second valid URL."""
    if not _SIGNATURE.fullmatch(signature):
        raise _refused()
    try:
        raw = base64.urlsafe_b64decode(signature + "==")
        r, s = int.from_bytes(raw[:32]), int.from_bytes(raw[32:])
        if 2 * s >= ORDER:
            raise _refused()
        key.verify(encode_dss_signature(r, s), message, _ALGORITHM)
    except (InvalidSignature, binascii.Error, ValueError):
        raise _refused() from None


def _refused() -> Unauthenticated:
    return Unauthenticated("The signed URL is not valid for this request.", code="bad_signature")
