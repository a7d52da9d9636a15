"""URLs that let whoever holds them do one thing with one object of a directory, until they expire.

    {gateway}/v1/objects/{key}?expires=…&kid=…&signature=…

The signature is ES256 by a key of the keyring, over method, key, expiry and everything else in the query: a URL for
one part of an upload is good for that part. It ends with its key, too, once that is retired and no longer verifies.
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
from interlock.adapters.signers import ORDER
from interlock.clock import Clock
from interlock.errors import Unauthenticated

PATH: Final = "/v1/objects"
RESULTS: Final = "/v1/results"
"""The key of a result is `{run_id}/{index}`."""
_PROOF: Final = ("expires", "kid", "signature")
# No token begins like this: what signs a URL can never be taken for what signs a token, nor the other way round; nor
# what signs one of an object for what signs one of a result.
_PURPOSES: Final = {PATH: "interlock object url 1", RESULTS: "interlock result url 1"}
_ALGORITHM: Final = ec.ECDSA(SHA256())
_EXPIRES: Final = re.compile(r"[1-9][0-9]{0,11}")
# One spelling per signature, as of tokens.
_SIGNATURE: Final = re.compile(r"[A-Za-z0-9_-]{85}[AQgw]")

Query = Iterable[tuple[str, str]]
"""Names and values as they came, those that came twice included."""


class SignedUrls:
    def __init__(self, keyring: Keyring, clock: Clock, *, base_url: str, path: str = PATH) -> None:
        self._path, self._purpose = path, _PURPOSES[path]
        self._keyring = keyring
        self._clock = clock
        self._base_url = base_url

    async def sign(self, method: str, key: str, seconds: float, more: Query = ()) -> str:
        """`more` is what else the query must have, such as the upload and the part of a PUT."""
        expires = str(math.ceil(self._clock.now().timestamp() + seconds))
        kid = (await self._keyring.active())["kid"]
        query = [*more, ("expires", expires), ("kid", kid)]
        signature = _text(await self._keyring.sign(kid, self._message(method, key, query)))
        return f"{self._base_url}{self._path}/{quote(key)}?{urlencode([*query, ('signature', signature)])}"

    async def verify(self, method: str, key: str, query: Query) -> None:
        """Raises Unauthenticated unless this very request was signed, and has not expired."""
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
            raise Unauthenticated("The signed URL has expired; ask for another one.", code="url_expired")

    def _message(self, method: str, key: str, query: Query) -> bytes:
        """Lines cannot run into each other: neither a key nor what is encoded has a line feed."""
        return "\n".join([self._purpose, method, quote(key), urlencode(sorted(query))]).encode()


def is_signed(query: Query) -> bool:
    """Whether a request means to prove itself by its query."""
    return any(name in _PROOF for name, _ in query)


def _text(signature: bytes) -> str:
    return base64.urlsafe_b64encode(signature).rstrip(b"=").decode()


def _require_signature(key: ec.EllipticCurvePublicKey, signature: str, message: bytes) -> None:
    """The smaller `s` of the two that verify: a URL cannot be turned into another one that is as good."""
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
    return Unauthenticated("The signed URL is not one for this request.", code="bad_signature")
