"""Tasks that must not share a child process. The children are real, and the test plays the dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID, uuid4

import msgspec
import pytest
from msgspec import Raw

from interlock.wire.access import TaskSecret
from interlock.wire.attempts import ClaimBatchReply, ClaimGroup, ClaimReply, GroupedTask, TaskPayload
from interlock.wire.tasks import JobRef
from interlock.workers import pool as pools
from interlock.workers.claimed_tasks import Pace
from interlock.workers.heartbeats import Watch
from interlock.workers.pool import Pool
from interlock.workers.process import Launch
from interlock.workers.protocol import Outbound
from tests.spark.test_driver_pool import Reports
from tests.support.system import until

OPERATORS = """
import os, pathlib, time
from interlock.workers import operator

@operator
def process(payload, ctx):
    return os.getpid()

@operator
def meet(payload, ctx):
    mine, other = map(pathlib.Path, payload)
    mine.touch()
    while not other.exists():
        time.sleep(0.01)
    return os.getpid()
"""
OURS, THEIRS = uuid4(), uuid4()
DATA_URL = "postgresql://data-database"


class Site:
    """A pool of children, with the results of its tasks."""

    def __init__(self, folder: Path, children: int, proxy: str | None, *, always_on: int = 16) -> None:
        self.reports = Reports()
        self.pace = Pace(100)
        launch = Launch(operators=(str(folder),), data_url=DATA_URL, outbound=Outbound(proxy=proxy))
        self.pool = Pool(launch, self.pace, self.reports, 60, always_on=always_on)
        self.watch = Watch(self.pool, self.pace)
        self.pool.start(children)

    async def run(self, *asked: Any, **task: Any) -> list[Any]:
        """Runs tasks and returns their results, in the order in which they end."""
        self.pool.take(claim(*asked or (None,), **task))
        return [await self.result() for _ in asked or (None,)]

    async def result(self) -> Any:
        ended = await asyncio.wait_for(self.reports.completions.get(), 60)
        return msgspec.json.decode(ended.result) if isinstance(ended.result, Raw) else ended.error_class

    async def process(self, **task: Any) -> int:
        (pid,) = await self.run(**task)
        assert isinstance(pid, int), pid
        return pid


class Start(Protocol):
    def __call__(self, children: int = 1, proxy: str | None = None) -> Site: ...


def claim(
    *payloads: Any, org: UUID = OURS, operator: str = "isolated:process", secret: str | None = None
) -> ClaimBatchReply:
    group = ClaimGroup(
        run_id=uuid4(),
        attempt=1,
        lease_token=uuid4(),
        lease_expires_at=datetime.now(UTC) + timedelta(minutes=1),
        timeout_at=datetime.now(UTC) + timedelta(hours=1),
        job_id=uuid4(),
        job=JobRef(dag_name=None, name=None),
        operator=operator,
        config=Raw(b"{}"),
        org_id=org,
        secrets=[] if secret is None else [TaskSecret(name="TOKEN", value=secret, hosts=[])],
        tasks=[GroupedTask(uuid4(), n, Raw(msgspec.json.encode(one))) for n, one in enumerate(payloads)],
    )
    return ClaimBatchReply(claims=[], groups=[group])


def follower(org: UUID) -> ClaimBatchReply:
    """Claims a task that gets the URL of the data database. It fails, because its config is empty."""
    task = TaskPayload(
        task_id=uuid4(),
        run_id=uuid4(),
        index=0,
        attempt=1,
        org_id=org,
        job_id=uuid4(),
        job=JobRef(dag_name=None, name=None),
        operator="block_follower",
        config=Raw(b"{}"),
        payload=Raw(b"null"),
        inputs=[],
        outputs=[],
        timeout_at=datetime.now(UTC) + timedelta(hours=1),
    )
    expires_at = datetime.now(UTC) + timedelta(minutes=1)
    claimed = ClaimReply(status="Claimed", task=task, lease_token=uuid4(), lease_expires_at=expires_at)
    return ClaimBatchReply(claims=[claimed], groups=[])


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    (tmp_path / "isolated.py").write_text(OPERATORS)
    sites: list[Site] = []

    def start(children: int = 1, proxy: str | None = None) -> Site:
        sites.append(Site(tmp_path, children, proxy))
        return sites[-1]

    yield start
    for site in sites:
        await site.pool.abandon()


async def test_orgs_share_a_child_while_no_task_has_secrets(start: Start) -> None:
    site = start()
    assert await site.process(org=OURS) == await site.process(org=THEIRS) == await site.process(org=OURS)


async def test_child_with_a_secret_of_one_org_runs_no_task_of_another(start: Start) -> None:
    site = start()
    bound = await site.process(org=THEIRS, secret="of strangers")
    assert await site.process(org=THEIRS) == bound
    assert await site.process(org=OURS) != bound


async def test_secret_is_not_passed_to_a_child_that_ran_code_of_another_org(start: Start) -> None:
    """An operator can leave a thread behind, which would find the secret."""
    site = start()
    first = await site.process(org=THEIRS)
    assert await site.process(org=OURS, secret="our own") != first


async def test_child_with_the_data_url_runs_only_code_of_the_platform(start: Start) -> None:
    site = start()
    site.pool.take(follower(OURS))
    assert await site.result() == "BadConfig"
    (bound,) = [child.pid for child in site.pool.children]
    assert await site.run("same", operator="echo") == ["same"]
    assert [child.pid for child in site.pool.children] == [bound]
    fresh = await site.process()
    assert fresh != bound
    site.pool.take(follower(OURS))
    assert await site.result() == "BadConfig"
    assert [child.pid for child in site.pool.children] != [fresh]


async def test_child_with_the_proxy_of_the_platform_runs_no_code_of_users(start: Start) -> None:
    site = start(proxy="http://user:password@proxy.example:3128")
    await site.run("not a URL", operator="http_fetch")
    (bound,) = [child.pid for child in site.pool.children]
    await site.run("not a URL", operator="http_fetch", org=THEIRS)
    assert [child.pid for child in site.pool.children] == [bound]
    assert await site.process() != bound


async def test_task_of_another_org_gets_a_turn_between_many_of_the_bound_org(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "TURN_SECONDS", 0.0)
    site = start()
    bound = await site.process(org=OURS, secret="our own")
    site.pool.take(claim(*range(2000), org=OURS, secret="our own"))
    site.pool.take(claim(None, org=THEIRS, secret="of strangers"))
    site.pool.take(claim(*range(2000), org=OURS, secret="our own"))
    pids = [await site.result() for _ in range(4001)]
    other = next(pid for pid in pids if pids.count(pid) == 1)
    assert other != bound
    assert 0 < pids.index(other) < 4000


async def test_idle_child_of_another_org_is_replaced_while_tasks_wait(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "TURN_SECONDS", 0.0)
    site = start(children=2)
    await until(lambda: _ready(site, 2))
    ready = {child.pid for child in site.pool.children}
    site.pool.take(claim(None, org=OURS, secret="our own"))
    site.pool.take(claim(None, org=THEIRS, secret="of strangers"))
    assert {await site.result(), await site.result()} == ready
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    site.pool.take(claim([first, second], [second, first], org=OURS, operator="isolated:meet", secret="our own"))

    async def both_ended() -> bool:
        site.watch.run_once()
        return site.reports.completions.qsize() == 2

    await until(both_ended, seconds=60)
    met = {await site.result(), await site.result()}
    assert len(met) == 2
    assert len(met & ready) == 1


async def _ready(site: Site, children: int) -> bool:
    return sum(child.ready for child in site.pool.children) == children
