"""A verifier's view of keys that somebody else publishes as a JWK Set.

Keys are kept by kid. An unknown kid causes a look at the document, at a bounded rate however many forged tokens come.
While the publisher is away, known keys go on being good for a while; then nothing verifies until it is back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import Struct

from interlock.adapters.signers import public_key
from interlock.clock import Clock
from interlock.errors import Unavailable

log = structlog.get_logger()
K = TypeVar("K")

MOST_KEYS: Final = 100
_LONGEST_KID: Final = 256
PAUSE_SECONDS = 1.0
"""Between two looks at the dispatcher's keys. Who waits for one waits no longer than this."""
FRESH_SECONDS: Final = 60.0
"""How long the dispatcher's keys are taken for granted: less than a retired one goes on verifying."""
STALE_SECONDS: Final = 15 * 60.0
"""How long they are good without the dispatcher."""


class Fetches(Protocol):
    async def fetch(self, url: str) -> bytes:
        """Unavailable when there is no document."""
        ...


class _Document(Struct, frozen=True):
    keys: list[dict[str, Any]]


_document = msgspec.json.Decoder(_Document)


def entries(document: bytes) -> dict[str, dict[str, Any]]:
    """The keys of a JWK Set that have a name and are meant for signatures. Unavailable for what is no such document."""
    try:
        found = _document.decode(document).keys
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Unavailable("The document of keys is not a JWK Set.", code="no_document") from None
    if len(found) > MOST_KEYS:
        raise Unavailable(f"The document has more than {MOST_KEYS} keys.", code="no_document")
    named: dict[str, dict[str, Any]] = {}
    for jwk in found:
        kid = jwk.get("kid")
        if not isinstance(kid, str) or not 0 < len(kid) <= _LONGEST_KID or jwk.get("use", "sig") != "sig":
            continue
        if kid in named:
            raise Unavailable("Two keys of the document have the same name.", code="no_document")
        named[kid] = jwk
    return named


class KeySet(Generic[K]):
    """`read` makes keys of a document. `patient`: an unknown kid waits for the next look, where one is not due yet."""

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
        self._looked_at = float("-inf")
        self._failed = True
        self._looking = asyncio.Lock()
        self._behind: asyncio.Task[None] | None = None

    async def get(self, kid: str) -> K | None:
        """Unavailable when nobody can say: the document cannot be had, and what was in it is too old."""
        if self._knows(kid):
            if self._age() >= self._fresh:
                self._look_behind()
            return self._keys[kid]
        await self._look_for(kid, time.monotonic())
        if self._knows(kid):
            return self._keys[kid]
        if self._failed:
            raise Unavailable("The keys that tokens are signed with cannot be fetched; try again.", code="no_keys")
        return None

    def _age(self) -> timedelta:
        return self._clock.now() - self._as_of

    def _knows(self, kid: str) -> bool:
        return kid in self._keys and self._age() <= self._stale

    def _wait(self) -> float:
        return self._looked_at + self._pause() - time.monotonic()

    def _look_behind(self) -> None:
        """Nobody waits for it: a publisher that is away must not hold up those whose key is known."""
        if (self._behind is None or self._behind.done()) and self._wait() <= 0:
            self._behind = asyncio.create_task(self._look_again())

    async def _look_again(self) -> None:
        async with self._looking:
            if self._wait() <= 0:
                await self._look()

    async def _look_for(self, kid: str, asked_at: float) -> None:
        """One look serves all who asked before it. Who finds the last one too recent does without, or waits."""
        async with self._looking:
            if self._knows(kid) or self._looked_at >= asked_at:
                return
            if self._wait() > 0 and not self._patient:
                return
            await asyncio.sleep(max(0.0, self._wait()))
            await self._look()

    async def _look(self) -> None:
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
            self._looked_at = time.monotonic()


class PublishedKeys:
    """The public keys of capability tokens, from the dispatcher: all that a process needs which signs none."""

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
    """A key of another kind than ours is none of ours, whatever it may be good for."""
    found = {kid: _p256(jwk) for kid, jwk in entries(document).items() if jwk.get("alg") == "ES256"}
    return {kid: key for kid, key in found.items() if key is not None}


def _p256(jwk: Mapping[str, Any]) -> ec.EllipticCurvePublicKey | None:
    if jwk.get("kty") != "EC" or jwk.get("crv") != "P-256" or "d" in jwk:
        return None
    try:
        return public_key(jwk)
    except (KeyError, TypeError, ValueError):
        return None
