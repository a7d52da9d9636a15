"""block_follower against a chain with new blocks and reorgs, compared row by row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from interlock.wire.attempts import Event
from interlock.workers import TaskFailed
from interlock.workers.block_follower.store import Producer, Store, Superseded, Target, WrongChain
from interlock.workers.failures import DataDatabaseAway
from tests.support.block_followers import KINDS, FollowedDatasets, data_database
from tests.support.dev_chain import Node, served


@pytest.fixture
async def data_url(postgres_url: str) -> AsyncIterator[str]:
    async with data_database(postgres_url) as url:
        yield url


@pytest.fixture
async def connection(data_url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(data_url)
    yield connection
    await connection.close()


@pytest.fixture
async def site(data_url: str, connection: asyncpg.Connection[Any]) -> FollowedDatasets:
    return FollowedDatasets(data_url, connection)


async def test_every_block_transaction_and_log_is_stored_once_and_emitted(site: FollowedDatasets) -> None:
    async with served(blocks=130) as node:
        result = await site.follow(node.url, end_block=130, batch_size=20)
        assert result["last_block"] == 130
        assert result["locations"] == [f"postgres_table:dataset_{site.version(kind).hex}" for kind in KINDS]
        await site.check(node.chain, 0, 130)
        assert all(site.cursor(kind) == 130 for kind in KINDS)
        assert site.progress[-1] == "block 130 of 130"


async def test_job_may_have_some_outputs_in_any_order(data_url: str, connection: Any) -> None:
    async with served(blocks=30) as node:
        for kinds in (("logs",), ("transactions", "blocks")):
            site = FollowedDatasets(data_url, connection, kinds)
            await site.follow(node.url, start_block=7, end_block=30, batch_size=8)
            await site.check(node.chain, 7, 30)


async def test_new_blocks_are_followed_after_their_confirmations(site: FollowedDatasets) -> None:
    async with served(blocks=10) as node, site.following(node.url, confirmations=3):
        await site.reaches(7)
        for _ in range(5):
            node.chain.mine(2)
            await site.reaches(node.chain.head.number - 3)
            await site.check(node.chain, 0, node.chain.head.number - 3)
    assert site.rewritten("blocks") == []


@pytest.mark.parametrize("depth", [1, 6, 25])
async def test_reorg_is_rewritten_and_emitted_from_the_common_ancestor(site: FollowedDatasets, depth: int) -> None:
    async with served(blocks=40) as node, site.following(node.url, batch_size=7):
        await site.reaches(40)
        node.chain.reorg(depth)
        await site.heard(lambda: all(site.rewritten(kind) for kind in KINDS))
        await site.check(node.chain, 0, 40)
        assert all(site.rewritten(kind) == [(41 - depth, 40)] for kind in KINDS)
        # A second rewrite of the same range is a new event.
        node.chain.reorg(depth)
        await site.heard(lambda: all(len(site.rewritten(kind)) == 2 for kind in KINDS))
        node.chain.mine(3)
        await site.reaches(43)
        await site.check(node.chain, 0, 43)
        sequences = [event.sequence for event in site.of("logs") if event.cursor is None]
        assert len(set(sequences)) == 2


async def test_chain_with_repeated_reorgs_is_stored_in_its_final_state(site: FollowedDatasets) -> None:
    async with served(blocks=0, reorg_every=3, max_depth=6) as node:

        async def mine_on(document: Any, served_node: Node) -> None:
            if served_node.chain.head.number < 300:
                served_node.chain.mine(2)

        node.spoil = mine_on
        await site.follow(node.url, end_block=290, batch_size=4)
        # Blocks near the end may have been replaced after the follower returned. The next attempt repairs that.
        assert len(await site.rows("blocks")) == 291
        node.spoil = None
        node.chain.mine(400 - node.chain.head.number)
        await site.follow(node.url, attempt=2, end_block=400)
        await site.check(node.chain, 0, 400)
        assert site.rewritten("logs")


async def test_shorter_branch_deletes_later_blocks_and_refilling_is_a_rewrite(site: FollowedDatasets) -> None:
    async with served(blocks=30) as node, site.following(node.url):
        await site.reaches(30)
        _replace_by_shorter(node, ancestor=20, head=25)
        await site.heard(lambda: site.rewritten("logs") == [(21, 30)])
        await site.check(node.chain, 0, 25)
        node.chain.mine(3)
        await site.heard(lambda: site.rewritten("logs")[1:] == [(26, 28)])
        node.chain.mine(4)
        await site.reaches(32)
        await site.check(node.chain, 0, 32)
        assert site.rewritten("logs")[2:] == [(29, 30)]


def _replace_by_shorter(node: Node, ancestor: int, head: int) -> None:
    chain = node.chain
    chain.reorg(chain.head.number - ancestor)
    del chain._canonical[head + 1 :]


async def test_follower_waits_for_a_lagging_endpoint(site: FollowedDatasets) -> None:
    async with served(blocks=30) as node, site.following(node.url):
        await site.reaches(30)
        newest = node.chain._canonical[21:]
        del node.chain._canonical[21:]
        await node.asked(5)
        node.chain._canonical.extend(newest)
        node.chain.mine(2)
        await site.reaches(32)
        await site.check(node.chain, 0, 32)
    assert site.rewritten("blocks") == []


async def test_reorg_deeper_than_the_kept_hashes_fails_with_advice(site: FollowedDatasets) -> None:
    async with served(blocks=60) as node:
        await site.follow(node.url, end_block=50, keep_hashes=10)
        node.chain.reorg(30)
        with pytest.raises(TaskFailed, match="keep_hashes is 10") as failed:
            await site.follow(node.url, attempt=2, end_block=60, keep_hashes=10)
        assert failed.value.error_class == "ReorgTooDeep"
        kept = "select count(*), min(block_number) from datasets.followed_blocks"
        assert await site.connection.fetch(kept) == [(10, 41)]


async def test_reorg_down_to_the_start_block_replaces_everything(site: FollowedDatasets) -> None:
    async with served(blocks=40) as node, site.following(node.url, start_block=35):
        await site.reaches(40)
        node.chain.reorg(20)
        await site.heard(lambda: site.rewritten("blocks"))
        await site.check(node.chain, 35, 40)
        assert site.rewritten("blocks") == [(35, 40)]


async def test_another_chain_at_the_same_url_is_refused(site: FollowedDatasets) -> None:
    async with served(blocks=20) as node, served(blocks=40, seed=8) as other, served(blocks=40, chain_id=5) as third:
        await site.follow(node.url, end_block=20)
        for stranger in (other, third):
            with pytest.raises(WrongChain, match="Point rpc_url at the stored chain"):
                await site.follow(stranger.url, attempt=2, end_block=40)
        with pytest.raises(WrongChain, match="To change start_block"):
            await site.follow(node.url, attempt=3, start_block=3, end_block=40)
        await site.check(node.chain, 0, 20)


async def test_paused_follower_stops_and_resumes(site: FollowedDatasets) -> None:
    async with served(blocks=10) as node:
        site.paused = True
        async with site.following(node.url):
            await site.shows("block -1 of 0, paused")
            asked = node.requests
            await site.shows("paused", times=5)
            assert node.requests == asked
            site.paused = False
            await site.reaches(10)
            await site.check(node.chain, 0, 10)


# The fence: a single writer


def _store(site: FollowedDatasets, connection: Any, attempt: int) -> Store:
    targets = [Target(kind, *site.datasets[kind]) for kind in site.kinds]  # type: ignore[arg-type]
    return Store(connection, targets, Producer(site.task_id, attempt))


NOTHING: dict[Any, list[Any]] = {kind: [] for kind in KINDS}


async def test_newer_attempt_fences_the_older_one(site: FollowedDatasets, data_url: str) -> None:
    connections = [await asyncpg.connect(data_url) for _ in range(4)]
    older, newer = _store(site, connections[0], 1), _store(site, connections[1], 2)
    await older.take_over(1, "0xa", 0)
    await older.write(0, ["0x0", "0x1"], NOTHING, 10)
    stored = await newer.take_over(1, "0xa", 0)
    assert (stored.position, stored.cursor, stored.hashes) == (1, 1, {0: "0x0", 1: "0x1"})
    with pytest.raises(DataDatabaseAway):
        await older.write(2, ["0x2"], NOTHING, 10)
    # Nor can it write on another connection, which a connection pooler might assign.
    older._connection = connections[2]
    with pytest.raises(Superseded):
        await older.write(2, ["0x2"], NOTHING, 10)
    with pytest.raises(Superseded):
        await _store(site, connections[3], 1).take_over(1, "0xa", 0)
    await newer.write(2, ["0x2"], NOTHING, 10)
    assert await site.connection.fetchval("select max(position) from datasets.followers") == 2
    for connection in connections:
        connection.terminate()


async def test_older_attempt_is_refused_unless_it_holds_the_lease(site: FollowedDatasets) -> None:
    def refuse(events: list[Event]) -> None:
        raise TaskFailed("The attempt was fenced off.", "EmitRefused")

    async with served(blocks=20) as node:
        await site.follow(node.url, attempt=7, end_block=10)
        accept, site.before_emit = site.before_emit, refuse
        with pytest.raises(TaskFailed, match="fenced off"):
            await site.follow(node.url, attempt=6, end_block=20)
        await site.check(node.chain, 0, 10)
        # The task was deleted and created again with its job, so its attempts count from 1 again.
        site.before_emit = accept
        await site.follow(node.url, attempt=1, end_block=20)
        await site.check(node.chain, 0, 20)


async def test_repeated_write_gives_the_same_rows(site: FollowedDatasets) -> None:
    async with served(blocks=20) as node:
        await site.follow(node.url, end_block=20)
        # Simulates a process that died after it wrote the rows and before it wrote the position.
        await site.connection.execute("update datasets.followers set position = 9")
        await site.connection.execute("delete from datasets.followed_blocks where block_number > 9")
        await site.follow(node.url, attempt=2, end_block=20)
        await site.check(node.chain, 0, 20)


async def test_two_followers_of_different_tasks_share_the_data_database(data_url: str, connection: Any) -> None:
    others = [await asyncpg.connect(data_url) for _ in range(2)]
    sites = [FollowedDatasets(data_url, each) for each in (connection, *others)]
    async with served(blocks=30) as node:
        await asyncio.gather(*(site.follow(node.url, end_block=30) for site in sites))
        for site in sites:
            await site.check(node.chain, 0, 30)
    for other in others:
        await other.close()
