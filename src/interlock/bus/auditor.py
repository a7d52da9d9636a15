"""Fairness as all dispatchers see it together: repeated bans become one everywhere, and so does a share that is spread.

Dispatchers report what they saw; the auditor adds it up. A ban costs the warm path and nothing else: what is within the
limit is delivered, by the slow stage. Only who goes on asking a target that has no room left is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.bus import metrics
from interlock.bus.events import tell
from interlock.bus.model import Ban
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.settings import Settings
from interlock.wire.bus_events import AbuseDetected

_sql = queries("bus_fairness")
_runs_sql = queries("runs")

WINDOW_SECONDS: Final = 120.0
"""Of shares that are added up."""
LANE_SHARE: Final = 0.8
SHARE: Final = 0.7
"""Of all lanes of a source together, where there are several targets."""
COMPETING: Final = 0.1
VOLUME: Final = 100
"""Dispatches of a lane in the window before shares mean anything."""
_MOST: Final = 5_000

Entry = tuple[UUID, str, str, str]
"""Org, source, target, name."""


async def report(connection: Connection, bans: Sequence[tuple[UUID, Ban]], totals: Mapping[Entry, int]) -> None:
    """What one dispatcher has seen."""
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
    """One at a time, so that a ban is told once."""

    name = "bus_auditor"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.audit_seconds
        self._database = database
        self._strikes = settings.fairness_strikes
        self._within = settings.fairness_strike_seconds
        self._ban_seconds = settings.fairness_ban_seconds

    async def run_once(self) -> int:
        """Never says that there is more to do: the next look is due after a pause, whatever this one found."""
        async with self._database.transaction() as connection:
            if not await _runs_sql.only_one(connection, name=self.name):
                return 0
            repeated = await _sql.ban_repeat_offenders(
                connection, within_seconds=self._within, strikes=self._strikes, ban_seconds=self._ban_seconds
            )
            dominant = await _sql.ban_dominant(
                connection,
                within_seconds=WINDOW_SECONDS,
                volume=VOLUME,
                lane_share=LANE_SHARE,
                share=SHARE,
                competing=COMPETING,
                ban_seconds=self._ban_seconds,
            )
            found = _abuses(repeated, dominant)
            await tell(connection, found)
            await _sql.forget_fairness(
                connection, keep_seconds=max(self._within, WINDOW_SECONDS, self._ban_seconds), most=_MOST
            )
            await failpoint("audit.before_commit")
        metrics.GLOBAL_BANS.inc(len(repeated) + len(dominant))
        return 0


def _abuses(repeated: Sequence[Row], dominant: Sequence[Row]) -> list[tuple[UUID, AbuseDetected]]:
    """One for each source, of all that it was found to do in this pass."""
    targets: defaultdict[tuple[UUID, str], set[str]] = defaultdict(set)
    violations: defaultdict[tuple[UUID, str], int] = defaultdict(int)
    until: dict[tuple[UUID, str], datetime] = {}
    for row in (*repeated, *dominant):
        who = row["org_id"], row["source"]
        targets[who].update(row["targets"] if "targets" in row else [row["target"]])
        violations[who] += row["violations"] if "violations" in row else 1  # noqa: SIM401
        until[who] = max(row["until"], until.get(who, row["until"]))
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
