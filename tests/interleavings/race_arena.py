"""The environment of a race: one database, three dispatchers that share nothing else, and an observer's connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from interlock.apps.app import App, assemble
from interlock.clock import ManualClock
from interlock.settings import Settings
from interlock.stores.postgres import Database, Row
from interlock.tasks.queue import Received
from interlock.wire.jobs import JobAccepted
from tests.interleavings import invariants
from tests.interleavings.operations import (
    ORG,
    Lease,
    Operation,
    claim_range,
    complete,
    lease_of,
    one_pass,
    receive,
    submit,
)
from tests.interleavings.operations import claim as claim_one
from tests.interleavings.scheduler import Order, Played, Race

POLICY = {"max_attempts": 3, "backoff_seconds": 10, "jitter": 0, "lease_seconds": 60, "timeout_seconds": 600}
PAST_THE_LEASE = 61.0
PAST_THE_BACKOFF = 11.0

# Referencing rows are deleted first. TRUNCATE would create a new file for every table and index, however few the rows.
_EMPTIED = """
    do $$ declare name regclass; begin
        for name in
            with recursive found (name, depth) as (
                select oid, 0 from pg_class where relnamespace = 'interlock'::regnamespace and relkind in ('r', 'p')
                union
                select r.conrelid, f.depth + 1 from found f join pg_constraint r on r.confrelid = f.name
                where r.contype = 'f' and r.conrelid <> r.confrelid
            )
            select f.name from found f join pg_class c on c.oid = f.name
            where c.relname not in ('orgs', 'api_keys', 'worker_tokens', 'signing_keys')
            group by f.name order by max(depth) desc
        loop
            execute format('delete from %s', name);
        end loop;
    end $$
"""


class Arena:
    def __init__(
        self, settings: Settings, databases: list[Database], watcher: asyncpg.Connection[Any], clock: ManualClock
    ) -> None:
        self._settings = settings
        self._databases = databases
        self.watcher = watcher
        self.clock = clock
        self.kernels = self._assembled()
        self.indirect = self._assembled(queue_direct=False)[0]
        """A gateway whose queue is outside Postgres: it writes messages to the outbox."""

    @property
    def objects_root(self) -> str:
        return self._settings.objects_root

    def _assembled(self, **settings: Any) -> list[App]:
        made = self._settings.model_copy(update=settings)
        return [assemble(made, database, coordination=None, state_url="") for database in self._databases]

    @property
    def home(self) -> App:
        return self.kernels[0]

    async def play(self, order: Order, **operations: Operation) -> Played:
        """Plays the order, folds the counters, and checks the invariants that hold in every order."""
        used = dict(zip(operations, self.kernels, strict=False))
        race = Race(
            order,
            {name: partial(operation, used[name]) for name, operation in operations.items()},
            {name: _application(self.kernels.index(kernel)) for name, kernel in used.items()},
            self.watcher,
        )
        played = await race.play()
        await self.check()
        return played

    async def check(self) -> None:
        await self.fold()
        await invariants.require(self.watcher, self.clock.now())

    async def fold(self) -> None:
        while await self.do(one_pass("run-counters")):
            continue

    async def do(self, operation: Operation) -> Any:
        """Runs an operation alone, before or after a race."""
        return await operation(self.home)

    async def empty(self) -> None:
        await self.watcher.execute(_EMPTIED)

    async def emptied(self) -> Arena:
        """Returns a clean arena: no rows, and no cached state in the kernels."""
        await self.empty()
        await self.do(one_pass("statistics"))  # as dispatchers do: an autovacuum may have counted the empty tables
        return Arena(self._settings, self._databases, self.watcher, self.clock)

    # Setup. Messages are acked as a worker would, so that a wake-up found later is a new one.

    async def submitted(self, tasks: int = 1, *, kernel: App | None = None, **job: Any) -> JobAccepted:
        """Submits a run of queued tasks."""
        policy = POLICY | job.pop("policy", {})
        accepted = await submit([{"host": "a", "n": n} for n in range(tasks)], policy=policy, **job)(
            kernel or self.home
        )
        assert isinstance(accepted, JobAccepted)
        return accepted

    async def claimed(self, tasks: int = 1, **job: Any) -> list[Lease]:
        """Submits a run and claims its tasks, as far as its cap allows."""
        accepted = await self.submitted(tasks, **job)
        (message,) = await self.do(receive())
        await self.do(claim_range(accepted.run_id, 0, tasks - 1, message=message))
        return await self.leases(accepted.run_id)

    async def leases(self, run_id: UUID) -> list[Lease]:
        rows = await self.watcher.fetch(
            "select task_id, attempt, lease_token, run_id from interlock.tasks"
            " where run_id = $1 and status = 'Running' order by task_index",
            run_id,
        )
        return [Lease(*row) for row in rows]

    async def failed(self, **job: Any) -> Lease:
        """Returns the ended attempt of a task that waits for its retry."""
        (lease,) = await self.claimed(**job)
        await self.do(complete(lease, "Failed"))
        return lease

    async def reaped(self, **job: Any) -> Lease:
        """Returns an attempt that the reaper has ended: its task waits for a retry, or for its holder's late report."""
        (lease,) = await self.claimed(**job)
        self.clock.advance(PAST_THE_LEASE)
        assert await self.do(one_pass("reaper")) == 1
        return lease

    async def requeued(self, **job: Any) -> Lease:
        """Returns a reaped attempt whose task is queued for the next one."""
        lease = await self.reaped(**job)
        self.clock.advance(PAST_THE_BACKOFF)
        assert await self.do(one_pass("retries")) == 1
        return lease

    async def claim(self, task_id: UUID) -> Lease:
        return lease_of(await self.do(claim_one(task_id)))

    # Outcome

    async def task(self, task_id: UUID) -> Row:
        row: Row | None = await self.watcher.fetchrow("select * from interlock.tasks where task_id = $1", task_id)
        assert row is not None
        return row

    async def tasks(self, run_id: UUID) -> list[Row]:
        return await self.watcher.fetch("select * from interlock.tasks where run_id = $1 order by task_index", run_id)

    async def state(self, task_id: UUID) -> tuple[str, int]:
        """Returns status and attempt."""
        row = await self.task(task_id)
        return row["status"], row["attempt"]

    async def history(self, task_id: UUID) -> list[tuple[int, str | None]]:
        rows = await self.watcher.fetch(
            "select attempt, outcome::text from interlock.attempt_history where task_id = $1"
            " order by attempt, ended_at nulls last",
            task_id,
        )
        return [(row["attempt"], row["outcome"]) for row in rows]

    async def run_state(self, run_id: UUID) -> str:
        return str(await self.value("select state from interlock.runs where run_id = $1", run_id))

    async def messages(self) -> list[Received]:
        """Receives all visible messages."""
        found: list[Received] = await self.do(receive(100))
        return found

    async def value(self, sql: str, *arguments: Any) -> Any:
        return await self.watcher.fetchval(sql, *arguments)

    async def rows(self, sql: str, *arguments: Any) -> list[Row]:
        return await self.watcher.fetch(sql, *arguments)


def _application(number: int) -> str:
    return f"interlock-racer-{number}"


@asynccontextmanager
async def opened(url: str, directory: Path, *, kernels: int = 3) -> AsyncIterator[Arena]:
    settings, clock = Settings(dir=directory, state_url=url), ManualClock()
    async with AsyncExitStack() as stack:
        watcher = await asyncpg.connect(url)
        stack.push_async_callback(watcher.close)
        await watcher.execute("insert into interlock.orgs (org_id, name) values ($1, 'test')", ORG)
        databases = []
        for number in range(kernels):
            database = await Database.open(url, size=4, clock=clock, name=_application(number))
            stack.push_async_callback(database.close)
            databases.append(database)
        arena = Arena(settings, databases, watcher, clock)
        await arena.home.access.keyring.ensure()
        yield arena
