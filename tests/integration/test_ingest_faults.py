"""What happens to a list while it is read: canceled, deleted, read by two, its message lost, its process stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from interlock.errors import Unavailable
from interlock.failpoints import arm, disarm
from interlock.settings import INGEST_QUEUE
from interlock.wiring import ingest
from tests.conftest import copied
from tests.ingests import Intake, intake

LINES = b"".join(b'{"n": %d, "text": "%b"}\n' % (n, b"." * 190) for n in range(90_000))
"""Three chunks."""


@pytest.fixture(scope="module")
async def door(postgres_url: str, template: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Intake]:
    async with (
        copied(postgres_url, template) as url,
        intake(url, tmp_path_factory.mktemp("ingest"), shard_threshold=50, reconcile_grace_seconds=0) as started,
    ):
        yield started


@pytest.fixture(autouse=True)
async def nothing_left(door: Intake) -> AsyncIterator[None]:
    yield
    for point in ("ingest.shard_created", "ingest.chunk_loaded", "ingest.loaded", "ingest.finished"):
        disarm(point)
    assert await door.system.value("select count(*) from interlock.ingests where settled_at is null") == 0


async def tables(door: Intake) -> set[str]:
    async with door.system.kernel.database.connection() as connection:
        rows = await connection.fetch("select relname from pg_class where relname ~ '^tasks_[0-9]+$' and relkind = 'r'")
    return {row["relname"] for row in rows} - {"tasks_0"}


@pytest.mark.parametrize("point", ["ingest.chunk_loaded", "ingest.loaded"])
async def test_a_run_that_is_canceled_while_its_list_is_read_has_no_task(door: Intake, point: str) -> None:
    before = await tables(door)
    accepted = await door.submit(LINES)

    async def cancel() -> None:
        assert (await door.system.user("POST", f"/v1/jobs/{accepted['job_id']}/cancel")).status_code == 200

    arm(point, cancel)
    await door.drain()
    run = await door.system.run(accepted["run_id"])
    assert (run["state"], run["total"], run["ended_at"] is not None) == ("Canceled", 0, True)
    assert await tables(door) == before


@pytest.mark.parametrize("point", ["ingest.chunk_loaded", "ingest.loaded", "ingest.finished"])
async def test_a_job_that_is_deleted_while_its_list_is_read_leaves_nothing(door: Intake, point: str) -> None:
    before = await tables(door)
    accepted = await door.submit(LINES)

    async def delete() -> None:
        disarm(point)
        assert (await door.system.user("DELETE", f"/v1/jobs/{accepted['job_id']}")).status_code == 200

    arm(point, delete)
    await door.drain()
    await door.system.settle()
    for table in ("runs", "ingests", "ingest_chunks"):
        assert not await door.system.value(
            f"select count(*) from interlock.{table} where run_id = $1::text::uuid", accepted["run_id"]
        )
    assert await tables(door) == before


async def test_two_processes_on_one_message_make_each_task_once(door: Intake) -> None:
    accepted = await door.submit(LINES)
    message = await door.system.value("select body::text from interlock.queue_messages where queue = $1", INGEST_QUEUE)
    async with ingest(door.system.kernel.settings, wait_seconds=0) as others:
        first = asyncio.create_task(door.pass_of())
        while not await door.system.value("select count(*) from interlock.ingest_chunks"):
            await asyncio.wait({first}, timeout=0.05)
        await door.visible()
        await asyncio.gather(first, others[0].run_once(), others[1].run_once())
    assert message is not None
    run = await door.system.run(accepted["run_id"])
    assert (run["state"], run["total"], run["counts"]["Queued"]) == ("Running", 90_000, 90_000)
    assert sorted(await door.payloads(accepted["run_id"])) == list(range(90_000))
    assert (
        await door.system.value(
            "select sum(rows) from interlock.ingest_chunks where run_id = $1::text::uuid", accepted["run_id"]
        )
        == 90_000
    )


async def test_a_database_that_is_away_in_the_middle_costs_a_try_and_no_line(door: Intake) -> None:
    accepted = await door.submit(LINES)

    async def cut() -> None:
        disarm("ingest.chunk_loaded")
        raise Unavailable("away")

    arm("ingest.chunk_loaded", cut)
    assert await door.pass_of() == 1
    assert (await door.system.run(accepted["run_id"]))["state"] == "Ingesting"
    await door.visible()
    await door.drain()
    assert sorted(await door.payloads(accepted["run_id"])) == list(range(90_000))


async def test_a_list_that_never_can_be_read_is_given_up(door: Intake) -> None:
    accepted = await door.submit(b"1\n" * 60)

    async def cut() -> None:
        raise asyncpg.PostgresError("something else")

    arm("ingest.shard_created", cut)
    for _ in range(door.system.kernel.settings.ingest_tries):
        await door.visible()
        assert await door.pass_of() == 1
    run = await door.system.run(accepted["run_id"])
    assert (run["state"], run["reason"]) == ("Failed", "Given up after 15 tries: PostgresError")


async def test_a_run_whose_message_is_lost_is_found_at_every_step(door: Intake) -> None:
    for point in ("ingest.chunk_loaded", "ingest.loaded", "ingest.finished"):
        accepted = await door.submit(LINES[: LINES.index(b'{"n": 100,')])

        async def lost(point: str = point) -> None:
            disarm(point)
            raise Unavailable("away")

        arm(point, lost)
        await door.pass_of()
        await door.system.value("delete from interlock.queue_messages where queue = $1", INGEST_QUEUE)
        assert await door.pass_of("ingest_reconciler") == 1
        await door.drain()
        run = await door.system.run(accepted["run_id"])
        assert (run["state"], run["total"]) == ("Running", 100)


async def test_a_run_that_no_process_survives_fails(door: Intake) -> None:
    accepted = await door.submit(b"1\n")
    await door.system.value("update interlock.queue_messages set dead_at = now() where queue = $1", INGEST_QUEUE)
    assert await door.pass_of("ingest_reconciler") == 1
    run = await door.system.run(accepted["run_id"])
    assert (run["state"], "survived" in run["reason"]) == ("Failed", True)
    await door.system.value("delete from interlock.queue_messages where queue = $1", INGEST_QUEUE)


async def test_a_process_that_is_told_to_stop_gives_the_list_back(door: Intake) -> None:
    accepted = await door.submit(LINES)
    reached = asyncio.Event()

    async def wait() -> None:
        reached.set()
        await asyncio.Event().wait()

    arm("ingest.chunk_loaded", wait)
    working = asyncio.create_task(door.pass_of())
    await reached.wait()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    disarm("ingest.chunk_loaded")
    assert await door.pass_of() == 1
    assert (await door.system.run(accepted["run_id"]))["total"] == 90_000


async def test_a_paused_run_stays_paused_when_its_tasks_are_there(door: Intake) -> None:
    accepted = await door.submit(LINES[: LINES.index(b'{"n": 100,')])
    await door.system.user("POST", f"/v1/jobs/{accepted['job_id']}/pause")
    await door.drain()
    assert (await door.system.run(accepted["run_id"]))["state"] == "Paused"
    resumed = await door.system.user("POST", f"/v1/jobs/{accepted['job_id']}/resume")
    assert resumed.json()["state"] == "Running"


@pytest.mark.parametrize("tasks", [0, 3])
async def test_an_open_run_that_is_canceled_ends(door: Intake, tasks: int) -> None:
    body = {"operator": "echo", "open": True, "tasks": list(range(tasks))}
    opened = (await door.system.user("POST", "/v1/jobs", json=body)).json()
    await door.system.user("POST", f"/v1/jobs/{opened['job_id']}/cancel")
    late = await door.system.user("POST", f"/v1/jobs/{opened['job_id']}/tasks", json={"tasks": [1]})
    assert late.json()["code"] == "run_closed"
    assert await door.pass_of("unwanted_runs") == 1
    await door.system.settle()
    assert (await door.system.run(opened["run_id"]))["ended_at"] is not None


async def test_lists_are_deleted_after_their_time_but_not_while_they_are_read(door: Intake) -> None:
    unused = await door.upload(b"1")
    accepted = await door.submit(b"2")
    await door.system.value("update interlock.uploads set sweep_at = 'epoch'")
    assert await door.pass_of("upload_sweep") >= 1
    root = Path(door.system.kernel.settings.objects_root.removeprefix("file://")) / "uploads"
    left = {path.parent.name for path in root.rglob("00001")}
    assert unused not in left
    await door.drain()
    assert (await door.system.run(accepted["run_id"]))["total"] == 1
    await door.system.value("update interlock.uploads set sweep_at = 'epoch'")
    await door.pass_of("upload_sweep")
    assert not list(root.rglob("00001"))
