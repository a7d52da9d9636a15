"""Rate limits per key of a run: the tasks of a host that start per second, across all workers; others do not wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from valkey.asyncio import Valkey

from interlock.clock import ManualClock
from interlock.stores.embedded import EmbeddedValkey
from tests.support.sharded_runs import submit_sharded
from tests.support.system import System, running

URLS = [{"url": f"https://{host}.example/{n}"} for n in range(60) for host in ("busy", "quiet")]


@pytest.fixture
async def paced(state_url: str, tmp_path: Path, clock: ManualClock, valkey: EmbeddedValkey) -> AsyncIterator[System]:
    url = await valkey.start()
    async with Valkey.from_url(url) as client:
        await client.flushall()
    async with running(state_url, tmp_path, clock, valkey_url=url) as system:
        yield system


async def begun(system: System) -> Counter[str]:
    """Receives and claims until the queue is empty, and returns the number of claimed tasks of each host."""
    hosts: Counter[str] = Counter()
    while messages := await system.receive(max_messages=100):
        for message in messages:
            body = {name: message["body"][name] for name in ("run_id", "start", "end")}
            receipt = {"queue": "platform"} | {name: message[name] for name in ("message_id", "receipt")}
            claims = (await system.claim_many(**body, message=receipt)).get("claims", [])
            hosts.update(claim["task"]["payload"]["url"].split("/")[2] for claim in claims)
    return hosts


@pytest.mark.parametrize("own", [False, True], ids=["shard 0", "own shard"])
async def test_tasks_of_a_key_start_at_most_at_its_rate(paced: System, clock: ManualClock, own: bool) -> None:
    limits = {"rate": {"key": "host", "per_second": 5}}
    await (submit_sharded if own else System.submit)(paced, URLS, limits=limits)
    total = await begun(paced)
    assert total == {"busy.example": 5, "quiet.example": 5}
    for _ in range(4):
        clock.advance(1)
        total += await begun(paced)
    assert total == {"busy.example": 25, "quiet.example": 25}
    clock.advance(60)
    total += await begun(paced)
    assert total == {"busy.example": 30, "quiet.example": 30}
    dead = "select count(*) from interlock.queue_messages where dead_at is not null or receives > 1"
    assert await paced.value(dead) == 0


async def test_task_without_a_key_is_not_rate_limited(paced: System) -> None:
    payloads: list[Any] = [{"tenant": "a"}, {"tenant": "a"}, {"tenant": None}, {}, 5, "text"]
    run = await paced.submit(payloads, limits={"rate": {"key": "/tenant", "per_second": 1}})
    (message,) = await paced.receive(max_messages=10)
    reply = await paced.claim_many(run_id=message["body"]["run_id"], start=0, end=5)
    assert sorted(claim["task"]["index"] for claim in reply["claims"]) == [0, 2, 3, 4, 5]
    assert (await paced.run(run["run_id"]))["state"] == "Running"


async def test_both_limits_of_a_run_apply_together(paced: System, clock: ManualClock) -> None:
    limits = {"rate": {"key": "host", "per_second": 5}, "max_concurrency": 8}
    await paced.submit(URLS, limits=limits)
    assert (await begun(paced)).total() == 8
    clock.advance(10)
    assert (await begun(paced)).total() == 0
