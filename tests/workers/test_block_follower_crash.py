"""block_follower in processes that are killed or frozen at any point, and under a real worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest

from interlock.apps.dispatcher import services as dispatcher_services
from interlock.client import Client
from interlock.processes.loop import forever
from interlock.settings import Settings
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import DatasetRef, Policy
from interlock.wire.tasks import TaskView
from interlock.workers import Worker
from tests.support.block_followers import FAST, KINDS, Attempt, FollowedDatasets, attempt, data_database
from tests.support.dags import deploy
from tests.support.dev_chain import Node, expected_rows, served
from tests.support.system import System, until


@pytest.fixture
async def site(postgres_url: str) -> AsyncIterator[FollowedDatasets]:
    async with data_database(postgres_url) as url:
        connection = await asyncpg.connect(url)
        yield FollowedDatasets(url, connection)
        await connection.close()


@pytest.mark.parametrize("lives", [0, 1, 3])
async def test_next_attempt_emits_events_of_committed_writes(
    site: FollowedDatasets, tmp_path: Path, lives: int
) -> None:
    async with served(blocks=60) as node:
        for number in range(1, 4):
            async with attempt(site, tmp_path, number, lives, rpc_url=node.url, batch_size=4) as started:
                code = await _mined_until_it_ends(node, started, depth=5)
                assert code == -signal.SIGKILL
                await started.hear()
        node.chain.mine(2)
        await site.follow(node.url, attempt=4, end_block=node.chain.head.number)
        await site.check(node.chain, 0, node.chain.head.number)
        assert await site.connection.fetchval("select count(*) from datasets.owed_ranges") == 0


async def _mined_until_it_ends(node: Node, started: Attempt, depth: int) -> int:
    """Reorganizes and extends the chain every few requests, so that there are always events to emit."""
    ended = asyncio.create_task(started.ended())
    while not ended.done():
        asked = asyncio.create_task(node.asked(4))
        await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        node.chain.reorg(depth)
        node.chain.mine(1)
    return (await ended)[0]


WAITING = """select exists (select from pg_stat_activity where application_name = 'interlock block_follower'
    and wait_event_type = 'Lock' and datname = current_database())"""


@asynccontextmanager
async def stuck_in_its_transaction(site: FollowedDatasets, node: Node) -> AsyncIterator[None]:
    """Blocks the next write at the hashes, after its rows are copied and while it holds the fence."""
    other = await asyncpg.connect(site.data_url)
    async with other.transaction():
        await other.execute("lock table datasets.followed_blocks in share mode")
        node.chain.reorg(3)
        node.chain.mine(4)
        await until(lambda: site.connection.fetchval(WAITING))
        yield
    await other.close()


async def test_kill_during_a_transaction_leaves_no_rows(site: FollowedDatasets, tmp_path: Path) -> None:
    async with served(blocks=30) as node:
        async with attempt(site, tmp_path, 1, rpc_url=node.url) as started:
            await until(lambda: _position(site, 30))
            before = node.chain
            stored = await site.rows("blocks")
            async with stuck_in_its_transaction(site, node):
                started.process.kill()
                await started.ended()
            assert await site.rows("blocks") == stored
            await started.hear()
        await site.follow(node.url, attempt=2, end_block=before.head.number)
        await site.check(node.chain, 0, node.chain.head.number)
        assert site.rewritten("logs") == [(28, 30)]


async def _position(site: FollowedDatasets, number: int) -> bool:
    if await site.connection.fetchval("select to_regclass('datasets.followers')") is None:
        return False
    return bool(await site.connection.fetchval("select min(position) from datasets.followers") == number)


async def test_frozen_follower_blocks_no_successor_and_writes_nothing_later(
    site: FollowedDatasets, tmp_path: Path
) -> None:
    async with served(blocks=30) as node:
        async with attempt(site, tmp_path, 1, rpc_url=node.url) as older:
            await until(lambda: _position(site, 30))
            async with stuck_in_its_transaction(site, node):
                os.kill(older.process.pid, signal.SIGSTOP)
            await older.hear()
            head = node.chain.mine(10).number
            await site.follow(node.url, attempt=2, end_block=head)
            await site.check(node.chain, 0, head)
            emitted = len(older.announced())
            os.kill(older.process.pid, signal.SIGCONT)
            code, words = await older.ended()
            assert code == 1
            assert "The data database is unavailable" in words
            assert len(older.announced()) == emitted
        await site.check(node.chain, 0, head)


# Under a worker

ONCE = Policy(backoff_seconds=0, jitter=0, max_attempts=1)
WORKER = """
import asyncio, sys
from interlock.settings import Settings
from interlock.workers import main
settings = Settings(
    internal_url=sys.argv[1], worker_token=sys.argv[2], data_url=sys.argv[3], outbound_allow=["127.0.0.1"]
)
asyncio.run(main(settings, concurrency=1))
"""


@asynccontextmanager
async def working(
    system: System, data_url: str | None, children: int = 1, operators: Sequence[str] = ()
) -> AsyncIterator[Client]:
    loops = [asyncio.create_task(forever(service)) for service in dispatcher_services(system.kernel)]
    settings = Settings(
        internal_url=system.internal_url,
        worker_token=system.worker_token,
        data_url=data_url,
        outbound_allow=["127.0.0.1"],
    )
    worker = Worker(settings, concurrency=children, cancel_grace=5, operators=operators)
    running = asyncio.create_task(worker.run())
    async with Client(system.gateway_url, system.admin_key) as client:
        yield client
    worker.request_drain()
    worker.request_drain()
    await running
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


async def _submit(
    client: Client, site: FollowedDatasets, operator: str = "block_follower", *, policy: Policy = ONCE, **config: Any
) -> UUID:
    outputs = [DatasetRef(dataset_uuid=uuid, dataset_version=version) for uuid, version in site.datasets.values()]
    accepted = await client.submit(
        [None], operator=operator, outputs=outputs, policy=policy, config=FAST | config, name=f"follow-{uuid4().hex}"
    )
    return accepted.run_id


async def _task(client: Client, run_id: UUID) -> TaskView:
    (task,) = [task async for task in client.tasks(run=run_id)]
    return task


async def _ended(client: Client, run_id: UUID) -> TaskView:
    async with asyncio.timeout(60):
        await client.wait(run_id, poll_seconds=0.05)
    return await _task(client, run_id)


async def test_follower_under_a_worker_reports_its_cursors_to_the_dispatcher(
    system: System, site: FollowedDatasets
) -> None:
    async with served(blocks=80) as node, working(system, site.data_url) as client:
        task = await _ended(client, await _submit(client, site, rpc_url=node.url, end_block=80, batch_size=9))
        assert task.status is TaskStatus.COMPLETED, task
        assert msgspec.json.decode(task.result)["last_block"] == 80
        node.chain.reorg(7)
        node.chain.mine(1)
        task = await _ended(client, await _submit(client, site, rpc_url=node.url, end_block=81))
        assert task.status is TaskStatus.COMPLETED, task
        for kind in KINDS:
            version = site.version(kind)
            known = "select (progress, cursor)::text from interlock.dataset_versions where dataset_version = $1"
            assert await system.value(known, version) == "(cursor,81)"
            rewritten = (
                "select array_agg(partition_key) from interlock.dataset_events"
                " where dataset_version = $1 and cursor is null"
            )
            assert await system.value(rewritten, version) == ["74-80"]


async def test_next_worker_continues_where_a_killed_one_stopped(system: System, site: FollowedDatasets) -> None:
    """Worker and child are killed together. The lease expires, and an attempt on another worker continues."""
    again = Policy(backoff_seconds=0, jitter=0, max_attempts=5, lease_seconds=1)
    async with served(blocks=50) as node, Client(system.gateway_url, system.admin_key) as outside:
        run_id = await _submit(outside, site, policy=again, rpc_url=node.url, end_block=70)
        words = (system.internal_url, system.worker_token, site.data_url)
        killed = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, *words)
        try:
            await until(lambda: _position(site, 50), seconds=60)
        finally:
            killed.kill()
            await killed.wait()
        node.chain.reorg(8)
        node.chain.mine(20)
        async with working(system, site.data_url) as client:
            task = await _ended(client, run_id)
        assert (task.status, task.attempt) == (TaskStatus.COMPLETED, 2)
        expected = expected_rows(node.chain, 0, 70)
        for kind in KINDS:
            assert await site.rows(kind) == expected[kind]
            cursor = "select cursor from interlock.dataset_versions where dataset_version = $1"
            assert await system.value(cursor, site.version(kind)) == 70
            rewritten = "select range_start from interlock.dataset_events where dataset_version = $1 and cursor is null"
            assert await system.value(rewritten, site.version(kind)) == 43


async def test_paused_source_stops_reading_until_resumed(system: System, site: FollowedDatasets) -> None:
    async with served(blocks=5) as node, working(system, site.data_url) as client:
        run_id = await _submit(client, site, rpc_url=node.url, end_block=9)
        await until(lambda: _position(site, 5))
        job_id = await system.value("update interlock.jobs set source = '{}' returning job_id")
        pause = (
            "insert into interlock.pauses (job_id, cause_id, bulk, path, reason) values ($1, $1, false, '{}', 'full')"
        )
        await system.value(pause, job_id)
        await until(lambda: _shows(client, run_id, "paused"))
        node.chain.mine(4)
        await until(lambda: _shows(client, run_id, "paused"))
        assert await _position(site, 5)
        await system.value("delete from interlock.pauses")
        assert (await _ended(client, run_id)).status is TaskStatus.COMPLETED
        assert await _position(site, 9)


async def _shows(client: Client, run_id: UUID, text: str) -> bool:
    return text in ((await _task(client, run_id)).progress_text or "")


async def test_cancel_stops_a_follower_that_waits_for_blocks(system: System, site: FollowedDatasets) -> None:
    async with served(blocks=5) as node, working(system, site.data_url) as client:
        run_id = await _submit(client, site, rpc_url=node.url)
        await until(lambda: _position(site, 5))
        await client.cancel_run(run_id)
        task = await _ended(client, run_id)
        assert task.status is TaskStatus.CANCELED


async def test_worker_without_the_data_url_fails_with_advice(system: System, site: FollowedDatasets) -> None:
    async with working(system, None) as client:
        task = await _ended(client, await _submit(client, site, rpc_url="http://127.0.0.1:1"))
        assert task.error_class == "DataDatabaseRefused"
        assert "INTERLOCK_DATA_URL" in (task.error_message or "")


async def test_user_operators_do_not_get_the_data_url(
    system: System, site: FollowedDatasets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries the environment, the context, and the import path of the platform's function."""
    (tmp_path / "nosy.py").write_text(
        "import os\n"
        "from interlock.workers import TaskFailed, operator\n"
        "@operator\n"
        "def look(payload, ctx):\n"
        "    try:\n"
        "        found = ctx.data_url\n"
        "    except TaskFailed as error:\n"
        "        found = error.error_class\n"
        "    return [found, sorted(name for name in os.environ if 'INTERLOCK' in name)]\n"
    )
    monkeypatch.setenv("INTERLOCK_DATA_URL", site.data_url)
    by_path = "interlock.workers.block_follower.operator:block_follower"
    await system.declare("nosy:look", by_path)
    async with working(system, site.data_url, operators=[str(tmp_path)]) as client:
        task = await _ended(client, await _submit(client, site, "nosy:look"))
        assert msgspec.json.decode(task.result) == ["DataDatabaseRefused", []]
        task = await _ended(client, await _submit(client, site, by_path, rpc_url="http://127.0.0.1:1"))
        assert task.error_class == "OperatorNotFound"


# In a DAG

DAG = """
name: chain
jobs:
  - name: follow
    activation: source
    source: {{ kind: always_on }}
    runtime: platform
    operator: block_follower
    outputs: [blocks, transactions, logs]
    config: {{ rpc_url: "{url}", poll_seconds: 0.05 }}
  - name: copy
    operator: echo
    inputs: [{{ from: {{ job: follow, output: logs }} }}]
    outputs: [copied]
"""


async def test_jobs_downstream_of_a_follower_get_new_and_rewritten_blocks(
    system: System, site: FollowedDatasets
) -> None:
    read = "select max(committed) from interlock.job_cursors"
    given = """select max(t.payload ->> 'partition_key') from interlock.tasks t join interlock.jobs j using (job_id)
               where j.name = 'copy' and t.status = 'Completed' and t.payload ->> 'changed_start' = $1"""
    async with served(blocks=30) as node, working(system, site.data_url, children=2) as client:
        await deploy(system, DAG.format(url=node.url))
        await until(lambda: _equals(system, read, 30), seconds=60)
        node.chain.reorg(5)
        await until(lambda: system.value(given, "26"), seconds=60)
        node.chain.mine(3)
        await until(lambda: _equals(system, read, 33), seconds=60)
        (task,) = [task async for task in client.tasks() if task.job.name == "follow"]
        assert task.status is TaskStatus.RUNNING
        assert task.attempt == 1


async def _equals(system: System, query: str, value: int) -> bool:
    return bool(await system.value(query) == value)
