"""Rights to dispatch that this process has fetched ahead, and what it owes the authoritative count.

A token was taken from a window before it came here, so using it can pass no limit. It ends with that window: one that
is left then is lost, never used in the next. Tokens are not shared and not guessed.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from uuid import UUID

from interlock.bus.model import Lane, Limit

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
        self._pockets: dict[tuple[str, str], Pocket] = {}
        self._wanted: dict[Lane, Limit] = {}
        self._spent: dict[Lane, tuple[Limit, int]] = {}
        self._denied: dict[tuple[str, str], float] = {}

    def take(self, limit: Limit, now: float) -> bool:
        key = (limit.target, limit.name)
        pocket = self._pockets.get(key)
        if pocket is None:
            pocket = self._pockets[key] = Pocket()
        pocket.asked += 1
        if pocket.left > 0 and now < pocket.ends_at:
            pocket.left -= 1
            if pocket.left == 0:
                self._wanted[Lane(*key)] = limit
            return True
        self._wanted[Lane(*key)] = limit
        return False

    def wanted(self, now: float) -> list[Wanted]:
        """Lanes that ran out, with how much each would use; asking forgets them."""
        found = [Wanted(limit, self._worth(lane, limit, now)) for lane, limit in self._wanted.items()]
        self._wanted.clear()
        return [each for each in found if each.amount > 0]

    def _worth(self, lane: Lane, limit: Limit, now: float) -> int:
        pocket = self._pockets[lane]
        rest = pocket.remaining if now < pocket.ends_at else limit.rate
        return min(pocket.asked, rest // _SHARE_OF_REST, _MOST_AT_ONCE)

    def fetched(self, lane: Lane, granted: int, ends_at: float, remaining: int) -> None:
        pocket = self._pockets.setdefault(lane, Pocket())
        pocket.left, pocket.ends_at, pocket.asked, pocket.remaining = granted, ends_at, 0, remaining

    def spend(self, limit: Limit) -> None:
        """Of a limit that is counted after dispatch."""
        lane = Lane(limit.target, limit.name)
        known = self._spent.get(lane)
        self._spent[lane] = (limit, 1 if known is None else known[1] + 1)

    def spent(self) -> list[Wanted]:
        found = [Wanted(limit, count) for limit, count in self._spent.values()]
        self._spent.clear()
        return found

    def deny(self, lane: Lane, until: float) -> None:
        self._denied[lane] = until

    def denied(self, limit: Limit, now: float) -> float | None:
        """Seconds that the lane is still closed here, if it is."""
        until = self._denied.get((limit.target, limit.name))
        return None if until is None or until <= now else until - now

    @property
    def owes(self) -> bool:
        return bool(self._wanted or self._spent)
