"""Whether one source keeps the others from a lane, as one dispatcher sees it.

A source that has had more than its share of warm dispatches while others wanted some, too, loses the warm path for a
while: its commands go by the slow stage, where the limit is the same for all. Whoever is alone on a lane is never
penalised, however much it sends. Windows end by themselves, so that nobody carries a past along.
"""

from __future__ import annotations

from typing import Final

from interlock.bus.model import Ban, BanKind, Fairness

WINDOW_SECONDS: Final = 30.0


class _Window:
    __slots__ = ("asked", "asked_by", "dispatched", "dispatched_by", "ends_at")

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.asked = 0
        self.dispatched = 0
        self.asked_by: dict[str, int] = {}
        self.dispatched_by: dict[str, int] = {}


class Shares:
    """Of one org. What was dispatched is added up for the auditor, too, who sees all dispatchers."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._seconds = window_seconds
        self._windows: dict[tuple[str, str], _Window] = {}
        self._bans: dict[tuple[str, str, str], Ban] = {}
        self.totals: dict[tuple[str, str, str], int] = {}
        """Warm dispatches since they were last handed to the auditor."""
        self.imposed: list[Ban] = []
        """Bans that nobody was told of yet."""

    def banned(self, source: str, lane: tuple[str, str], now: float) -> Ban | None:
        """What keeps a source from the warm path of a lane, if anything does."""
        ban = self._bans.get((source, *lane)) if self._bans else None
        return ban if ban is not None and ban.until > now else None

    def asked(self, source: str, lane: tuple[str, str], now: float) -> None:
        """A command came that may go by the warm path. One that may not competes with nobody there: if it counted,
        whoever is left would look dominant."""
        window = self._windows.get(lane)
        if window is None or now >= window.ends_at:
            window = self._windows[lane] = _Window(now + self._seconds)
        window.asked += 1
        window.asked_by[source] = window.asked_by.get(source, 0) + 1

    def dispatched(self, source: str, lane: tuple[str, str], rules: Fairness, now: float) -> None:
        """It went out by the warm path; the next may not, if that was more than fair."""
        window = self._windows[lane]
        window.dispatched += 1
        count = window.dispatched_by[source] = window.dispatched_by.get(source, 0) + 1
        entry = (source, *lane)
        self.totals[entry] = self.totals.get(entry, 0) + 1
        if window.dispatched < rules.minimum_volume or count <= rules.dominant_share * window.dispatched:
            return
        others = (window.asked - window.asked_by[source]) / window.asked
        if others >= rules.competing_share:
            self._ban(source, lane, rules, count / window.dispatched, others, window.dispatched, now)

    def _ban(
        self,
        source: str,
        lane: tuple[str, str],
        rules: Fairness,
        share: float,
        others: float,
        volume: int,
        now: float,
    ) -> None:
        target, name = lane
        shares = round(share, 4), round(others, 4)
        ban = Ban(source, BanKind.WARM, now + rules.ban_seconds, target, name, *shares, dispatch_volume=volume)
        self._bans = {entry: known for entry, known in self._bans.items() if known.until > now}
        self._bans[source, target, name] = ban
        self.imposed.append(ban)
        # What led to it is paid for: the next window is judged by itself.
        del self._windows[lane]

    def take_totals(self, now: float) -> dict[tuple[str, str, str], int]:
        """What was dispatched since the last time. Lanes that nobody uses any more are forgotten by the way."""
        self._windows = {lane: window for lane, window in self._windows.items() if window.ends_at > now}
        totals, self.totals = self.totals, {}
        return totals

    def take_imposed(self) -> list[Ban]:
        imposed, self.imposed = self.imposed, []
        return imposed
