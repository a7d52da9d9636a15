"""Clients that keep an installation busy with every kind of work and retry each submission until it is accepted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from interlock.client import Client
from interlock.wire.jobs import DatasetRef, Policy, RunView, Scaling
from tests.crash.ledger import Accepted, Ledger, audit
from tests.crash.seed import random_for
from tests.support.polls import PATIENCE

LEASE_SECONDS = 4.0
"""Heartbeats are sent three times as often, so that a busy machine does not lose a lease."""


@dataclass(frozen=True)
class Kind:
    tasks: int
    payload: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    outputs: int = 0


KINDS = {
    "plain": Kind(20),
    "producing": Kind(6, outputs=1),
    "slow": Kind(3, {"seconds": 2.0}),
    # One at a time: if a wake-up is lost with its process, no other task wakes the rest.
    "capped": Kind(4, {}, {"scaling": Scaling(max_concurrency=1, key="/host", max_concurrency_per_key=1)}, outputs=1),
    "flaky": Kind(4, {"failures": 1}),
    "inline": Kind(4, {}, {"runtime": "dispatcher", "operator": "echo"}),
}


@dataclass
class Load:
    """`connect` creates a client of the gateway, which may have moved; `purpose` identifies this load."""

    connect: Callable[[], Client]
    ledger: Ledger
    purpose: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def submit(self, kind: Kind, **policy: Any) -> Accepted:
        """Submits with the same key until there is a reply."""
        key = f"{self.purpose} {next(self._numbers)}"
        settings: dict[str, Any] = {"max_attempts": 50, "backoff_seconds": 0.05, "lease_seconds": LEASE_SECONDS}
        options = {"operator": "crash.work", "config": {"journal": str(self.ledger.journal)}} | kind.options
        options["policy"] = Policy(**settings | policy)
        options["outputs"] = [DatasetRef(dataset_uuid=uuid4(), dataset_version=uuid4()) for _ in range(kind.outputs)]
        blows = self.ledger.blows
        async with self.connect() as client:
            payloads = [kind.payload | {"host": "ab"[n % 2]} for n in range(kind.tasks)]
            job = await client.submit(payloads, idempotency_key=key, **options)
        failures = kind.payload.get("failures", 0)
        return await self.ledger.note(key, job.run_id, job.total or 0, blows=blows, failures=failures)

    async def ended(self, one: Accepted) -> RunView:
        async with self.connect() as client:
            run = await client.wait(one.run_id)
        if one.blows_after is None:
            one.blows_after = self.ledger.blows
        return run

    async def _keep_busy(self, chance: random.Random, stop: asyncio.Event) -> None:
        """Stops only between two submissions: a submission that was sent is retried until there is a reply."""
        kinds = list(KINDS)
        while not stop.is_set():
            chance.shuffle(kinds)
            for name in kinds:
                if not stop.is_set():
                    await self._unless(stop, self.ended(await self.submit(KINDS[name])))

    async def _unless(self, stop: asyncio.Event, waiting: Coroutine[Any, Any, RunView]) -> None:
        work, stopping = asyncio.create_task(waiting), asyncio.create_task(stop.wait())
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if work.done():
            work.result()
        work.cancel()

    @asynccontextmanager
    async def running(self, clients: int = 3) -> AsyncIterator[None]:
        """Runs clients with one submission each in progress, until the context exits."""
        stop = asyncio.Event()
        busy = [asyncio.create_task(self._keep_busy(random_for(f"{self.purpose}, {n}"), stop)) for n in range(clients)]
        try:
            yield
            stop.set()
            await asyncio.gather(*busy)
        except BaseException as error:
            for client in filter(asyncio.Task.done, busy):
                error.add_note(f"a client had failed before: {client.exception()!r}")
            raise
        finally:
            for client in busy:
                client.cancel()
            await asyncio.gather(*busy, return_exceptions=True)

    async def settle(self, state_url: str) -> None:
        """Waits until all accepted runs have ended, and audits the system."""
        runs: list[RunView] = []
        with suppress(TimeoutError):  # the audit reports runs that have not ended
            async with asyncio.timeout(PATIENCE):
                for one in list(self.ledger.accepted.values()):
                    runs += [await self.ended(one)]
        found = await audit(state_url, self.ledger, runs)
        assert not found, "\n".join(found)
