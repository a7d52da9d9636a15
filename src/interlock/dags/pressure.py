"""Backpressure: a queue past its limit holds back whoever feeds it, all the way up; bulk work first.

A pause is a row of `pauses`. It stops the making of tasks, not the tasks that are there, and loses nothing: changes of
datasets and triggers stay where they are and become tasks after the release. The job whose queue is too long is not
held back itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import structlog

from interlock.adapters.notifications import Wakeups
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.errors import BadRequest
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.settings import Settings
from interlock.wire import JobRef, PauseLevel, PausePage, PauseView

log = structlog.get_logger()
_sql = queries("pressure")
_runs_sql = queries("runs")

_PAGE: Final = 1000
_CLEAR: Final = 0.8
"""Share of its limits that a queue must come down to before anybody is released."""
_COUNTED: Final = 100_000
_REST: Final = 9
"""A pass that took long is followed by a pause that many times as long: measuring never becomes the load."""
_ZERO: Final = UUID(int=0)

Path = tuple[UUID, ...]
"""Of jobs, from the cause up to the one that is held back."""


@dataclass(frozen=True, slots=True)
class _Upstream:
    """The part of the graph above the jobs that are too far behind."""

    writers: Mapping[UUID, Sequence[UUID]]
    """By reader."""
    sheds: frozenset[UUID]
    """Jobs with bulk work."""
    names: Mapping[UUID, str]

    def paths(self, cause: UUID) -> dict[UUID, Path]:
        """The shortest way up to every job above. Not to the cause itself, not even round a circle."""
        found: dict[UUID, Path] = {cause: (cause,)}
        waiting = deque([cause])
        while waiting:
            reader = waiting.popleft()
            for writer in self.writers.get(reader, ()):
                if writer not in found:
                    found[writer] = (*found[reader], writer)
                    waiting.append(writer)
        del found[cause]
        return found


@dataclass(frozen=True, slots=True)
class _Pause:
    job_id: UUID
    cause_id: UUID
    bulk: bool
    path: Path
    reason: str


@dataclass(slots=True)
class _Standing:
    """What is held back for one cause now."""

    rows: dict[UUID, Row] = field(default_factory=dict)

    @property
    def bulk(self) -> bool:
        return all(row["bulk"] for row in self.rows.values())

    @property
    def since(self) -> datetime:
        since: datetime = min(row["since"] for row in self.rows.values())
        return since

    @property
    def reason(self) -> str:
        return str(next(iter(self.rows.values()))["reason"])


class Pressure(Periodic):
    name = "pressure"

    def __init__(self, database: Database, settings: Settings, wakeups: Wakeups) -> None:
        self.seconds = settings.pressure_seconds
        self._database = database
        self._wakeups = wakeups
        self._patience = timedelta(seconds=settings.backpressure_escalate_seconds)
        self._took = 0.0

    async def idle(self, seconds: float) -> None:
        await asyncio.sleep(max(seconds, _REST * self._took))

    async def run_once(self) -> int:
        """Measures every queue that has a limit. Returns 0, so that a pass is never followed by the next at once."""
        started = time.perf_counter()
        released = await self._database.run(self._pass)
        self._took = time.perf_counter() - started
        if released:
            self._wakeups.wake("scopes")
        return 0

    async def _pass(self, connection: Connection) -> bool:
        """Whether anybody was released."""
        if not await _runs_sql.only_one(connection, name=self.name):
            return False
        standing = _by_cause(await _sql.all_pauses(connection))
        behind = await self._behind(connection, standing)
        upstream = await _upstream(connection, behind)
        wanted: list[_Pause] = []
        for cause_id, row in behind.items():
            wanted += await self._wanted(connection, row, standing.get(cause_id), upstream)
        released = await _apply(connection, wanted, standing, upstream)
        await failpoint("pressure.before_commit")
        return released

    async def _behind(self, connection: Connection, standing: Mapping[UUID, _Standing]) -> dict[UUID, Row]:
        """Queues past their limit, and those that were and have not come down far enough."""
        found: dict[UUID, Row] = {}
        after = _ZERO
        while True:
            page = await _sql.measure(connection, after=after, most=_PAGE)
            for row in page:
                if _filled(row) > 1 or (row["job_id"] in standing and _filled(row) > _CLEAR):
                    found[row["job_id"]] = row
            if len(page) < _PAGE:
                return found
            after = page[-1]["job_id"]

    async def _wanted(
        self, connection: Connection, row: Row, standing: _Standing | None, upstream: _Upstream
    ) -> list[_Pause]:
        """All that is to be held back for one cause."""
        cause_id = row["job_id"]
        paths = upstream.paths(cause_id)
        if not paths:
            return []
        bulk = self._bulk(row, standing, sheds=not upstream.sheds.isdisjoint(paths))
        if standing is not None and standing.bulk == bulk:
            reason = standing.reason
        else:
            reason = await _reason(connection, row)
        return [_Pause(job_id, cause_id, bulk, path, reason) for job_id, path in paths.items()]

    def _bulk(self, row: Row, standing: _Standing | None, *, sheds: bool) -> bool:
        """Whether shedding bulk work is enough. What is held back entirely stays so until the release."""
        if standing is None:
            return sheds
        if not standing.bulk:
            return False
        waited = row["now"] - standing.since >= self._patience
        return _filled(row) <= 1 or (sheds and not waited)


def _filled(row: Row) -> float:
    """How much of its limits a queue takes up; over 1 it is past one of them."""
    depth = row["depth"] / row["max_queue_depth"] if row["max_queue_depth"] else 0.0
    age = row["age"] / row["max_queue_age"] if row["max_queue_age"] else 0.0
    return float(max(depth, age))


async def _reason(connection: Connection, row: Row) -> str:
    name, depth, age = row["name"] or str(row["job_id"]), row["max_queue_depth"], row["max_queue_age"]
    if depth is not None and row["depth"] > depth:
        most = max(_COUNTED, depth + 1)
        waiting = await _sql.count_waiting(connection, job_id=row["job_id"], most=most)
        more = "at least " if waiting == most else ""
        return f"{name} has {more}{waiting:,} tasks waiting; its max_queue_depth is {depth}"
    return f"{name} has had a task waiting for {row['age']:.0f} s; its max_queue_age is {age:.0f} s"


async def _upstream(connection: Connection, job_ids: Iterable[UUID]) -> _Upstream:
    causes = list(job_ids)
    rows = await _sql.upstream(connection, job_ids=causes) if causes else []
    writers: defaultdict[UUID, list[UUID]] = defaultdict(list)
    for row in rows:
        writers[row["reader"]].append(row["writer"])
    return _Upstream(
        writers=writers,
        sheds=frozenset(row["writer"] for row in rows if row["sheds"]),
        names={row["writer"]: _name(row) for row in rows},
    )


def _by_cause(rows: Iterable[Row]) -> dict[UUID, _Standing]:
    found: defaultdict[UUID, _Standing] = defaultdict(_Standing)
    for row in rows:
        found[row["cause_id"]].rows[row["job_id"]] = row
    return dict(found)


async def _apply(
    connection: Connection, wanted: Sequence[_Pause], standing: Mapping[UUID, _Standing], upstream: _Upstream
) -> bool:
    """Writes what differs, under the lock that keeps the reconciler from looking on meanwhile."""
    kept = {(pause.job_id, pause.cause_id) for pause in wanted}
    gone = [row for each in standing.values() for row in each.rows.values() if _key(row) not in kept]
    changed = [pause for pause in wanted if _differs(pause, standing)]
    if not gone and not changed:
        return False
    await _sql.lock_pauses(connection)
    if changed:
        await _hold(connection, changed)
    if gone:
        await _sql.release(
            connection, job_ids=[row["job_id"] for row in gone], cause_ids=[row["cause_id"] for row in gone]
        )
    _tell(changed, gone, upstream)
    return bool(gone)


def _key(row: Row) -> tuple[UUID, UUID]:
    return row["job_id"], row["cause_id"]


def _differs(pause: _Pause, standing: Mapping[UUID, _Standing]) -> bool:
    there = standing[pause.cause_id].rows.get(pause.job_id) if pause.cause_id in standing else None
    return there is None or (there["bulk"], tuple(there["path"])) != (pause.bulk, pause.path)


async def _hold(connection: Connection, pauses: Sequence[_Pause]) -> None:
    await _sql.hold(
        connection,
        job_ids=[pause.job_id for pause in pauses],
        cause_ids=[pause.cause_id for pause in pauses],
        bulks=[pause.bulk for pause in pauses],
        paths=[",".join(map(str, pause.path)) for pause in pauses],
        reasons=[pause.reason for pause in pauses],
    )


def _tell(changed: Sequence[_Pause], gone: Sequence[Row], upstream: _Upstream) -> None:
    """A line per cause: a wide graph is no reason for a thousand lines."""
    held: defaultdict[UUID, list[_Pause]] = defaultdict(list)
    for pause in changed:
        held[pause.cause_id].append(pause)
    for cause_id, pauses in held.items():
        names = sorted(upstream.names[pause.job_id] for pause in pauses)
        level = _level(pauses[0].bulk)
        log.warning("pressure.paused", cause=str(cause_id), level=level, jobs=names[:20], why=pauses[0].reason)
    released: defaultdict[UUID, list[str]] = defaultdict(list)
    for row in gone:
        released[row["cause_id"]].append(str(row["job_id"]))
    for cause_id, jobs in released.items():
        log.info("pressure.released", cause=str(cause_id), jobs=jobs[:20])


def _name(row: Row) -> str:
    name = row["name"] or str(row["writer"])
    return f"{row['dag_name']}/{name}" if row["dag_name"] else name


def _level(bulk: bool) -> PauseLevel:
    return PauseLevel.BULK if bulk else PauseLevel.ALL


class Pauses:
    """Who is held back, for API, CLI and metrics."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> PausePage:
        after_job, after_cause = _decode(cursor)
        async with self._database.connection() as connection:
            rows = await _sql.list_pauses(
                connection, org_id=org_id, after_job=after_job, after_cause=after_cause, most=limit
            )
        last = rows[-1] if len(rows) == limit else None
        return PausePage(
            pauses=[_view(row) for row in rows],
            next_cursor=f"{last['job_id']}.{last['cause_id']}" if last else None,
        )

    async def levels(self) -> dict[PauseLevel, int]:
        """How many jobs are held back, by level."""
        async with self._database.connection() as connection:
            (row,) = await _sql.pause_levels(connection)
        return {level: row[level] for level in PauseLevel}


def _decode(cursor: str | None) -> tuple[UUID, UUID]:
    if cursor is None:
        return _ZERO, _ZERO
    job, _, cause = cursor.partition(".")
    try:
        return UUID(job), UUID(cause)
    except ValueError:
        sentence = "`cursor` is not one this server gave out; start again without it."
        raise BadRequest(sentence, code="bad_cursor") from None


def _view(row: Row) -> PauseView:
    return PauseView(
        job_id=row["job_id"],
        job=JobRef(dag_name=row["dag_name"], name=row["name"]),
        cause_id=row["cause_id"],
        cause=JobRef(dag_name=row["cause_dag"], name=row["cause_name"]),
        level=_level(row["bulk"]),
        path=row["path"],
        reason=row["reason"],
        since=row["since"],
    )
