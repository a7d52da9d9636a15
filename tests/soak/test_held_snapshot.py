"""Work goes on while somebody holds an old snapshot: a backup, a report, a session that was forgotten.

PostgreSQL then keeps every version of every row. Tables grow; what must not grow is what it takes to receive, claim and
complete a task. Pages are counted, since they are the same on every machine; times are only shown.

`INTERLOCK_SOAK_TASKS=1000000 .venv/bin/python -m pytest tests/soak -n 0 -s` serves that many tasks, and prints a line
for every round.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from interlock.adapters import lowwater
from interlock.clock import ManualClock
from interlock.settings import Settings
from interlock.wiring import kernel
from tests.soak.churn import LOOPS, Churn, Steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

TASKS = int(os.environ.get("INTERLOCK_SOAK_TASKS", "5000"))
BEFORE, HELD, AFTER = 2, 6, 2
RUNS = max(1, TASKS // 102 // (BEFORE + HELD + AFTER))
"""Of 100 tasks each, in one round."""

HOT = (
    "receive",
    "ack",
    *(f"{step} {kind}" for step in ("claim", "heartbeat", "complete") for kind in ("range", "list")),
)
TIMELESS = ("receive", "relay", "reaper", "retries", "run-counters", "retention")
"""What scans along a queue of its own, and must not step over all that was ever in it."""
BYTES_PER_ATTEMPT = 3000
"""That a table and its indexes grow by while nothing can be removed, everything an attempt writes taken together."""


class Observer:
    """Whoever looks from outside: holds the snapshot, vacuums in autovacuum's stead, weighs tables."""

    def __init__(
        self, connection: asyncpg.Connection[asyncpg.Record], holder: asyncpg.Connection[asyncpg.Record]
    ) -> None:
        self._connection = connection
        self._transaction = holder.transaction(isolation="repeatable_read", readonly=True)
        self._holder = holder

    async def hold(self) -> None:
        await self._transaction.start()
        await self._holder.fetchval("select count(*) from interlock.tasks")

    async def release(self) -> None:
        await self._transaction.rollback()

    async def take_over_from_autovacuum(self) -> None:
        for table in await self._tables():
            await self._connection.execute(f"alter table {table} set (autovacuum_enabled = off)")

    async def vacuum(self) -> None:
        await self._connection.execute(f"vacuum (analyze) {', '.join(await self._tables())}")

    async def bytes(self) -> int:
        return sum([await self._bytes_of(table) for table in await self._tables()])

    async def count(self, table: str) -> int:
        rows: int = await self._connection.fetchval(f"select count(*) from interlock.{table}")
        return rows

    async def _bytes_of(self, table: str) -> int:
        size: int = await self._connection.fetchval("select pg_total_relation_size($1::regclass)", table)
        return size

    async def _tables(self) -> list[str]:
        sql = (
            "select oid::regclass::text from pg_class where relnamespace = 'interlock'::regnamespace and relkind = 'r'"
        )
        return [row[0] for row in await self._connection.fetch(sql)]


@pytest.fixture
async def observer(state_url: str) -> AsyncIterator[Observer]:
    connection, holder = await asyncpg.connect(state_url), await asyncpg.connect(state_url)
    yield Observer(connection, holder)
    await holder.close()
    await connection.close()


@pytest.fixture
async def churn(state_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Churn]:
    """Runs are kept for two rounds, so that retention has work in each."""
    settings = Settings(dir=tmp_path, state_url=state_url, retention_days=150 / 86_400)
    async with kernel(settings, process="soak", clock=clock) as parts:
        org = await parts.principals.create_org("soak")
        yield Churn(parts, clock, org.org_id)


class Diary:
    """What rounds have shown, each with a line for whoever watches."""

    def __init__(self, churn: Churn, observer: Observer) -> None:
        self._churn = churn
        self._observer = observer
        self.rounds: list[Steps] = []
        self.overheads: list[dict[str, int]] = []

    async def round(self, phase: str) -> None:
        steps = await self._churn.round(RUNS)
        self.rounds.append(steps)
        self.overheads.append(await self._churn.overhead())
        times = {step: f"{steps.latency()[step]:.1f}" for step in HOT}
        size = await self._observer.bytes() // 1024
        print(f"{phase:7} served {self._churn.served:8} size {size:8} KiB  ms {times}  idle pages {self.overheads[-1]}")  # noqa: T201


async def test_claims_stay_quick_and_tables_bounded_while_a_snapshot_is_held(
    churn: Churn, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if looking at a queue from its beginning had become dear at once, and not after a day.
    monkeypatch.setattr(lowwater, "_CHEAP_SECONDS", 0.0)
    monkeypatch.setattr(lowwater, "_SHARE", 1e-9)
    diary = Diary(churn, observer)
    await observer.take_over_from_autovacuum()
    for _ in range(BEFORE):
        await diary.round("before")
        await observer.vacuum()
    size, served = await observer.bytes(), churn.served

    await observer.hold()
    for _ in range(HELD):
        await diary.round("held")
    await observer.release()
    peak = await observer.bytes()
    assert peak - size <= BYTES_PER_ATTEMPT * (churn.served - served)
    _check_hot_steps(diary, of=BEFORE + HELD - 1, at_most=2.0)
    _check_overheads(diary, of=BEFORE + HELD - 1)

    for _ in range(AFTER):
        await observer.vacuum()
        await diary.round("after")
    _check_hot_steps(diary, of=BEFORE + HELD + AFTER - 1, at_most=1.25)
    assert await observer.bytes() <= 1.05 * peak

    await _retain(churn, observer)
    await observer.vacuum()
    assert await observer.bytes() <= peak


def _check_hot_steps(diary: Diary, *, of: int, at_most: float) -> None:
    """Against the last round before the snapshot, with a few pages for indexes that have got a level deeper."""
    then, now = diary.rounds[BEFORE - 1].typical(), diary.rounds[of].typical()
    slower = {step: (then[step], now[step]) for step in HOT if now[step] > at_most * then[step] + 8}
    assert slower == {}


def _check_overheads(diary: Diary, *, of: int) -> None:
    """Against the first round under the snapshot, whose own dead are just as many. Counters look 64 pages back."""
    then, now = diary.overheads[BEFORE], diary.overheads[of]
    grown = {loop: (then[loop], now[loop]) for loop in TIMELESS if now[loop] > 1.5 * then[loop] + 80}
    assert grown == {}


async def _retain(churn: Churn, observer: Observer) -> None:
    """Everything is past its time at once: retention goes through it until nothing is left."""
    churn.clock.advance(3600)
    for loop in LOOPS:
        await churn.exhaust(loop)
    assert {table: await observer.count(table) for table in ("tasks", "runs", "attempts", "queue_messages")} == {
        "tasks": 0, "runs": 0, "attempts": 0, "queue_messages": 0
    }  # fmt: skip
