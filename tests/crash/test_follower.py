"""Followers that are killed and frozen at random, on a chain with reorgs."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest

from tests.crash.seed import KILLS, random_for
from tests.support.block_followers import Attempt, FollowedDatasets, attempt, data_database, lease
from tests.support.dev_chain import Node, served


@pytest.fixture
async def site(postgres_url: str) -> AsyncIterator[FollowedDatasets]:
    async with data_database(postgres_url) as url:
        connection = await asyncpg.connect(url)
        yield FollowedDatasets(url, connection)
        await connection.close()


async def test_rows_and_events_match_the_chain_after_random_kills_and_freezes(
    site: FollowedDatasets, tmp_path: Path
) -> None:
    chance = random_for("a follower")
    everyone: list[Attempt] = []
    frozen: list[Attempt] = []
    async with served(blocks=60) as node, AsyncExitStack() as attempts:
        for number in range(1, KILLS + 1):
            started = await attempts.enter_async_context(
                attempt(site, tmp_path, number, rpc_url=node.url, batch_size=chance.randint(1, 20))
            )
            everyone.append(started)
            await _live(node, chance, chance.randint(1, 60))
            if chance.random() < 0.4:
                os.kill(started.process.pid, signal.SIGSTOP)
                frozen.append(started)
            else:
                started.process.kill()
                await started.ended()
            for older in [one for one in frozen if one is not started and chance.random() < 0.5]:
                frozen.remove(older)
                os.kill(older.process.pid, signal.SIGCONT)
            for one in everyone:
                await one.hear()
        node.chain.mine(3)
        head = node.chain.head.number
        lease(tmp_path, KILLS + 1)
        await site.follow(node.url, attempt=KILLS + 1, end_block=head)
        for older in frozen:
            os.kill(older.process.pid, signal.SIGCONT)
        for one in everyone:
            # Killed, or refused after it continued.
            assert (await one.ended())[0] in (-signal.SIGKILL, 1)
            await one.hear()
        await site.check(node.chain, 0, head, in_order=False)


async def _live(node: Node, chance: random.Random, requests: int) -> None:
    """Waits for that many requests, with blocks and reorgs between them."""
    for _ in range(requests):
        await node.asked(1)
        if chance.random() < 0.3:
            node.chain.reorg(chance.randint(1, 12))
        node.chain.mine(chance.randint(0, 3))
