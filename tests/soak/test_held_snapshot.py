"""Work continues while a connection holds an old snapshot: a backup, a report, a forgotten session.

PostgreSQL then keeps every version of every row. Tables grow, but the cost of receiving, claiming and completing a task
must not. The test counts pages, which are the same on every machine; times are only shown.

`INTERLOCK_SOAK_TASKS=1000000 .venv/bin/python -m pytest tests/soak -n 0 -s` processes that many tasks, and prints a
line for every round.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from interlock.apps.app import open_app
from interlock.clock import ManualClock
from interlock.settings import Settings
from interlock.stores import low_water
from tests.soak.churn import LOOPS, Churn, Steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

TASKS = int(os.environ.get("INTERLOCK_SOAK_TASKS", "5000"))
BEFORE, HELD, AFTER = 2, 6, 2
RUNS = max(1, TASKS // 102 // (BEFORE + HELD + AFTER))
"""Runs of 100 tasks each per round."""

HOT = (
    "receive",
    "ack",
    *(f"{step} {kind}" for step in ("claim", "heartbeat", "complete") for kind in ("range", "list")),
)
TIMELESS = ("receive", "relay", "reaper", "retries", "run-counters", "retention")
"""Loops that scan their own queue, and must not step over everything that was ever in it."""
BYTES_PER_ATTEMPT = 3000
"""Maximum growth of tables and indexes while nothing can be removed, for everything that an attempt writes."""


class Observer:
    """Outside connections: hold the snapshot, vacuum instead of autovacuum, and measure tables."""

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
    """A kernel that keeps runs for two rounds, so that retention has work in each."""
    settings = Settings(dir=tmp_path, state_url=state_url, retention_days=150 / 86_400)
    async with open_app(settings, process="soak", clock=clock) as parts:
        org = await parts.access.principals.create_org("soak")
        yield Churn(parts, clock, org.org_id)


class Diary:
    """Measurements of all rounds. Prints a line per round."""

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


async def test_claims_stay_fast_and_tables_bounded_under_a_held_snapshot(
    churn: Churn, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Makes scanning a queue from its beginning count as expensive immediately, and not only after a day.
    monkeypatch.setattr(low_water, "_CHEAP_SECONDS", 0.0)
    monkeypatch.setattr(low_water, "_SHARE", 1e-9)
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
    """Compares with the last round before the snapshot, allowing a few pages for indexes that are a level deeper."""
    then, now = diary.rounds[BEFORE - 1].typical(), diary.rounds[of].typical()
    slower = {step: (then[step], now[step]) for step in HOT if now[step] > at_most * then[step] + 8}
    assert slower == {}


def _check_overheads(diary: Diary, *, of: int) -> None:
    """Compares with the first round under the snapshot, which has as many dead rows. Counters look 64 pages back."""
    then, now = diary.overheads[BEFORE], diary.overheads[of]
    grown = {loop: (then[loop], now[loop]) for loop in TIMELESS if now[loop] > 1.5 * then[loop] + 80}
    assert grown == {}


async def _retain(churn: Churn, observer: Observer) -> None:
    """Expires everything, and runs retention until nothing is left."""
    churn.clock.advance(3600)
    for loop in LOOPS:
        await churn.exhaust(loop)
    assert {table: await observer.count(table) for table in ("tasks", "runs", "attempts", "queue_messages")} == {
        "tasks": 0, "runs": 0, "attempts": 0, "queue_messages": 0
    }  # fmt: skip
