"""A DAG under load whose processes die: every accepted change reaches every job, and every cursor its end.

A ledger outside of the system records accepted changes. At the end each job has exactly the scopes that follow from
them, each computed from the newest change, and streams are read to their end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import pytest

from interlock.client import Client
from interlock.wire.dags import SourceEvent
from tests.crash.seed import KILLS, random_for
from tests.support.deployment import Deployment, Process, deployed
from tests.support.polls import answered

WIDTH: Final = 10
SCOPES: Final = 40
DAG: Final = """
name: crash
defaults: {{ max_attempts: 50, backoff_seconds: 0.05, backoff_cap_seconds: 1, heartbeat_timeout_seconds: 4 }}
jobs:
  - {{ name: source, activation: source, source: {{ kind: manual }}, operator: crash.scope, outputs: [rows] }}
  - {{ name: stream, activation: source, source: {{ kind: manual }}, operator: crash.scope, outputs: [rows] }}
  - name: derived
    operator: crash.scope
    inputs: [{{ from: {{ job: source, output: rows }} }}]
    outputs: [rows]
    config: {{ journal: "{journal}", edition: {edition} }}
  - name: far
    operator: crash.scope
    inputs: [{{ from: {{ job: derived, output: rows }} }}]
    outputs: [rows]
    config: {{ journal: "{journal}" }}
  - name: follower
    operator: crash.scope
    inputs: [{{ from: {{ job: stream, output: rows }} }}]
    outputs: [rows]
    config: {{ journal: "{journal}" }}
  - name: behind
    operator: crash.scope
    inputs: [{{ from: {{ job: follower, output: rows }} }}]
    outputs: [rows]
    config: {{ journal: "{journal}" }}
"""

# The scopes of each job in its current version; empty bounds are omitted.
_MADE: Final = """
    select j.name, array_agg((p.range_start, p.range_end) order by p.range_start) as scopes
    from interlock.jobs j
    join interlock.dataset_versions v on v.job_id = j.job_id
    join interlock.partitions p on p.dataset_version = v.dataset_version
    where j.dag_name = 'crash' and j.current and j.source is null
    group by j.name"""
# Scopes that are not done, or were assigned for an older change than the newest one of their inputs.
_STALE: Final = """
    select count(*) from interlock.edges g
    join interlock.jobs j on j.job_id = g.job_id and j.current
    join interlock.partitions p on p.dataset_version = g.dataset_version
    left join interlock.materialisations m on m.job_id = g.job_id and m.range_start = p.range_start
         and m.range_end = p.range_end and m.done_commit >= p.commit_id
    where g.active and m.job_id is null"""
_CURSORS: Final = """
    select count(*) from interlock.job_cursors c
    join interlock.edges g on g.job_id = c.job_id and g.active
    join interlock.dataset_versions v on v.dataset_version = g.dataset_version
    where c.committed <> v.cursor"""
_OPEN: Final = """
    select count(*) from interlock.tasks t join interlock.jobs j using (job_id)
    where j.dag_name = 'crash' and j.current
      and (t.status in ('Queued', 'Running') or (t.status = 'Failed' and not t.dead))"""
_TWICE: Final = """
    select count(*) from (
        select task_id from interlock.output_commits group by task_id, output_index having count(*) > 1) t"""


@dataclass
class Feed:
    """Generates changes and records which were accepted."""

    deployment: Deployment
    rng: random.Random
    partitions: set[int] = field(default_factory=set)
    cursor: int = -1
    accepted: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def yaml(self, edition: int = 1) -> str:
        return DAG.format(journal=self.deployment.journal, edition=edition)

    async def deploy(self, edition: int = 1) -> None:
        async with self.deployment.client() as client:
            await client.dags.deploy(self.yaml(edition), operators=["crash.scope"])

    async def _one(self, client: Client) -> None:
        """Sends a new or rewritten partition, or advances the stream."""
        if self.rng.random() < 0.6:
            place = self.rng.randrange(SCOPES)
            event = SourceEvent(start=place * WIDTH, end=place * WIDTH + WIDTH - 1)
            await client.sources.send("crash", "source", [event])
            self.partitions.add(place)
        else:
            cursor = self.cursor + self.rng.randint(1, 5)
            await client.sources.send("crash", "stream", [SourceEvent(cursor=cursor)])
            self.cursor = cursor
        async with self.changed:
            self.accepted += 1
            self.changed.notify_all()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()

        async def feed() -> None:
            async with self.deployment.client() as client:
                while not stop.is_set():
                    await self._one(client)

        feeding = asyncio.create_task(feed())
        try:
            yield
            stop.set()
            await feeding
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def more(self, count: int) -> None:
        wanted = self.accepted + count
        async with asyncio.timeout(120), self.changed:
            await self.changed.wait_for(lambda: self.accepted >= wanted)

    async def _left(self) -> list[str]:
        rows = await self.deployment.ask(
            "select j.name, t.status::text, t.attempt, t.dead, t.lease_expires_at, t.retry_at,"
            " (select count(*) from interlock.queue_messages) as messages,"
            " (select array_agg(distinct e.error_class || ': ' || e.error_message) from interlock.attempts e"
            "  where e.task_id = t.task_id) as errors"
            " from interlock.tasks t join interlock.jobs j using (job_id)"
            " where j.dag_name = 'crash' and t.status in ('Queued', 'Running', 'Failed') limit 20"
        )
        return [str(dict(row)) for row in rows]

    async def settled(self) -> None:
        await self.deployment.start()

        async def quiet() -> bool:
            counts = [(await self.deployment.ask(sql))[0][0] for sql in (_OPEN, _STALE, _CURSORS)]
            building = await self.deployment.ask("select 1 from interlock.dag_versions where state = 'Building'")
            return not any(counts) and not building

        try:
            await answered(quiet, 180)
        except TimeoutError as error:
            error.add_note(f"remaining tasks: {await self._left()}")
            raise
        made = {row["name"]: [tuple(scope) for scope in row["scopes"]] for row in await self.deployment.ask(_MADE)}
        wanted = [(place * WIDTH, place * WIDTH + WIDTH - 1) for place in sorted(self.partitions)]
        assert made.get("derived", []) == made.get("far", []) == wanted
        assert made.get("follower", []) == made.get("behind", [])
        assert _covered(made.get("follower", [])) == self.cursor
        assert (await self.deployment.ask(_TWICE))[0][0] == 0


def _covered(scopes: list[tuple[int, int]]) -> int:
    """Returns the end of a gapless sequence of scopes from 0."""
    reached = -1
    for start, end in scopes:
        assert start == reached + 1, f"a gap or an overlap before {start}"
        reached = end
    return reached


@pytest.fixture(scope="module")
async def site() -> AsyncIterator[Deployment]:
    async with deployed() as deployment:
        yield deployment


Case = Callable[[Feed, Process], Awaitable[None]]
CASES: dict[tuple[str, str], Case] = {}


def dies(process: str, failpoint: str) -> Callable[[Case], Case]:
    def register(case: Case) -> Case:
        CASES[process, failpoint] = case
        return case

    return register


async def armed(victim: Process, failpoint: str, skip: int = 0, **settings: str) -> None:
    await victim.kill()
    await victim.start(f"{failpoint}=kill*{skip}", **settings)


def _under_load(process: str, failpoint: str) -> None:
    async def case(feed: Feed, victim: Process) -> None:
        await armed(victim, failpoint, feed.rng.randint(0, 3))
        await victim.killed_itself()
        await victim.start()

    CASES[process, failpoint] = case


_under_load("dispatcher", "route.before_commit")
_under_load("dispatcher", "scopes.before_commit")
_under_load("dispatcher", "complete.before_commit")
_under_load("worker", "worker.before_complete")


@dies("gateway", "deploy.before_commit")
async def _(feed: Feed, victim: Process) -> None:
    await armed(victim, "deploy.before_commit")
    deploying = asyncio.create_task(feed.deploy(edition=2))
    await victim.killed_itself()
    await victim.start()
    await deploying


@dies("dispatcher", "cutover.before_commit")
async def _(feed: Feed, victim: Process) -> None:
    """The new generation is built while changes arrive."""
    await armed(victim, "cutover.before_commit")
    await feed.deploy(edition=3)
    await victim.killed_itself()
    await victim.start()


async def test_kill_at_any_step_from_change_to_task_loses_and_duplicates_nothing(site: Deployment) -> None:
    feed = Feed(site, random_for("changes of the pipeline"))
    await feed.deploy()
    chance = random_for("deaths of the pipeline")
    order = sorted(CASES)
    chance.shuffle(order)
    async with feed.running():
        for number, (process, failpoint) in enumerate(order):
            try:
                await feed.more(3)
                await CASES[process, failpoint](feed, site[process])
            except BaseException as error:
                error.add_note(f"at {failpoint}, after {order[:number]}")
                raise
        for _ in range(KILLS // 4):
            await feed.more(chance.randint(1, 10))
            victim = site[chance.choice(["dispatcher", "worker", "gateway"])]
            await victim.kill()
            await victim.start()
    await feed.settled()
