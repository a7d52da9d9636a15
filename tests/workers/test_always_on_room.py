"""Always-on sources run in children of their own, so that they occupy no slots of tasks. The children are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest

from interlock.wire.attempts import ClaimBatchReply
from tests.support.system import until
from tests.workers.test_pool_isolation import Site, claim

OPERATORS = """
import os, pathlib, time
from interlock.workers import operator

@operator
def process(payload, ctx):
    return os.getpid()

@operator
def follow(payload, ctx):
    pathlib.Path(payload).touch()
    while not pathlib.Path(payload + ".stop").exists():
        time.sleep(0.01)
"""


class Start(Protocol):
    def __call__(self, children: int, always_on: int = 16) -> Site: ...


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    (tmp_path / "sources_of_tests.py").write_text(OPERATORS)
    sites: list[Site] = []

    def started(children: int, always_on: int = 16) -> Site:
        sites.append(Site(tmp_path, children, None, always_on=always_on))
        return sites[-1]

    yield started
    for site in sites:
        await site.pool.abandon()


def source(path: Path) -> ClaimBatchReply:
    reply = claim(str(path), operator="sources_of_tests:follow")
    endless = msgspec.structs.replace(reply.groups[0], timeout_at=datetime.now(UTC) + timedelta(days=36_500))
    return msgspec.structs.replace(reply, groups=[endless])


async def following(site: Site, path: Path) -> None:
    site.pool.take(source(path))

    async def begun() -> bool:
        return await asyncio.to_thread(path.exists)

    await until(begun)


async def idle(site: Site, room: int) -> None:
    async def free() -> bool:
        return site.pool.room(None) == room

    await until(free)


async def test_two_sources_leave_both_children_to_tasks(start: Start, tmp_path: Path) -> None:
    site = start(2)
    for name in ("one", "two"):
        await following(site, tmp_path / name)
    await idle(site, 2)
    assert len(site.pool.children) == 4
    assert isinstance(await run(site), int)


async def test_source_that_ends_takes_its_child_with_it(start: Start, tmp_path: Path) -> None:
    site = start(1)
    await following(site, tmp_path / "one")
    await idle(site, 1)
    (tmp_path / "one.stop").touch()
    await site.result()

    async def alone() -> bool:
        return len(site.pool.children) == 1

    await until(alone)
    await idle(site, 1)
    assert isinstance(await run(site), int)


async def test_sources_beyond_the_limit_occupy_children_of_tasks(start: Start, tmp_path: Path) -> None:
    site = start(2, always_on=1)
    for name in ("one", "two"):
        await following(site, tmp_path / name)
    await idle(site, 1)
    assert len(site.pool.children) == 3


async def run(site: Site) -> Any:
    (pid,) = await site.run(operator="sources_of_tests:process")
    return pid
