"""Failed logins by client address: a token bucket each, so that guessing credentials costs the stores little."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

_BURST_SECONDS: Final = 20
_MOST_PEERS: Final = 10_000
_MOST_PROVED: Final = 10_000


class Lockout:
    """A peer whose bucket is empty may still use credentials that have proved good here: behind a proxy or a NAT, one
    who guesses does not lock out the others. `per_second` 0 turns it off."""

    def __init__(self, per_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._burst = max(1.0, per_second * _BURST_SECONDS)
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By peer, the tokens left and when that was. A peer that is not here has all of them."""
        self._proved: OrderedDict[int, None] = OrderedDict()
        """Hashes, which Python keys with a secret of the process."""

    def wait(self, peer: str, credentials: list[str]) -> float | None:
        """Seconds until the peer may try credentials that are not known to be good; None if it may now."""
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
            if len(self._left) > _MOST_PEERS:
                self._left.popitem(last=False)

    def proved(self, credential: str) -> None:
        if self._rate:
            self._proved[hash(credential)] = None
            if len(self._proved) > _MOST_PROVED:
                self._proved.popitem(last=False)

    def _tokens(self, peer: str) -> float:
        left, at = self._left.get(peer, (self._burst, 0.0))
        return min(self._burst, left + (self._now() - at) * self._rate)
