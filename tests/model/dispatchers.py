"""The real side: two dispatchers with their own pools on one database, with a clock that only the test moves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import pytest

from interlock.access import keyring
from interlock.access.principals import WorkerIdentity
from interlock.apps.app import App, open_app
from interlock.apps.dispatcher import services as dispatcher_services
from interlock.clock import ManualClock
from interlock.failpoints import FailpointError, arm, disarm
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.stores.postgres import Row
from tests.model.model_types import DICE

T = TypeVar("T")

MAX_RECEIVES = 3
ANY_WORKER = WorkerIdentity("any", "any", None)
PLATFORM_WORKER = WorkerIdentity("platform", "platform", ("platform",))

# A message covers few tasks, so that small runs have several. The dispatchers differ in range size, and in whether
# messages go through the outbox, like two versions during a deploy.
_DIFFERENCES: list[dict[str, Any]] = [
    {"range_size": 3, "queue_direct": True},
    {"range_size": 2, "queue_direct": False},
]

_EMPTY = """
    do $$ declare shard regclass; begin
        for shard in select inhrelid::regclass from pg_inherits
            where inhparent = 'interlock.tasks'::regclass and inhrelid <> 'interlock.tasks_0'::regclass loop
            execute format('drop table %s', shard);
        end loop;
    end $$;
    delete from interlock.queue_messages; delete from interlock.outbox; delete from interlock.run_deltas;
    delete from interlock.tasks; delete from interlock.slots; delete from interlock.lease_alarms;
    delete from interlock.attempts; delete from interlock.output_commits; delete from interlock.dataset_events;
    delete from interlock.buffer_publishes;
    delete from interlock.runs; delete from interlock.dataset_versions; delete from interlock.jobs;
    delete from interlock.datasets;
    delete from interlock.idempotency_keys; delete from interlock.workers; delete from interlock.sweeps;
    delete from interlock.capabilities; delete from interlock.signing_keys where retired_at is not null;
    select setval('public.ids', 1, false)"""


# Nothing is random, so that a repeated example behaves the same: ids count up, random numbers are constant.
_FIXED = f"""
    create sequence public.ids;
    create function public.next_id() returns uuid language sql as
    $$ select ('0197a000-0000-7000-8000-' || lpad(to_hex(nextval('public.ids')), 12, '0'))::uuid $$;
    alter table interlock.jobs alter job_id set default public.next_id();
    alter table interlock.runs alter run_id set default public.next_id();
    alter function interlock.backoff rename to backoff_by_dice;
    create function interlock.backoff(attempt int, base float8, factor float8, cap float8, jitter float8, dice float8)
    returns interval language sql immutable parallel safe as
    $$ select interlock.backoff_by_dice(attempt, base, factor, cap, jitter, {DICE}) $$"""


@dataclass
class World:
    dispatchers: list[App]
    clock: ManualClock
    org_id: UUID
    _loop: asyncio.AbstractEventLoop
    _rows: asyncpg.Connection[Any]
    _stack: AsyncExitStack
    _services: list[dict[str, Service]]

    def service(self, at: int, name: str) -> Service:
        """Returns a background loop of one dispatcher; it keeps its scan position, as in a process."""
        return self._services[at][name]

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def select(self, sql: str, *arguments: Any) -> list[Row]:
        """Reads the tables directly, without a kernel."""
        return self.do(self.select_async(sql, *arguments))

    async def select_async(self, sql: str, *arguments: Any) -> list[Row]:
        return await self._rows.fetch(sql, *arguments)

    def execute(self, sql: str) -> None:
        self.do(self._rows.execute(sql))

    def empty(self) -> None:
        """Empties the tables: far cheaper than a new database, and than TRUNCATE for a handful of rows."""
        for run in self.select("select run_id from interlock.runs"):
            for dispatcher in self.dispatchers:
                dispatcher.tasks.claims.shards.forget(run["run_id"])
        self.execute(_EMPTY)

    def close(self) -> None:
        self.do(self._stack.aclose())
        self._loop.close()


@contextmanager
def opened(state_url: str, directory: Path, patch: pytest.MonkeyPatch) -> Iterator[World]:
    """Opens the world with one event loop for its lifetime: Hypothesis calls rules from synchronous code."""
    # A dispatcher looks up an unknown key at most once per second. Nothing here depends on that pause.
    patch.setattr(keyring, "_REFRESH_SECONDS", 0.0)
    loop = asyncio.new_event_loop()
    world = loop.run_until_complete(_open(loop, state_url, directory))
    try:
        yield world
    finally:
        world.close()


async def _open(loop: asyncio.AbstractEventLoop, state_url: str, directory: Path) -> World:
    clock, stack, numbers = ManualClock(), AsyncExitStack(), itertools.count(1)
    rows = await asyncpg.connect(state_url)
    stack.push_async_callback(rows.close)
    await rows.execute(_FIXED)
    shared = {"dir": directory, "state_url": state_url, "queue_max_receives": MAX_RECEIVES, "retention_days": 2.0}
    parts = [
        await stack.enter_async_context(
            open_app(Settings(**shared, **own), process=f"model-{next(numbers)}", clock=clock)  # type: ignore[arg-type]
        )
        for own in _DIFFERENCES
    ]
    org = await parts[0].access.principals.create_org("model")
    services = [{service.name: service for service in dispatcher_services(part)} for part in parts]
    return World(parts, clock, org.org_id, loop, rows, stack, services)


class Crashed(Exception):
    """The process that handled the call died; the caller gets no reply."""


@contextmanager
def crashing(at: str | None) -> Iterator[None]:
    """Ends the call at this failpoint: what had committed by then stays, and nothing else happened."""
    if at is None:
        yield
        return

    async def fail() -> None:
        raise FailpointError(at)

    arm(at, fail)
    try:
        yield
    except FailpointError as error:
        raise Crashed(at) from error
    finally:
        disarm(at)
