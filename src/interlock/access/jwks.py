"""Keys that another service publishes as a JWK Set: fetched over HTTP, and cached.

Keys are cached by kid. An unknown kid causes a fetch, at a limited rate even if many forged tokens arrive. While the
publisher is unavailable, cached keys stay valid for a while; then nothing verifies until it is back.

The server is trusted only for its document: redirects and other schemes are rejected, and time and memory are limited.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.error
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import OpenerDirector

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import Struct

from interlock.clock import Clock
from interlock.errors import Unavailable
from interlock.http import fetch
from interlock.stores.signers import public_key

log = structlog.get_logger()
K = TypeVar("K")

MAX_KEYS: Final = 100
_LONGEST_KID: Final = 256
PAUSE_SECONDS = 1.0
"""Minimum interval between two fetches from the dispatcher, and so the maximum wait for one."""
FRESH_SECONDS: Final = 60.0
"""Time for which keys of the dispatcher are used without a refresh: shorter than a retired key stays valid."""
STALE_SECONDS: Final = 15 * 60.0
"""Time for which they are used while the dispatcher is unavailable."""


class Fetches(Protocol):
    async def fetch(self, url: str) -> bytes:
        """Fetches a document. Raises Unavailable."""
        ...


class _Document(Struct, frozen=True):
    keys: list[dict[str, Any]]


_document = msgspec.json.Decoder(_Document)


def entries(document: bytes) -> dict[str, dict[str, Any]]:
    """Returns the signing keys with an id from a JWK Set. Raises Unavailable for any other document."""
    try:
        found = _document.decode(document).keys
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Unavailable("The key document is not a JWK Set.", code="no_document") from None
    if len(found) > MAX_KEYS:
        raise Unavailable(f"The key document has more than {MAX_KEYS} keys.", code="no_document")
    named: dict[str, dict[str, Any]] = {}
    for jwk in found:
        kid = jwk.get("kid")
        if not isinstance(kid, str) or not 0 < len(kid) <= _LONGEST_KID or jwk.get("use", "sig") != "sig":
            continue
        if kid in named:
            raise Unavailable("Two keys of the document have the same kid.", code="no_document")
        named[kid] = jwk
    return named


class KeySet(Generic[K]):
    """Cached keys.

    `read` parses a document. If `patient`, an unknown kid waits for the next fetch that the rate allows.
    """

    def __init__(
        self,
        fetch: Callable[[], Awaitable[bytes]],
        read: Callable[[bytes], Mapping[str, K]],
        clock: Clock,
        *,
        pause: Callable[[], float],
        fresh_seconds: float,
        stale_seconds: float,
        patient: bool,
    ) -> None:
        self._fetch = fetch
        self._read = read
        self._clock = clock
        self._pause = pause
        self._fresh = timedelta(seconds=fresh_seconds)
        self._stale = timedelta(seconds=stale_seconds)
        self._patient = patient
        self._keys: Mapping[str, K] = {}
        self._as_of = datetime.min.replace(tzinfo=UTC)
        self._refreshed_at = float("-inf")
        self._failed = True
        self._refreshing = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None

    async def get(self, kid: str) -> K | None:
        """Returns a key, or None if it does not exist.

        Raises Unavailable if the document cannot be fetched and is too old.
        """
        if self._knows(kid):
            if self._age() >= self._fresh:
                self._refresh_in_background()
            return self._keys[kid]
        await self._refresh_for(kid, time.monotonic())
        if self._knows(kid):
            return self._keys[kid]
        if self._failed:
            raise Unavailable("The keys that verify tokens cannot be fetched; retry later.", code="no_keys")
        return None

    def _age(self) -> timedelta:
        return self._clock.now() - self._as_of

    def _knows(self, kid: str) -> bool:
        return kid in self._keys and self._age() <= self._stale

    def _wait(self) -> float:
        return self._refreshed_at + self._pause() - time.monotonic()

    def _refresh_in_background(self) -> None:
        """Refreshes in the background, so that an unavailable publisher does not delay requests with a known key."""
        if (self._background is None or self._background.done()) and self._wait() <= 0:
            self._background = asyncio.create_task(self._refresh_if_due())

    async def _refresh_if_due(self) -> None:
        async with self._refreshing:
            if self._wait() <= 0:
                await self._refresh()

    async def _refresh_for(self, kid: str, requested_at: float) -> None:
        """Fetches for an unknown kid. One fetch serves all callers that waited for it; the rate limit applies."""
        async with self._refreshing:
            if self._knows(kid) or self._refreshed_at >= requested_at:
                return
            if self._wait() > 0 and not self._patient:
                return
            await asyncio.sleep(max(0.0, self._wait()))
            await self._refresh()

    async def _refresh(self) -> None:
        as_of = self._clock.now()
        try:
            keys = self._read(await self._fetch())
        except Unavailable as error:
            self._failed = True
            log.warning("keys.not_fetched", reason=error.detail)
        else:
            self._failed = False
            self._keys, self._as_of = keys, as_of
        finally:
            self._refreshed_at = time.monotonic()


class PublishedKeys:
    """Public keys of capability tokens, fetched from the dispatcher, for processes that do not sign."""

    def __init__(self, url: str, http: Fetches, clock: Clock) -> None:
        self._keys: KeySet[ec.EllipticCurvePublicKey] = KeySet(
            lambda: http.fetch(f"{url.rstrip('/')}/internal/jwks/task"),
            task_keys,
            clock,
            pause=lambda: PAUSE_SECONDS,
            fresh_seconds=FRESH_SECONDS,
            stale_seconds=STALE_SECONDS,
            patient=True,
        )

    async def public(self, kid: str) -> ec.EllipticCurvePublicKey | None:
        return await self._keys.get(kid)


def task_keys(document: bytes) -> dict[str, ec.EllipticCurvePublicKey]:
    """Returns the ES256 keys of a document; keys of other types are ignored."""
    found = {kid: _p256(jwk) for kid, jwk in entries(document).items() if jwk.get("alg") == "ES256"}
    return {kid: key for kid, key in found.items() if key is not None}


def _p256(jwk: Mapping[str, Any]) -> ec.EllipticCurvePublicKey | None:
    if jwk.get("kty") != "EC" or jwk.get("crv") != "P-256" or "d" in jwk:
        return None
    try:
        return public_key(jwk)
    except (KeyError, TypeError, ValueError):
        return None


MAX_BYTES: Final = 256 * 1024
_STEP_SECONDS: Final = 3.0
"""Timeout of the connection, and of each read."""
_ALL_SECONDS: Final = 10.0


class Documents:
    """Fetches with the standard library in a thread, which is enough for rare and small documents.

    Uses the proxies of the environment, except for this machine.
    """

    def __init__(self, ca: Path | None = None) -> None:
        self._ca = ca

    async def fetch(self, url: str) -> bytes:
        """Fetches a document.

        Raises Unavailable on errors, timeouts, documents over the limit and other statuses than 200.
        """
        return await self._bounded(url, partial(self._read, url))

    async def post_form(self, url: str, form: Mapping[str, str], headers: Mapping[str, str]) -> bytes:
        """Sends a form and returns the document of the reply. Raises Unavailable like `fetch`."""
        return await self._bounded(url, partial(self._post, url, form, headers))

    async def _bounded(self, url: str, exchange: Callable[[], bytes]) -> bytes:
        try:
            return await asyncio.wait_for(asyncio.to_thread(exchange), _ALL_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            raise _unavailable(url, f"status {error.code}") from None
        except TimeoutError:
            raise _unavailable(url, "it took too long") from None
        except fetch.TooLarge as error:
            raise _unavailable(url, str(error)) from None
        except (*fetch.FAILURES, ValueError) as error:
            raise _unavailable(url, type(error).__name__) from error

    def _read(self, url: str) -> bytes:
        return fetch.read(self._opener, url, limit=MAX_BYTES, seconds=_STEP_SECONDS)

    def _post(self, url: str, form: Mapping[str, str], headers: Mapping[str, str]) -> bytes:
        return fetch.post_form(self._opener, url, form, headers, limit=MAX_BYTES, seconds=_STEP_SECONDS)

    @cached_property
    def _opener(self) -> OpenerDirector:
        trust = ssl.create_default_context(cafile=str(self._ca) if self._ca else None)
        return fetch.opener(trust, proxies=True)


def _unavailable(url: str, why: str) -> Unavailable:
    parts = urlsplit(url)
    return Unavailable(f"{parts.scheme}://{parts.hostname}{parts.path} cannot be fetched: {why}.", code="no_document")
