"""Limits of requests per client: failed logins per address, and requests per API key."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from interlock.clock import Clock
from interlock.errors import TooManyRequests
from interlock.stores.valkey import Coordination
from interlock.telemetry import LIMITS_UNAVAILABLE

_BURST_SECONDS: Final = 20
_MAX_PEERS: Final = 10_000
_MAX_PROVED: Final = 10_000
_REFUSED_FOR: Final = timedelta(seconds=10)
_MAX_REFUSED: Final = 10_000


class Lockout:
    """Limits invalid credentials per client address. `per_second` 0 disables it.

    A client with an empty bucket can still use credentials that were valid before, so that one guessing client does not
    lock out others behind the same proxy or NAT.
    """

    def __init__(self, per_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._burst = max(1.0, per_second * _BURST_SECONDS)
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens left per peer, with the time of the last update. A peer that is missing has a full bucket."""
        self._proved: OrderedDict[int, None] = OrderedDict()
        """Hashes of credentials. Python seeds them with a secret per process."""

    def wait(self, peer: str, credentials: list[str]) -> float | None:
        """Returns the seconds until the peer may try unknown credentials, or None if it may now."""
        if peer not in self._left:
            return None
        left = self._tokens(peer)
        if left >= 1 or any(hash(each) in self._proved for each in credentials):
            return None
        return (1 - left) / self._rate

    def failed(self, peer: str) -> None:
        if self._rate:
            self._left[peer] = (self._tokens(peer) - 1, self._now())
            self._left.move_to_end(peer)
            if len(self._left) > _MAX_PEERS:
                self._left.popitem(last=False)

    def proved(self, credential: str) -> None:
        if self._rate:
            self._proved[hash(credential)] = None
            if len(self._proved) > _MAX_PROVED:
                self._proved.popitem(last=False)

    def _tokens(self, peer: str) -> float:
        left, at = self._left.get(peer, (self._burst, 0.0))
        return min(self._burst, left + (self._now() - at) * self._rate)


class Refused:
    """Credentials that did not verify a moment ago, as hashes: the same one again needs no look-up.

    A credential that is made later is never among them: its secret did not exist.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: OrderedDict[bytes, datetime] = OrderedDict()

    def __contains__(self, credential: str) -> bool:
        until = self._until.get(_digest(credential))
        return until is not None and until > self._clock.now()

    def add(self, credential: str) -> None:
        self._until[_digest(credential)] = self._clock.now() + _REFUSED_FOR
        if len(self._until) > _MAX_REFUSED:
            self._until.popitem(last=False)


def too_many_failures(wait: float) -> TooManyRequests:
    return TooManyRequests(
        "Too many invalid credentials from this address; retry later with valid credentials.",
        retry_after=wait,
        code="too_many_failures",
    )


def _digest(credential: str) -> bytes:
    return hashlib.sha256(credential.encode(errors="surrogatepass")).digest()


class RequestLimit:
    """A rate limit that works without Valkey: each process then applies the whole limit on its own."""

    def __init__(
        self, coordination: Coordination | None, per_second: int, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self.per_second = per_second
        """Requests of one key per second; 0 for no limit."""
        self._coordination = coordination
        self._seconds = seconds
        self._window = 0
        self._used: Counter[str] = Counter()

    async def wait(self, key: str) -> float | None:
        """Counts one request. Returns the seconds to wait if the key has sent more than its limit in this second."""
        if not self.per_second:
            return None
        counted = None if self._coordination is None else await self._coordination.count(key, window_seconds=1.0)
        if counted is None:
            LIMITS_UNAVAILABLE.labels(limit="requests").inc()
            counted = self._count_here(key)
        used, left = counted
        return max(0.001, left) if used > self.per_second else None

    def _count_here(self, key: str) -> tuple[int, float]:
        now = self._seconds()
        if int(now) != self._window:
            self._window, self._used = int(now), Counter()
        self._used[key] += 1
        return self._used[key], self._window + 1 - now
