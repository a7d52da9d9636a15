"""The slow stage: decides from the registry and the authoritative counts. It has no cache and prefetches nothing.

One transaction takes a hand-off, decides about it and writes the effects. So only a delivery uses up the id of a strict
command, limits count exactly what was sent, and a crash at any point leaves the hand-off unchanged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import structlog

from interlock.bus import metrics
from interlock.bus.model import Ban, BanKind, Decision, Escalation, Limit, Outcome
from interlock.bus.path import delivery, fates, limits, reports
from interlock.bus.path.delivery import Delivered, delivered
from interlock.bus.path.fates import Fate
from interlock.bus.path.limits import LimitUse, WindowKey
from interlock.bus.path.persistence import HANDOFFS, Effects, Facts, facts, notify
from interlock.errors import Unavailable
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.low_water import Look, low_water
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import CONTENT_ERRORS, Connection, Database, Row, database_time, queries, set_aside
from interlock.wire.bus_events import FailureReason
from interlock.wire.bus_registry import DedupeMode, Enforcement

log = structlog.get_logger()
_sql = queries(__name__, "path")
_fairness_sql = queries(__name__, "fairness")

_BATCH: Final = 200
_MAX_SWEPT: Final = 5_000
_MAX_TRIES: Final = 8
"""Attempts for a command whose delivery raises an error; then its failure is reported."""


@dataclass
class Case:
    """A hand-off and its decision, which never changes once it is set."""

    row: Row
    message: Delivered
    known: Facts
    registered: Row | None = None
    """The registry's row for its lane and source."""
    decision: Decision | None = None
    refused_by: WindowKey | None = None
    """The limit that refused it."""

    @property
    def no_room(self) -> bool:
        """The limit of the lane refused it: the target takes no commands from any source now."""
        return self.refused_by is not None and not self.refused_by[3]

    @property
    def org_id(self) -> UUID:
        org_id: UUID = self.row["org_id"]
        return org_id

    @property
    def source(self) -> str:
        return self.message.command.source

    @property
    def entry(self) -> tuple[UUID, str, str]:
        return self.org_id, self.source, self.message.metadata.id

    def get(self, column: str) -> Any:
        return None if self.registered is None else self.registered[column]

    @property
    def strict(self) -> bool:
        return bool(self.get("dedupe_mode") == DedupeMode.STRICT)

    def fail(self, reason: FailureReason, wait_seconds: float | None = None) -> None:
        self.decision = Decision(Outcome.FAILED, None, reason.value, wait_seconds=wait_seconds, ban=self.known.ban)

    @property
    def banned(self) -> bool:
        """The source is banned from the warm path, even if the command was escalated for another reason."""
        return self.row["reason"] == Escalation.WARM_BAN or self.known.ban is not None

    @property
    def _service(self) -> str:
        return self.source.partition("/")[2]

    def limit(self) -> Limit | None:
        command = self.message.command
        return self._limit("", command.target, command.name, None, self.get("enforcement"))

    def source_limit(self) -> Limit | None:
        return self._limit("own_", "", "", self._service, self.get("own_enforcement"))

    def quota(self) -> Limit | None:
        """Returns the quota of a banned source; other sources have none to check."""
        command = self.message.command
        if not self.banned:
            return None
        return self._limit("quota_", command.target, command.name, self._service, Enforcement.STRICT)

    def _limit(self, prefix: str, target: str, name: str, source: str | None, enforcement: str) -> Limit | None:
        if self.get(f"{prefix}rate") is None:
            return None
        return Limit(
            target,
            name,
            self.get(f"{prefix}rate"),
            self.get(f"{prefix}window_seconds"),
            self.get(f"{prefix}burst"),
            self.get(f"{prefix}cooldown_seconds"),
            Enforcement(enforcement),
            source,
        )


class SlowStage:
    """Any number may run: each takes different hand-offs, and row locks serialise their use of limits and ids."""

    name = "bus_slow"

    def __init__(self, database: Database, settings: Settings, wakeups: Wakeups) -> None:
        self.seconds = settings.relay_seconds
        self._database = database
        self._wakeups = wakeups
        self._water = low_water()
        self._max_refusals = settings.fairness_refusals

    async def idle(self, seconds: float) -> None:
        await self._wakeups.wait(f"queue:{HANDOFFS}", seconds)

    async def run_once(self) -> int:
        with self._water.look(await self._database.oldest_begin()) as look:
            try:
                return await self._pass(look, _BATCH)
            except Unavailable:
                raise
            except Exception as error:
                log.warning("bus.batch_failed", reason=type(error).__name__, exc_info=error)
            return await self._one_by_one(look)

    async def _pass(self, look: Look[datetime], limit: int) -> int:
        async def work(connection: Connection) -> list[Case]:
            rows = await _sql.take_handoffs(connection, since=look.since, limit=limit)
            look.reached = max((row["due_at"] for row in rows), default=None) or await database_time(connection)
            cases = [
                Case(row, delivered(row["body"]), facts(row["facts"]))
                for row in sorted(rows, key=lambda row: row["handoff_id"])
            ]
            if cases:
                await self._decide(connection, cases)
                await failpoint("slow.before_commit")
            return cases

        cases = await self._database.run(work)
        _count(cases, self._database.clock.now())
        return len(cases)

    async def _one_by_one(self, look: Look[datetime]) -> int:
        """Processes hand-offs singly after a batch failed, so that one of them does not hold up the others."""
        done = 0
        for _ in range(_BATCH):
            try:
                found = await self._pass(look, 1)
            except Unavailable:
                raise
            except Exception as error:
                log.warning("bus.command_failed", reason=type(error).__name__, exc_info=error)
                found = await self._set_aside(look)
            if not found:
                break
            done += found
        return done

    async def _set_aside(self, look: Look[datetime]) -> int:
        async with self._database.transaction() as connection:
            rows = await _sql.take_handoffs(connection, since=look.since, limit=1)
            exhausted = [row for row in rows if row["tries"] + 1 >= _MAX_TRIES]
            again = [row for row in rows if row["tries"] + 1 < _MAX_TRIES]
            await _sql.put_back_handoffs(
                connection,
                org_ids=[row["org_id"] for row in again],
                sources=[row["source"] for row in again],
                command_ids=[row["command_id"] for row in again],
                reasons=[row["reason"] for row in again],
                bodies=[row["body"] for row in again],
                facts=[row["facts"] for row in again],
                received=[row["received_at"] for row in again],
                tries=[row["tries"] + 1 for row in again],
            )
            await _report(connection, list(self._given_up(exhausted)), self._database.clock.now())
        return len(rows)

    def _given_up(self, rows: Sequence[Row]) -> Iterator[Case]:
        for row in rows:
            try:
                case = Case(row, delivered(row["body"]), Facts())
            except CONTENT_ERRORS as error:
                set_aside(self.name, error, org_id=str(row["org_id"]))
                continue
            case.fail(FailureReason.DELIVERY_FAILURE)
            yield case

    async def _decide(self, connection: Connection, cases: Sequence[Case]) -> None:
        await _resolve(connection, cases)
        followers = await _deduplicate(connection, cases)
        await _apply_limits(connection, cases)
        await self._judge_banned(connection, cases)
        await _trigger_jobs(connection, cases)
        await _release(connection, cases, followers)
        await _report(connection, cases, self._database.clock.now())

    async def _judge_banned(self, connection: Connection, cases: Sequence[Case]) -> None:
        """Counts commands of banned sources that found no room, and refuses the source beyond a number of them."""
        refused: dict[tuple[UUID, str, str, str], list[Case]] = {}
        for case in cases:
            if case.banned and case.no_room:
                command = case.message.command
                refused.setdefault((case.org_id, case.source, command.target, command.name), []).append(case)
        if not refused:
            return
        rows = await _fairness_sql.note_refusals(
            connection,
            org_ids=[key[0] for key in refused],
            sources=[key[1] for key in refused],
            targets=[key[2] for key in refused],
            names=[key[3] for key in refused],
            refused=[len(found) for found in refused.values()],
            limit=self._max_refusals,
        )
        for row in rows:
            ban = Ban(
                row["source"],
                BanKind.WARM,
                0.0,
                source_share=row["source_share"],
                competing_share=row["competing_share"],
                dispatch_volume=row["dispatch_volume"],
            )
            for case in refused[row["org_id"], row["source"], row["target"], row["name"]]:
                case.known = Facts(ban)
                case.fail(FailureReason.FAIRNESS_VIOLATION, row["left_seconds"])


def _open(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.decision is None]


async def _resolve(connection: Connection, cases: Sequence[Case]) -> None:
    commands = [case.message.command for case in cases]
    rows = await _sql.resolve(
        connection,
        org_ids=[case.org_id for case in cases],
        targets=[command.target for command in commands],
        names=[command.name for command in commands],
        services=[command.source.partition("/")[2] for command in commands],
    )
    for row in rows:
        case = cases[row["n"] - 1]
        case.registered = row
        if not row["routed"]:
            case.fail(FailureReason.ROUTE_MISSING)
        elif not row["allowed"]:
            case.fail(FailureReason.ACL_DENY)


async def _deduplicate(connection: Connection, cases: Sequence[Case]) -> dict[int, Case]:
    """Claims ids. Of several commands with the same id, the first one claims it. Returns this leader for each of the
    others, by hand-off."""
    leaders: dict[tuple[UUID, str, str], Case] = {}
    followers: dict[int, Case] = {}
    for case in _open(cases):
        if case.strict and leaders.setdefault(case.entry, case) is not case:
            followers[case.row["handoff_id"]] = leaders[case.entry]
            case.decision = Decision(Outcome.DUPLICATE)
    if not leaders:
        return followers
    claimants = list(leaders.values())
    rows = await _sql.claim_ids(
        connection,
        **_entries(claimants),
        handoff_ids=[case.row["handoff_id"] for case in claimants],
        seconds=[case.get("dedupe_seconds") for case in claimants],
    )
    claimed = {row["handoff_id"] for row in rows}
    for case in claimants:
        if case.row["handoff_id"] not in claimed:
            case.decision = Decision(Outcome.DUPLICATE)
    return followers


def _entries(cases: Sequence[Case]) -> dict[str, list[Any]]:
    return {
        "org_ids": [case.org_id for case in cases],
        "sources": [case.source for case in cases],
        "command_ids": [UUID(case.message.metadata.id) for case in cases],
    }


async def _apply_limits(connection: Connection, cases: Sequence[Case]) -> None:
    """Applies the limit of the source, its quota and the shared limit of the lane, in this order: a source beyond its
    own limit uses up nothing of the shared one. Tokens are returned if a later limit refuses the command. All
    dispatchers lock rows in this order."""
    own = _limited(cases, Case.source_limit)
    strict = [(case, limit) for case, limit in own if limit.enforcement is Enforcement.STRICT]
    await _take(connection, strict, FailureReason.RATE_LIMIT_EXCEEDED)
    quotas = _limited(cases, Case.quota)
    await _take(connection, quotas, FailureReason.SOURCE_QUOTA)
    shared = _limited(cases, Case.limit)
    scarce = [(case, limit) for case, limit in shared if limit.enforcement is Enforcement.STRICT]
    await _take(connection, scarce, FailureReason.RATE_LIMIT_EXCEEDED)
    await _give_back(connection, [*strict, *quotas])
    counted = [(case, limit) for case, limit in (*own, *shared) if limit.enforcement is not Enforcement.STRICT]
    await limits.count(connection, _uses([(case, limit) for case, limit in counted if case.decision is None]))


def _limited(cases: Sequence[Case], by: Callable[[Case], Limit | None]) -> list[tuple[Case, Limit]]:
    return [(case, limit) for case in _open(cases) if (limit := by(case)) is not None]


async def _take(connection: Connection, wanted: Sequence[tuple[Case, Limit]], refusal: FailureReason) -> None:
    """Takes tokens in the order of arrival, and fails the commands that get none."""
    grants = await limits.take(connection, _uses(wanted))
    given: defaultdict[WindowKey, int] = defaultdict(int)
    for case, limit in wanted:
        key = LimitUse(case.org_id, limit, 0).key
        given[key] += 1
        grant = grants[key]
        if given[key] > grant.amount:
            case.fail(refusal, grant.wait_seconds)
            case.refused_by = key


async def _give_back(connection: Connection, taken: Sequence[tuple[Case, Limit]]) -> None:
    """Returns the tokens of commands that failed, except to the limit that refused them: it gave none."""
    unused: Counter[WindowKey] = Counter()
    for case, limit in taken:
        key = LimitUse(case.org_id, limit, 0).key
        if case.decision is not None and case.refused_by != key:
            unused[key] += 1
    await limits.give_back(connection, unused)


def _uses(wanted: Sequence[tuple[Case, Limit]]) -> list[LimitUse]:
    uses: dict[WindowKey, LimitUse] = {}
    for case, limit in wanted:
        one = LimitUse(case.org_id, limit, 1)
        known = uses.get(one.key)
        uses[one.key] = one if known is None else known._replace(amount=known.amount + 1)
    return list(uses.values())


async def _trigger_jobs(connection: Connection, cases: Sequence[Case]) -> None:
    for case in _open(cases):
        if case.get("job_name") is None:
            continue
        triggered = await delivery.trigger(
            connection,
            case.org_id,
            case.get("dag_name") or "",
            case.get("job_name"),
            source=case.source,
            command_id=case.message.metadata.id,
            body=case.row["body"],
        )
        if not triggered:
            case.fail(FailureReason.DELIVERY_FAILURE)


async def _release(connection: Connection, cases: Sequence[Case], followers: dict[int, Case]) -> None:
    """Releases the ids of failed commands: only a delivery uses up an id. Commands with the id of a failed leader fail
    as well."""
    refused = [
        case for case in cases if case.strict and case.decision is not None and case.decision.outcome is Outcome.FAILED
    ]
    claimed = [case for case in refused if case.decision is not None and case.get("allowed")]
    if claimed:
        await _sql.release_ids(connection, **_entries(claimed))
    for case in cases:
        leader = followers.get(case.row["handoff_id"])
        if leader is not None and leader.decision is not None:
            case.decision = leader.decision


async def _report(connection: Connection, cases: Sequence[Case], now: datetime) -> None:
    """Writes the effects of the decisions, and the fates for the senders."""
    if not cases:
        return
    effects = Effects(now)
    for case in cases:
        _note(effects, case, now)
    await effects.write(connection)
    await fates.record(connection, [_fate(case, now) for case in cases])
    await notify(connection, [*effects.notified, fates.DECIDED])


def _fate(case: Case, now: datetime) -> Fate:
    decision, command = case.decision or Decision(Outcome.DELIVERED), case.message.command
    until = None if decision.wait_seconds is None else reports.throttle_until(decision, now)
    return Fate(*case.entry, decision.outcome.value, decision.reason, command.target, command.name, until)


def _note(effects: Effects, case: Case, now: datetime) -> None:
    message, command = case.message, case.message.command
    about = message.metadata, case.source, command.target, command.name
    if case.decision is None:
        if case.get("queue") is not None:
            effects.deliver(case.org_id, case.get("queue"), case.row["body"])
        latency = max(0.0, (now - case.row["received_at"]).total_seconds())
        effects.emit(case.org_id, reports.delivered(*about, path="slow", latency_seconds=latency))
    elif case.decision.outcome is Outcome.DUPLICATE:
        effects.emit(case.org_id, reports.duplicate(*about))
    else:
        effects.emit(case.org_id, reports.failed(*about, case.decision, now))


def _count(cases: Sequence[Case], now: datetime) -> None:
    for case in cases:
        if case.strict:
            seconds = max(0.0, (now - case.row["received_at"]).total_seconds())
            metrics.DEDUP_SLOW_PATH_LATENCY.observe(seconds)
        if case.decision is None:
            metrics.delivered(case.message.command.target, case.message.command.name, "slow")
        elif case.decision.outcome is Outcome.DUPLICATE:
            metrics.DEDUP_DUPLICATES_PREVENTED.labels("slow").inc()
        else:
            metrics.COMMANDS_FAILED.labels(case.decision.reason).inc()
            metrics.MISROUTES.inc(case.decision.reason == FailureReason.ROUTE_MISSING)


class BusSweep(Periodic):
    """Deletes expired ids of strict commands, which affect no decision any more, and old fates."""

    name = "bus_sweep"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.retention_seconds
        self._database = database
        self._fate_seconds = settings.command_fate_seconds

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            ids = await _sql.forget_ids(connection, limit=_MAX_SWEPT)
            old = await _sql.forget_fates(connection, seconds=self._fate_seconds, limit=_MAX_SWEPT)
        return len(ids) + len(old)
