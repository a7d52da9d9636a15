"""Fairness between the sources of a lane: as one dispatcher sees it, and as the auditor sees it across all dispatchers.

A source that has more than its share of warm dispatches while others compete loses the warm path for a while: its
commands go to the slow stage, where the limit is the same for all. A source that is alone on a lane is never penalised,
whatever it sends. Each window is judged separately, so that the past has no effect.

The auditor adds up the reports of all dispatchers: repeated bans become a ban everywhere, and so does a share that is
spread over dispatchers. A ban costs only the warm path: the slow stage delivers what is within the limit. Only a banned
source that keeps sending to a target without room is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from interlock.bus import metrics
from interlock.bus.model import Ban, BanKind, Fairness
from interlock.bus.telemetry import emit
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries, try_lock
from interlock.wire.bus_events import AbuseDetected

WINDOW_SECONDS: Final = 30.0


class _Window:
    __slots__ = ("attempts", "attempts_by", "dispatched", "dispatched_by", "ends_at")

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.attempts = 0
        self.dispatched = 0
        self.attempts_by: dict[str, int] = {}
        self.dispatched_by: dict[str, int] = {}


class Shares:
    """The shares of one org in this dispatcher. Dispatches are also added up for the auditor."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._seconds = window_seconds
        self._windows: dict[tuple[str, str], _Window] = {}
        self._bans: dict[tuple[str, str, str], Ban] = {}
        self.totals: dict[tuple[str, str, str], int] = {}
        """Warm dispatches since the last report to the auditor."""
        self.imposed: list[Ban] = []
        """Bans that are not reported yet."""

    def banned(self, source: str, lane: tuple[str, str], now: float) -> Ban | None:
        """Returns the ban of a source from the warm path of a lane, if there is one."""
        ban = self._bans.get((source, *lane)) if self._bans else None
        return ban if ban is not None and ban.until > now else None

    def count_attempt(self, source: str, lane: tuple[str, str], now: float) -> None:
        """Counts a command that may take the warm path. A command that may not does not compete there: if it counted,
        the remaining sources would look dominant."""
        window = self._windows.get(lane)
        if window is None or now >= window.ends_at:
            window = self._windows[lane] = _Window(now + self._seconds)
        window.attempts += 1
        window.attempts_by[source] = window.attempts_by.get(source, 0) + 1

    def count_dispatch(self, source: str, lane: tuple[str, str], rules: Fairness, now: float) -> None:
        """Counts a command that took the warm path, and bans its source if it dominates the lane."""
        window = self._windows[lane]
        window.dispatched += 1
        count = window.dispatched_by[source] = window.dispatched_by.get(source, 0) + 1
        entry = (source, *lane)
        self.totals[entry] = self.totals.get(entry, 0) + 1
        if window.dispatched < rules.minimum_volume or count <= rules.dominant_share * window.dispatched:
            return
        others = (window.attempts - window.attempts_by[source]) / window.attempts
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
        # The ban settles this window: the next one is judged separately.
        del self._windows[lane]

    def take_totals(self, now: float) -> dict[tuple[str, str, str], int]:
        """Returns the dispatches since the last call, and drops the windows of idle lanes."""
        self._windows = {lane: window for lane, window in self._windows.items() if window.ends_at > now}
        totals, self.totals = self.totals, {}
        return totals

    def take_imposed(self) -> list[Ban]:
        imposed, self.imposed = self.imposed, []
        return imposed


# The auditor, which sees the reports of all dispatchers

_sql = queries(__name__, "fairness")

AUDIT_WINDOW_SECONDS: Final = 120.0
"""The window in which the auditor adds up shares."""
LANE_SHARE: Final = 0.8
SHARE: Final = 0.7
"""Share of all lanes of a source together, if it has several targets."""
COMPETING: Final = 0.1
VOLUME: Final = 100
"""Minimum dispatches of a lane in the window: below it, shares are not judged."""
_MAX_DELETED: Final = 5_000

Entry = tuple[UUID, str, str, str]
"""Org, source, target, name."""


async def report(connection: Connection, bans: Sequence[tuple[UUID, Ban]], totals: Mapping[Entry, int]) -> None:
    """Reports the bans and dispatches of one dispatcher to the auditor."""
    await _sql.report(
        connection,
        strike_org_ids=[org_id for org_id, _ in bans],
        strike_sources=[ban.source for _, ban in bans],
        strike_targets=[ban.target for _, ban in bans],
        strike_names=[ban.name for _, ban in bans],
        source_shares=[ban.source_share for _, ban in bans],
        competing_shares=[ban.competing_share for _, ban in bans],
        volumes=[ban.dispatch_volume for _, ban in bans],
        org_ids=[org_id for org_id, _, _, _ in totals],
        sources=[source for _, source, _, _ in totals],
        targets=[target for _, _, target, _ in totals],
        names=[name for _, _, _, name in totals],
        dispatched=list(totals.values()),
    )


class Auditor(Periodic):
    """Imposes bans everywhere. One auditor runs at a time, so that each ban is reported once."""

    name = "bus_auditor"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.audit_seconds
        self._database = database
        self._strikes = settings.fairness_strikes
        self._within = settings.fairness_strike_seconds
        self._ban_seconds = settings.fairness_ban_seconds

    async def run_once(self) -> int:
        """Always returns 0: the next pass starts after a pause, whatever this one found."""
        async with self._database.transaction() as connection:
            if not await try_lock(connection, self.name):
                return 0
            repeated = await _sql.ban_repeat_offenders(
                connection, within_seconds=self._within, strikes=self._strikes, ban_seconds=self._ban_seconds
            )
            dominant = await _sql.ban_dominant(
                connection,
                within_seconds=AUDIT_WINDOW_SECONDS,
                volume=VOLUME,
                lane_share=LANE_SHARE,
                share=SHARE,
                competing=COMPETING,
                ban_seconds=self._ban_seconds,
            )
            found = _abuses(repeated, dominant)
            await emit(connection, found)
            await _sql.forget_fairness(
                connection, keep_seconds=max(self._within, AUDIT_WINDOW_SECONDS, self._ban_seconds), limit=_MAX_DELETED
            )
            await failpoint("audit.before_commit")
        metrics.GLOBAL_BANS.inc(len(repeated) + len(dominant))
        return 0


def _abuses(repeated: Sequence[Row], dominant: Sequence[Row]) -> list[tuple[UUID, AbuseDetected]]:
    """Returns one event per source, which covers all its violations in this pass."""
    targets: defaultdict[tuple[UUID, str], set[str]] = defaultdict(set)
    violations: defaultdict[tuple[UUID, str], int] = defaultdict(int)
    until: dict[tuple[UUID, str], datetime] = {}
    for row in (*repeated, *dominant):
        key = row["org_id"], row["source"]
        targets[key].update(row["targets"] if "targets" in row else [row["target"]])
        violations[key] += row["violations"] if "violations" in row else 1  # noqa: SIM401
        until[key] = max(row["until"], until.get(key, row["until"]))
    return [
        (
            org_id,
            AbuseDetected(
                source=source,
                affected_targets=sorted(targets[org_id, source]),
                total_violations=violations[org_id, source],
                ban_applied_until=until[org_id, source],
            ),
        )
        for org_id, source in until
    ]
