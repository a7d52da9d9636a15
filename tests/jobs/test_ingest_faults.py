"""Faults during the ingest of a list: cancel, delete, two readers, a lost message, a stopped process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from interlock.apps.ingest import ingest
from interlock.errors import Unavailable
from interlock.failpoints import arm, disarm
from interlock.settings import INGEST_QUEUE
from tests.conftest import copied
from tests.support.staged_lists import Intake, intake

LINES = b"".join(b'{"n": %d, "text": "%b"}\n' % (n, b"." * 190) for n in range(90_000))
"""A list of three chunks."""


@pytest.fixture(scope="module")
async def site(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    async with (
        copied(postgres_url, template) as url,
        intake(url, tmp_path_factory.mktemp("ingest"), shard_threshold=50, reconcile_grace_seconds=0) as started,
    ):
        yield started


@pytest.fixture(autouse=True)
async def nothing_left(site: Intake) -> AsyncIterator[None]:
    yield
    for point in ("ingest.shard_created", "ingest.chunk_loaded", "ingest.loaded", "ingest.finished"):
        disarm(point)
    assert await site.system.value("select count(*) from interlock.ingests where settled_at is null") == 0


async def tables(site: Intake) -> set[str]:
    async with site.system.kernel.stores.database.connection() as connection:
        rows = await connection.fetch("select relname from pg_class where relname ~ '^tasks_[0-9]+$' and relkind = 'r'")
    return {row["relname"] for row in rows} - {"tasks_0"}


@pytest.mark.parametrize("point", ["ingest.chunk_loaded", "ingest.loaded"])
async def test_run_canceled_during_its_ingest_has_no_task(site: Intake, point: str) -> None:
    before = await tables(site)
    accepted = await site.submit(LINES)

    async def cancel() -> None:
        assert (await site.system.user("POST", f"/v1/jobs/{accepted['job_id']}/cancel")).status_code == 200

    arm(point, cancel)
    await site.drain()
    run = await site.system.run(accepted["run_id"])
    assert (run["state"], run["total"], run["ended_at"] is not None) == ("Canceled", 0, True)
    assert await tables(site) == before


@pytest.mark.parametrize("point", ["ingest.chunk_loaded", "ingest.loaded", "ingest.finished"])
async def test_job_deleted_during_its_ingest_leaves_nothing(site: Intake, point: str) -> None:
    before = await tables(site)
    accepted = await site.submit(LINES)

    async def delete() -> None:
        disarm(point)
        assert (await site.system.user("DELETE", f"/v1/jobs/{accepted['job_id']}")).status_code == 200

    arm(point, delete)
    await site.drain()
    await site.system.settle()
    for table in ("runs", "ingests", "ingest_chunks"):
        assert not await site.system.value(
            f"select count(*) from interlock.{table} where run_id = $1::text::uuid", accepted["run_id"]
        )
    assert await tables(site) == before


async def test_two_processes_on_one_message_make_each_task_once(site: Intake) -> None:
    accepted = await site.submit(LINES)
    message = await site.system.value("select body::text from interlock.queue_messages where queue = $1", INGEST_QUEUE)
    async with ingest(site.system.kernel.settings, wait_seconds=0) as others:
        first = asyncio.create_task(site.pass_of())
        while not await site.system.value("select count(*) from interlock.ingest_chunks"):
            await asyncio.wait({first}, timeout=0.05)
        await site.visible()
        await asyncio.gather(first, others[0].run_once(), others[1].run_once())
    assert message is not None
    run = await site.system.run(accepted["run_id"])
    assert (run["state"], run["total"], run["counts"]["Queued"]) == ("Running", 90_000, 90_000)
    assert sorted(await site.payloads(accepted["run_id"])) == list(range(90_000))
    assert (
        await site.system.value(
            "select sum(rows) from interlock.ingest_chunks where run_id = $1::text::uuid", accepted["run_id"]
        )
        == 90_000
    )


async def test_database_outage_costs_a_try_and_no_line(site: Intake) -> None:
    accepted = await site.submit(LINES)

    async def cut() -> None:
        disarm("ingest.chunk_loaded")
        raise Unavailable("away")

    arm("ingest.chunk_loaded", cut)
    assert await site.pass_of() == 1
    assert (await site.system.run(accepted["run_id"]))["state"] == "Ingesting"
    await site.visible()
    await site.drain()
    assert sorted(await site.payloads(accepted["run_id"])) == list(range(90_000))


async def test_unreadable_list_is_given_up(site: Intake) -> None:
    accepted = await site.submit(b"1\n" * 60)

    async def cut() -> None:
        raise asyncpg.PostgresError("something else")

    arm("ingest.shard_created", cut)
    for _ in range(site.system.kernel.settings.ingest_tries):
        await site.visible()
        assert await site.pass_of() == 1
    run = await site.system.run(accepted["run_id"])
    assert (run["state"], run["reason"]) == ("Failed", "Given up after 15 tries: PostgresError")


async def test_run_whose_message_is_lost_is_found_at_every_step(site: Intake) -> None:
    for point in ("ingest.chunk_loaded", "ingest.loaded", "ingest.finished"):
        accepted = await site.submit(LINES[: LINES.index(b'{"n": 100,')])

        async def lost(point: str = point) -> None:
            disarm(point)
            raise Unavailable("away")

        arm(point, lost)
        await site.pass_of()
        await site.system.value("delete from interlock.queue_messages where queue = $1", INGEST_QUEUE)
        assert await site.pass_of("ingest_reconciler") == 1
        await site.drain()
        run = await site.system.run(accepted["run_id"])
        assert (run["state"], run["total"]) == ("Running", 100)


async def test_run_that_crashes_every_process_fails(site: Intake) -> None:
    accepted = await site.submit(b"1\n")
    await site.system.value("update interlock.queue_messages set dead_at = now() where queue = $1", INGEST_QUEUE)
    assert await site.pass_of("ingest_reconciler") == 1
    run = await site.system.run(accepted["run_id"])
    assert (run["state"], "every ingest process crashed" in run["reason"]) == ("Failed", True)
    await site.system.value("delete from interlock.queue_messages where queue = $1", INGEST_QUEUE)


async def test_stopping_process_returns_its_list(site: Intake) -> None:
    accepted = await site.submit(LINES)
    reached = asyncio.Event()

    async def wait() -> None:
        reached.set()
        await asyncio.Event().wait()

    arm("ingest.chunk_loaded", wait)
    working = asyncio.create_task(site.pass_of())
    await reached.wait()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    disarm("ingest.chunk_loaded")
    assert await site.pass_of() == 1
    assert (await site.system.run(accepted["run_id"]))["total"] == 90_000


async def test_paused_run_stays_paused_after_its_ingest(site: Intake) -> None:
    accepted = await site.submit(LINES[: LINES.index(b'{"n": 100,')])
    await site.system.user("POST", f"/v1/jobs/{accepted['job_id']}/pause")
    await site.drain()
    assert (await site.system.run(accepted["run_id"]))["state"] == "Paused"
    resumed = await site.system.user("POST", f"/v1/jobs/{accepted['job_id']}/resume")
    assert resumed.json()["state"] == "Running"


@pytest.mark.parametrize("tasks", [0, 3])
async def test_open_run_that_is_canceled_ends(site: Intake, tasks: int) -> None:
    body = {"operator": "echo", "open": True, "tasks": list(range(tasks))}
    opened = (await site.system.user("POST", "/v1/jobs", json=body)).json()
    await site.system.user("POST", f"/v1/jobs/{opened['job_id']}/cancel")
    late = await site.system.user("POST", f"/v1/jobs/{opened['job_id']}/tasks", json={"tasks": [1]})
    assert late.json()["code"] == "run_closed"
    assert await site.pass_of("unwanted_runs") == 1
    await site.system.settle()
    assert (await site.system.run(opened["run_id"]))["ended_at"] is not None


async def test_expired_lists_are_deleted_but_not_during_their_ingest(site: Intake) -> None:
    unused = await site.upload(b"1")
    accepted = await site.submit(b"2")
    await site.system.value("update interlock.uploads set sweep_at = 'epoch'")
    assert await site.pass_of("upload_sweep") >= 1
    root = Path(site.system.kernel.settings.objects_root.removeprefix("file://")) / "uploads"
    left = {path.parent.name for path in root.rglob("00001")}
    assert unused not in left
    await site.drain()
    assert (await site.system.run(accepted["run_id"]))["total"] == 1
    await site.system.value("update interlock.uploads set sweep_at = 'epoch'")
    await site.pass_of("upload_sweep")
    assert not list(root.rglob("00001"))
