"""Backpressure: a queue over its limit pauses everything upstream of it, bulk work first.

A pause is a row in `pauses`. It stops the creation of tasks, not existing tasks, and loses nothing: dataset changes and
triggers stay stored and become tasks after the release. The job with the overlong queue is not paused itself.
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

from interlock.failpoints import failpoint
from interlock.http.cursors import FIRST, bad_cursor
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Connection, Database, Row, queries, try_lock
from interlock.wire.dags import PauseLevel, PausePage, PauseView
from interlock.wire.tasks import JobRef

log = structlog.get_logger()
_sql = queries(__name__, "pressure")

_PAGE: Final = 1000
_CLEAR: Final = 0.8
"""Share of its limits that a queue must fall to before the jobs upstream are released."""
_COUNTED: Final = 100_000
_IDLE_FACTOR: Final = 9
"""The idle time after a pass is at least this multiple of its duration, so that measuring never becomes the load."""

Path = tuple[UUID, ...]
"""Job ids, from the cause up to the paused job."""


@dataclass(frozen=True, slots=True)
class _Upstream:
    """The part of the graph upstream of the jobs that are over their limits."""

    writers: Mapping[UUID, Sequence[UUID]]
    """Writers of each reader."""
    sheds: frozenset[UUID]
    """Jobs with bulk work."""
    names: Mapping[UUID, str]

    def paths(self, cause: UUID) -> dict[UUID, Path]:
        """Returns the shortest path to every job upstream of the cause. Excludes the cause, even in a cycle."""
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
class _CausePauses:
    """The current pauses for one cause."""

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
        await asyncio.sleep(max(seconds, _IDLE_FACTOR * self._took))

    async def run_once(self) -> int:
        """Measures every queue that has a limit. Returns 0, so that the next pass never starts immediately."""
        started = time.perf_counter()
        released = await self._database.run(self._pass)
        self._took = time.perf_counter() - started
        if released:
            self._wakeups.wake("scopes")
        return 0

    async def _pass(self, connection: Connection) -> bool:
        """Returns True if any job was released."""
        if not await try_lock(connection, self.name):
            return False
        paused = _by_cause(await _sql.all_pauses(connection))
        behind = await self._behind(connection, paused)
        upstream = await _upstream(connection, behind)
        wanted: list[_Pause] = []
        for cause_id, row in behind.items():
            wanted += await self._wanted(connection, row, paused.get(cause_id), upstream)
        released = await _apply(connection, wanted, paused, upstream)
        await failpoint("pressure.before_commit")
        return released

    async def _behind(self, connection: Connection, paused: Mapping[UUID, _CausePauses]) -> dict[UUID, Row]:
        """Returns queues over their limit, and causes of pauses that are still above the release threshold."""
        found: dict[UUID, Row] = {}
        after = FIRST
        while True:
            page = await _sql.measure(connection, after=after, limit=_PAGE)
            for row in page:
                if _filled(row) > 1 or (row["job_id"] in paused and _filled(row) > _CLEAR):
                    found[row["job_id"]] = row
            if len(page) < _PAGE:
                return found
            after = page[-1]["job_id"]

    async def _wanted(
        self, connection: Connection, row: Row, paused: _CausePauses | None, upstream: _Upstream
    ) -> list[_Pause]:
        """Returns all pauses that one cause requires."""
        cause_id = row["job_id"]
        paths = upstream.paths(cause_id)
        if not paths:
            return []
        bulk = self._bulk(row, paused, sheds=not upstream.sheds.isdisjoint(paths))
        if paused is not None and paused.bulk == bulk:
            reason = paused.reason
        else:
            reason = await _reason(connection, row)
        return [_Pause(job_id, cause_id, bulk, path, reason) for job_id, path in paths.items()]

    def _bulk(self, row: Row, paused: _CausePauses | None, *, sheds: bool) -> bool:
        """Returns True if pausing bulk work is enough. A full pause stays full until the release."""
        if paused is None:
            return sheds
        if not paused.bulk:
            return False
        waited = row["now"] - paused.since >= self._patience
        return _filled(row) <= 1 or (sheds and not waited)


def _filled(row: Row) -> float:
    """Returns the used share of a queue's limits; above 1, it is over one of them."""
    depth = row["depth"] / row["max_queue_depth"] if row["max_queue_depth"] else 0.0
    age = row["age"] / row["max_queue_age"] if row["max_queue_age"] else 0.0
    return float(max(depth, age))


async def _reason(connection: Connection, row: Row) -> str:
    name, depth, age = row["name"] or str(row["job_id"]), row["max_queue_depth"], row["max_queue_age"]
    if depth is not None and row["depth"] > depth:
        limit = max(_COUNTED, depth + 1)
        waiting = await _sql.count_waiting(connection, job_id=row["job_id"], limit=limit)
        more = "at least " if waiting == limit else ""
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


def _by_cause(rows: Iterable[Row]) -> dict[UUID, _CausePauses]:
    found: defaultdict[UUID, _CausePauses] = defaultdict(_CausePauses)
    for row in rows:
        found[row["cause_id"]].rows[row["job_id"]] = row
    return dict(found)


async def _apply(
    connection: Connection, wanted: Sequence[_Pause], paused: Mapping[UUID, _CausePauses], upstream: _Upstream
) -> bool:
    """Writes the differences, under the lock that excludes the reconciler."""
    kept = {(pause.job_id, pause.cause_id) for pause in wanted}
    gone = [row for each in paused.values() for row in each.rows.values() if _key(row) not in kept]
    changed = [pause for pause in wanted if _differs(pause, paused)]
    if not gone and not changed:
        return False
    await _sql.lock_pauses(connection)
    if changed:
        await _hold(connection, changed)
    if gone:
        await _sql.release(
            connection, job_ids=[row["job_id"] for row in gone], cause_ids=[row["cause_id"] for row in gone]
        )
    _log(changed, gone, upstream)
    return bool(gone)


def _key(row: Row) -> tuple[UUID, UUID]:
    return row["job_id"], row["cause_id"]


def _differs(pause: _Pause, paused: Mapping[UUID, _CausePauses]) -> bool:
    there = paused[pause.cause_id].rows.get(pause.job_id) if pause.cause_id in paused else None
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


def _log(changed: Sequence[_Pause], gone: Sequence[Row], upstream: _Upstream) -> None:
    """Logs one line per cause, so that a wide graph does not produce a thousand lines."""
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
    """Current pauses, for API, CLI and metrics."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, org_id: UUID, cursor: str | None, limit: int) -> PausePage:
        after_job, after_cause = _decode(cursor)
        async with self._database.connection() as connection:
            rows = await _sql.list_pauses(
                connection, org_id=org_id, after_job=after_job, after_cause=after_cause, limit=limit
            )
        last = rows[-1] if len(rows) == limit else None
        return PausePage(
            pauses=[_view(row) for row in rows],
            next_cursor=f"{last['job_id']}.{last['cause_id']}" if last else None,
        )

    async def levels(self) -> dict[PauseLevel, int]:
        """Counts paused jobs by level."""
        async with self._database.connection() as connection:
            (row,) = await _sql.pause_levels(connection)
        return {level: row[level] for level in PauseLevel}


def _decode(cursor: str | None) -> tuple[UUID, UUID]:
    if cursor is None:
        return FIRST, FIRST
    job, _, cause = cursor.partition(".")
    try:
        return UUID(job), UUID(cause)
    except ValueError:
        raise bad_cursor() from None


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
