"""Rights to dispatch that this process has fetched ahead, and what it owes the authoritative count.

A token was taken from a window before it came here, so using it can pass no limit. It ends with that window: one that
is left then is lost, never used in the next. Tokens are not shared and not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from interlock.bus.model import Limit, LimitKey

_MOST_AT_ONCE: Final = 1_000
_SHARE_OF_REST: Final = 20
"""Part of what a window has left that one dispatcher may take at once. The slow stage must find some, too, for what is
on its way there; and little is lost where a dispatcher stops. A limit that is smaller than this is never prefetched."""


class Pocket:
    __slots__ = ("asked", "ends_at", "left", "remaining")

    def __init__(self) -> None:
        self.left = 0
        self.ends_at = 0.0
        self.asked = 0
        """Commands that came since the last fetch: what the next one should be for."""
        self.remaining = 0
        """In the window until `ends_at`, when last heard."""


class Wanted(NamedTuple):
    limit: Limit
    amount: int


class Tokens:
    """Of one org."""

    def __init__(self, org_id: UUID) -> None:
        self.org_id = org_id
        self._pockets: dict[LimitKey, Pocket] = {}
        self._wanted: dict[LimitKey, Limit] = {}
        self._spent: dict[LimitKey, tuple[Limit, int]] = {}
        self._denied: dict[LimitKey, float] = {}

    def take(self, limits: Sequence[Limit], now: float) -> bool:
        """One token of each, or none of any: what one limit holds back uses up nothing of another. Those that have none
        are wanted."""
        pockets = [self._pocket(limit) for limit in limits]
        out = [pocket.left <= 0 or now >= pocket.ends_at for pocket in pockets]
        admitted = not any(out)
        for limit, pocket, empty in zip(limits, pockets, out, strict=True):
            if admitted:
                pocket.left -= 1
            if admitted or empty:
                pocket.asked += 1
            if empty or pocket.left == 0:
                self._wanted[limit.key] = limit
        return admitted

    def _pocket(self, limit: Limit) -> Pocket:
        key = limit.key
        pocket = self._pockets.get(key)
        if pocket is None:
            pocket = self._pockets[key] = Pocket()
        return pocket

    def wanted(self, now: float) -> list[Wanted]:
        """Limits that ran out, with how much each would use; asking forgets them."""
        found = [Wanted(limit, self._worth(key, limit, now)) for key, limit in self._wanted.items()]
        self._wanted.clear()
        return [each for each in found if each.amount > 0]

    def _worth(self, key: LimitKey, limit: Limit, now: float) -> int:
        pocket = self._pockets[key]
        rest = pocket.remaining if now < pocket.ends_at else limit.rate
        return min(pocket.asked, rest // _SHARE_OF_REST, _MOST_AT_ONCE)

    def fetched(self, key: LimitKey, granted: int, ends_at: float, remaining: int) -> None:
        pocket = self._pockets.setdefault(key, Pocket())
        pocket.left, pocket.ends_at, pocket.asked, pocket.remaining = granted, ends_at, 0, remaining

    def spend(self, limit: Limit) -> None:
        """Of a limit that is counted after dispatch."""
        key = limit.key
        known = self._spent.get(key)
        self._spent[key] = (limit, 1 if known is None else known[1] + 1)

    def spent(self) -> list[Wanted]:
        found = [Wanted(limit, count) for limit, count in self._spent.values()]
        self._spent.clear()
        return found

    def deny(self, key: LimitKey, until: float) -> None:
        self._denied[key] = until

    def denied(self, limit: Limit, now: float) -> float | None:
        """Seconds that the limit is still closed here, if it is."""
        until = self._denied.get(limit.key) if self._denied else None
        return None if until is None or until <= now else until - now

    @property
    def owes(self) -> bool:
        return bool(self._wanted or self._spent)
